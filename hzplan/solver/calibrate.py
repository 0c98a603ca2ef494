"""Calibration: correcting a profile's times by those that a run of a plan measured.

A run gives the length of its steps and the time that compute waited for each tier and the optimizer. Times in
the profile are of three kinds: compute, each tier, the optimizer. Each kind gets the factor that explains the
run best. The norm's all-reduce and wake-up latency keep their measured times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp, log, log1p, sqrt
from pathlib import Path
from typing import TypeVar

from hzplan.errors import UserError
from hzplan.formats.metrics import Measured
from hzplan.formats.plan import Plan
from hzplan.formats.profile import (
    CalibratedEntry,
    CollectivePoint,
    MatrixPoint,
    OptimizerPoint,
    Profile,
    RecomputeCost,
    RoundingPoint,
    UseCost,
)
from hzplan.solver.evaluate import Evaluation, replay

LEAST, MOST = 1 / 16, 16.0
"""Bounds of a calibration factor (measured over predicted)."""
UNSEEN = 0.005
"""Share of a step: a tier whose predicted and measured waits are both below it keeps its factor, because a
run tells nothing about communication that is hidden."""
ROUNDS = 3
GRID, CUTS = 13, 15
"""Factors tried per kind, evenly spaced in logarithm; and golden-section steps around the best of them."""
NOISE = 0.05
"""Standard deviation of a run's waits, as a share of the step."""
WIDTH = 0.2
"""Width of the prior (Cauchy) of a factor's logarithm: half of all factors lie within e^±0.2."""
OPTIMIZER = "optim"


@dataclass(frozen=True)
class Factors:
    """Multipliers of a profile's times; ``tiers`` fastest first."""

    compute: float
    tiers: tuple[float, ...]
    optimizer: float

    @classmethod
    def none(cls, tiers: int) -> Factors:
        """Factors that change nothing."""
        return cls(1.0, (1.0,) * tiers, 1.0)

    def on(self, profile: Profile) -> Profile:
        """The profile with its times multiplied by these factors."""
        uses = tuple(
            use.model_copy(update={"costs": tuple(_cost_times(cost, self.compute) for cost in use.costs)})
            for use in profile.uses
        )
        curves = tuple(
            curve.model_copy(update={"points": tuple(_times(point, factor) for point in curve.points)})
            for curve in profile.collectives
            for factor in [self.tiers[profile.mesh.tier_of(curve.high - 1)]]
        )
        factor, steps = self.optimizer, profile.optimizer
        update: dict[str, object] = {"points": tuple(_times(point, factor) for point in steps.points)}
        if steps.norm is not None:
            update["norm"] = tuple(_times(point, factor) for point in steps.norm)
        if (matrix := steps.matrix) is not None:
            parts = {
                "begin": tuple(_times(point, factor) for point in matrix.begin),
                "finish": tuple(_times(point, factor) for point in matrix.finish),
                "products": tuple(_times(point, factor) for point in matrix.products),
            }
            update["matrix"] = matrix.model_copy(update=parts)
        rounding = tuple(
            one.model_copy(update={"points": tuple(_rounding_times(p, self.compute) for p in one.points)})
            for one in profile.rounding or ()
        )
        return profile.model_copy(
            update={
                "rounding": rounding or None,
                "uses": uses,
                "collectives": curves,
                "optimizer": profile.optimizer.model_copy(update=update),
            }
        )


Point = TypeVar("Point", UseCost, RecomputeCost, CollectivePoint, OptimizerPoint, MatrixPoint)


def _times(point: Point, factor: float) -> Point:
    return point.model_copy(update={"seconds": round(point.seconds * factor, 9)})


def _rounding_times(point: RoundingPoint, factor: float) -> RoundingPoint:
    parts = {"pack_seconds": point.pack_seconds, "unpack_seconds": point.unpack_seconds}
    return point.model_copy(update={name: round(of * factor, 9) for name, of in parts.items()})


def _cost_times(cost: UseCost, factor: float) -> UseCost:
    later = {"straggler_seconds": round(cost.straggler_seconds * factor, 9)}
    return _times(cost, factor).with_again(lambda again: _times(again, factor)).model_copy(update=later)


@dataclass(frozen=True)
class Calibration:
    """A corrected profile; ``before`` and ``after``: the plan that ran, predicted without and with it."""

    profile: Profile
    factors: Factors
    before: Evaluation
    after: Evaluation


def calibrate(plan: Plan, profile: Profile, path: Path, measured: Measured) -> Calibration:
    """Fit the factors to a run of a plan, one after the other, a few times around.

    Compute's factor is the ratio of measured to predicted step without waits. The factor of a tier, or of the
    optimizer, is the likeliest one: waits and step have an error of ``NOISE`` of the step, and the factor's
    logarithm has a Cauchy prior of width ``WIDTH``. So a tier on which the waits hardly depend keeps its
    factor near 1. ``path``: the plan's, for messages. UserError when the profile is not of the plan's model.
    """
    if not measured.exposed_s:
        raise UserError(f"{path}: no step of the run's metrics was timed; run with more --steps")
    tiers = len(profile.mesh.tiers)
    factors = Factors.none(tiers)
    before = replay(plan, profile, path)
    kinds = [*enumerate(profile.cluster.tier_names), (tiers, OPTIMIZER)]
    noise = NOISE * measured.step_s
    for _ in range(ROUNDS):
        found = replay(plan, factors.on(profile), path)
        busy = measured.step_s - sum(measured.exposed_s.values())
        predicted = found.step_s - sum(found.waits_s.values())
        factors = replace(factors, compute=_within(factors.compute * busy / predicted if predicted else 1.0))
        for kind, name in kinds:
            now = replay(plan, factors.on(profile), path).waits_s[name]
            if max(measured.exposed_s.get(name, 0.0), now) < UNSEEN * measured.step_s:
                continue

            def unlikely(logarithm: float, kind: int = kind, others: Factors = factors) -> float:
                tried = replay(plan, _with(others, kind, exp(logarithm)).on(profile), path)
                waits = tried.waits_s
                apart = [tried.step_s - measured.step_s]
                apart += [waits[name] - measured.exposed_s.get(name, 0.0) for _, name in kinds]
                return sum((seconds / noise) ** 2 for seconds in apart) + log1p((logarithm / WIDTH) ** 2)

            factors = _with(factors, kind, exp(_least(unlikely)))
    entry = CalibratedEntry(
        steps=measured.steps,
        compute=round(factors.compute, 4),
        tiers=tuple(round(factor, 4) for factor in factors.tiers),
        optimizer=round(factors.optimizer, 4),
    )
    corrected = factors.on(profile).model_copy(update={"calibrated": entry})
    return Calibration(corrected, factors, before, replay(plan, corrected, path))


def _with(factors: Factors, kind: int, factor: float) -> Factors:
    """The factors with another one for tier ``kind``; ``kind`` = number of tiers means the optimizer."""
    if kind == len(factors.tiers):
        return replace(factors, optimizer=factor)
    return replace(factors, tiers=(*factors.tiers[:kind], factor, *factors.tiers[kind + 1 :]))


def _least(unlikely: Callable[[float], float]) -> float:
    """The logarithm at which ``unlikely`` is least: the best of a grid, then golden-section search."""
    end = log(MOST)
    step = 2 * end / (GRID - 1)
    grid = [-end + step * index for index in range(GRID)]
    values = [unlikely(point) for point in grid]
    best = grid[values.index(min(values))]
    low, high = max(-end, best - step), min(end, best + step)
    ratio = (sqrt(5) - 1) / 2
    inner = [high - ratio * (high - low), low + ratio * (high - low)]
    costs = [unlikely(point) for point in inner]
    for _ in range(CUTS):
        if costs[0] < costs[1]:
            high = inner[1]
            inner = [high - ratio * (high - low), inner[0]]
            costs = [unlikely(inner[0]), costs[0]]
        else:
            low = inner[0]
            inner = [inner[1], low + ratio * (high - low)]
            costs = [costs[1], unlikely(inner[1])]
    return (low + high) / 2


def _within(factor: float) -> float:
    return min(MOST, max(LEAST, factor))
