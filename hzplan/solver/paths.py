"""What a step's period is at least, as inequalities: one for every closed walk through the schedule.

The period of a cyclic schedule is the largest ratio, over closed walks, of the durations on the walk to the
number of times that it passes into the next step (max-plus algebra: Baccelli et al. 1992, *Synchronization
and Linearity*, §3.2.4). Durations are linear in the choice of patterns, so each walk is one linear row

    T ≥ constant + Σ_{unit, key} weight · d[unit, key],

and rows are made only when a choice, integral or fractional, violates them: a few dozen do, where a row for
every edge takes thousands. ``Network.walks`` finds them by longest paths.

A step of many micro-batches is represented by its first ones and its last one; for those between, every
stream has one more node, as long as the work that they put on it. Each such walk is one of the full
schedule, so what holds for the network holds for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hzplan.core.schedule import Kind, Schedule, Task
from hzplan.cost.model import CostModel
from hzplan.cost.unit import UnitCost
from hzplan.solver.patterns import SWITCHED, duration_keys

MS = 1e-6  # nanoseconds to milliseconds
MAX_PASSES = 12
SAME = 1e-9
"""Periods that differ by less than this share are equal."""

Weights = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Cut:
    """A row: the period in milliseconds is at least ``constant`` + Σ ``weights``·durations [units, keys]."""

    constant: float
    weights: Weights

    def at(self, durations: Weights) -> float:
        """The row's value at some durations in milliseconds [units, keys]."""
        return self.constant + float((self.weights * durations).sum())


class Network:
    """The schedule's edges, and every task's duration as a linear function of the units' durations.

    ``units``: those that have a choice, in the order of the rows of durations and weights; among them may be
    ``switches``, by the unit that each is of.
    """

    def __init__(
        self,
        model: CostModel,
        short: Schedule,
        whole: Schedule,
        units: Sequence[str],
        micro_batch: int,
        switches: Mapping[str, str],
    ) -> None:
        self.model, self.whole, self.micro_batch, self.switches = model, whole, micro_batch, switches
        self.rows = {unit: row for row, unit in enumerate(units)}
        keys = duration_keys(short.tiers)
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
        self.after = [[place[u] for u in after[node]] for node in order]
        self.wraps = {
            place[task.index]: [place[u] for u in task.after_previous]
            for task in short.tasks
            if task.after_previous
        }
        self.begin = place[0]
        last = {task.stream: place[task.index] for task in short.tasks}
        self.tails = [self.begin, *last.values()]
        parts = [self._part(nodes[node], times[node]) for node in order]
        self.constants = np.array([constant for constant, _ in parts])
        terms = [(number, *term) for number, (_, found) in enumerate(parts) for term in found]
        self.term_node = np.array([node for node, _, _ in terms], dtype=np.int64)
        self.term_at = np.array([at for _, at, _ in terms], dtype=np.int64)
        self.term_times = np.array([many for _, _, many in terms], dtype=float)

    def _part(self, tasks: Iterable[Task], times: int) -> tuple[float, list[tuple[int, float]]]:
        """The duration of some tasks, so many times: milliseconds, and places in the durations."""
        constant, terms = 0.0, []
        for task in tasks:
            if task.kind is Kind.COMPUTE:
                index = task.position % len(self.whole.uses)
                constant += times * self.model.compute_ns(index, self.micro_batch) * MS
                switch = self.switches.get(self.whole.uses[index].unit)
                again = self.model.again_ns(index, self.micro_batch) * MS
                if switch is not None and again:
                    at = self.rows[switch] * self.shape[1] + self.columns[SWITCHED]
                    terms.append((at, times * again))
            elif task.kind is Kind.STEP:
                constant += times * self.model.step_ns(self.whole) * MS
            elif (key := (task.kind, task.tier)) in self.columns:
                terms += [
                    (self.rows[unit] * self.shape[1] + self.columns[key], float(times))
                    for unit in task.units
                    if unit in self.rows
                ]
        return constant, terms

    def lengths(self, durations: Weights) -> Weights:
        """Every node's milliseconds."""
        parts = self.term_times * durations.ravel()[self.term_at]
        return self.constants + np.bincount(self.term_node, parts, minlength=len(self.constants))

    def walks(self, durations: Weights) -> list[Cut]:
        """The critical walk, and those that lead to every stream's end; the one of the largest value first.

        ``durations``: milliseconds [units, keys].
        """
        lengths = self.lengths(durations).tolist()
        before = self._passes(lengths)
        found: dict[bytes, Cut] = {}
        for tail in self.tails:
            walk = _closed(before, tail)
            if walk is not None:
                cut = self._cut(*walk)
                found.setdefault(cut.weights.tobytes(), cut)
        return sorted(found.values(), key=lambda cut: -cut.at(durations))

    def _passes(self, lengths: Sequence[float]) -> list[list[int]]:
        """Longest paths, step after step, until the period repeats: for every step and node the one that it
        waited for last, as its number, or less the number of nodes for one of the step before."""
        nodes = len(lengths)
        previous: list[float] = []
        begins: list[float] = []
        found: list[list[int]] = []
        for _ in range(MAX_PASSES):
            ends: list[float] = []
            before: list[int] = []
            for node, edges in enumerate(self.after):
                start, binding = 0.0, node  # nobody
                for u in edges:
                    if ends[u] >= start:
                        start, binding = ends[u], u
                if previous and node in self.wraps:
                    for u in self.wraps[node]:
                        if previous[u] >= start:
                            start, binding = previous[u], u - nodes
                ends.append(start + lengths[node])
                before.append(binding)
            found.append(before)
            begins.append(ends[self.begin])
            previous = ends
            if _repeats(begins):
                break
        return found

    def _cut(self, walk: Sequence[int], steps: int) -> Cut:
        counts = np.bincount(np.array(walk), minlength=len(self.constants)) / steps
        weights = np.zeros(self.shape)
        np.add.at(weights.reshape(-1), self.term_at, self.term_times * counts[self.term_node])
        return Cut(float(counts @ self.constants), weights)

    def durations(self, units: Mapping[str, UnitCost]) -> Weights:
        """Milliseconds [units, keys] of some costs."""
        found = np.zeros(self.shape)
        for unit, row in self.rows.items():
            if unit in units:
                found[row] = [units[unit].duration_ns(kind, tier) * MS for kind, tier in self.columns]
        for unit, switch in self.switches.items():
            found[self.rows[switch], self.columns[SWITCHED]] = float(units[unit].recompute)
        return found

    @cached_property
    def capacities(self) -> list[Cut]:
        """The whole load of every tier; of copies from the host's memory, and to it, where there are such; of
        the processors with the share of speed that tiers take."""
        tiers = range(self.whole.tiers)
        loads = [np.zeros(self.shape) for _ in tiers]
        copies = {kind: np.zeros(self.shape) for kind in (Kind.FETCH, Kind.STORE) if self.whole.host_slots}
        compute, work = 0.0, np.zeros(self.shape)
        for task in self.whole.tasks:
            constant, terms = self._part([task], 1)
            compute += constant
            if task.kind is Kind.COMPUTE or task.tier >= 0 or task.kind in copies:
                load = copies[task.kind] if task.kind in copies else loads[task.tier]
                load = work if task.kind is Kind.COMPUTE else load
                for at, many in terms:
                    load.flat[at] += many
        cuts = [Cut(0.0, load) for load in [*loads, *copies.values()]]
        for share, load in zip(self.model.interference.surely_lost, loads, strict=True):
            work += share * load
        return [*cuts, Cut(compute, work)]


def _middles(model: CostModel, short: Schedule) -> dict[int, tuple[int, list[Task]]]:
    """For every stream, by the last micro-batch's first task: the last task of the one before it that has
    nodes, and the stream's work for one micro-batch between them."""
    three = model.schedule(
        prefetch=short.prefetch, accumulation=3, clip=short.clip, gradient_buffers=short.gradient_buffers
    )
    found = {}
    for stream, tasks in short.streams.items():
        placed = [task for task in tasks if task.position >= 0]
        first = [task for task in placed if short.micro_batch(task) == short.accumulation - 2]
        last = [task for task in placed if short.micro_batch(task) == short.accumulation - 1]
        if first and last:
            work = [t for t in three.streams[stream] if t.position >= 0 and three.micro_batch(t) == 1]
            found[last[0].index] = first[-1].index, work
    return found


def _repeats(begins: Sequence[float]) -> bool:
    """Whether the last steps repeat with a cycle of one to four steps."""
    periods = [b - a for a, b in itertools.pairwise(begins)]
    return any(
        len(periods) >= 2 * cycle + 1
        and all(
            abs(periods[-i] - periods[-i - cycle]) <= SAME * abs(periods[-i]) for i in range(1, cycle + 1)
        )
        for cycle in range(1, 5)
    )


def _closed(before: Sequence[Sequence[int]], node: int) -> tuple[list[int], int] | None:
    """Follow what was waited for from a node of the last step until a walk closes: its nodes, its steps.

    None where the first step is reached before.
    """
    nodes = len(before[0])
    step = len(before) - 1
    walk: list[int] = []
    passed: dict[int, tuple[int, int]] = {}  # where steps were entered -> how long the walk was, and the step
    while True:
        walk.append(node)
        binding = before[step][node]
        if binding == node:
            return None
        if binding >= 0:
            node = binding
            continue
        if node in passed:
            length, since = passed[node]
            return walk[length:], since - step
        passed[node] = len(walk), step
        step, node = step - 1, binding + nodes
        if step < 0:
            return None
