"""At a gap of 0: every choice that may be faster than the fastest plan is replayed.

A bound is of the objective, and a replayed step can be longer than the objective of its choice. So that a
plan is the fastest of all choices follows only where each other choice has a row (``paths``) that is not
below the plan's step, or was replayed. Rows are sums over units, so sums over a part of the units, with the
least of each other unit, already say which choices need no replay.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from hzplan.cost.simulate import events
from hzplan.solver.candidates import Candidates
from hzplan.solver.evaluate import fastest_of, within
from hzplan.solver.in_order import InOrder
from hzplan.solver.paths import MS, LazyConstraint
from hzplan.solver.question import Coefficients
from hzplan.solver.search import Search

MOST_CHOICES = 200_000
"""Choices, or parts of such, that are kept at once at most; more are not tried at all."""
MOST_EVENTS = 20_000_000
"""Task ends that all replays together simulate at most."""


def exhaust(
    searches: Sequence[Search], inside: InOrder | None, found: Candidates, deadline: float
) -> int | None:
    """Add to ``found`` the fastest of all choices with links shared, and of all in the order of a fastest
    plan. Returns how many choices were replayed for it; None where they are too many."""
    best, replayed, simulated = fastest_of(found.all), 0, 0
    while True:
        before = best
        places = [(search, _rows(search)) for search in searches]
        equal = [best, *(one for one in found.all if within(one, best.predicted.period_ns))]
        if inside is not None and any(map(inside.covers, equal)):  # the plan may become one of these
            for pace in inside.paces:
                ordered = pace.ordered or pace.any_order.in_order(pace.order)
                places.append((ordered, [*_rows(pace.any_order), *_rows(ordered)]))
        elif best.schedule.order is not None:
            return None
        for search, rows in places:
            choices = _choices(search, rows, best.predicted.period_ns * MS)
            if choices is None:
                return None
            for least_ms, choice in choices:
                step_ns = best.predicted.period_ns
                if least_ms / MS >= step_ns:
                    break
                one = search.evaluate(choice)
                if not search.fits(one) or one.floor_ns >= step_ns or not found.admits(one):
                    continue
                replayed += 1
                simulated += events(one.schedule, one.model.late_ns(one.schedule, one.micro_batch))
                if simulated > MOST_EVENTS or time.monotonic() > deadline:
                    return None
                if within(one, step_ns) and one.predicted.period_ns < step_ns:
                    best = one
        if best is before:
            return replayed
        found.all.append(best)


def _rows(search: Search) -> list[LazyConstraint]:
    """Rows that hold for every choice of a search, in any order of messages or in its own."""
    known = search.lp.cycles if "lp" in vars(search) else ()
    return [*search.question.network.capacities, *(cut for _, cut in known)]


def _choices(
    search: Search, rows: Sequence[LazyConstraint], below_ms: float
) -> Iterator[tuple[float, dict[str, int]]] | None:
    """The choices whose rows are all below ``below_ms`` and that may fit, each with the largest of its rows,
    ms; the smallest first. None where they are too many."""
    question, costs = search.question, search.costs
    network, resident = question.network, question.memory_use.resident
    units = list(question.pools)
    kept: dict[str, np.ndarray] = {}
    parts: dict[str, Coefficients] = {}  # by unit: [patterns kept, rows, and MiB in the last column]
    for unit in units:
        may = costs[unit] < below_ms if unit in costs else np.ones(len(question.pools[unit].levels), bool)
        kept[unit] = np.flatnonzero(may)
        weights = np.array([cut.weights[network.rows[unit]] for cut in rows])
        timed = question.durations_ms[unit][kept[unit]] @ weights.T
        parts[unit] = np.column_stack([timed, resident[unit][kept[unit]]])
    if not all(map(len, kept.values())):
        return iter(())
    limits = np.array([*[below_ms] * len(rows), question.budget_mib * (1 + 1e-12)])
    least = np.array([*(cut.constant for cut in rows), 0.0])
    least = least + sum(of.min(axis=0) for of in parts.values())
    sums, taken = least[None, :], np.zeros((1, 0), dtype=np.int64)
    for unit in units:
        more = parts[unit] - parts[unit].min(axis=0)
        if len(sums) * len(more) > 20 * MOST_CHOICES:
            return None
        at, of = np.divmod(np.arange(len(sums) * len(more)), len(more))
        grown = sums[at] + more[of]
        may = (grown <= limits).all(axis=1)
        sums, taken = grown[may], np.column_stack([taken[at[may]], kept[unit][of[may]]])
        if len(sums) > MOST_CHOICES:
            return None
    largest = sums[:, :-1].max(axis=1)
    return (
        (float(largest[number]), dict(zip(units, map(int, taken[number]), strict=True)))
        for number in np.argsort(largest, kind="stable")
    )
