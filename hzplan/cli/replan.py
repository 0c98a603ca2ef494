"""A plan for another number of ranks than a run's: one that lies beside it, or one solved anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hzplan.errors import JobFailed, NoPlanFits, UserError
from hzplan.formats.plan import Plan


def beside(path: Path, world: int) -> Path | None:
    """The plan itself, or the fastest one of the same training in its folder, where it is for ``world``."""
    plan = Plan.load(path)
    if plan.mesh.world == world:
        return path
    found: list[tuple[float, Path]] = []
    for other in sorted(path.parent.glob("*.json")):
        try:
            one = Plan.load(other)
        except UserError:
            continue  # another file
        if one.mesh.world == world and _training(one) == _training(plan):
            found.append((one.predicted.step_s, other))
    return min(found)[1] if found else None


def _training(plan: Plan) -> tuple[object, ...]:
    """What must not change when a run goes on; nor may it need more memory than it was given."""
    return (
        *(plan.model.signature, plan.model.dtype, plan.model.seq_len, plan.optimizer, plan.clip),
        *(plan.batch.global_batch, plan.source.memory_budget_bytes, plan.source.host_memory_bytes),
        *(plan.reduce_dtype, plan.narrow_sums, plan.wire),
    )


def solved(path: Path, world: int) -> Path:
    """Solve a plan's question for another number of ranks, and write the answer and its profile beside it.

    The batch stays, or becomes the next smaller one that the ranks can share. Links to the slowest tier are
    taken to be as fast as they were. UserError when the plan's profile is not there or cannot be resized,
    NoPlanFits when nothing fits.
    """
    from hzplan.cost.collectives import with_ranks
    from hzplan.formats.certificate import save
    from hzplan.formats.source import profile_of
    from hzplan.solver.certificate import certify
    from hzplan.solver.emit import emit
    from hzplan.solver.guard import request_of
    from hzplan.solver.solve import Infeasible, Solved, solve

    plan = Plan.load(path)
    profile = with_ranks(profile_of(path, plan), world)
    smallest = world * profile.micro_batches[0]
    batch = plan.batch.global_batch // smallest * smallest or smallest
    request = replace(request_of(plan), global_batch=batch)
    if request.wire is not None:
        request = replace(request, wire=request.wire.on_tiers(len(profile.mesh.tiers)))
    outcome = solve(profile, request)
    if isinstance(outcome, Infeasible):
        raise NoPlanFits(
            f"{path}: nothing fits on {world} ranks in {request.memory_bytes / 2**20:,.0f} MiB each; solve "
            "with more --memory, or start more ranks"
        )
    if not isinstance(outcome, Solved):
        raise JobFailed(f"{path}: no plan was found for {world} ranks: {outcome.reason}")
    target = path.with_name(f"{path.stem}.{world}-ranks.json")
    resized = path.with_name(f"{path.stem}.{world}-ranks.profile.json")
    profile.save(resized)
    made = emit(profile, request, outcome, profile_path=resized, plan_path=target)
    save(made, certify(profile, outcome), target)
    return target
