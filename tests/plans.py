"""Valid plans without measuring or solving: a model's own tensors and uses, levels as asked."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

import torch
from torch import nn

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.layout import REDUCE_DTYPES, Dtype
from hzplan.core.matrices import MatrixWay
from hzplan.core.recompute import HOST, Recomputed
from hzplan.core.schedule import Use
from hzplan.core.wire import Wire
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
    recompute_entry,
)
from hzplan.formats.profile import signature
from hzplan.models.hooks import attach
from hzplan.models.matrices import MatrixRule
from hzplan.models.units import Unit, find_units
from hzplan.models.workload import Workload, load


def recorded_uses(workload: Workload, model: nn.Module) -> tuple[Use, ...]:
    """The units' turns in one forward and backward of a micro-batch."""
    found: list[Use] = []

    class Recorder:
        def enter(self, unit: str, phase: Literal["forward", "backward"]) -> None:
            found.append(Use(unit, phase))

        def gradient(self, parameter: nn.Parameter) -> None:
            parameter.grad = None

        def backward_end(self) -> None:
            pass

    detach = attach(find_units(model), Recorder())
    workload.loss(model, workload.batch(1, torch.Generator().manual_seed(0))).backward()
    detach()
    return tuple(found)


def make_plan(
    workload: Workload | str = "gpt:nano",
    *,
    mesh: str = "2",
    levels: Levels | Callable[[str], Levels] | None = None,
    micro_batch: int = 2,
    accumulation: int = 1,
    prefetch: int = 1,
    clip: bool = False,
    optimizer: str = "adamw",
    dtype: Dtype = "float32",
    reduce_dtype: Dtype | None = None,
    recompute: Collection[str] | Recomputed = (),
    offload: Collection[str] = (),
    matrix: MatrixWay = "",
    matrix_units: int | None = None,
    wire: Wire | None = None,
    flat_sums: bool = False,
) -> Plan:
    """A plan for a float32 model; ``levels`` for all tensors, or by unit name (default: ZeRO-3);
    ``matrix``: how Muon's updates get hidden matrices, and ``matrix_units`` of how many units at once;
    ``recompute``: units that compute their forward again; ``offload``: units whose optimizer state lies in
    the host's memory; ``wire``: what travels narrower; ``flat_sums``: whole gradients are summed at once."""
    workload = load(workload) if isinstance(workload, str) else workload
    shape = Mesh.parse(mesh)
    model = workload.build()
    units = find_units(model)
    ways = recompute if isinstance(recompute, Recomputed) else Recomputed.of(recompute)

    def shards(unit: str) -> Shards:
        chosen = levels(unit) if callable(levels) else levels or Levels(*[shape.levels] * 3)
        param, grad, optim = chosen.shards(shape)
        return Shards(param=param, grad=grad, optim=optim)

    def buckets(unit: Unit) -> tuple[BucketEntry, ...]:
        matrices = MatrixRule().of(unit) if matrix else frozenset()
        names = [tensor.name for tensor in unit.tensors]
        parts = [[n for n in names if n not in matrices], [n for n in names if n in matrices]]
        return tuple(
            BucketEntry(shards=shards(unit.name), matrix=way or None, tensors=tuple(of))
            for of, way in zip(parts, ("", matrix), strict=True)
            if of
        )

    tensors = [tensor.computed_in(dtype) for unit in units for tensor in unit.tensors]
    names = tuple(f"tier {tier}" for tier in range(len(shape.tiers)))
    return Plan(
        model=PlanModel(
            name=workload.name,
            parameters=sum(tensor.numel for tensor in tensors),
            signature=signature(tensors),
            dtype=dtype,
            seq_len=workload.seq_len,
        ),
        cluster=PlanCluster(mesh=mesh, tier_names=names, backend="gloo"),
        optimizer=optimizer,
        clip=clip,
        reduce_dtype=reduce_dtype or REDUCE_DTYPES[dtype][0],
        wire=WireEntry(**wire._asdict()) if wire is not None else None,
        flat_sums=True if flat_sums else None,
        batch=Batch(
            global_batch=shape.world * micro_batch * accumulation,
            micro_batch=micro_batch,
            accumulation=accumulation,
        ),
        prefetch=prefetch,
        gradient_buffers=prefetch + 1,
        matrix_units=matrix_units,
        copy_uses=prefetch + 1 if HOST in ways.values() else None,
        source=Source(
            profile="profile.json",
            profile_sha256="0",
            memory_budget_bytes=1 << 30,
            asked_gap=0.0,
            host_memory_bytes=1 << 30 if offload or HOST in ways.values() else None,
        ),
        proof=Proof(status="given", objective_s=0.1, bound_s=0.1, gap=0.0, solver="none"),
        predicted=Predicted(
            step_s=0.1,
            exposed_comm_s=dict.fromkeys([*names, "optim"], 0.0),
            peak_memory_bytes=1 << 20,
            memory_bytes={},
            tokens_per_s_per_gpu=1.0,
            mfu=0.0,
        ),
        units=tuple(
            PlanUnit(
                name=unit.name,
                requires=unit.requires,
                recompute=recompute_entry(ways.get(unit.name)),
                offload=True if unit.name in offload else None,
                buckets=buckets(unit),
            )
            for unit in units
        ),
        uses=tuple(map(str, recorded_uses(workload, model))),
    )
