"""Wake-up latency: from the end of one stream's task to the begin of another stream's that waits for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing

import torch

from hzplan.core.schedule import COMPUTE_STREAM, Schedule, Task, Use, build
from hzplan.profiler.session.ranks import Ranks
from hzplan.profiler.session.statistics import nanoseconds
from hzplan.runtime.executor import Executor

STEPS = 8
TASK_S = 3e-3
"""Seconds of a task, about a short collective's: threads that wait for less do not go to sleep."""
TIERS = 2
UNITS = ("first", "second")
SIZE = 512
"""Rows of the square matrices that compute multiplies."""


def measure_wakeup(ranks: Ranks) -> float:
    """Seconds, from steps whose tasks only sleep, run by the runtime's own threads while this one multiplies
    matrices; all ranks at once.

    The slowest rank's median over all wake-ups. Where ranks share processors the mean is twice as much, of
    those that wait for a processor; interference accounts for them already.
    """
    schedule = build(
        [Use(unit, "forward") for unit in UNITS] + [Use(unit, "backward") for unit in reversed(UNITS)],
        {unit: (unit,) for unit in UNITS},
        UNITS,
        tiers=TIERS,
        prefetch=1,
        accumulation=1,
        clip=True,
    )
    matrix = torch.ones(SIZE, SIZE)
    out = torch.empty_like(matrix)
    begins, ends = [0.0] * len(schedule.tasks), [0.0] * len(schedule.tasks)
    found: list[float] = []

    def work(task: Task, scratch: int = 0) -> None:
        begins[task.index] = began = time.perf_counter()
        if task.stream == COMPUTE_STREAM:
            while time.perf_counter() - began < TASK_S:
                torch.mm(matrix, matrix, out=out)
        else:
            time.sleep(TASK_S)
        ends[task.index] = time.perf_counter()

    ranks.barrier()
    with closing(Executor(schedule, work, lambda task: False)) as executor:
        for _ in range(STEPS):
            ends[0] = time.perf_counter()
            executor.begin_step()
            for task in schedule.streams[COMPUTE_STREAM][1:]:
                executor.start(task)
                work(task)
                executor.end(task)
            executor.synchronize()
            found += wakeups(schedule, begins, ends)
    return nanoseconds(max(ranks.gather(statistics.median(found))))


def wakeups(schedule: Schedule, begins: Sequence[float], ends: Sequence[float]) -> Iterator[float]:
    """One step's wake-ups, seconds, from the end of the last task waited for if that is another stream's."""
    for task in schedule.tasks[1:]:
        before = max(task.after, key=lambda index: ends[index])
        if schedule.tasks[before].stream != task.stream:
            yield begins[task.index] - ends[before]
