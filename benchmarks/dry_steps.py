"""``python -m benchmarks.dry_steps``: what the runtime itself costs in a step, by tasks and by ranks.

One rank of many, whose collectives take no time (``runtime.backends.rate_limited``), and blocks that compute
next to nothing: what is left is Python, threads and copies. Beside it the same model in plain torch.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.schedule import Use
from hzplan.formats.base import write_text
from hzplan.runtime.apply import Choice, apply
from hzplan.runtime.backends.rate_limited import RateLimitedWorld
from hzplan.runtime.executor import Executor

BLOCKS, RANKS = (8, 77, 770), (64, 1024, 16384)
WIDTH, WIDE = 8, 384
STEPS, WARM_UP = 12, 3
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Cost:
    """Seconds of a step: ``step_s`` by the clock, of processor time on compute's thread (``compute_s``) and
    in the process, the medians of steps; ``plain_s``: compute's thread in plain torch. ``tasks``: of a step,
    those with something to do. ``made_s``: of making the runtime."""

    blocks: int
    ranks: int
    tasks: int
    made_s: float
    step_s: float
    compute_s: float
    process_s: float
    plain_s: float

    @property
    def task_us(self) -> float:
        """Microseconds of compute's thread per task, beyond plain torch, whose optimizer has next to nothing
        to do where blocks are small."""
        return (self.compute_s - self.plain_s) / self.tasks * 1e6


def measure(blocks: int, mesh: Mesh, width: int) -> Cost:
    """A step of so many blocks on one rank of a mesh: parameters sharded in the node, the rest everywhere."""
    model = _model(blocks, width)
    plain = torch.optim.AdamW(model.parameters(), fused=True)
    clip_plain = partial(nn.utils.clip_grad_norm_, list(model.parameters()), 1.0)
    _, plain_s, _ = _steps(model, plain, clip_plain, plain.zero_grad, width)
    names = [str(index) for index in range(blocks)]
    uses = (*(Use(name, "forward") for name in names), *(Use(name, "backward") for name in reversed(names)))
    levels = Levels(mesh.tier_bounds[0][1], mesh.levels, mesh.levels)
    choice = Choice(mesh, {name: levels for name, _ in model.named_parameters()}, uses, 2, 1, clip=True)
    world = RateLimitedWorld(mesh, 0, lambda operation, stage, nbytes: 0.0, exchanges=False)
    began = time.perf_counter()
    sharded, optimizer = apply(model, choice, torch.optim.AdamW, world=world, fused=True)
    made_s = time.perf_counter() - began
    executor = optimizer.engine.executor
    assert isinstance(executor, Executor)
    clip = partial(optimizer.clip_grad_norm_, 1.0)
    found = _steps(sharded, optimizer, clip, executor.synchronize, width)
    tasks = len(executor.record.start_s)
    optimizer.engine.close()
    return Cost(blocks, mesh.world, tasks, made_s, *found, plain_s)


def _model(blocks: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks)))


def _steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[], object],
    clear: Callable[[], object],
    width: int,
) -> tuple[float, float, float]:
    """Medians over steps: wall, this thread's processor time, the process's."""
    batch: Tensor = torch.randn(1, width)
    samples = []
    for _ in range(STEPS + WARM_UP):
        clocks = time.perf_counter(), time.thread_time(), time.process_time()
        model(batch).square().mean().backward()
        clip()
        optimizer.step()
        clear()
        now = time.perf_counter(), time.thread_time(), time.process_time()
        samples.append([b - a for a, b in zip(clocks, now, strict=True)])
    step_s, compute_s, process_s = (statistics.median(of) for of in zip(*samples[WARM_UP:], strict=True))
    return step_s, compute_s, process_s


@app.command()
def main(output: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None) -> None:
    """Measure. Nothing else should run meanwhile.

    Example: python -m benchmarks.dry_steps
    """
    torch.set_num_threads(1)
    narrow = [measure(blocks, Mesh.parse("8|8"), WIDTH) for blocks in BLOCKS]
    found = narrow + [measure(BLOCKS[1], Mesh.of_tiers(8, ranks // 8), WIDE) for ranks in RANKS]
    print("blocks ranks  tasks   making      step  compute  process   plain  µs/task")
    for one in found:
        milliseconds = (one.step_s, one.compute_s, one.process_s, one.plain_s)
        print(
            f"{one.blocks:6} {one.ranks:5} {one.tasks:6} {one.made_s:6.1f} s "
            + " ".join(f"{1e3 * seconds:7.1f}" for seconds in milliseconds)
            + (f" ms {one.task_us:6.1f}" if one in narrow else " ms      –")
        )
    if output is not None:
        write_text(output, json.dumps([asdict(one) for one in found], indent=1) + "\n")


if __name__ == "__main__":
    app()
