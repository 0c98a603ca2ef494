"""Choosing what parameters and gradients travel in, on each tier, among the formats that a user admits.

A format changes how long messages of its tier take, every message's by about the same share: so of each
tier's formats the one with the shortest messages, rounding included, is the best for any plan. The proof is
that no plan in these formats is faster; the choice of formats itself is not proven. A format that does not
make the plan itself faster by ``LEAST_GAIN`` is left out again: rounding is not for free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hzplan.core.hierarchy import Levels
from hzplan.core.wire import Admitted, Format, What, Wire
from hzplan.cost.model import CostModel
from hzplan.errors import UserError
from hzplan.formats.profile import Profile
from hzplan.solver.evaluate import Evaluation, evaluate, uniform, unit_costs
from hzplan.solver.search import Request, cost_model
from hzplan.solver.solve import Outcome, Solved

LEAST_GAIN = 0.02
"""Share of a step that a format has to save."""

Answer = tuple[Request, Outcome]


def solve_in(
    admitted: Admitted, profile: Profile, request: Request, solve: Callable[[Request], Answer]
) -> Answer:
    """Answer a question in the formats that serve it, of those admitted; ``solve`` answers one in given
    formats. UserError where nobody knows how long rounding takes.

    Where some turn out not to be needed the question is solved without them in what is left of its time, at
    least a quarter of it.
    """
    wire = shortest(admitted, profile, request)
    answer = solve(replace(request, wire=wire))
    _, outcome = answer
    if wire is None or not isinstance(outcome, Solved) or (fewer := _needed(outcome.best, wire)) == wire:
        return answer
    left = max(request.time_limit_s - outcome.seconds, request.time_limit_s / 4)
    asked, outcome = solve(replace(request, wire=fewer, time_limit_s=left))
    return replace(asked, time_limit_s=request.time_limit_s), outcome


def shortest(admitted: Admitted, profile: Profile, request: Request) -> Wire | None:
    """Of each tier the formats with the shortest messages; None where exact ones are."""
    wanted = {*admitted.param, *admitted.grad}
    missing = sorted(wanted - {one.format for one in profile.rounding or ()})
    if missing:
        raise UserError(
            f"--wire: the profile does not know how long rounding to {missing[0]} takes; profile again"
        )
    tiers = len(profile.mesh.tiers)
    first: Format = "exact"
    exact = (first,) * tiers
    chosen: dict[What, tuple[Format, ...]] = {}
    offered: dict[What, tuple[Format, ...]] = {"param": admitted.param, "grad": admitted.grad}
    for what, formats in offered.items():
        seconds = {}
        for form in (first, *formats):
            everywhere = (form,) * tiers
            wire = Wire(exact, exact, admitted.kept)._replace(**{what: everywhere})
            seconds[form] = _messages_ns(cost_model(profile, replace(request, wire=wire)), what)
        chosen[what] = tuple(min(seconds, key=lambda form: seconds[form][tier]) for tier in range(tiers))
    wire = Wire(chosen["param"], chosen["grad"], admitted.kept)
    return None if wire.is_exact else wire


def _messages_ns(model: CostModel, what: What) -> list[int]:
    """By tier, nanoseconds in which everything goes once, where everything is sharded."""
    finest = len(model.mesh.dims)
    units = unit_costs(model, uniform(model.profile, Levels(finest, finest, finest))).values()
    kinds = (lambda one: one.unshard_ns) if what == "param" else (lambda one: one.reduce_ns)
    return [sum(of) for of in zip(*map(kinds, units), strict=True)]


def _needed(best: Evaluation, wire: Wire) -> Wire | None:
    """The formats without those that a plan is about as fast without."""
    limit = best.predicted.period_ns * (1 + LEAST_GAIN)
    for what in ("param", "grad"):
        for tier in range(len(best.model.mesh.tiers)):
            listed = list(getattr(wire, what))
            if listed[tier] == "exact":
                continue
            listed[tier] = "exact"
            fewer = wire._replace(**{what: tuple(listed)})
            model = replace(best.model, wire=fewer)
            one = evaluate(model, best.levels, best.schedule, best.micro_batch, modes=best.modes)
            if one.predicted.period_ns <= limit:
                wire = fewer
    return None if wire.is_exact else wire
