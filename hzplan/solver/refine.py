"""What is done to plans in the simulator: the fastest made faster, and the one chosen plainer and leaner."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from hzplan.cost.model import tensors_of
from hzplan.solver.candidates import Candidates
from hzplan.solver.evaluate import Evaluation, Modes, evaluate, fastest_of, within, within_objective
from hzplan.solver.local import Choice, Replay, Surroundings, improve, leaner, plainer
from hzplan.solver.patterns import Family
from hzplan.solver.pins import Pins
from hzplan.solver.prefer import plainness
from hzplan.solver.relaxation import INFINITY
from hzplan.solver.search import Request, Search


def improved(
    found: Candidates, searches: Sequence[Search], request: Request, deadline: float
) -> list[Evaluation]:
    """The plan predicted fastest, and the one with a single triple, changed as long as that helps."""
    around, fits = _surroundings(found, searches, request)
    plain = [one for one in found.all if plainness(one)[0] == 1]
    starts = {id(one): one for one in [fastest_of(some) for some in (found.all, plain) if some]}
    changed = []
    for start in starts.values():
        replays = _replays(start, searches)
        changed.append(improve(start, replays, around, fits, lambda: time.monotonic() > deadline))
    return changed


def settled(
    best: Evaluation,
    found: Candidates,
    searches: Sequence[Search],
    request: Request,
    limits: tuple[float, float],
    deadline: float,
) -> Evaluation:
    """The plan made plainer, then leaner, as long as its step, and its objective, are within the limits."""
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
    """Replays under every pace of the start's micro-batch size, the start's own first."""

    def own(levels: Choice, modes: Modes) -> Evaluation:
        return evaluate(start.model, levels, start.schedule, start.micro_batch, start.slots, modes)

    pace = start.schedule.prefetch, start.schedule.gradient_buffers
    others = [
        search
        for search in searches
        if search.question.micro_batch == start.micro_batch
        and (search.question.schedule.prefetch, search.question.schedule.gradient_buffers) != pace
    ]
    return [own, *(search.replay for search in others)]


def _surroundings(
    found: Candidates, searches: Sequence[Search], request: Request
) -> tuple[Surroundings, Callable[[Evaluation], bool]]:
    """What may be changed in a plan, and whether a plan is allowed."""
    families, profile = searches[0].families, searches[0].question.model.profile
    switches = searches[0].question.switches
    groups = _alike({unit: f for unit, f in families.items() if unit not in {*switches.values()}})
    free = {unit: families[name] for unit, name in switches.items() if len(families[name].levels) > 1}
    around = Surroundings(
        groups,
        {unit: [tensor.trainable for tensor in tensors] for unit, tensors in tensors_of(profile).items()},
        {
            units[0]: list(dict.fromkeys(one.levels[unit] for one in found.all for unit in units))
            for units in groups
        },
        searches[0].question.model.mesh.triples(),
        _alike(free),
        [units for units in groups if families[units[0]].host.any()],
    )
    pins = Pins(request.pins, profile)
    return around, lambda one: searches[0].fits(one) and pins.keep(profile, one.levels)


def _tidied(
    best: Evaluation, searches: Sequence[Search], fits: Callable[[Evaluation], bool], ceiling: float
) -> Evaluation:
    """Of like units the first are recomputed, as many as were, where the step stays within the ceiling: later
    ones then keep less while those compute again, and a reader sees one run of layers."""
    families, again = searches[0].families, set(best.modes.recompute)
    switches = searches[0].question.switches  # the same in all
    for units in _alike({unit: families[name] for unit, name in switches.items()}):
        count = len(again.intersection(units))
        again = again.difference(units) | set(units[:count])
    if again == best.modes.recompute:
        return best
    modes = best.modes._replace(recompute=frozenset(again))
    tidy = evaluate(best.model, best.levels, best.schedule, best.micro_batch, best.slots, modes)
    return tidy if fits(tidy) and within(tidy, ceiling) else best


def _alike(families: Mapping[str, Family]) -> list[list[str]]:
    """Units that have one family, in groups."""
    found: dict[int, list[str]] = {}
    for unit, family in families.items():
        found.setdefault(id(family), []).append(unit)
    return list(found.values())
