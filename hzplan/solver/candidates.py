"""The plans found so far, and which of them is the best."""

from __future__ import annotations

from hzplan.solver.evaluate import Evaluation, fastest_of, within
from hzplan.solver.paths import MS
from hzplan.solver.relaxation import TOLERANCE

NEAR = 0.01
"""Predicted steps that differ by less than this share are called equal: no profile is more exact."""


class Candidates:
    """Every plan that was replayed and fits."""

    def __init__(self) -> None:
        self.all: list[Evaluation] = []

    @property
    def least_ms(self) -> float:
        """The least objective so far, in milliseconds."""
        return self.least_ns * MS

    @property
    def least_ns(self) -> float:
        """The least objective so far."""
        least = float("inf")
        for one in self.all:
            if one.floor_ns < least:
                least = min(least, one.objective_ns)
        return least

    def choose(self, bound_ns: float, gap: float) -> Evaluation:
        """The plan that keeps the links least busy, of those that the simulator calls as good as fastest.

        The ILP leaves the sharing of links out, so the least objective need not be the fastest plan. The
        simulator leaves out what communication costs compute, so of predictions that differ by less than
        ``NEAR`` the plan with less communication is the faster one. Where the proven optimum of the objective
        is asked for (a gap of 0), only plans that reach it count; else those within the gap, where there are
        any. Of equals: fewer units that are recomputed or offloaded, then fewer different triples, then fewer
        gradients that are copied to be scattered, then less memory.
        """
        enough = max(self.least_ns, bound_ns)
        near = [f for f in self.all if gap > 0 or f.objective_ns <= enough]
        fastest = fastest_of(near).predicted.period_ns * (1 + NEAR)
        proven = bound_ns * (1 + gap + TOLERANCE)
        plain = sorted(near, key=_plainness)
        plain = [f for f in plain if within(f, proven)] + plain
        return next(f for f in plain if within(f, fastest) and f.predicted.period_ns <= fastest)


def _plainness(evaluation: Evaluation) -> tuple[float, ...]:
    triples = {triple for levels in evaluation.levels.values() for triple in levels}
    return (
        evaluation.communication_ns,
        len(evaluation.modes.recompute) + len(evaluation.modes.offload),
        len(triples),
        sum(cost.staging_bytes for cost in evaluation.units.values()),
        evaluation.memory.peak,
    )
