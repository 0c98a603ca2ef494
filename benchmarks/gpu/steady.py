"""``python -m benchmarks.gpu.steady PLAN``: what the allocator does in a long run close to the budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hzplan.formats.plan import Plan
from hzplan.models.workload import load
from hzplan.peers.contender import Setting
from hzplan.peers.hzplan import Hzplan
from hzplan.training.batches import SyntheticBatches

LEARNING_RATE = 1e-5
COUNTED = ("num_device_alloc", "num_alloc_retries", "num_ooms")
"""Of torch.cuda.memory_stats: calls of cudaMalloc, and what was tried again after freeing."""
STEPS_CAPPED = 50
"""With no more memory than the budget."""
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    plan: Annotated[Path, typer.Argument(help="For one rank.")],
    steps: Annotated[int, typer.Option(help="After three to warm up.")] = 200,
    share: Annotated[
        float, typer.Option(help="How much of what the process may take the plan predicts it does.")
    ] = 0.95,
) -> None:
    """Train on synthetic batches, first with all of the device's memory, then with no more than the budget.

    Example: python -m benchmarks.gpu.steady plan.json
    """
    loaded = Plan.load(plan)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    workload = load(loaded.model.name, seq_len=loaded.model.seq_len)
    data = SyntheticBatches(workload, loaded.batch.micro_batch, 0)
    total = torch.cuda.get_device_properties(device).total_memory
    budget = round(loaded.predicted.peak_memory_bytes / share)
    ours = Hzplan(Setting(loaded, workload, data, lr=LEARNING_RATE, seed=0))
    free = _trained(ours, 3, steps)
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)
    capped = _trained(ours, 4 + steps, STEPS_CAPPED)
    allocated, reserved = free["allocated_bytes"], free["reserved_bytes"]
    result: dict[str, Any] = {"free": free, "capped": capped}
    print(
        json.dumps(
            result
            | {
                "steps": steps,
                "budget_bytes": budget,
                "predicted_bytes": loaded.predicted.peak_memory_bytes,
                "reserved_of_allocated": reserved / allocated,
            }
        )
    )


def _trained(ours: Hzplan, first: int, steps: int) -> dict[str, int]:
    """What the allocator does in so many steps, after one that takes up again what steps need."""
    torch.cuda.empty_cache()  # what making the model took, or the steps before
    ours.step(first)
    ours.finish()
    before = _counts()
    torch.cuda.reset_peak_memory_stats()
    for step in range(steps):
        ours.step(first + 1 + step)
    ours.finish()
    peaks = {"allocated_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}  # fmt: skip  # noqa: E501
    now = _counts()
    return peaks | {name: now[name] - before[name] for name in COUNTED}


def _counts() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    return {name: int(stats.get(name, 0)) for name in COUNTED}


if __name__ == "__main__":
    app()
