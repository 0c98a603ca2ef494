"""Replay a schedule with durations: the timeline of the steady state and the exposed communication.

Two readings of the same DAG. ``replay`` gives every task the whole of its link: that is the ILP's objective,
and with it the load of each tier, and of the processors, a lower bound. ``replay_shared`` lets tasks that use
one tier at the same time share its bandwidth equally, and slows compute and communication by what they cost
each other, which is what is reported as the prediction.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hzplan.cost import Interference
from hzplan.schedule import COMPUTE_STREAM, Schedule, Task

MAX_STEPS = 24


@dataclass(frozen=True)
class Timeline:
    """One steady-state step: nanoseconds from its begin; ``period_ns`` from begin to begin."""

    start_ns: tuple[float, ...]
    end_ns: tuple[float, ...]
    period_ns: float
    exposed_ns: dict[str, float]


def replay(schedule: Schedule, durations_ns: Sequence[int]) -> Timeline:
    """Longest path, step after step, until the period repeats (max-plus systems become periodic).

    A period may itself alternate over a few steps; the mean over the cycle is then the period.
    """
    previous: list[float] = [0.0] * len(schedule.tasks)
    begins: list[float] = []
    starts: list[float] = []
    ends: list[float] = []
    for _ in range(MAX_STEPS):
        starts, ends = [], []
        for task, duration in zip(schedule.tasks, durations_ns, strict=True):
            start = max(
                max((ends[u] for u in task.after), default=0.0),
                max((previous[u] for u in task.after_previous), default=0.0) if begins else 0.0,
            )
            starts.append(start)
            ends.append(start + duration)
        begins.append(starts[0])
        previous = ends
        period = _steady(begins)
        if period is not None:
            break
    else:
        half = len(begins) // 2
        period = (begins[-1] - begins[half]) / (len(begins) - 1 - half)
    return _timeline(schedule, starts, ends, period)


def objective_ns(
    schedule: Schedule, durations_ns: Sequence[int], interference: Interference | None = None
) -> float:
    """A lower bound on a step's time for these durations, and what the ILP minimises.

    The largest of three: the period in which no two tasks share a link; the whole load of a tier, which
    cannot carry its bytes faster, whatever the sharing; and compute, plus of every tier's load the share that
    it takes of compute's speed. The last holds because compute either waits while a tier is at work, which
    costs the period more, or loses that share of its speed, and a tier is at work no shorter than its load.
    """
    loads = tier_loads_ns(schedule, durations_ns)
    lost = interference.lost if interference else (0.0,) * schedule.tiers
    compute = sum(d for t, d in zip(schedule.tasks, durations_ns, strict=True) if t.stream == COMPUTE_STREAM)
    processors = compute + sum(share * load for share, load in zip(lost, loads, strict=True))
    return max(replay(schedule, durations_ns).period_ns, processors, *loads)


def tier_loads_ns(schedule: Schedule, durations_ns: Sequence[int]) -> list[int]:
    """The sum of the durations of all tasks of a tier, for every tier."""
    loads = [0] * schedule.tiers
    for task, duration in zip(schedule.tasks, durations_ns, strict=True):
        if task.tier >= 0:
            loads[task.tier] += duration
    return loads


def replay_shared(
    schedule: Schedule,
    durations_ns: Sequence[int],
    interference: Interference | None = None,
    steps: int = 4,
) -> Timeline:
    """Event by event: tasks active on one tier progress at equal shares of its bandwidth.

    While a tier is at work compute progresses slower, and while compute runs the tier's tasks do.
    """
    cost = interference or Interference.none(schedule.tiers)
    total = len(schedule.tasks)
    streams = list(schedule.streams.values())
    heads = [0] * len(streams)
    ends: dict[int, float] = {}
    starts: dict[int, float] = {}
    remaining: dict[int, float] = {}  # stream index -> work left of its running task
    now = 0.0

    def key(stream: int) -> int:
        step, place = divmod(heads[stream], len(streams[stream]))
        return step * total + streams[stream][place].index

    def task_of(stream: int) -> Task:
        return streams[stream][heads[stream] % len(streams[stream])]

    def ready(stream: int) -> bool:
        step = heads[stream] // len(streams[stream])
        task = task_of(stream)
        return (
            step < steps
            and all(step * total + u in ends for u in task.after)
            and (step == 0 or all((step - 1) * total + u in ends for u in task.after_previous))
        )

    while len(ends) < steps * total:
        progressed = True
        while progressed:  # start what can start; tasks of zero length end at once
            progressed = False
            for stream in range(len(streams)):
                if stream not in remaining and ready(stream):
                    starts[key(stream)] = now
                    duration = durations_ns[task_of(stream).index]
                    if duration:
                        remaining[stream] = float(duration)
                    else:
                        ends[key(stream)] = now
                        heads[stream] += 1
                    progressed = True
        if not remaining:
            continue
        on_tier: dict[int, int] = {}
        for stream in remaining:
            on_tier[task_of(stream).tier] = on_tier.get(task_of(stream).tier, 0) + 1
        computing = any(task_of(stream).stream == COMPUTE_STREAM for stream in remaining)
        speed = 1.0 - sum(cost.lost[tier] for tier in on_tier if tier >= 0)
        slowdown = {
            stream: _slowdown(task_of(stream), on_tier, speed, cost if computing else None)
            for stream in remaining
        }
        elapsed = min(work * slowdown[stream] for stream, work in remaining.items())
        now += elapsed
        for stream in list(remaining):
            remaining[stream] -= elapsed / slowdown[stream]
            if remaining[stream] <= 1e-6:
                del remaining[stream]
                ends[key(stream)] = now
                heads[stream] += 1
    base = (steps - 1) * total
    first = (steps // 2) * total
    period = (starts[base] - starts[first]) / (steps - 1 - steps // 2)
    return _timeline(
        schedule,
        [starts[base + i] for i in range(total)],
        [ends[base + i] for i in range(total)],
        period,
    )


def _slowdown(task: Task, on_tier: Mapping[int, int], speed: float, cost: Interference | None) -> float:
    """How many times as long a task takes beside what else is under way."""
    if task.stream == COMPUTE_STREAM:
        return 1.0 / speed
    if task.tier < 0:
        return 1.0
    return on_tier[task.tier] * (cost.slowdown[task.tier] if cost else 1.0)


def _steady(begins: Sequence[float]) -> float | None:
    """The mean period once the last steps repeat with a cycle of one to four steps."""
    periods = [b - a for a, b in itertools.pairwise(begins)]
    for cycle in range(1, 5):
        if len(periods) >= 2 * cycle + 1 and periods[-cycle:] == periods[-2 * cycle : -cycle]:
            return sum(periods[-cycle:]) / cycle
    return None


def _timeline(schedule: Schedule, starts: Sequence[float], ends: Sequence[float], period: float) -> Timeline:
    origin = starts[0]
    return Timeline(
        tuple(start - origin for start in starts),
        tuple(end - origin for end in ends),
        period,
        _exposed(schedule, starts, ends, origin + period),
    )


def _exposed(
    schedule: Schedule, starts: Sequence[float], ends: Sequence[float], next_begin: float
) -> dict[str, float]:
    """Time the compute stream waits, booked to the tier (or the optimizer) it waits on."""
    exposed = {f"tier {tier}": 0.0 for tier in range(schedule.tiers)} | {"optim": 0.0}
    period = next_begin - starts[0]
    idle_since = starts[0]
    for task in schedule.streams[COMPUTE_STREAM]:
        gap = starts[task.index] - idle_since
        if gap > 0:
            exposed[_cause(schedule, task, starts, ends, period)] += gap
        idle_since = ends[task.index]
    return exposed


def _cause(
    schedule: Schedule, task: Task, starts: Sequence[float], ends: Sequence[float], period: float
) -> str:
    """Follow the last dependency to end, back through tasks of zero length, to one that took time."""
    shift = 0.0
    while True:
        edges = [(ends[u] + shift, u, 0.0) for u in task.after]
        edges += [(ends[u] + shift - period, u, -period) for u in task.after_previous]
        # Of equal ends prefer communication: a compute task that ends now is not what was waited for.
        _, binding, step = max(edges, key=lambda e: (e[0], schedule.tasks[e[1]].stream != COMPUTE_STREAM))
        shift += step
        task = schedule.tasks[binding]
        if ends[binding] > starts[binding] or task.stream == COMPUTE_STREAM:
            return f"tier {task.tier}" if task.tier >= 0 else "optim"
