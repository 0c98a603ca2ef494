"""DDP's measured peak memory, which budgets are shares of: ``python -m benchmarks.peak PLAN MODEL``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from hzplan.formats.plan import Plan
from hzplan.models.workload import load
from hzplan.peers.contender import Setting
from hzplan.peers.ddp import DDP
from hzplan.training.batches import SyntheticBatches


def peak_bytes(plan: Plan, model: str) -> int:
    """Of one rank; replicas need the same memory however many there are, so one is enough."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        workload = load(model, seq_len=plan.model.seq_len)
        data = SyntheticBatches(workload, plan.batch.micro_batch, seed=0)
        peak = DDP(Setting(plan, workload, data, lr=1e-3, seed=0)).peak_memory_bytes
        dist.destroy_process_group()
    return peak


if __name__ == "__main__":
    print(peak_bytes(Plan.load(Path(sys.argv[1])), sys.argv[2]))
