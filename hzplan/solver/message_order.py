"""The message order that makes a plan's step the shortest, by descent from two first orders.

Units that are reduced together, and like them in the other layers, have the same numbers. One descent begins
with the same numbers for all: gradients first on the fastest tier, where all-gathers arrive last, and the
order of launches on the slowest, where reduce-scatters do. The other begins with the order in which messages
end where they share their link, which differs between small and large units. Steps of the descent change the
numbers of all units on one tier, or of one kind of units.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from hzplan.core.order import CircularOrder, arranged, in_order, is_ahead
from hzplan.core.schedule import Ahead, Kind, MessageOrder, Schedule
from hzplan.cost.simulate import longest_paths
from hzplan.solver.evaluate import Evaluation, evaluate
from hzplan.solver.local import LEAST_GAIN
from hzplan.solver.rows import INFINITY

MOST_KINDS = 8
"""Kinds of units that have numbers of their own, at most: those with the longest messages."""

_Numbers = tuple[tuple[Ahead, ...], int]
"""By kind of units, and for updated parameters (``MessageOrder.sync``)."""


def in_best_order(one: Evaluation, late: Callable[[], bool]) -> Evaluation:
    """The plan in the order found; itself where there is no time, or the order that it has is no worse."""
    descent = _Descent(one, late)
    starts = [descent.alike(), descent.as_shared()] if one.schedule.order is None else [descent.own()]
    lengths = {}
    for start in starts:
        best, length = descent.best(start)
        lengths[descent.order(best)] = length
    order = min(lengths, key=lambda order: lengths[order])
    if lengths[order] == INFINITY or order == one.schedule.order:
        return one
    found = descent.evaluated(order)
    return one if one.schedule.order is not None and _is_no_longer(one, found) else found


def _is_no_longer(one: Evaluation, other: Evaluation) -> bool:
    return one.predicted.period_ns * (1 - LEAST_GAIN) <= other.predicted.period_ns


class _Descent:
    """The orders of one plan. ``kinds``: groups of units with the same numbers; ``syncs``: numbers of uses
    that updated parameters are gathered ahead, up to all of them first."""

    def __init__(self, one: Evaluation, late: Callable[[], bool]) -> None:
        self.one, self.late = one, late
        self.shared: Schedule = one.schedule.shared or one.schedule
        self.durations = one.model.durations(self.shared, one.units, one.micro_batch)
        self.kinds = _kinds(self.shared, self.durations, one.model.like)
        self.most = self.shared.prefetch + 1
        uses = len(self.shared.uses)
        doubled = itertools.takewhile(lambda n: n < uses, (self.most << n for n in itertools.count(1)))
        self.syncs = [*range(self.most + 1), *doubled, uses]
        self._known: dict[_Numbers, float] = {}

    def alike(self) -> _Numbers:
        """The same numbers for all, 0 on the fastest tier."""
        tiers = self.shared.tiers
        ahead = tuple(round(self.most * tier / max(tiers - 1, 1)) for tier in range(tiers))
        return (ahead,) * len(self.kinds), self.most

    def own(self) -> _Numbers:
        """Those of the plan's order."""
        order = self.one.schedule.order
        assert order is not None
        ahead, none = dict(order.ahead), (0,) * self.shared.tiers
        return tuple(ahead.get(units[0], none) for units in self.kinds), order.sync

    def as_shared(self) -> _Numbers:
        """By kind the numbers that most of its units have where links are shared."""
        counts: dict[tuple[str, int], Counter[int]] = {}
        ends = self.one.predicted.end_ns
        for tier in range(self.shared.tiers):
            gathered = -1
            messages = [task for task in self.shared.tasks if task.tier == tier and _is_message(task.kind)]
            for task in sorted(messages, key=lambda task: (ends[task.index], task.index)):
                if task.kind is Kind.UNSHARD:
                    gathered = max(gathered, task.position)
                else:
                    ahead = max(0, gathered - task.position)
                    counts.setdefault((task.units[0], tier), Counter())[ahead] += 1
        found: list[Ahead] = []
        for units in self.kinds:
            reached = [0]
            for tier in range(self.shared.tiers):
                seen = sum((counts.get((unit, tier), Counter()) for unit in units), Counter[int]())
                reached.append(max(reached[-1], seen.most_common(1)[0][0] if seen else 0))
            found.append(tuple(reached[1:]))
        return tuple(found), self.most

    def best(self, start: _Numbers) -> tuple[_Numbers, float]:
        """Where the descent from ``start`` ends, and the period there, nanoseconds."""
        best, shortest = start, self.length_ns(start)
        changed = True
        while changed and not self.late():
            changed = False
            for tried in self._neighbours(best):
                if self.late():
                    break
                length = self.length_ns(tried)
                if length < shortest * (1 - LEAST_GAIN):
                    best, shortest, changed = tried, length, True
        return best, shortest

    def _neighbours(self, numbers: _Numbers) -> Iterator[_Numbers]:
        aheads, sync = numbers
        yield from ((aheads, value) for value in self.syncs if value != sync)
        values = sorted({*range(self.most + 1), *(value for ahead in aheads for value in ahead)})
        places = range(len(self.kinds))
        for changed in [places, *([place] for place in places if len(places) > 1)]:
            for tier in range(self.shared.tiers):
                for value in values:
                    tried = list(aheads)
                    for place in changed:
                        tried[place] = (*aheads[place][:tier], value, *aheads[place][tier + 1 :])
                    if tuple(tried) != aheads and all(is_ahead(a, self.shared.tiers) for a in tried):
                        yield tuple(tried), sync

    def order(self, numbers: _Numbers) -> MessageOrder:
        """The order of these numbers."""
        aheads, sync = numbers
        units = ((unit, ahead) for some, ahead in zip(self.kinds, aheads, strict=True) for unit in some)
        return MessageOrder(tuple(units), sync)

    def length_ns(self, numbers: _Numbers) -> float:
        """The period in this order if gathers of results shared no link; infinite for a circle."""
        if numbers not in self._known:
            self._known[numbers] = INFINITY
            try:
                found = arranged(self.shared, self.order(numbers))
            except CircularOrder:
                return INFINITY
            _, _, self._known[numbers] = longest_paths(
                found.sequence, found.after, found.after_previous, self.durations
            )
        return self._known[numbers]

    def evaluated(self, order: MessageOrder) -> Evaluation:
        """The plan in an order."""
        one = self.one
        return evaluate(
            one.model, one.levels, in_order(self.shared, order), one.micro_batch, one.slots, one.modes
        )


def _is_message(kind: Kind) -> bool:
    return kind in (Kind.UNSHARD, Kind.REDUCE, Kind.FINAL_REDUCE)


def _kinds(schedule: Schedule, durations: Sequence[int], like: Mapping[str, object]) -> list[tuple[str, ...]]:
    """Units by what is reduced together; beyond ``MOST_KINDS`` those with the shortest messages are one."""
    units: dict[object, dict[str, None]] = {}
    lengths: Counter[object] = Counter()
    for task, duration in zip(schedule.tasks, durations, strict=True):
        if task.kind in (Kind.REDUCE, Kind.FINAL_REDUCE):
            kind = tuple(like[unit] for unit in task.units)
            units.setdefault(kind, {}).update(dict.fromkeys(task.units))
            lengths[kind] += duration
    longest = [tuple(units[kind]) for kind, _ in lengths.most_common()]
    rest = tuple(unit for some in longest[MOST_KINDS - 1 :] for unit in some)
    return [*longest[: MOST_KINDS - 1], *([rest] if rest else [])]
