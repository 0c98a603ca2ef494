"""Lower bounds on a step's period as linear inequalities, one for each cycle of the event graph.

The period of a cyclic schedule is the largest ratio, over cycles, of the durations on the cycle to the number
of steps that it takes (``cost.events``). Durations are linear in the choice of patterns, so each cycle is one
linear row

    T ≥ constant + Σ_{unit, key} weight · d[unit, key].

Rows are lazy: made only when a choice, integral or fractional, violates them. A few dozen are enough, where a
row for every edge would be thousands. ``Network.critical_cycles`` finds them by longest paths.

A step of many micro-batches is represented by its first ones and its last one; for those between, every
stream has one more node, as long as their work on that stream. Each cycle of this short graph is also a cycle
of the full one, so its row is valid for the full schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hzplan.core.recompute import HOST
from hzplan.core.schedule import COMPUTE_STREAM, HOST_LINK, Kind, Schedule, Task
from hzplan.cost.events import Cycle, Event, EventGraph
from hzplan.cost.lateness import Late, late_in
from hzplan.cost.model import CostModel, takes_processors
from hzplan.cost.unit import UnitCost
from hzplan.solver.patterns import RECOMPUTE_KEYS, DurationKey, keys_of

MS = 1e-6  # nanoseconds to milliseconds
MET = (0.3, 1 - 1e-6)
"""Shares of a mixture of choices above which a message counts as one that ranks meet in. Rows of messages
that few of them have would not bind."""
Weights = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class LazyConstraint:
    """A cycle's row: period in ms ≥ ``constant`` + Σ ``weights``·durations [units, keys].

    ``walk``: the cycle (``events.Cycle``). None for a row of a whole step.
    """

    constant: float
    weights: Weights
    walk: tuple[int, ...] | None = None

    def at(self, durations: Weights) -> float:
        """The right-hand side for durations in milliseconds [units, keys]."""
        return self.constant + float((self.weights * durations).sum())


class Network:
    """The event graph: the schedule's edges, with task durations linear in the units' durations.

    ``units``: names of everything that has a choice, units and recompute binaries, in the order of the rows
    of durations and weights; ``binaries``: by unit, the name of its recompute binary.
    """

    def __init__(
        self,
        model: CostModel,
        short: Schedule,
        whole: Schedule,
        units: Sequence[str],
        micro_batch: int,
        binaries: Mapping[str, str],
    ) -> None:
        self.model, self.whole, self.micro_batch, self.binaries = model, whole, micro_batch, binaries
        self.rows = {unit: row for row, unit in enumerate(units)}
        keys = keys_of(model)
        self.columns = {key: column for column, key in enumerate(keys)}
        self.shape = len(units), len(keys)
        nodes: list[list[Task]] = [[task] for task in short.tasks]  # a node lasts as long as its tasks
        times = [1] * len(nodes)
        between = whole.accumulation - short.accumulation
        middles = _middles(model, short) if between > 0 else {}
        order: list[int] = []
        after = [list(task.after) for task in short.tasks]
        for task in short.tasks:
            if task.index in middles:
                begins, work = middles[task.index]
                after[task.index].append(len(nodes))
                order.append(len(nodes))
                nodes.append(work)
                times.append(between)
                after.append([begins])
            order.append(task.index)
        place = {node: position for position, node in enumerate(order)}
        late = [Late(*(ns * MS for ns in one)) for one in model.late_uses_ns(micro_batch) or ()]
        left_out = range(short.accumulation - 1, whole.accumulation - 1)

        def late_of(node: int) -> tuple[tuple[float, ...], ...]:
            """Of a node of compute; that for the micro-batches between lasts as long as all of those."""
            if not late or nodes[node][0].stream != COMPUTE_STREAM:
                return ()
            uses = [task for task in nodes[node] if task.kind is Kind.COMPUTE]
            placed = [divmod(task.position, len(whole.uses)) for task in uses]
            if node < len(short.tasks):
                at = [(use, n if n < left_out.start else n + between, late[use]) for n, use in placed]
            else:
                at = [(use, n, late[use]) for n in left_out for _, use in placed]
            return late_in(whole.accumulation, at)

        def event(node: int) -> Event:
            first, wraps = nodes[node][0], short.tasks[node].after_previous if node < len(short.tasks) else ()
            return Event(
                *(first.stream, first.tier, tuple(place[u] for u in after[node])),
                *(tuple(place[u] for u in wraps), model.meets(first), late_of(node)),
            )

        merged = [place[node] for node in order if node >= len(short.tasks)]
        events = [event(node) for node in order]
        self.graph = EventGraph(events, short.tiers, model.interference, len(whole.uses), merged)
        parts = [self._part(nodes[node], times[node]) for node in order]
        self.constants = np.array([constant for constant, _ in parts])
        terms = [(number, *term) for number, (_, found) in enumerate(parts) for term in found]
        self.term_node = np.array([node for node, _, _ in terms], dtype=np.int64)
        self.term_at = np.array([at for _, at, _ in terms], dtype=np.int64)
        self.term_times = np.array([many for _, _, many in terms], dtype=float)
        self.sent = [self._sent(nodes[node][0]) for node in order]

    def _part(self, tasks: Iterable[Task], times: int) -> tuple[float, list[tuple[int, float]]]:
        """The duration of ``tasks``, ``times`` over: constant ms, and (index into durations, factor)
        terms."""
        constant, terms = 0.0, []
        for task in tasks:
            if task.kind is Kind.COMPUTE:
                index = task.position % len(self.whole.uses)
                constant += times * self.model.compute_ns(index, self.micro_batch) * MS
                binary = self.binaries.get(self.whole.uses[index].unit)
                if binary is not None:
                    terms += self._of_recomputation(self.rows[binary], index, times)
            elif task.kind is Kind.STEP:
                constant += times * self.model.norm.step_ns(self.whole, replicated=True) * MS
                terms += self._of_units(task.kind, self.rows, times) if self.whole.clip else []
            elif task.kind in (Kind.SAVE, Kind.LOAD):
                terms += self._of_copy(task.units[0], times)
            elif DurationKey(task.kind, task.tier) in self.columns:
                terms += self._of_units(task.kind, task.units, times, task.tier)
        return constant, terms

    def _of_recomputation(self, row: int, use_index: int, times: int) -> list[tuple[int, float]]:
        """The terms of what a use's unit computes again."""
        added = {
            key: self.model.recompute_ns(use_index, self.micro_batch, way) * MS
            for way, key in RECOMPUTE_KEYS.items()
        }
        return [
            (row * self.shape[1] + self.columns[key], times * more_ms)
            for key, more_ms in added.items()
            if more_ms
        ]

    def _of_copy(self, unit: str, times: int) -> list[tuple[int, float]]:
        """The term of a copy of a unit's activations."""
        if (binary := self.binaries.get(unit)) is None:
            return []
        copy_ms = self.model.save_ns(unit, self.micro_batch) * MS
        return [(self.rows[binary] * self.shape[1] + self.columns[RECOMPUTE_KEYS[HOST]], times * copy_ms)]

    def _of_units(
        self, kind: Kind, units: Iterable[str], times: int, tier: int = -1
    ) -> list[tuple[int, float]]:
        """The terms of the units' durations of a kind."""
        named = list(units)
        factors = {DurationKey(kind, tier): float(times)}
        factors[DurationKey(kind, tier, once=True)] = times / len(named)
        return [
            (self.rows[unit] * self.shape[1] + self.columns[key], factor)
            for key, factor in factors.items()
            if key in self.columns
            for unit in named
            if unit in self.rows
        ]

    def lengths(self, durations: Weights) -> Weights:
        """The duration of every node, ms, for durations [units, keys]."""
        parts = self.term_times * durations.ravel()[self.term_at]
        return self.constants + np.bincount(self.term_node, parts, minlength=len(self.constants))

    def critical_cycles(self, durations: Weights, *, windows: bool = True) -> list[LazyConstraint]:
        """The critical cycle, and the cycle that binds each stream's end, the largest value first.

        ``durations``: milliseconds [units, keys]; ``windows``: whether through windows as well.
        """
        found: dict[bytes, LazyConstraint] = {}
        for joint in self._meetings(durations):
            for cycle in self.graph.cycles(self.lengths(durations), windows=windows, joint=joint):
                cut = self.row(cycle)
                same = found.setdefault(cut.weights.tobytes(), cut)
                if same.constant < cut.constant:
                    found[cut.weights.tobytes()] = cut
        return sorted(found.values(), key=lambda cut: -cut.at(durations))

    def _meetings(self, durations: Weights) -> list[frozenset[int]]:
        """Messages in which ranks may be said to meet: those that are there; of a mixture of choices those
        that much of it has, and those that all of it has."""
        shares = [
            float(durations.reshape(-1)[sent].mean()) if sent and self.graph.may_meet(event) else 0.0
            for event, sent in enumerate(self.sent)
        ]
        sets = (frozenset(event for event, share in enumerate(shares) if share > least) for least in MET)
        return list(dict.fromkeys(sets))

    def row(self, cycle: Cycle) -> LazyConstraint:
        """The row of a cycle."""
        weights = np.zeros(self.shape)
        np.add.at(weights.reshape(-1), self.term_at, self.term_times * cycle.counts[self.term_node])
        constant = float(cycle.counts @ self.constants)
        for late, ends in cycle.parts:
            missing = ends if late > 0 else ()
            constant += late * (1 - len(missing))
            for end in missing:  # of units without tensors there is none, and so never a message
                weights.reshape(-1)[self.sent[end]] += late / max(1, len(self.sent[end]))
        return LazyConstraint(constant, weights, cycle.walk)

    def _sent(self, task: Task) -> list[int]:
        """Indices into durations whose mean is at most 1 where a task sends something, else 0."""
        column = self.columns.get(DurationKey(task.kind, task.tier, sends=True))
        if column is None:
            return []
        return [self.rows[unit] * self.shape[1] + column for unit in task.units if unit in self.rows]

    def checked(self, walk: Sequence[int]) -> LazyConstraint:
        """The row of a cycle from outside; ValueError where it is none of the event graph."""
        return self.row(self.graph.checked(walk))

    def durations(self, units: Mapping[str, UnitCost]) -> Weights:
        """Milliseconds [units, keys] of some costs."""
        found = np.zeros(self.shape)
        for unit, row in self.rows.items():
            if unit in units:
                found[row] = [key.of(units[unit]) * MS for key in self.columns]
        for unit, binary in self.binaries.items():
            if (way := units[unit].recompute) is not None:
                found[self.rows[binary], self.columns[RECOMPUTE_KEYS[way]]] = 1.0
        return found

    @cached_property
    def compute(self) -> LazyConstraint:
        """The row of all compute of a step."""
        return self._sum(task for task in self.whole.tasks if task.stream == COMPUTE_STREAM)

    @property
    def capacities(self) -> list[LazyConstraint]:
        """Rows of whole steps, which hold in any order of messages."""
        return [*self.loads, *self.together]

    @property
    def together(self) -> list[LazyConstraint]:
        """Those of them that compute is part of."""
        return [*self.energies, *self.processors]

    @cached_property
    def loads(self) -> list[LazyConstraint]:
        """The whole load of every tier; of copies from the host's memory, and to it, where there are such."""
        tiers = [[task for task in self.whole.tasks if task.tier == tier] for tier in range(self.whole.tiers)]
        copies = [[task for task in self.whole.tasks if task.stream in way] for way in HOST_LINK]
        return [self._sum(tasks) for tasks in [*tiers, *filter(None, copies)]]

    @cached_property
    def energies(self) -> list[LazyConstraint]:
        """What compute and all loads take together as they slow each other (``Interference.energies``)."""
        return [
            LazyConstraint(
                energy.compute * self.compute.constant,
                energy.compute * self.compute.weights
                + sum(share * load.weights for share, load in zip(energy.loads, self.loads, strict=False)),
            )
            for energy in self.model.interference.energies
        ]

    @cached_property
    def processors(self) -> list[LazyConstraint]:
        """The processor time of all tasks (``CostModel.processor_ns``), where it is known."""
        if (share := self.model.compute_processor_share) is None:
            return []
        row = self._sum(filter(takes_processors, self.whole.tasks))
        weights = share * row.weights
        for task in self.whole.tasks:
            for unit in task.units if task.tier >= 0 else ():
                for key, many in (
                    (DurationKey(task.kind, task.tier, processors=True), 1),
                    (DurationKey(task.kind, task.tier, once=True, processors=True), len(task.units)),
                ):
                    if unit in self.rows and key in self.columns:
                        weights[self.rows[unit], self.columns[key]] += 1.0 / many
        return [LazyConstraint(share * row.constant, weights)]

    def _sum(self, tasks: Iterable[Task]) -> LazyConstraint:
        """The summed duration of some tasks."""
        constant, terms = self._part(tasks, 1)
        weights = np.zeros(self.shape)
        for at, many in terms:
            weights.flat[at] += many
        return LazyConstraint(constant, weights)


def _middles(model: CostModel, short: Schedule) -> dict[int, tuple[int, list[Task]]]:
    """The nodes for micro-batches that have no tasks in ``short``, one per stream.

    By the first task of the stream's last micro-batch: the task before it on the stream, and the tasks of
    one micro-batch between them. (In a message order that task before may be of any micro-batch; what goes on
    the stream between it and the same place of a later micro-batch is the same.)
    """
    three = model.schedule(
        **short.pace._asdict(),
        accumulation=3,
        clip=short.clip,
        offload=bool(short.offload_slots or short.saved),
        order=short.order,
    )
    found = {}
    for stream, tasks in short.streams.items():
        placed = [task for task in tasks if task.position >= 0]
        in_last = [short.micro_batch(task) == short.accumulation - 1 for task in placed]
        if any(in_last) and (first := in_last.index(True)):
            work = [t for t in three.streams[stream] if t.position >= 0 and three.micro_batch(t) == 1]
            found[placed[first].index] = placed[first - 1].index, work
    return found
