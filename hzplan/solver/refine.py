"""Local search on found plans: the fastest is made faster, the one chosen is made plainer and leaner."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from hzplan.core.recompute import WAYS
from hzplan.cost.model import tensors_of
from hzplan.solver.candidates import Candidates
from hzplan.solver.evaluate import Evaluation, Modes, evaluate, fastest_of, within, within_objective
from hzplan.solver.in_order import InOrder
from hzplan.solver.local import Choosable, LevelsByUnit, Replay, Surroundings, improve, leaner, plainer
from hzplan.solver.message_order import in_best_order
from hzplan.solver.patterns import ColumnPool
from hzplan.solver.prefer import plainness
from hzplan.solver.rows import INFINITY
from hzplan.solver.search import MAX_NODES, Request, Search, grammar_for, pins_of

MOST_ORDERS = 4
"""Message orders that are searched in, one after the other, at most."""
NODES_IN_ORDER = 12
"""Branch-and-bound nodes that are expanded before the order is looked at again."""


def improved(
    found: Candidates, searches: Sequence[Search], request: Request, deadline: float, bound_ns: float
) -> tuple[list[Evaluation], InOrder | None]:
    """The plan predicted fastest, and the fastest with a single triple, each after ``local.improve``.

    Where that is not within the gap of the bound, searches in message orders follow: in those that suit the
    fastest plan and the one with the least objective. The better of the two searches is returned with the
    plans.
    """
    around, fits = _surroundings(found, searches, request)
    plain = [one for one in found.all if plainness(one)[0] == 1]
    starts = {id(one): one for one in [fastest_of(some) for some in (found.all, plain) if some]}

    def late() -> bool:
        return time.monotonic() > deadline

    changed = [improve(start, _replays(start, searches), around, fits, late) for start in starts.values()]
    fastest, least = fastest_of(changed), min(found.all, key=lambda one: one.objective_ns)
    if within(fastest, bound_ns * (1 + request.gap)) or request.target is not None:
        return changed, None  # other runtimes send messages as they come
    searched = []
    for one in {id(one): one for one in (fastest, least)}.values():
        inside = _in_its_order(one, searches, request, deadline)
        if inside is not None:
            searched.append(inside)
    if not searched:  # no time
        return changed, None
    inside = min(searched, key=lambda one: fastest_of(one.found.all).predicted.period_ns)
    while True:
        inside.explore(MAX_NODES, deadline)
        inside.solve_ilps(deadline)
        best = fastest_of(inside.found.all)
        if inside.covers(best) or late():
            break
        inside = InOrder(best, searches, request)  # each begins with a faster plan
        searched.append(inside)
    last = improve(best, _replays(best, searches), around, fits, late)
    if inside.covers(last):
        inside.found.all.append(last)  # perhaps of levels that no column has, which its bound is not of
    return [*changed, *(one for some in searched for one in some.found.all), last], inside


def _in_its_order(
    one: Evaluation, searches: Sequence[Search], request: Request, deadline: float
) -> InOrder | None:
    """Search in the order that suits a plan, then in the one that suits what was found; None: no time."""
    inside = None
    for _ in range(MOST_ORDERS):
        start = in_best_order(one, lambda: time.monotonic() > deadline)
        if start is one:
            break
        inside = InOrder(start, searches, request)
        inside.explore(NODES_IN_ORDER, deadline)
        one = fastest_of(inside.found.all)
    return inside


def simplified(
    best: Evaluation,
    found: Candidates,
    searches: Sequence[Search],
    request: Request,
    limits: tuple[float, float],
    deadline: float,
) -> Evaluation:
    """The plan after ``local.plainer`` and ``leaner``; ``limits``: of its predicted step and objective,
    ns."""
    around, allowed = _surroundings(found, searches, request)
    ceiling, most = limits

    def fits(one: Evaluation) -> bool:
        return allowed(one) and (most == INFINITY or within_objective(one, most))

    def late() -> bool:
        return time.monotonic() > deadline

    replays = _replays(best, searches)
    best = plainer(best, replays[0], around, fits, ceiling, late)
    best = leaner(best, replays, around, fits, ceiling, late)
    return _tidied(best, searches, fits, ceiling)


def _replays(start: Evaluation, searches: Sequence[Search]) -> list[Replay]:
    """Replays under every pace of the start's micro-batch size, the start's own first; in a message order its
    own alone."""

    def own(levels: LevelsByUnit, modes: Modes) -> Evaluation:
        return evaluate(start.model, levels, start.schedule, start.micro_batch, start.slots, modes)

    if start.schedule.order is not None:  # what is proven is proven of this order
        return [own]
    pace = start.schedule.pace
    others = [
        search
        for search in searches
        if search.question.micro_batch == start.micro_batch and search.question.schedule.pace != pace
    ]
    return [own, *(search.replay for search in others)]


def _surroundings(
    found: Candidates, searches: Sequence[Search], request: Request
) -> tuple[Surroundings, Callable[[Evaluation], bool]]:
    """The neighbourhood of the local search, and the test whether a plan fits and keeps all pins."""
    pools, profile = searches[0].pools, searches[0].question.model.profile
    grammar = grammar_for(profile, request)
    binaries = searches[0].question.binaries
    groups = _alike({unit: f for unit, f in pools.items() if unit not in {*binaries.values()}})
    free = {unit: pools[name] for unit, name in binaries.items() if len(pools[name].levels) > 1}
    around = Surroundings(
        groups,
        tensors_of(profile),
        {
            units[0]: list(dict.fromkeys(one.levels[unit] for one in found.all for unit in units))
            for units in groups
        },
        searches[0].question.model.triples if grammar is None else grammar.triples,
        [Choosable(tuple(units), free[units[0]].ways) for units in _alike(free)],
        [units for units in groups if pools[units[0]].host.any()],
    )
    pins = pins_of(profile, request)
    return around, lambda one: searches[0].fits(one) and pins.keep(profile, one.levels)


def _tidied(
    best: Evaluation, searches: Sequence[Search], fits: Callable[[Evaluation], bool], ceiling: float
) -> Evaluation:
    """The plan with its recomputed units moved to the first of their like ones, where the step stays within
    the ceiling. A reader then sees one run of layers, and their activations are freed for the later ones."""
    pools, recompute = searches[0].pools, best.modes.recompute
    binaries = searches[0].question.binaries  # the same in all
    for units in _alike({unit: pools[name] for unit, name in binaries.items()}):
        ways = sorted((recompute[unit] for unit in units if unit in recompute), key=WAYS.index, reverse=True)
        recompute = recompute.with_(units, None)
        for unit, way in zip(units, ways, strict=False):
            recompute = recompute.with_([unit], way)
    if recompute == best.modes.recompute:
        return best
    modes = best.modes._replace(recompute=recompute)
    tidy = evaluate(best.model, best.levels, best.schedule, best.micro_batch, best.slots, modes)
    return tidy if fits(tidy) and within(tidy, ceiling) else best


def _alike(pools: Mapping[str, ColumnPool]) -> list[list[str]]:
    """Units that have one pool, in groups."""
    found: dict[int, list[str]] = {}
    for unit, pool in pools.items():
        found.setdefault(id(pool), []).append(unit)
    return list(found.values())
