"""``python -m benchmarks.gpu.beside PLAN ONE OTHER``: two ways to train on this device, in turns; JSON out.

Both live in this process, and nobody else: a model of a few billion parameters leaves no room for more. Where
the plan recomputes a unit, everyone does.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn

from hzplan.formats.plan import Plan
from hzplan.models.recompute import recompute
from hzplan.models.workload import load
from hzplan.peers.compare import compare
from hzplan.peers.contender import Contender, Setting
from hzplan.peers.ddp import Local
from hzplan.peers.fsdp2 import FSDP2
from hzplan.peers.hzplan import Hzplan
from hzplan.training.batches import SyntheticBatches

PLAIN, AGAIN, FSDP2_, OURS = "plain", "plain again", "fsdp2", "hzplan"
LEARNING_RATE = 1e-5
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, eq=False)
class RecomputeOptions(Setting):
    """For those who know no plan: the units that it recomputes are, by torch's checkpoint."""

    def build_model(self) -> nn.Module:
        """See Setting."""
        model = super().build_model()
        for name in self.plan.recomputed:
            recompute(model.get_submodule(name), partial(self.plan.recomputed.get, name))
        return model


@app.command()
def main(
    plan: Annotated[Path, typer.Argument(help="For one rank.")],
    one: Annotated[str, typer.Argument(help="hzplan, plain, plain again or fsdp2.")],
    other: Annotated[str, typer.Argument(help="Another of them.")],
    rounds: Annotated[int, typer.Option(help="Turns of each.")] = 8,
    steps: Annotated[int, typer.Option(help="Steps of a turn.")] = 4,
) -> None:
    """Train in turns; prints seconds of a step by round, and peaks.

    Example: python -m benchmarks.gpu.beside plan.json hzplan fsdp2
    """
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "cuda:nccl,cpu:gloo" if on_gpu else "gloo",
            init_method=f"file://{folder}/meet",
            rank=0,
            world_size=1,
        )
        makers = _makers(Plan.load(plan))
        found = compare(
            {name: makers[name] for name in (one, other)},
            rounds=rounds,
            steps_per_round=steps,
            alone=(one, other),
        )
        dist.destroy_process_group()
    entries = found.entries
    result: dict[str, Any] = {name: {"round_s": entry.round_s, "losses": entry.losses} for name, entry in entries.items()}  # fmt: skip  # noqa: E501
    for name, entry in entries.items():
        result[name]["peak_memory_bytes"] = entry.peak_memory_bytes
    print(json.dumps(result | {"absent": dict(found.absent)}))


def _makers(plan: Plan) -> dict[str, Callable[[], Contender]]:
    workload = load(plan.model.name, seq_len=plan.model.seq_len)
    data = SyntheticBatches(workload, plan.batch.micro_batch, 0)
    ours = Setting(plan, workload, data, lr=LEARNING_RATE, seed=0)
    others = RecomputeOptions(plan, workload, data, lr=LEARNING_RATE, seed=0)
    return {
        OURS: partial(Hzplan, ours, timed=False),
        PLAIN: partial(Local, others),
        AGAIN: partial(Local, others),
        FSDP2_: partial(FSDP2, others),
    }


if __name__ == "__main__":
    app()
