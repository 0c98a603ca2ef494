"""Guarding plans: replay a recorded plan, solve its question again, say what changed and what got worse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hzplan.core.recompute import NOTHING, Recomputed
from hzplan.errors import UserError, printable
from hzplan.formats.base import has_fingerprint, to_text
from hzplan.formats.certificate import Certificate, path_of
from hzplan.formats.plan import Plan, gap_of
from hzplan.formats.source import profile_of, profile_path
from hzplan.solver.certificate import Refused, certify, multiplied
from hzplan.solver.difference import choices
from hzplan.solver.emit import emit
from hzplan.solver.evaluate import Evaluation, replay
from hzplan.solver.pins import Pins
from hzplan.solver.solve import Failed, Request, Solved, searches_of, solve

TOLERANCE = 0.005
"""Share by which a recorded figure may get worse, unless check.toml says otherwise."""

TIME_LIMIT_S = 300.0
"""Seconds for solving a plan's question again; golden plans need a few."""

EXACT = 1e-9
"""Relative difference below which two figures count as equal."""

GAP_PLACE = 1e-6
"""The last place of a gap in a plan."""

NEARLY = 1e-6
"""Share by which a plan's bound may be above its certificate's, whose multipliers are rounded."""

Kind = Literal["cost data", "formula", "solver", "choice", "prediction", "proof", "text", "training"]


@dataclass(frozen=True)
class Change:
    """One difference from the recorded plan. ``fails``: whether it fails the check or is a remark."""

    kind: Kind
    what: str
    fails: bool

    def __str__(self) -> str:
        return " ".join(f"{self.kind}: {self.what}".split())  # names are the user's, lines are ours


@dataclass(frozen=True)
class Verdict:
    """The check of one plan: figures as (recorded, now), and all changes.

    ``fresh``: the plan that solving again gives, with its ``certificate``; None after a replay alone or where
    nothing fits.
    ``unreadable``: the message where plan or profile cannot be read.
    """

    path: Path
    changes: tuple[Change, ...] = ()
    objective_s: tuple[float, float] | None = None
    peak_memory_bytes: tuple[int, int] | None = None
    fresh: Plan | None = None
    certificate: Certificate | None = None
    unreadable: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it was checked, and nothing got worse."""
        return self.unreadable is None and not any(change.fails for change in self.changes)

    @property
    def trains(self) -> bool:
        """Whether nothing says that training under it is wrong."""
        return not any(change.kind == "training" and change.fails for change in self.changes)

    @property
    def reason(self) -> str:
        """The changes that fail the check, in words; empty when it passes."""
        return self.unreadable or "; ".join(str(change) for change in self.changes if change.fails)


def guard(path: Path, *, replay_only: bool = False, tolerance: float = TOLERANCE) -> Verdict:
    """Check one plan file against its profile. UserError, naming the plan, when it cannot be checked."""
    try:
        return _guard(path, Plan.load(path), tolerance, replay_only=replay_only)
    except UserError as error:
        about = "" if str(error).startswith(f"{printable(path)}:") else f"{path}: "
        raise UserError(f"{about}{error}") from None


def _guard(path: Path, plan: Plan, tolerance: float, *, replay_only: bool) -> Verdict:
    profile = profile_of(path, plan)
    now = replay(plan, profile, path)
    same_data = has_fingerprint(profile, plan.source.profile_sha256)
    changes = [*_replayed(plan, now, tolerance, same_data=same_data)]
    changes += _stated(plan)
    changes += _hidden(plan, now)
    changes += _proven(path, plan, now)
    fresh = certificate = None
    if not replay_only:
        request = replace(request_of(plan), time_limit_s=TIME_LIMIT_S)
        outcome = solve(profile, request)
        if isinstance(outcome, Solved):
            now = outcome.best
            source = profile_path(path, plan)
            fresh = emit(profile, request, outcome, profile_path=source, plan_path=path)
            fresh = fresh.model_copy(update={"replica_sync": plan.replica_sync})
            certificate = certify(profile, outcome)
            changes += _solved(plan, fresh, now, tolerance)
            changes += _text(path, plan, fresh, same_data=same_data)
        elif isinstance(outcome, Failed):
            changes.append(Change("solver", outcome.reason, True))
        else:
            least, budget = outcome.smallest.memory.peak, request.memory_bytes
            what = f"solving again finds no plan within the budget: at least {least} B needed of {budget} B"
            changes.append(Change("choice", what, True))
    return Verdict(
        path,
        tuple(dict.fromkeys(changes)),
        (plan.proof.objective_s, now.objective_ns / 1e9),
        (plan.predicted.peak_memory_bytes, now.memory.peak),
        fresh,
        certificate,
    )


def request_of(plan: Plan) -> Request:
    """The question that a plan answers."""
    return Request(
        plan.source.memory_budget_bytes,
        plan.batch.global_batch,
        gap=plan.source.asked_gap,
        tie=plan.source.asked_tie,
        clip=plan.clip,
        reduce_dtype=plan.reduce_dtype,
        narrow_sums=bool(plan.narrow_sums),
        wire=plan.wire.formats if plan.wire is not None else None,
        pins=plan.source.pins,
        recompute=plan.source.recompute,
        host_bytes=plan.source.host_memory_bytes or 0,
        target=plan.source.target,
    )


def _replayed(plan: Plan, now: Evaluation, tolerance: float, *, same_data: bool) -> Iterator[Change]:
    """Changes that replaying the recorded choice shows; with the same profile they are a formula's."""
    if not same_data:
        yield Change("cost data", "the profile is not the one that the plan was solved from", True)
    if not Pins(plan.source.pins, now.model.profile).keep(now.model.profile, now.levels):
        yield Change("choice", "the recorded plan is not as its field source.pins says", True)
    everything = Recomputed.of(now.model.recomputable)
    asked = {"none": NOTHING, "all": everything}.get(plan.source.recompute, now.modes.recompute)
    if now.modes.recompute != asked:
        yield Change("choice", "the recorded plan is not as its field source.recompute says", True)
    if now.memory.peak > plan.source.memory_budget_bytes:
        yield Change("prediction", "the recorded plan no longer fits its budget", True)
    if now.memory.host > (plan.source.host_memory_bytes or 0):
        yield Change("prediction", "the recorded plan takes more of the host's memory than it may", True)
    kind: Kind = "formula" if same_data else "prediction"
    for name, (before, after, unit) in _figures(plan, now).items():
        if abs(after - before) > EXACT * max(abs(before), abs(after)) and f"{before:.9g}" != f"{after:.9g}":
            what = f"replaying the recorded plan gives {name} {_compared(before, after, unit)}"
            yield Change(kind, what, after > before * (1 + tolerance))


def _hidden(plan: Plan, now: Evaluation) -> Iterator[Change]:
    """Whether a relaxed tier's transfers still hide behind the steps that they have."""
    tier = plan.replica_sync
    if isinstance(tier, str):
        return
    longest_s = tier.delay * tier.busy_s / plan.predicted.step_s * now.step_s
    if tier.transfer_s > longest_s * (1 + EXACT):
        steps = f"{tier.delay} steps {longest_s:.6g} s"
        what = f"a transfer to other groups takes {tier.transfer_s:.6g} s, {steps}"
        yield Change("prediction", what, True)


def _stated(plan: Plan) -> Iterator[Change]:
    """Figures of a plan's proof that contradict each other."""
    proof, step_s = plan.proof, plan.predicted.step_s
    if proof.status == "given":
        return
    bounds = {"bound_s": proof.bound_s}
    if proof.in_order_bound_s is not None:
        bounds["in_order_bound_s"] = proof.in_order_bound_s
        if plan.message_order is None:
            yield Change("proof", "in_order_bound_s is of a message order, and the plan has none", True)
    for name, bound_s in bounds.items():
        if bound_s > step_s * (1 + EXACT) + EXACT:
            what = f"{name} is {bound_s:.9g} s, above the step of {step_s:.9g} s that it is a bound of"
            yield Change("proof", what, True)
    gap = gap_of(step_s, max(bounds.values()))
    if abs(proof.gap - gap) > 2 * GAP_PLACE:
        yield Change("proof", f"gap is {proof.gap:.6f}, step and bound give {gap:.6f}", True)


def _proven(path: Path, plan: Plan, now: Evaluation) -> Iterator[Change]:
    """What the certificate beside a plan does not give."""
    proof = path_of(path)
    if plan.proof.status == "given":
        return
    if not proof.exists():
        yield Change("proof", f"{proof.name} is not there, so bounds follow only from solving again", False)
        return
    if not proof.is_file():  # reading a pipe would wait
        raise UserError(f"{proof}: is no regular file")
    certificate = Certificate.load(proof)
    if certificate.profile_sha256 != plan.source.profile_sha256:
        yield Change("proof", f"{proof.name} is of another profile", True)
        return
    try:
        follows = multiplied(certificate, now, searches_of(now.model.profile, request_of(plan)))
    except Refused as error:
        yield Change("proof", f"{proof.name}: {error}", True)
        return
    stated = {"bound_s": (plan.proof.bound_s, follows.bound_s)}
    if plan.proof.in_order_bound_s is not None:
        stated["in_order_bound_s"] = plan.proof.in_order_bound_s, follows.in_order_bound_s or follows.bound_s
    for name, (said, certified) in stated.items():
        if said > certified * (1 + NEARLY):
            what = f"{name} is {said:.6g} s, {proof.name} gives {certified:.6g} s; an ILP proved the rest"
            yield Change("proof", what, False)


def _solved(plan: Plan, fresh: Plan, now: Evaluation, tolerance: float) -> Iterator[Change]:
    """Changes that solving again shows: another solver, other choices, worse figures."""
    if fresh.proof.solver != plan.proof.solver:
        yield Change("solver", f"{fresh.proof.solver}, recorded {plan.proof.solver}", False)
    different = choices(plan, fresh)
    if different:
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        yield Change("choice", f"solving again chooses otherwise: {different[0]}{more}", False)
    figures = _figures(plan, now)
    del figures["objective"]  # a plan with a larger one may have a shorter predicted step
    for name, (before, after, unit) in figures.items():
        if after > before * (1 + tolerance):
            yield Change("choice", f"solving again gives {name} {_compared(before, after, unit)}", True)
    recorded, again = plan.proof, fresh.proof
    if recorded.bound_s > again.bound_s * (1 + tolerance):
        what = f"bound_s is {recorded.bound_s:.6g} s, solving again proves {again.bound_s:.6g} s"
        yield Change("proof", what, True)


def _text(path: Path, plan: Plan, fresh: Plan, *, same_data: bool) -> Iterator[Change]:
    """Changes of the plan file's text, which fails for a proven optimum of the same data and solver."""
    if same_data:  # the hash of a profile's text changes with its version, and its data do not
        source = fresh.source.model_copy(update={"profile_sha256": plan.source.profile_sha256})
        fresh = fresh.model_copy(update={"source": source})
    recorded, now = path.read_text(encoding="utf-8").splitlines(), to_text(fresh).splitlines()
    if recorded == now:
        return
    lines = len(set(now) ^ set(recorded))
    proven = plan.proof.replayed is not None and fresh.proof.replayed is not None
    fails = proven and same_data and plan.proof.solver == fresh.proof.solver
    why = ", though both are proven optimal by one solver" if fails else ""
    yield Change("text", f"{lines} lines of the file would change{why}", fails)


def _figures(plan: Plan, now: Evaluation) -> dict[str, tuple[float, float, str]]:
    """By name: recorded, now, unit."""
    return {
        "objective": (plan.proof.objective_s, round(now.objective_ns / 1e9, 9), "s"),
        "step": (plan.predicted.step_s, round(now.step_s, 9), "s"),
        "peak memory": (plan.predicted.peak_memory_bytes, now.memory.peak, "B"),
    }


def _compared(before: float, after: float, unit: str) -> str:
    growth = f" ({after / before - 1:+.2%})" if before else ""
    return f"{after:.6g} {unit}, recorded {before:.6g} {unit}{growth}"


def tolerance_of(path: Path, tolerances: Mapping[str, float]) -> float:
    """A plan's own tolerance by its file's stem, else ``default``'s, else TOLERANCE."""
    return tolerances.get(path.stem, tolerances.get("default", TOLERANCE))
