"""What a plan gains over the best scheme that users set by hand, and from what. Pure.

A plan and a scheme differ in five freedoms: levels, recomputation, micro-batch size, pace (prefetch depth and
gradient buffers) and message order. Each is switched off in turn: the plan keeps the others and takes this
one from the scheme. Where it does not fit so, as many more layers are recomputed as it needs. The shares need
not add up to the gain: some choices pay only together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hzplan.core.order import within
from hzplan.core.recompute import Recomputed
from hzplan.solver.evaluate import Evaluation, Modes, evaluate, fastest_of
from hzplan.solver.prefer import preferred, tie_of
from hzplan.solver.schemes import RecomputeOptions, Row
from hzplan.solver.search import Request

FREEDOMS = ("levels", "recompute", "micro-batch", "prefetch", "message order")


@dataclass(frozen=True)
class FreedomShare:
    """The share of its step by which the plan is slower without one freedom; None where it then does not
    fit."""

    freedom: str
    share: float | None


@dataclass(frozen=True)
class Gain:
    """A plan's gain: the share of its step by which the preferred fitting row, ``over``, takes longer.

    ``same``: that row is the plan.
    """

    over: Row
    share: float
    same: bool
    parts: tuple[FreedomShare, ...]


def gain(best: Evaluation, rows: Sequence[Row], request: Request) -> Gain | None:
    """The gain of the plan ``best`` over the best row; None where no row fits and is allowed."""
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
    return over(best, fitting[id(preferred(some, limit))], request)


def over(best: Evaluation, row: Row, request: Request) -> Gain:
    """The gain of the plan ``best`` over one row, which may not fit."""
    if row.found is best:
        return Gain(row, 0.0, True, ())
    share = row.found.predicted.period_ns / best.predicted.period_ns - 1
    return Gain(row, share, False, _parts(best, row.found, request))


def _parts(best: Evaluation, other: Evaluation, request: Request) -> tuple[FreedomShare, ...]:
    found = []
    for freedom in FREEDOMS:
        one = _mixed({name: other if name == freedom else best for name in FREEDOMS}, request, freedom)
        share = None if one is None else one.predicted.period_ns / best.predicted.period_ns - 1
        found.append(FreedomShare(freedom, share))
    return tuple(found)


def _mixed(of: Mapping[str, Evaluation], request: Request, given: str) -> Evaluation | None:
    """The plan that takes each freedom from the plan that ``of`` names; None where it does not fit.

    Where it does not fit, more units are recomputed, unless recomputation is the freedom ``given``.
    """
    levels, size, pace = of["levels"], of["micro-batch"], of["prefetch"].schedule
    ordered = of["message order"].schedule
    order = ordered.order
    if order is not None and ordered.pace != pace.pace:
        order = within(order, pace.prefetch + 1)
    schedule = levels.model.schedule(
        **pace.pace._asdict(),
        accumulation=size.schedule.accumulation,
        clip=request.clip,
        offload=request.host_bytes > 0,
        order=order,
    )
    start = of["recompute"].modes.recompute

    def made(recompute: Recomputed) -> Evaluation:
        modes = Modes(recompute, levels.modes.offload)
        return evaluate(levels.model, levels.levels, schedule, size.micro_batch, modes=modes)

    def fits(one: Evaluation) -> bool:
        return one.fits(request.memory_bytes, request.host_bytes)

    if fits(one := made(start)):
        return one
    if given == "recompute" or request.recompute != "choose":
        return None
    offered = RecomputeOptions.of(levels.model)
    low, high = sum(start.get(unit) == "full" for unit in offered.blocks) + 1, len(offered.blocks) + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(made(offered.first(middle))) else (middle + 1, high)
    one = made(offered.first(low))
    return one if fits(one) else None
