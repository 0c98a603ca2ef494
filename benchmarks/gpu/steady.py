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
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    plan: Annotated[Path, typer.Argument(help="For one rank.")],
    steps: Annotated[int, typer.Option(help="After three to warm up.")] = 200,
    share: Annotated[
        float, typer.Option(help="How much of what the process may take the plan predicts it does.")
    ] = 0.95,
) -> None:
    """Train on synthetic batches with no more memory than the budget.

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
    torch.cuda.empty_cache()  # what making the model took
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)
    ours.step(3)  # takes up again what the steps need
    ours.finish()
    before, now = _counts(), {}
    torch.cuda.reset_peak_memory_stats(device)
    for step in range(steps):
        ours.step(4 + step)
    ours.finish()
    now = _counts()
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    result: dict[str, Any] = {name: now[name] - before[name] for name in COUNTED}
    print(
        json.dumps(
            result
            | {
                "steps": steps,
                "budget_bytes": budget,
                "predicted_bytes": loaded.predicted.peak_memory_bytes,
                "allocated_bytes": allocated,
                "reserved_bytes": reserved,
                "reserved_of_allocated": reserved / allocated,
            }
        )
    )


def _counts() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    return {name: int(stats.get(name, 0)) for name in COUNTED}


if __name__ == "__main__":
    app()
