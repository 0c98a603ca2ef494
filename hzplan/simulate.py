"""Replay a schedule with durations: the timeline of the steady state and the exposed communication.

Two readings of the same DAG. ``replay`` gives every task the whole of its link: that is the ILP's objective,
and with it the load of each tier, and of the processors, a lower bound. ``replay_shared`` lets tasks that use
one tier at the same time share its bandwidth equally, and slows compute and communication by what they cost
each other, which is what is reported as the prediction.
"""

from __future__ import annotations

import itertools
import random
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
    late_ns: Sequence[int] | None = None,
) -> Timeline:
    """Event by event: tasks active on one tier progress at equal shares of its bandwidth.

    While a tier is at work compute progresses slower, and while compute runs the tier's tasks do; several
    tasks of a tier at once also lose by colliding.

    ``late_ns``: by how much the slowest rank's compute takes longer, by task. Then a few ranks compute, each
    now faster and now slower than the mean, and what they do together begins when the last of them comes.
    Exposed time is their mean, compute tasks' times are the first one's.
    """
    return _Replay(schedule, durations_ns, interference, late_ns).run()


PARTS = (-1.0, -1 / 3, 1 / 3, 1.0)
"""Where ranks lie between the fastest and the slowest of a use; as many ranks as are followed."""
STEPS, STEPS_OF_MANY = 4, 6
"""How many steps are replayed, of which the later half counts; of several ranks, whose steps differ, more."""


class _Replay:
    """Streams with the heads of their queues, and the time. Compute is a stream of every rank's own."""

    def __init__(
        self,
        schedule: Schedule,
        durations_ns: Sequence[int],
        interference: Interference | None,
        late_ns: Sequence[int] | None,
    ) -> None:
        self.schedule, self.durations_ns = schedule, durations_ns
        self.late_ns = late_ns if late_ns is not None and any(late_ns) else None
        self.cost = interference or Interference.none(schedule.tiers)
        self.ranks = len(PARTS) if self.late_ns else 1
        self.steps = STEPS_OF_MANY if self.late_ns else STEPS
        self.total = len(schedule.tasks)
        together = [tasks for name, tasks in schedule.streams.items() if name != COMPUTE_STREAM]
        compute = schedule.streams[COMPUTE_STREAM]
        self.queues = [*([compute] * self.ranks), *together]  # a rank's compute has the rank's number
        self.heads = [0] * len(self.queues)
        self.remaining: dict[int, float] = {}  # queue -> work left of its running task
        # By step and task: of every rank, for what they do together all of one value.
        self.starts: list[dict[int, float]] = [{} for _ in range(self.ranks)]
        self.ends: list[dict[int, float]] = [{} for _ in range(self.ranks)]
        self.ended: dict[int, int] = {}  # by how many ranks
        self.now = 0.0

    def run(self) -> Timeline:
        """Until all queues are through."""
        length = [self.steps * len(queue) for queue in self.queues]
        while any(head < end for head, end in zip(self.heads, length, strict=True)):
            self._start_ready()
            if self.remaining:
                self._pass_time()
        first = self.steps // 2 * self.total
        last = (self.steps - 1) * self.total
        period = (self.starts[0][last] - self.starts[0][first]) / (self.steps - 1 - self.steps // 2)
        exposed: dict[str, float] = {}
        counted = [last] if self.ranks == 1 else range(first, last, self.total)
        for starts, ends in zip(self.starts, self.ends, strict=True):
            for base in counted:
                waits = _exposed(
                    self.schedule,
                    [starts[base + i] for i in range(self.total)],
                    [ends[base + i] for i in range(self.total)],
                    starts[base] + period,
                )
                for name, wait in waits.items():
                    exposed[name] = exposed.get(name, 0.0) + wait / self.ranks / len(counted)
        origin = self.starts[0][last]
        return Timeline(
            tuple(self.starts[0][last + i] - origin for i in range(self.total)),
            tuple(self.ends[0][last + i] - origin for i in range(self.total)),
            period,
            exposed,
        )

    def _task(self, queue: int) -> Task:
        return self.queues[queue][self.heads[queue] % len(self.queues[queue])]

    def _key(self, queue: int) -> int:
        return self.heads[queue] // len(self.queues[queue]) * self.total + self._task(queue).index

    def _ready(self, queue: int) -> bool:
        """What a rank's compute needs of compute is its own; everything else needs all ranks'."""
        step = self.heads[queue] // len(self.queues[queue])
        if step >= self.steps:
            return False
        task, own = self._task(queue), queue < self.ranks
        edges = [(step, u) for u in task.after]
        if step:
            edges += [(step - 1, u) for u in task.after_previous]
        if own:
            ends = self.ends[queue]
            return all(at * self.total + u in ends for at, u in edges)
        return all(self.ended.get(at * self.total + u, 0) == self.ranks for at, u in edges)

    def _start_ready(self) -> None:
        """Start what can start; tasks of zero length end at once."""
        progressed = True
        while progressed:
            progressed = False
            for queue in range(len(self.queues)):
                if queue not in self.remaining and self._ready(queue):
                    key = self._key(queue)
                    for starts in self._of(queue, self.starts):
                        starts[key] = self.now
                    if duration := self._duration_ns(queue, key):
                        self.remaining[queue] = duration
                    else:
                        self._end(queue)
                    progressed = True

    def _duration_ns(self, queue: int, key: int) -> float:
        task = self._task(queue)
        duration = float(self.durations_ns[task.index])
        if queue < self.ranks and self.late_ns is not None:
            places = random.Random(key).sample(range(self.ranks), self.ranks)
            duration = max(0.0, duration + self.late_ns[task.index] * PARTS[places[queue]])
        return duration

    def _end(self, queue: int) -> None:
        key = self._key(queue)
        for ends in self._of(queue, self.ends):
            ends[key] = self.now
            self.ended[key] = self.ended.get(key, 0) + 1
        self.heads[queue] += 1

    def _of(self, queue: int, by_rank: list[dict[int, float]]) -> list[dict[int, float]]:
        """A rank's own, or everyone's."""
        return [by_rank[queue]] if queue < self.ranks else by_rank

    def _pass_time(self) -> None:
        """Until the next task ends."""
        on_tier: dict[int, int] = {}
        for queue in self.remaining:
            if queue >= self.ranks:
                tier = self._task(queue).tier
                on_tier[tier] = on_tier.get(tier, 0) + 1
        computing = sum(queue < self.ranks for queue in self.remaining) / self.ranks
        speed = 1.0 - sum(self.cost.lost[tier] for tier in on_tier if tier >= 0)
        slowdown = {
            queue: _slowdown(self._task(queue), on_tier, speed, self.cost, computing)
            for queue in self.remaining
        }
        elapsed = min(work * slowdown[queue] for queue, work in self.remaining.items())
        self.now += elapsed
        for queue in list(self.remaining):
            self.remaining[queue] -= elapsed / slowdown[queue]
            if self.remaining[queue] <= 1e-6:
                del self.remaining[queue]
                self._end(queue)


def _slowdown(
    task: Task, on_tier: Mapping[int, int], speed: float, cost: Interference, computing: float
) -> float:
    """How many times as long a task takes beside what else is under way.

    ``computing``: the share of ranks that compute.
    """
    if task.stream == COMPUTE_STREAM:
        return 1.0 / speed
    if task.tier < 0:
        return 1.0
    beside = on_tier[task.tier]
    shared = beside * cost.collision[task.tier] if beside > 1 else 1.0
    return shared * (1.0 + (cost.slowdown[task.tier] - 1.0) * computing)


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
