"""Correcting a profile by what a run measured.

A run of a plan says how long its steps were and what its compute waited for. Four kinds of seconds in the
profile decide both: compute's, each tier's, the optimizer's. Each kind gets a factor, such that the simulator
says of that plan what was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from hzplan.formats.metrics import Measured
from hzplan.formats.plan import Plan
from hzplan.formats.profile import CalibratedEntry, CollectivePoint, OptimizerPoint, Profile, UseCost
from hzplan.solver.evaluate import Evaluation, replay

LEAST, MOST = 1 / 16, 16.0
"""What a factor can be."""
UNSEEN = 0.005
"""A tier whose waits are predicted and measured below this share of the step is left as it is: nothing is
known of what is hidden."""
ROUNDS = 4
HALVINGS = 12
OPTIMIZER = "optim"


@dataclass(frozen=True)
class Factors:
    """By what seconds are multiplied; ``tiers`` fastest first."""

    compute: float
    tiers: tuple[float, ...]
    optimizer: float

    @classmethod
    def none(cls, tiers: int) -> Factors:
        """Everything as it is."""
        return cls(1.0, (1.0,) * tiers, 1.0)

    def on(self, profile: Profile) -> Profile:
        """A profile with these factors."""
        bounds = list(enumerate(profile.mesh.tier_bounds))

        def tier_of(low: int) -> int:
            return next(tier for tier, (first, end) in bounds if first <= low < end)

        uses = tuple(
            use.model_copy(update={"costs": tuple(_times(cost, self.compute) for cost in use.costs)})
            for use in profile.uses
        )
        curves = tuple(
            curve.model_copy(
                update={"points": tuple(_times(p, self.tiers[tier_of(curve.low)]) for p in curve.points)}
            )
            for curve in profile.collectives
        )
        update = {"points": tuple(_times(point, self.optimizer) for point in profile.optimizer.points)}
        return profile.model_copy(
            update={
                "uses": uses,
                "collectives": curves,
                "optimizer": profile.optimizer.model_copy(update=update),
            }
        )


Point = TypeVar("Point", UseCost, CollectivePoint, OptimizerPoint)


def _times(point: Point, factor: float) -> Point:
    update = {"seconds": round(point.seconds * factor, 9)}
    if isinstance(point, UseCost):
        update["late_seconds"] = round(point.late_seconds * factor, 9)
    return point.model_copy(update=update)


@dataclass(frozen=True)
class Calibration:
    """``profile``: corrected; ``before`` and ``after``: what is predicted of the plan that ran."""

    profile: Profile
    factors: Factors
    before: Evaluation
    after: Evaluation


def calibrate(plan: Plan, profile: Profile, path: Path, measured: Measured) -> Calibration:
    """Fit the factors to a run of a plan, one after the other, a few times around.

    Compute's is the ratio of what is left of the step without waits; a tier's, or the optimizer's, is found
    by bisection on its waits, which grow with it. ``path``: the plan's, for messages. UserError when the
    profile is not of the plan's model.
    """
    tiers = len(profile.mesh.tiers)
    factors = Factors.none(tiers)
    before = replay(plan, profile, path)
    kinds = [*enumerate(profile.cluster.tier_names), (tiers, OPTIMIZER)]
    for _ in range(ROUNDS):
        found = replay(plan, factors.on(profile), path)
        busy = measured.step_s - sum(measured.exposed_s.values())
        predicted = found.step_s - sum(waits_s(found, profile).values())
        factors = replace(factors, compute=_within(factors.compute * busy / predicted if predicted else 1.0))
        for kind, name in kinds:
            wanted = measured.exposed_s.get(name, 0.0)
            now = waits_s(replay(plan, factors.on(profile), path), profile)[name]
            if max(wanted, now) >= UNSEEN * measured.step_s:

                def waits(
                    factor: float, kind: int = kind, name: str = name, others: Factors = factors
                ) -> float:
                    tried = _with(others, kind, factor).on(profile)
                    return waits_s(replay(plan, tried, path), profile)[name]

                factors = _with(factors, kind, _bisect(waits, wanted))
    entry = CalibratedEntry(
        steps=measured.steps,
        compute=round(factors.compute, 4),
        tiers=tuple(round(factor, 4) for factor in factors.tiers),
        optimizer=round(factors.optimizer, 4),
    )
    corrected = factors.on(profile).model_copy(update={"calibrated": entry})
    return Calibration(corrected, factors, before, replay(plan, corrected, path))


def waits_s(found: Evaluation, profile: Profile) -> dict[str, float]:
    """What compute waits for in a step, seconds by tier name and "optim"."""
    names = {f"tier {tier}": name for tier, name in enumerate(profile.cluster.tier_names)}
    return {names.get(cause, cause): waited / 1e9 for cause, waited in found.predicted.exposed_ns.items()}


def _with(factors: Factors, kind: int, factor: float) -> Factors:
    """Another factor for a tier, or after the tiers for the optimizer."""
    if kind == len(factors.tiers):
        return replace(factors, optimizer=factor)
    return replace(factors, tiers=(*factors.tiers[:kind], factor, *factors.tiers[kind + 1 :]))


def _bisect(waits: Callable[[float], float], wanted: float) -> float:
    """The factor at which ``waits`` is as wanted, in equal ratios; an end where it is wanted beyond it."""
    low, high = LEAST, MOST
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if waits(middle) < wanted else (low, middle)
    return float((low * high) ** 0.5)


def _within(factor: float) -> float:
    return min(MOST, max(LEAST, factor))
