"""How long after the end of one stream's task another stream's, which waited for it, begins."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from hzplan.profiler.ranks import Ranks
from hzplan.profiler.samples import nanoseconds
from hzplan.runtime.executor import Executor
from hzplan.schedule import COMPUTE_STREAM, Schedule, Task, Use, build

STEPS = 8
TASK_S = 3e-3
"""About as long as a short collective: a thread that waits for less is still awake."""
USUAL = 0.95
TIERS = 2
UNITS = ("first", "second")


def measure_handoff(ranks: Ranks, compute: Callable[[], None]) -> float:
    """Seconds, from a step whose tasks only sleep, run by the runtime's own threads while this one computes.

    All ranks at once. The mean over what was handed over, but for the latest few, of the slowest rank: they
    follow each other in a step.
    """
    uses = [Use(unit, "forward") for unit in UNITS] + [Use(unit, "backward") for unit in reversed(UNITS)]
    schedule = build(
        uses,
        {unit: (unit,) for unit in UNITS},
        UNITS,
        tiers=TIERS,
        prefetch=1,
        accumulation=1,
        clip=True,
    )
    begins, ends = [0.0] * len(schedule.tasks), [0.0] * len(schedule.tasks)
    found: list[float] = []

    def timed(task: Task, work: Callable[[], None]) -> None:
        begins[task.index] = time.perf_counter()
        work()
        ends[task.index] = time.perf_counter()

    sleep = partial(time.sleep, TASK_S)
    executor = Executor(schedule, lambda task, lane: timed(task, sleep), lambda task: False)
    ranks.barrier()
    for _ in range(STEPS):
        ends[0] = time.perf_counter()
        executor.begin_step()
        for task in schedule.streams[COMPUTE_STREAM][1:]:
            executor.start(task)
            timed(task, compute)
            executor.end(task)
        executor.drain()
        found += _handoffs(schedule, begins, ends)
    executor.close()
    usual = sorted(found)[: round(USUAL * len(found))]
    return nanoseconds(max(ranks.gather(statistics.fmean(usual))))


def _handoffs(schedule: Schedule, begins: Sequence[float], ends: Sequence[float]) -> Iterator[float]:
    """Of one step: from the end of what a task waited for, where that was another stream's."""
    for task in schedule.tasks[1:]:
        before = max(task.after, key=lambda index: ends[index])
        if schedule.tasks[before].stream != task.stream:
            yield begins[task.index] - ends[before]
