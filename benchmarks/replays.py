"""How many replays of a step the search has in a second: ``python -m benchmarks.replays``, one core.

A replay is what a choice is decided by: the simulator's steady state of a plan, with its messages in order or
links shared, and what model and memory say of it before. The same plan over and over, nothing is kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from hzplan.cost.simulate import events
from hzplan.formats.plan import Plan
from hzplan.formats.source import profile_of
from hzplan.solver.evaluate import evaluate, replay

GOLDEN = Path(__file__).parents[1] / "plans"
ROUNDS = 20


def rows() -> Iterator[tuple[str, str, int, float, float]]:
    """Of every golden plan: name, how its messages share links, task ends of a replay, replays per second
    (the median of rounds), and which share of their time model and memory take."""
    for path in sorted(GOLDEN.glob("*.json")):
        plan = Plan.load(path)
        found = replay(plan, profile_of(path, plan), path)
        whole, before = [], []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            one = evaluate(found.model, found.levels, found.schedule, found.micro_batch, modes=found.modes)
            before.append(time.perf_counter() - started)
            assert one.predicted.period_ns == found.predicted.period_ns
            whole.append(time.perf_counter() - started)
        seconds = statistics.median(whole)
        ends = events(found.schedule, found.model.late_ns(found.schedule, found.micro_batch))
        how = "links shared" if found.schedule.order is None else "in order"
        yield path.stem, how, ends, 1 / seconds, statistics.median(before) / seconds


def table() -> str:
    """The rows in Markdown."""
    head = "| plan | messages | task ends | replays/s | of which model and memory |\n|---|---|--:|--:|--:|\n"
    return head + "".join(
        f"| {name} | {how} | {ends:,} | {rate:.0f} | {share:.0%} |\n"
        for name, how, ends, rate, share in rows()
    )


if __name__ == "__main__":
    print(table(), end="")
