"""Replay a schedule with durations: the timeline of the steady state and the exposed communication.

Two readings of the same DAG. ``replay`` gives every task the whole of its link: that is the ILP's objective,
and with it the load of each tier, and of the processors, a lower bound. ``replay_shared`` lets tasks that use
one tier at the same time share its bandwidth equally, and slows compute and communication by what they cost
each other, which is what is reported as the prediction.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import fsum, inf, prod
from operator import mul

import numpy as np

from hzplan.core.schedule import COMPUTE_STREAM, HOST_LINK, STORE_STREAM, Schedule, Task
from hzplan.cost.events import EventGraph, event_graph
from hzplan.cost.interference import Interference
from hzplan.cost.lateness import RANKS, Late, places

_HOST_WAYS = {stream: way for way, streams in enumerate(HOST_LINK) for stream in streams}

MAX_STEPS = 24
"""Steps that ``replay`` follows at most, in search of a periodic state."""


@dataclass(frozen=True)
class Timeline:
    """One steady-state step: nanoseconds from its begin; ``period_ns`` from begin to begin."""

    start_ns: tuple[float, ...]
    end_ns: tuple[float, ...]
    period_ns: float
    exposed_ns: dict[str, float]

    def waits_s(self, tier_names: Sequence[str]) -> dict[str, float]:
        """Seconds that compute waits in the step, by tier name and "optim"."""
        names = {f"tier {tier}": name for tier, name in enumerate(tier_names)}
        return {names.get(cause, cause): waited / 1e9 for cause, waited in self.exposed_ns.items()}


def replay(schedule: Schedule, durations_ns: Sequence[int]) -> Timeline:
    """Longest path, step after step, until the period repeats (max-plus systems become periodic).

    Where the length of steps alternates, the period is the mean over a cycle. Copies to the host's memory may
    fall behind for many steps before compute waits for them, so their own period counts too.
    """
    tasks = schedule.tasks
    if len(durations_ns) != len(tasks):
        raise ValueError(f"{len(tasks)} durations needed, not {len(durations_ns)}")
    starts, ends, period = longest_paths(
        range(len(tasks)),
        [task.after for task in tasks],
        [task.after_previous for task in tasks],
        durations_ns,
        _last_store(schedule),
    )
    return _timeline(schedule, starts, ends, period)


def longest_paths(
    sequence: Iterable[int],
    after: Sequence[Collection[int]],
    after_previous: Sequence[Collection[int]],
    durations_ns: Sequence[int],
    last_store: int = 0,
) -> tuple[list[float], list[float], float]:
    """Starts and ends of all tasks in a late step, and the period.

    ``sequence``: a topological order of the tasks that begins with the step's first one; by task ``after``
    and ``after_previous``, its predecessors in the same step and the one before; ``last_store``: see
    ``replay``.
    """
    plan = [(task, after[task], after_previous[task], durations_ns[task]) for task in sequence]
    starts, ends = [0.0] * len(plan), [0.0] * len(plan)
    begins: list[float] = []
    stored: list[float] = []
    for _ in range(MAX_STEPS):
        previous, ends = ends, [0.0] * len(plan)
        for task, now, before, duration in plan:
            start = 0.0
            for u in now:
                if ends[u] > start:
                    start = ends[u]
            if before:
                for u in before:
                    if previous[u] > start:
                        start = previous[u]
            starts[task] = start
            ends[task] = start + duration
        begins.append(starts[plan[0][0]])
        stored.append(ends[last_store])
        found = _steady(begins), _steady(stored)
        if found[0] is not None and found[1] is not None:
            break
    half = len(begins) // 2
    period = max(
        (times[-1] - times[half]) / (len(times) - 1 - half) if one is None else one
        for one, times in zip(found, (begins, stored), strict=True)
    )
    return starts, ends, period


def _last_store(schedule: Schedule) -> int:
    """The task that ends a step's copies to the host's memory; the step's begin where there are none."""
    return schedule.streams[STORE_STREAM][-1].index if schedule.offload_slots else 0


def objective_ns(
    schedule: Schedule,
    durations_ns: Sequence[int],
    interference: Interference | None = None,
    graph: EventGraph | None = None,
    processor_ns: Sequence[float] | None = None,
) -> float:
    """A lower bound on a step's time for these durations, and what the ILP minimises.

    The largest of four: the period if every task had the whole of its link, with what late ranks and
    interference are sure to cost (``graph``, ``event_graph`` of the schedule; None: made here, no rank is
    late); the whole load of a tier, which cannot carry its bytes faster, whatever the sharing; what
    compute and all loads take together as they slow each other (``Interference.energies``); and the
    processor time of all tasks (``processor_ns``, ``CostModel.processor_ns``).
    """
    if graph is None:
        graph = event_graph(schedule, interference or Interference.none(schedule.tiers))
    period = replay(schedule, durations_ns).period_ns
    if not graph.plain:
        period = max(period, graph.period(np.asarray(durations_ns, dtype=float)))
    return max(period, floor_ns(schedule, durations_ns, interference, processor_ns))


def floor_ns(
    schedule: Schedule,
    durations_ns: Sequence[int],
    interference: Interference | None = None,
    processor_ns: Sequence[float] | None = None,
) -> float:
    """The part of ``objective_ns`` that needs no replay: the largest of tier loads, loads of the link to the
    host's memory, energies, and what processors do."""
    loads = tier_loads_ns(schedule, durations_ns)
    compute = sum(d for t, d in zip(schedule.tasks, durations_ns, strict=True) if t.stream == COMPUTE_STREAM)
    energies = interference.energies if interference else ()
    copies = [0] * len(HOST_LINK)
    for task, duration in zip(schedule.tasks, durations_ns, strict=True):
        if (way := _HOST_WAYS.get(task.stream)) is not None:
            copies[way] += duration
    together = (energy.at(compute, loads) for energy in energies)
    return max(compute, *loads, *copies, *together, fsum(processor_ns or ()))


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
    late: Sequence[Late] | None = None,
    processor_ns: Sequence[float] | None = None,
) -> Timeline:
    """Event by event: tasks active on one tier progress at equal shares of its bandwidth.

    While a tier is busy, compute runs slower, and the reverse; several tasks on one tier also lose by
    contention. A task that waited for another stream begins after the wake-up latency.

    ``late``: by task, in nanoseconds. With it several ranks are simulated, each at random faster or slower
    than the mean, and a collective begins when the last of them is ready; a task that takes no time is none,
    and holds nobody up. Exposed time is the mean over ranks; start and end of what each does by itself are
    the first rank's.

    ``processor_ns``: by task, ``CostModel.processor_ns``. Messages, whose threads wait
    for them most of the time, get them first, and what computes shares the rest.
    """
    return _SharedReplay(schedule, durations_ns, interference, late, processor_ns).run()


STEPS, STEPS_OF_MANY = 4, 6
"""Steps simulated, of which the later half counts: for one rank, and for several, whose steps differ."""


def events(schedule: Schedule, late: Sequence[Late] | None = None) -> int:
    """The number of task ends that ``replay_shared`` simulates, a measure of its run time."""
    if late is None:
        return STEPS * len(schedule.tasks)
    computes = len(schedule.streams[COMPUTE_STREAM])
    return STEPS_OF_MANY * (len(schedule.tasks) + (RANKS - 1) * computes)


LEAST_COMPUTE = 0.05
"""The least share of the processors that messages leave to compute; assumed, so that nothing stands still."""

_Ready = tuple[int, int, str]
"""(rank, 0 for all; task number; stream whose task end released it)."""


class _SharedReplay:
    """The state of ``replay_shared``: open predecessors of each task, tasks under way, and the time.

    Every rank has its own compute stream, and passes by itself what takes no time; all else is common to all
    ranks and waits for all of them. A task's number is step × tasks + index. A stream's order needs no queue,
    because it is edges of the schedule.
    """

    def __init__(
        self,
        schedule: Schedule,
        durations_ns: Sequence[int],
        interference: Interference | None,
        late: Sequence[Late] | None,
        processor_ns: Sequence[float] | None,
    ) -> None:
        self.schedule, self.durations_ns = schedule, durations_ns
        self.late = late
        self.cost = interference or Interference.none(schedule.tiers)
        self.ranks = RANKS if late else 1
        self.steps = STEPS_OF_MANY if late else STEPS
        self.total = len(schedule.tasks)
        self.computes = [task.stream == COMPUTE_STREAM for task in schedule.tasks]
        # What carries nothing holds no rank up: each passes it by itself, as its compute.
        self.alone = [
            compute or not duration for compute, duration in zip(self.computes, durations_ns, strict=True)
        ]
        other = schedule.tiers  # kinds of tasks: of each tier, others, compute, copies in each direction
        self.kinds = [
            other + 1
            if compute
            else task.tier
            if task.tier >= 0
            else other + 2 + _HOST_WAYS[task.stream]
            if task.stream in _HOST_WAYS
            else other
            for task, compute in zip(schedule.tasks, self.computes, strict=True)
        ]
        self.processors = self._shares(processor_ns)
        self.slowdowns: dict[tuple[int, ...], list[float]] = {}
        uses = max(len(schedule.uses), 1)
        self.uses_of = [(task.position % uses, task.position // uses) for task in schedule.tasks]
        # By task, how far ahead each follower's number is and whether ranks pass it alone; without the next
        # step's.
        self.last_followers: list[list[tuple[int, bool]]] = [[] for _ in schedule.tasks]
        for task in schedule.tasks:
            for before in task.after:
                self.last_followers[before].append((task.index, self.alone[task.index]))
        self.followers = [list(of) for of in self.last_followers]
        for task in schedule.tasks:
            for before in task.after_previous:
                self.followers[before].append((self.total + task.index, self.alone[task.index]))
        self.waiting = [self._needed(rank) for rank in range(self.ranks)]
        self.streams = [task.stream for task in schedule.tasks]
        self.under_way: dict[tuple[int, int], float] = {}  # rank (0 for all) and task -> work left
        self.waking: dict[tuple[int, int], float] = {}  # tasks in wake-up -> when they begin
        size = self.steps * self.total
        self.starts = [[0.0] * size for _ in range(self.ranks)]  # of what is common: the same for all
        self.ends = [[0.0] * size for _ in range(self.ranks)]
        self.now = 0.0

    def run(self) -> Timeline:
        """The timeline of the last step, once all tasks of all steps are done."""
        self._start([(rank, 0, COMPUTE_STREAM) for rank in range(self.ranks)])
        while self.under_way or self.waking:
            self._pass_time()
        first = self.steps // 2 * self.total
        last = (self.steps - 1) * self.total
        # Where nothing is sent ranks drift apart, and the slowest says how long steps are.
        between = max(starts[last] - starts[first] for starts in self.starts)
        if self.schedule.offload_slots:
            stored = _last_store(self.schedule)
            between = max(between, *(ends[last + stored] - ends[first + stored] for ends in self.ends))
        period = between / (self.steps - 1 - self.steps // 2)
        exposed: dict[str, float] = {}
        counted = [last] if self.ranks == 1 else range(first, last, self.total)
        for starts, ends in zip(self.starts, self.ends, strict=True):
            for base in counted:
                part = slice(base, base + self.total)
                waits = _exposed(self.schedule, starts[part], ends[part], starts[base] + period)
                for name, wait in waits.items():
                    exposed[name] = exposed.get(name, 0.0) + wait / self.ranks / len(counted)
        origin = self.starts[0][last]
        return Timeline(
            tuple(start - origin for start in self.starts[0][last:]),
            tuple(end - origin for end in self.ends[0][last:]),
            period,
            exposed,
        )

    def _needed(self, rank: int) -> list[int]:
        """The number of predecessors of each task of each step.

        What a rank does by itself waits for its own, what is common for that of all ranks; it is counted with
        rank 0.
        """

        def count(befores: Sequence[int], own: bool) -> int:
            return sum(self.ranks if self.alone[u] and not own else 1 for u in befores)

        tasks = self.schedule.tasks
        first = [count(task.after, self.alone[task.index]) for task in tasks]
        if rank:
            first = [needed if own else 0 for needed, own in zip(first, self.alone, strict=True)]
        wraps = [count(task.after_previous, self.alone[task.index]) for task in tasks]
        later = [needed + more for needed, more in zip(first, wraps, strict=True)]
        return first + later * (self.steps - 1)

    def _start(self, ready: list[_Ready]) -> None:
        """Start tasks that are ready; tasks of zero length end at once, and their followers start.

        A task released by another stream's task is in wake-up first.
        """
        while ready:
            rank, key, by = ready.pop()
            duration = self._duration_ns(rank, key)
            if duration and self.cost.wakeup_ns and by != self.streams[key % self.total]:
                self.waking[rank, key] = self.now + self.cost.wakeup_ns
            else:
                self._begin(rank, key, duration)
            if not duration:
                self._end(rank, key, by, ready)

    def _begin(self, rank: int, key: int, duration: float) -> None:
        for starts in self._of(rank, key % self.total, self.starts):
            starts[key] = self.now
        if duration:
            self.under_way[rank, key] = duration

    def _end(self, rank: int, key: int, by: str, ready: list[_Ready]) -> None:
        """End a task; add to ``ready`` the tasks that waited only for it. ``by``: the stream that ended
        it."""
        step, index = divmod(key, self.total)
        own = self.alone[index]
        for ends in self._of(rank, index, self.ends):
            ends[key] = self.now
        base, everyone = key - index, range(self.ranks)
        for ahead, alone in self.followers[index] if step + 1 < self.steps else self.last_followers[index]:
            follower = base + ahead
            for one in ((rank,) if own else everyone) if alone else (0,):
                waiting = self.waiting[one]
                waiting[follower] -= 1
                if not waiting[follower]:
                    ready.append((one, follower, by))

    def _duration_ns(self, rank: int, key: int) -> float:
        step, index = divmod(key, self.total)
        duration = float(self.durations_ns[index])
        if self.late is not None and self.late[index].slowest:
            use, micro_batch = self.uses_of[index]
            place = places(use, step * self.schedule.accumulation + micro_batch)[rank]
            duration = max(0.0, duration + self.late[index].at(place))
        return duration

    def _of(self, rank: int, index: int, by_rank: list[list[float]]) -> list[list[float]]:
        """The rank's list for what it does by itself, the lists of all ranks for what is common."""
        return [by_rank[rank]] if self.alone[index] else by_rank

    def _pass_time(self) -> None:
        """Advance the time to the next end of a task, or of a wake-up."""
        total, under_way, kinds = self.total, self.under_way, self.kinds
        placed = tuple([kinds[key % total] for _, key in under_way])
        slowdown = self.slowdowns.get(placed) or self._slowdowns(placed)
        if self.processors:
            slowdown = self._with_processors(placed, slowdown)
        elapsed = min(map(mul, under_way.values(), slowdown), default=inf)
        if self.waking:
            elapsed = min(elapsed, min(self.waking.values()) - self.now)
        self.now += elapsed
        ready: list[_Ready] = []
        for (one, work), slow in zip(list(under_way.items()), slowdown, strict=True):
            more = work - elapsed / slow
            if more <= 1e-6:
                del under_way[one]
                self._end(*one, self.streams[one[1] % total], ready)
            else:
                under_way[one] = more
        if self.waking:
            for one in [one for one, begin in self.waking.items() if begin <= self.now + 1e-6]:
                del self.waking[one]
                self._begin(*one, self._duration_ns(*one))
        self._start(ready)

    def _slowdowns(self, kinds: tuple[int, ...]) -> list[float]:
        """By task under way, given their kinds, the factor by which the others lengthen it."""
        cost, other = self.cost, self.schedule.tiers
        on_tier = [kinds.count(tier) for tier in range(other)]
        computing = sum([1.0 / self.ranks] * kinds.count(other + 1))  # the share of ranks that compute
        # Updates of matrices are products, which share what computes them with those of the model.
        heavy, updating = cost.beside_updates - 1.0, min(1, kinds.count(other))
        losses = zip(cost.compute_loss, on_tier, strict=True)
        speed = prod(1.0 - lost for lost, some in losses if some)
        shared = (n * c if n > 1 else 1.0 for n, c in zip(on_tier, cost.contention, strict=True))
        beside = max(computing, updating) if heavy else computing
        beside_compute = (1.0 + (slower - 1.0) * beside for slower in cost.communication_slowdown)
        update = (1.0 + heavy * computing) / (speed if heavy else 1.0)
        copies = (float(max(1, kinds.count(other + 2 + way))) for way in range(len(HOST_LINK)))
        factors = [*map(mul, shared, beside_compute), update, (1.0 + heavy * updating) / speed, *copies]
        self.slowdowns[kinds] = [factors[kind] for kind in kinds]
        return self.slowdowns[kinds]

    def _shares(self, processor_ns: Sequence[float] | None) -> list[float]:
        """By task, the share of processors that it keeps busy while it runs alone; of compute one rank's."""
        if processor_ns is None:
            return []
        return [
            taken / duration / (self.ranks if compute else 1) if duration else 0.0
            for taken, duration, compute in zip(processor_ns, self.durations_ns, self.computes, strict=True)
        ]

    def _with_processors(self, placed: tuple[int, ...], slowdown: list[float]) -> list[float]:
        """Slowdowns with those by which tasks under way ask for no more than all processors."""
        total, tiers, shares = self.total, self.schedule.tiers, self.processors
        asked = [shares[key % total] / slow for (_, key), slow in zip(self.under_way, slowdown, strict=True)]
        if sum(asked) <= 1.0:
            return slowdown
        sent = sum(share for share, kind in zip(asked, placed, strict=True) if kind < tiers)
        rest = sum(asked) - sent
        # Compute gets what messages leave, and a little in any case.
        left = min(rest, max(1.0 - sent, LEAST_COMPUTE))
        slow_messages = max(1.0, sent / (1.0 - left)) if sent > 1.0 - LEAST_COMPUTE else 1.0
        slower = slow_messages, rest / left if rest else 1.0
        return [
            slow * slower[kind >= tiers] if share else slow
            for slow, kind, share in zip(slowdown, placed, asked, strict=True)
        ]


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


def critical(schedule: Schedule, timeline: Timeline) -> frozenset[int]:
    """The critical path of a simulated step: from the last compute task back along binding predecessors, to
    the step's begin or into the step before."""
    task = schedule.streams[COMPUTE_STREAM][-1]
    found = set[int]()
    while True:
        found.add(task.index)
        edges = [(timeline.end_ns[u], u) for u in task.after]
        edges += [(timeline.end_ns[u] - timeline.period_ns, -1) for u in task.after_previous]
        _, binding = max(edges, default=(0.0, -1))
        if binding < 0:
            return frozenset(found)
        task = schedule.tasks[binding]


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
    """Follow the last dependency to end, back through tasks of zero length, to one that took time; where none
    did, as in a step that only waits for late ranks, to the first that comes again."""
    shift, seen = 0.0, set[int]()
    while True:
        edges = [(ends[u] + shift, u, 0.0) for u in task.after]
        edges += [(ends[u] + shift - period, u, -period) for u in task.after_previous]
        # Of equal ends prefer communication: a compute task that ends now is not what was waited for.
        _, binding, step = max(edges, key=lambda e: (e[0], schedule.tasks[e[1]].stream != COMPUTE_STREAM))
        shift += step
        task = schedule.tasks[binding]
        if ends[binding] > starts[binding] or task.stream == COMPUTE_STREAM or binding in seen:
            return f"tier {task.tier}" if task.tier >= 0 else "optim"
        seen.add(binding)
