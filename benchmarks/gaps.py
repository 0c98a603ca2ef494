"""How far plans are from the best choice, at most: ``python -m benchmarks.gaps``.

Twelve models profiled in shapes, on networks of three speeds: the predicted step over the bound of the plan's
own message order, over the bound of any order, and what the step was without message orders. ``--golden``:
the golden questions instead; ``--measured``: ten profiles measured on emulated clusters and on one node.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

from benchmarks.questions import made
from hzplan.core.hierarchy import Levels
from hzplan.cost.collectives import with_nodes
from hzplan.cost.model import CostModel
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile
from hzplan.solver import refine
from hzplan.solver.evaluate import evaluate, uniform
from hzplan.solver.guard import request_of
from hzplan.solver.search import Request
from hzplan.solver.solve import Solved, solve
from hzplan.solver.sweep import with_network

ROOT = Path(__file__).parent.parent
MEASURED = Path(__file__).parent / "measured"
"""Profiles made on 2026-11-25 on two processors with ``benchmarks.measure.profiled``, by their names: model
(``benchmarks.models``), tiers, slowest tier's rate, dtype; those of one node with ``hzplan profile
benchmarks.models:MODEL --nproc 4 --mesh 2,2 --micro-batch 2``."""
SPEEDS = (0.25, 0.5, 1.0)
NODES = 8
SHARE = 0.95
"""Of the device's memory."""
LIMIT_S = 30.0


@dataclass(frozen=True)
class Cell:
    """One question and its answer. ``gap`` in the plan's order, ``any_order``: to the bound of all orders;
    ``shared_s``: the step of the answer without message orders."""

    about: str
    step_s: float
    shared_s: float
    gap: float
    any_order: float
    ordered: bool
    seconds: float


def modelled(folder: Path) -> Iterator[tuple[str, Profile, Request]]:
    """The modelled questions: every model on every network, a sequence for each rank and forward pass."""
    for path in made(folder):
        for speed in SPEEDS:
            profile = with_nodes(Profile.load(path), NODES)
            profile = profile if speed == 1.0 else with_network(profile, speed)
            batch = profile.data_ranks * profile.micro_batches[-1] * 2
            budget = int(profile.cluster.memory_bytes * SHARE)
            yield f"{path.stem}, network × {speed}", profile, Request(budget, batch, time_limit_s=LIMIT_S)


def measured() -> Iterator[tuple[str, Profile, Request]]:
    """Every measured profile, in 70 % of what replicas take, two forward passes a step."""
    for path in sorted(MEASURED.glob("*.json")):
        profile = Profile.load(path)
        model, size = CostModel(profile), profile.micro_batches[-1]
        schedule = model.schedule(prefetch=1, accumulation=2, clip=True)
        replicas = evaluate(model, uniform(profile, Levels(0, 0, 0)), schedule, size)
        budget, batch = replicas.memory.peak * 7 // 10, profile.data_ranks * size * 2
        yield path.stem, profile, Request(budget, batch, time_limit_s=LIMIT_S)


def golden() -> Iterator[tuple[str, Profile, Request]]:
    """The questions of the golden plans."""
    for path in sorted((ROOT / "plans").glob("*.json")):
        plan = Plan.load(path)
        profile = Profile.load(path.parent / plan.source.profile)
        yield path.stem, profile, replace(request_of(plan), time_limit_s=LIMIT_S)


def answered(about: str, profile: Profile, request: Request) -> Cell | None:
    """None where nothing fits."""
    began = time.monotonic()
    found = solve(profile, request)
    seconds = time.monotonic() - began
    with patch.object(refine, "in_best_order", lambda one, _: one):
        shared = solve(profile, request)
    if not isinstance(found, Solved) or not isinstance(shared, Solved):
        return None
    best = found.best
    any_order = best.predicted.period_ns / found.bound_ns - 1
    ordered = best.schedule.order is not None
    return Cell(about, best.step_s, shared.best.step_s, found.gap, any_order, ordered, seconds)


def summary(cells: Sequence[Cell]) -> str:
    """In how many cells the gap is at most 1, 2, 3, 5 %, and where the step is shorter or longer in order."""
    gaps = [cell.gap for cell in cells]
    change = [cell.step_s / cell.shared_s - 1 for cell in cells]
    seconds = [cell.seconds for cell in cells]
    within = [f"{sum(gap <= most for gap in gaps)} ≤ {most:.0%}" for most in (0.01, 0.02, 0.03, 0.05)]
    said = [
        f"{len(cells)} cells",
        f"gap: {', '.join(within)}, median {statistics.median(gaps):.2%}, worst {max(gaps):.2%}",
        f"step against shared links: longer in {sum(share > 1e-4 for share in change)}, at most "
        f"{max(change):+.2%}; shorter by 3 % in {sum(share <= -0.03 for share in change)}, at most "
        f"{min(change):+.2%}",
        f"seconds: median {statistics.median(seconds):.0f}, at most {max(seconds):.0f}",
    ]
    return "; ".join(said)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Gaps of the plans of modelled and golden questions.")
    parser.add_argument("--made", type=Path, default=Path("build/questions"), help="where profiles are kept")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--golden", action="store_true", help="the golden questions instead")
    which.add_argument("--measured", action="store_true", help="measured profiles instead")
    given = parser.parse_args()
    print("| question | step | shared links | gap | in any order | messages | seconds |")
    print("|---|--:|--:|--:|--:|---|--:|")
    cells = []
    asked = golden() if given.golden else measured() if given.measured else modelled(given.made)
    for about, profile, request in asked:
        cell = answered(about, profile, request)
        if cell is None:
            print(f"| {about} | does not fit | | | | | |", flush=True)
            continue
        cells.append(cell)
        print(
            f"| {about} | {1e3 * cell.step_s:,.0f} ms | {1e3 * cell.shared_s:,.0f} ms | {cell.gap:.2%} "
            f"| {cell.any_order:.2%} | {'in order' if cell.ordered else 'shared'} | {cell.seconds:.0f} |",
            flush=True,
        )
    print(f"\n{summary(cells)}")


if __name__ == "__main__":
    main()
