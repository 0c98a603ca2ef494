"""Runs a function on several gloo ranks and brings back what rank 0 returns."""

from __future__ import annotations

import importlib
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(world: int, target: str, payload: Any, folder: Path) -> Any:
    """Call ``module:function(payload)`` on every rank of one job; JSON in, rank 0's JSON out."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rendezvous, result = folder / "rendezvous", folder / "result.json"
    mp.spawn(_rank, (world, target, payload, str(rendezvous), str(result)), nprocs=world)
    return json.loads(result.read_text())


def _rank(rank: int, world: int, target: str, payload: Any, rendezvous: str, result: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    module, _, function = target.partition(":")
    returned = getattr(importlib.import_module(module), function)(payload)
    if rank == 0:
        Path(result).write_text(json.dumps(returned))
    dist.barrier()
    dist.destroy_process_group()
