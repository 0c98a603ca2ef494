"""Turning an evaluated choice into the content of a plan file."""

from __future__ import annotations

import os
from importlib.metadata import version
from math import floor
from pathlib import Path

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.layout import REDUCE_DTYPES, bucketise
from hzplan.core.recompute import HOST
from hzplan.core.wire import Wire
from hzplan.formats.base import fingerprint
from hzplan.formats.parallel import ModelParallel
from hzplan.formats.plan import (
    Batch,
    BucketEntry,
    Plan,
    PlanCluster,
    PlanModel,
    PlanUnit,
    Predicted,
    Proof,
    Shards,
    Source,
    WireEntry,
    gap_of,
    recompute_entry,
)
from hzplan.formats.profile import Profile
from hzplan.solver.evaluate import Evaluation
from hzplan.solver.solve import Request, Solved


def emit(profile: Profile, request: Request, solved: Solved, *, profile_path: Path, plan_path: Path) -> Plan:
    """The plan file's content; the profile is named relative to where the plan will lie."""
    step_s = _seconds(solved.best.predicted.period_ns)
    bound_s, in_order_s = (
        min(step_s, floor(bound) / 1e9) for bound in (solved.bound_ns, solved.in_order_bound_ns)
    )
    if solved.best.schedule.order is None:  # then it is not of plans in an order alone
        in_order_s = bound_s
    proof = Proof(
        status=solved.status,
        objective_s=_seconds(solved.best.objective_ns),
        bound_s=bound_s,
        in_order_bound_s=in_order_s if solved.best.schedule.order else None,
        gap=gap_of(step_s, in_order_s),
        replayed=solved.replayed,
        solver=f"highs {version('highspy')}",
    )
    source = Source(
        profile=os.path.relpath(profile_path.resolve(), plan_path.resolve().parent),
        profile_sha256=fingerprint(profile),
        memory_budget_bytes=request.memory_bytes,
        asked_gap=request.gap,
        asked_tie=request.tie,
        pins=request.pins,
        recompute=request.recompute,
        host_memory_bytes=request.host_bytes or None,
        target=request.target,
    )
    return as_plan(profile, solved.best, request, proof=proof, source=source)


def as_plan(profile: Profile, chosen: Evaluation, request: Request, *, proof: Proof, source: Source) -> Plan:
    """An evaluated choice of levels as a plan."""
    accumulation = chosen.schedule.accumulation
    return Plan(
        model=PlanModel(**profile.model.model_dump()),
        cluster=PlanCluster(
            mesh=profile.cluster.mesh,
            tier_names=profile.cluster.tier_names,
            backend=profile.cluster.backend,
        ),
        parallel=profile.parallel,
        optimizer=profile.optimizer.name,
        clip=request.clip,
        local_norm=chosen.model.has_local_norm(chosen.schedule, chosen.units) or None,
        reduce_dtype=request.reduce_dtype or REDUCE_DTYPES[profile.model.dtype][0],
        narrow_sums=True if chosen.model.narrow_sums else None,
        flat_sums=True if chosen.model.flat_sums and _is_flat(chosen) else None,
        wire=_wire(chosen.model.wire),
        batch=Batch(
            global_batch=profile.data_ranks * chosen.micro_batch * accumulation,
            micro_batch=chosen.micro_batch,
            accumulation=accumulation,
        ),
        prefetch=chosen.schedule.prefetch,
        gradient_buffers=chosen.schedule.gradient_buffers,
        message_bytes=chosen.schedule.message_bytes or None,
        matrix_units=chosen.schedule.matrix_units or None,
        copy_uses=chosen.schedule.copy_uses if HOST in chosen.modes.recompute.values() else None,
        sync_ahead=chosen.schedule.order.sync if chosen.schedule.order else None,
        ctas=profile.ctas,
        source=source,
        proof=proof,
        predicted=predict(profile, chosen),
        units=_units(profile, chosen),
        uses=tuple(str(use.use) for use in profile.uses),
    )


def _is_flat(chosen: Evaluation) -> bool:
    """Whether whole tensors' gradients are summed at once; all or none are."""
    kinds = {
        levels.flat
        for unit, tensors in chosen.model.tensors.items()
        for levels, tensor in zip(chosen.levels.get(unit, ()), tensors, strict=False)
        if tensor.trainable and levels.three == (0, 0, 0)
    }
    assert len(kinds) < 2, "sums of both kinds"
    return True in kinds


def predict(profile: Profile, chosen: Evaluation) -> Predicted:
    """The simulator's answer in a plan's terms; exposed communication by tier name."""
    parallel = profile.parallel or ModelParallel()
    sequences = chosen.micro_batch * chosen.schedule.accumulation / parallel.ranks
    flops = sum(
        cost.flops for use in profile.uses for cost in use.costs if cost.micro_batch == chosen.micro_batch
    )
    peak = profile.cluster.peak_flops * chosen.step_s
    return Predicted(
        step_s=_seconds(chosen.predicted.period_ns),
        exposed_comm_s={name: round(waited, 9) for name, waited in chosen.waits_s.items()},
        peak_memory_bytes=chosen.memory.peak,
        memory_bytes=chosen.memory.by_category(),
        tokens_per_s_per_gpu=round(sequences * profile.model.seq_len / chosen.step_s, 3)
        if chosen.step_s
        else 0.0,
        mfu=round(flops * chosen.schedule.accumulation / peak, 6) if peak else 0.0,
    )


def _units(profile: Profile, chosen: Evaluation) -> tuple[PlanUnit, ...]:
    tensors, levels = chosen.model.tensors, chosen.levels
    ahead = dict(chosen.schedule.order.ahead) if chosen.schedule.order else {}
    units = []
    for unit in profile.units:
        buckets = bucketise(zip(tensors[unit.name], levels.get(unit.name, ()), strict=True), profile.mesh)
        units.append(
            PlanUnit(
                name=unit.name,
                requires=unit.requires,
                recompute=recompute_entry(chosen.modes.recompute.get(unit.name)),
                offload=True if unit.name in chosen.modes.offload else None,
                ahead=ahead.get(unit.name),
                buckets=tuple(
                    BucketEntry(
                        shards=_shards(profile.mesh, bucket.levels),
                        matrix=bucket.levels.matrix or None,
                        tensors=tuple(tensor.name for tensor in bucket.tensors),
                    )
                    for bucket in buckets
                ),
            )
        )
    return tuple(units)


def _wire(wire: Wire | None) -> WireEntry | None:
    return None if wire is None or wire.is_exact else WireEntry(**wire._asdict())


def _shards(mesh: Mesh, levels: Levels) -> Shards:
    param, grad, optim = levels.shards(mesh)
    return Shards(param=param, grad=grad, optim=optim)


def _seconds(nanoseconds: float) -> float:
    return round(nanoseconds / 1e9, 9)
