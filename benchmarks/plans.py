"""The plan of a regime, and the poorer plans that show what each freedom is worth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.models import role
from benchmarks.regimes import NoResult
from hzplan.core.hierarchy import Levels
from hzplan.core.schedule import Pace
from hzplan.cost.model import CostModel, tensors_of
from hzplan.formats.base import fingerprint
from hzplan.formats.plan import Plan, Proof, Source
from hzplan.formats.profile import Profile
from hzplan.solver.emit import as_plan, emit
from hzplan.solver.evaluate import Evaluation, evaluate
from hzplan.solver.search import paces
from hzplan.solver.solve import PREFETCH_DEPTHS, Infeasible, Request, Solved, solve

VARIANTS = SINGLE, ROLES, PREFETCH_1 = "single", "roles", "prefetch-1"
"""One triple of levels for all tensors; one per role; a level per tensor, but only one use ahead."""

ROLE_NAMES = ("embedding", "attention", "mlp", "head")


def make(
    profile_path: Path, memory_bytes: int, global_batch: int, folder: Path
) -> tuple[Path, dict[str, Path], list[str]] | int:
    """Solve; write the plan and the poorer variants that differ from it; name those that do not fit.

    Where no plan fits, the bytes of the smallest.
    """
    profile = Profile.load(profile_path)
    request = Request(memory_bytes, global_batch)
    outcome = solve(profile, request)
    if isinstance(outcome, Infeasible):
        return outcome.smallest.memory.peak
    if not isinstance(outcome, Solved):
        raise NoResult(outcome.reason)
    chosen = folder / "plan.json"
    emit(profile, request, outcome, profile_path=profile_path, plan_path=chosen).save(chosen)
    model = CostModel(profile)
    single = best_single(model, request)
    shallow = solve(profile, Request(memory_bytes, global_batch, depths=(1,)))
    variants: dict[str, Evaluation | None] = {
        SINGLE: single,
        ROLES: best_by_role(model, request, single) if single else None,
        PREFETCH_1: shallow.best if isinstance(shallow, Solved) else None,
    }
    written = {}
    for name, found in variants.items():
        if found is not None and not _same(found, outcome.best):
            written[name] = folder / f"{name}.json"
            given(profile, profile_path, found, request).save(written[name])
    return chosen, written, [name for name, found in variants.items() if found is None]


def given(profile: Profile, profile_path: Path, found: Evaluation, request: Request) -> Plan:
    """A choice that no solver proved anything of, as a plan."""
    objective = found.objective_ns / 1e9
    return as_plan(
        profile,
        found,
        request,
        proof=Proof(status="given", objective_s=objective, bound_s=0.0, gap=0.0, solver="none"),
        source=Source(
            profile=profile_path.name,
            profile_sha256=fingerprint(profile),
            memory_budget_bytes=request.memory_bytes,
            asked_gap=request.gap,
            host_memory_bytes=request.host_bytes or None,
        ),
    )


def best_single(model: CostModel, request: Request) -> Evaluation | None:
    """The fastest choice with one triple for the whole model that fits."""
    return _fastest(
        request,
        (
            _evaluated(model, request, dict.fromkeys(ROLE_NAMES, triple), pace)
            for triple in model.mesh.triples()
            for pace in paces(model, PREFETCH_DEPTHS)
        ),
    )


def best_by_role(model: CostModel, request: Request, start: Evaluation) -> Evaluation:
    """One triple per role: from the best single one, role by role, until no change of one role helps.

    Greedy, so perhaps not the best of all; for every pace.
    """
    first = next(iter(start.levels.values()))[0]
    found = [
        _improved(model, request, dict.fromkeys(ROLE_NAMES, first), pace)
        for pace in paces(model, PREFETCH_DEPTHS)
    ]
    return min([start, *(f for f in found if f is not None)], key=lambda f: f.step_s)


def _improved(
    model: CostModel, request: Request, chosen: Mapping[str, Levels], pace: Pace
) -> Evaluation | None:
    """Change the triple of one role after the other while that helps; None where the start does not fit."""
    best = _evaluated(model, request, chosen, pace)
    if not _fits(best, request):
        return None
    improved = True
    while improved:
        improved = False
        for name in ROLE_NAMES:
            for triple in model.mesh.triples():
                levels = {**chosen, name: triple}
                candidate = _evaluated(model, request, levels, pace)
                if _fits(candidate, request) and candidate.step_s < best.step_s:
                    best, chosen, improved = candidate, levels, True
    return best


def _evaluated(model: CostModel, request: Request, by_role: Mapping[str, Levels], pace: Pace) -> Evaluation:
    size = model.profile.micro_batches[0]
    schedule = model.schedule(
        **pace._asdict(),
        accumulation=request.global_batch // (model.mesh.world * size),
        clip=request.clip,
    )
    levels = {
        unit: tuple(by_role[role(tensor.name)] for tensor in tensors)
        for unit, tensors in tensors_of(model.profile).items()
        if tensors
    }
    return evaluate(model, levels, schedule, size)


def _pace(found: Evaluation) -> Pace:
    return found.schedule.pace


def _fastest(request: Request, tried: Iterator[Evaluation]) -> Evaluation | None:
    fitting = [found for found in tried if _fits(found, request)]
    return min(fitting, key=lambda found: found.step_s, default=None)


def _fits(found: Evaluation, request: Request) -> bool:
    return found.memory.peak <= request.memory_bytes


def _same(one: Evaluation, other: Evaluation) -> bool:
    return one.levels == other.levels and _pace(one) == _pace(other)
