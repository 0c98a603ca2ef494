"""The order of preference among plans.

First the predicted step. Steps within the tie of the fastest count as equal; of those, first the ones in a
message order for which a bound was proven, where a search in one was needed; then the plan with the least
memory, then with the fewest distinct triples, then the nearest to a plan that the user names. Memory is left
free, never filled for nothing.

A *row* (a scheme as users set it by hand) that is within the tie of the fastest is the plan: what any other
plan would gain is less than the model can tell. Any other plan has to be ahead of every row by more than the
tie, so no row is as fast as it and leaner (``solve._decided`` asks in this order). Where compute keeps the
processors that ranks share busy it has to be ahead by ``NEAR``, and of the rows that are as near the one with
the fewest messages is the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from hzplan.core.hierarchy import Levels
from hzplan.cost.model import CostModel
from hzplan.solver.evaluate import Evaluation, fastest_of, within
from hzplan.solver.schemes import Row, slack_bytes

TIE = 0.005
"""Share of a step by which predictions may differ and count as equal, where neither --tie nor a smaller --gap
says less. A ratio of two predictions from one profile is no more exact."""


NEAR = 0.03
"""What another plan has to gain over the fastest row where compute keeps the processors busy: predictions of
one profile's random plans err by 2 to 13 % against each other there (standard deviation within a regime, 5 in
the median; benchmarks/results/2026-11-29-accuracy.json), and the fastest of many is one that they flatter."""
BUSY = 0.5
"""The least share of the processors that compute then takes by itself."""


def tie_of(gap: float, tie: float | None) -> float:
    """The tie that a question asks for: its own, else the gap's, at most ``TIE``."""
    return min(gap, TIE) if tie is None else tie


def margin_of(gap: float, tie: float | None, model: CostModel) -> float:
    """What a plan of its own has to gain over every row, a share of its step: ``NEAR`` where compute keeps
    the processors busy and nobody asked for another tie, else the tie."""
    busy = (model.compute_processor_share or 0.0) > BUSY
    return NEAR if busy and tie is None and gap else tie_of(gap, tie)


def messages(one: Evaluation) -> int:
    """How many messages a rank has in a step."""
    tasks = zip(one.schedule.tasks, one.durations_ns, strict=True)
    return sum(task.tier >= 0 and duration_ns > 0 for task, duration_ns in tasks)


def plain_enough(rows: Sequence[Row], step_ns: float, margin: float) -> Row | None:
    """Of the rows that fit and whose steps are within the margin of ``step_ns`` the one with the fewest
    messages, of these the fastest: what a step on busy processors takes beyond its prediction grows with
    them. None where no row is."""
    near = within_tie(step_ns, rows, margin)
    return min(near, key=lambda row: (messages(row.found), _step(row.found)), default=None)


def ceiling_ns(fastest: Evaluation, rows: Sequence[Row], tie: float) -> float:
    """The longest step that a plan which is no row may have, nanoseconds.

    Within the tie of the fastest, and ahead of every row that fits by more than the tie.
    """
    limit = fastest.predicted.period_ns * (1 + tie)
    ahead = (row.found.predicted.period_ns / (1 + tie) for row in rows if row.fits)
    return max(fastest.predicted.period_ns, min([limit, *ahead]))


def within_tie(step_ns: float, rows: Sequence[Row], tie: float) -> list[Row]:
    """The rows that fit and whose steps are within the tie of one of ``step_ns``."""
    return [row for row in rows if row.fits and _step(row.found) <= step_ns * (1 + tie)]


def preferred(some: Sequence[Evaluation], ceiling: float, like: Evaluation | None = None) -> Evaluation:
    """Of the plans whose step is within the ceiling the first in the order of preference; the fastest where
    none is."""
    lean: list[Evaluation] = []
    for one in sorted(some, key=lambda one: one.memory.peak):  # few are replayed: those that may be chosen
        if lean and one.memory.peak > lean[0].memory.peak + slack_bytes(lean[0].memory.peak):
            break
        if within(one, ceiling):
            lean.append(one)
    if not lean:
        return fastest_of(some)
    return min(
        lean, key=lambda one: (*plainness(one), 0 if like is None else distance(one, like), _step(one))
    )


def plainness(one: Evaluation) -> tuple[int, int]:
    """How many distinct triples a plan has, and how many sets of them its units have; fewer are plainer."""
    trained = [
        frozenset(
            triple
            for triple, tensor in zip(one.levels[unit.name], unit.tensors, strict=True)
            if tensor.trainable
        )
        for unit in one.model.profile.units
        if unit.name in one.levels
    ]
    distinct, sets = frozenset[Levels]().union(*trained), {of for of in trained if of}
    return len(distinct), len(sets)


def distance(one: Evaluation, other: Evaluation) -> int:
    """How many choices differ: of levels by tensor, of modes by unit, of micro-batch size and paces."""
    levels = sum(
        mine != theirs
        for unit, triples in one.levels.items()
        for mine, theirs in zip(triples, other.levels.get(unit, ()), strict=False)
    )
    modes = len(one.modes.recompute.difference(other.modes.recompute))
    modes += len(one.modes.offload ^ other.modes.offload)
    return levels + modes + sum(mine != theirs for mine, theirs in zip(_pace(one), _pace(other), strict=True))


def _pace(one: Evaluation) -> tuple[object, ...]:
    return one.micro_batch, *one.schedule.pace, one.schedule.order


def _step(one: Evaluation) -> float:
    return one.predicted.period_ns
