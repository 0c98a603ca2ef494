"""Guarding plans: replay a recorded plan, solve its question again, and say what got worse."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hzplan.errors import UserError
from hzplan.formats.base import fingerprint
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile
from hzplan.solver.emit import emit
from hzplan.solver.evaluate import Evaluation, replay
from hzplan.solver.solve import Request, Solved, solve

TOLERANCE = 0.005
"""By how much of itself a recorded figure may get worse."""

TIME_LIMIT_S = 300.0


@dataclass(frozen=True)
class Verdict:
    """One plan: the recorded figures, those of now, and why it fails (empty when it does not).

    ``fresh`` is the plan that solving again gives, None where only a replay was made or nothing fits.
    """

    path: Path
    reason: str
    objective_s: tuple[float, float]
    peak_memory_bytes: tuple[int, int]
    fresh: Plan | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing got worse."""
        return not self.reason


def guard(path: Path, *, replay_only: bool = False) -> Verdict:
    """Check one plan file against its profile. UserError when either cannot be read."""
    plan = Plan.load(path)
    profile_path = path.parent / plan.source.profile
    try:
        profile = Profile.load(profile_path)
    except UserError as error:
        raise UserError(f"{path}: field source.profile: {error}") from None
    replayed = replay(plan, profile, path)
    now = replayed
    fresh = None
    reasons = []
    if fingerprint(profile) != plan.source.profile_sha256:
        reasons.append("cost data: the profile is not the one that the plan was solved from")
    if replayed.memory.peak > plan.source.memory_budget_bytes:
        reasons.append("prediction: the recorded plan no longer fits its budget")
    reasons += _worse("prediction: replaying the recorded plan", plan, replayed)
    if not replay_only:
        request = Request(
            plan.source.memory_budget_bytes,
            plan.batch.global_batch,
            gap=plan.source.asked_gap,
            time_limit_s=TIME_LIMIT_S,
            clip=plan.clip,
            reduce_dtype=plan.reduce_dtype,
        )
        outcome = solve(profile, request)
        if isinstance(outcome, Solved):
            now = outcome.best
            fresh = emit(profile, request, outcome, profile_path=profile_path, plan_path=path)
            reasons += _worse("choice: solving again", plan, now, objective=plan.source.asked_gap == 0)
        else:
            reasons.append("choice: solving again finds no plan within the budget")
    return Verdict(
        path,
        "; ".join(dict.fromkeys(reasons)),
        (plan.proof.objective_s, now.objective_ns / 1e9),
        (plan.predicted.peak_memory_bytes, now.memory.peak),
        fresh,
    )


def _worse(what: str, plan: Plan, now: Evaluation, *, objective: bool = True) -> list[str]:
    """Which recorded figures ``now`` exceeds by more than the tolerance.

    ``objective``: whether the ILP's is one of them. With a gap to spare a plan may be chosen for a shorter
    predicted step that has a larger one.
    """
    pairs = {
        **({"objective": (plan.proof.objective_s, now.objective_ns / 1e9, "s")} if objective else {}),
        "step": (plan.predicted.step_s, now.step_s, "s"),
        "peak memory": (plan.predicted.peak_memory_bytes, now.memory.peak, "B"),
    }
    return [
        f"{what} gives {name} {after:.6g} {unit}, recorded {before:.6g} {unit}{_growth(before, after)}"
        for name, (before, after, unit) in pairs.items()
        if after > before * (1 + TOLERANCE)
    ]


def _growth(before: float, after: float) -> str:
    return f" ({after / before - 1:+.2%})" if before else ""
