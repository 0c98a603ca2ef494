"""What a plan gains over the best scheme that users set by hand, and from what. Pure.

A plan and a scheme differ in four freedoms: levels, recomputation, micro-batch size and pace (prefetch depth
and gradient buffers). Each is switched off in turn: the plan keeps the others and takes this one from the
scheme. Where it does not fit so, as many more layers are recomputed as it needs. The shares need not add up
to the gain: one freedom may only pay with another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hzplan.solver.evaluate import Evaluation, Modes, evaluate, fastest_of
from hzplan.solver.prefer import preferred, tie_of
from hzplan.solver.schemes import Recomputing, Row
from hzplan.solver.search import Request


@dataclass(frozen=True)
class Part:
    """A freedom, and by which share of its step the plan is slower without it; None where it does not fit."""

    freedom: str
    share: float | None


@dataclass(frozen=True)
class Gain:
    """Over the row that is preferred among those that fit: by which share of the plan's step that takes
    longer. ``same``: the row is the plan."""

    over: Row
    share: float
    same: bool
    parts: tuple[Part, ...]


def gain(best: Evaluation, rows: Sequence[Row], request: Request) -> Gain | None:
    """None where no scheme fits that the question allows."""
    fitting: dict[int, Row] = {}
    for row in rows:
        if row.fits and row.allowed:
            fitting.setdefault(id(row.found), row)  # a user's own setting may be a scheme's
    if not fitting:
        return None
    if id(best) in fitting:
        return Gain(fitting[id(best)], 0.0, True, ())
    some = [row.found for row in fitting.values()]
    limit = fastest_of(some).predicted.period_ns * (1 + tie_of(request.gap, request.tie))
    over = fitting[id(preferred(some, limit))]
    share = over.found.predicted.period_ns / best.predicted.period_ns - 1
    return Gain(over, share, False, _parts(best, over.found, request))


def _parts(best: Evaluation, other: Evaluation, request: Request) -> tuple[Part, ...]:
    mine = {"levels": best, "recompute": best, "micro-batch": best, "prefetch": best}
    found = []
    for freedom in mine:
        without = {**mine, freedom: other}
        again = None if freedom != "recompute" else other.modes.recompute
        one = _without(
            without["levels"],
            without["recompute"],
            without["micro-batch"],
            without["prefetch"],
            request,
            again,
        )
        share = None if one is None else one.predicted.period_ns / best.predicted.period_ns - 1
        found.append(Part(freedom, share))
    return tuple(found)


def _without(
    levels: Evaluation,
    recompute: Evaluation,
    size: Evaluation,
    pace: Evaluation,
    request: Request,
    given: frozenset[str] | None,
) -> Evaluation | None:
    """A plan put together of parts of two. ``given``: what is recomputed; None: more where it has to fit."""
    model = levels.model
    schedule = model.schedule(
        prefetch=pace.schedule.prefetch,
        accumulation=size.schedule.accumulation,
        clip=request.clip,
        gradient_buffers=pace.schedule.gradient_buffers,
        offload=request.host_bytes > 0,
    )
    recomputing = Recomputing.of(model)
    start = recompute.modes.recompute
    modes = Modes(start, levels.modes.offload)

    def made(again: frozenset[str]) -> Evaluation:
        chosen = modes._replace(recompute=again)
        return evaluate(model, levels.levels, schedule, size.micro_batch, modes=chosen)

    def fits(one: Evaluation) -> bool:
        return one.fits(request.memory_bytes, request.host_bytes)

    if fits(one := made(start)):
        return one
    if given is not None or request.recompute != "choose":
        return None
    low, high = len(start.intersection(recomputing.blocks)) + 1, len(recomputing.blocks) + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(made(recomputing.first(middle))) else (middle + 1, high)
    one = made(recomputing.first(low))
    return one if fits(one) else None
