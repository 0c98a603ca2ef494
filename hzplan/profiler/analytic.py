"""A profile without a cluster: shapes under fake tensors, rates from ``cost_models/``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hzplan.errors import UserError, one_line
from hzplan.formats.cluster import ClusterModel, Device, TierModel
from hzplan.formats.profile import (
    ClusterEntry,
    CollectiveCurve,
    CollectivePoint,
    ModelledEntry,
    OptimizerEntry,
    OptimizerPoint,
    Profile,
    UseCost,
    UseEntry,
)
from hzplan.hierarchy import Mesh, Stage
from hzplan.layout import ITEM_BYTES, MASTER_DTYPE, Dtype
from hzplan.models.units import Unit, find_units
from hzplan.models.workload import Workload
from hzplan.profiler.entries import joined_units, model_entry, unit_entry
from hzplan.profiler.fake import FakeTurn, FakeTurns, Ledger, Rates, fake_model
from hzplan.profiler.machine import provenance
from hzplan.profiler.optimizer import footprint
from hzplan.profiler.samples import nanoseconds
from hzplan.schedule import Use

LEAST_BYTES, LEAST_ELEMENTS = 1 << 10, 1 << 10


def analyse(
    workload: Workload,
    cluster: ClusterModel,
    device: Device,
    *,
    mesh: Mesh,
    micro_batches: Sequence[int],
    dtype: Dtype,
    optimizer: str,
    progress: Callable[[str, float], None] = lambda text, fraction: None,
) -> Profile:
    """The profile of a model on a cluster that is not there. One process, no memory to speak of.

    ``mesh`` has the cluster's tiers. Seconds of operations are those of a roofline, of collectives those of
    a ring: latency per hop, and bytes over the rate that every rank of a tier has while all send.

    Raises UserError for a dtype that the device has no peak for, and for a model that cannot run so, as one
    whose forward looks at values.
    """
    if len(mesh.tiers) != len(cluster.tiers):
        raise UserError(f"mesh {mesh} does not have the {len(cluster.tiers)} tiers of cluster {cluster.name}")
    if dtype not in device.flops_per_s:
        raise UserError(f"{device.name} has no peak for {dtype}; it has {', '.join(device.flops_per_s)}")
    peak = device.flops_per_s[dtype].value
    rates = Rates(
        peak * device.product_share.value,
        device.bytes_per_s.value * device.bytes_share.value,
        device.launch_s.value,
    )
    sizes = sorted(set(micro_batches))
    passes: list[tuple[tuple[Use, ...], list[FakeTurn]]] = []
    torch_dtype: torch.dtype = getattr(torch, dtype)
    with fake_model(workload.build, torch_dtype) as model:
        units = find_units(model)
        if not any(parameter.requires_grad for unit in units for _, parameter in unit.parameters):
            raise UserError(f"{workload.name}: no parameter is trained, so there is nothing to plan")
        for number, size in enumerate(sizes):
            progress(f"forward and backward in shapes, micro-batch {size}", number / len(sizes))
            passes.append(_pass(workload, model, units, size, rates, mesh.world))
        entries = tuple(unit_entry(unit) for unit in units)
        looked_up = {unit.name for unit in units if _looks_up(unit.module)}
    uses = _uses(sizes, passes, looked_up, workload.name)
    tensors = [tensor.spec for unit in entries for tensor in unit.tensors]
    largest = max(sum(tensor.spec.numel for tensor in unit.tensors) for unit in entries)
    progress("modelled", 1.0)
    return Profile(
        provenance=provenance(),
        modelled=ModelledEntry(cluster=cluster.name, device=device.name),
        model=model_entry(workload, tensors, dtype),
        cluster=ClusterEntry(
            mesh=str(mesh),
            tier_names=tuple(tier.name for tier in cluster.tiers),
            backend=cluster.backend,
            device="cuda" if cluster.backend == "nccl" else "cpu",
            memory_bytes=int(device.memory_bytes.value),
            peak_flops=peak,
            scattered_by_exchange=cluster.backend == "gloo",
        ),
        optimizer=_optimizer(optimizer, dtype, rates, largest),
        units=joined_units(entries, uses),
        uses=uses,
        collectives=_collectives(cluster, mesh, largest * ITEM_BYTES[MASTER_DTYPE[dtype]]),
    )


def _pass(
    workload: Workload, model: nn.Module, units: Sequence[Unit], size: int, rates: Rates, world: int
) -> tuple[tuple[Use, ...], list[FakeTurn]]:
    """The uses of a forward and backward, and what each would cost."""
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        real = workload.batch(size, torch.Generator().manual_seed(0))
    batch = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), real)
    turns = FakeTurns(units, world)
    there = [*model.parameters(), *model.buffers(), *(t for t in tree_leaves(batch) if isinstance(t, Tensor))]
    ledger = Ledger(rates, there)
    turns.ledger = ledger
    try:
        with workload.in_shapes(), ledger:
            uses = turns.run(lambda: workload.loss(model, batch), ledger)
            found = ledger.turns()
    except Exception as error:  # the user's model, which may raise anything
        raise UserError(
            f"{workload.name}: a forward and backward without values failed: {one_line(error)}; where the "
            "model looks at values, profile it on a device instead"
        ) from error
    finally:
        turns.detach()
    if not uses:
        raise UserError(f"{workload.name}: its loss uses no module that has parameters")
    return uses, found


def _looks_up(module: nn.Module) -> bool:
    """Whether a module's backward surely reads no parameter."""
    return type(module) is nn.Embedding and module.max_norm is None


def _uses(
    sizes: Sequence[int],
    passes: Sequence[tuple[tuple[Use, ...], list[FakeTurn]]],
    looked_up: set[str],
    name: str,
) -> tuple[UseEntry, ...]:
    orders = {uses for uses, _ in passes}
    if len(orders) > 1:
        raise UserError(f"{name}: the order in which modules are used depends on the micro-batch size")
    return tuple(
        UseEntry(
            unit=use.unit,
            phase=use.phase,
            reads=use.phase == "forward" or use.unit not in looked_up,
            costs=tuple(
                UseCost(
                    micro_batch=size,
                    seconds=nanoseconds(turns[index].seconds),
                    spread=0.0,
                    flops=turns[index].flops,
                    retained_bytes=turns[index].retained_bytes,
                    peak_bytes=turns[index].peak_bytes,
                )
                for size, (_, turns) in zip(sizes, passes, strict=True)
            ),
        )
        for index, use in enumerate(passes[0][0])
    )


def _optimizer(name: str, dtype: Dtype, rates: Rates, largest: int) -> OptimizerEntry:
    """A fused step: parameter, gradient and state are read, parameter and state written, and masters cast."""
    state, temporary = footprint(name, getattr(torch, dtype), torch.device("cpu"))
    item = ITEM_BYTES[MASTER_DTYPE[dtype]]
    per_element = (3 + 2 * state) * item
    if MASTER_DTYPE[dtype] != dtype:
        per_element += item + ITEM_BYTES[dtype]
    return OptimizerEntry(
        name=name,
        state_per_element=state,
        temporary_per_element=temporary,
        points=tuple(
            OptimizerPoint(
                elements=elements,
                seconds=nanoseconds(rates.launch_s + elements * per_element / rates.bytes_per_s),
                spread=0.0,
            )
            for elements in sorted({LEAST_ELEMENTS, max(largest, LEAST_ELEMENTS + 1)})
        ),
    )


def _collectives(cluster: ClusterModel, mesh: Mesh, largest_bytes: int) -> tuple[CollectiveCurve, ...]:
    """Rings: n − 1 hops, (n − 1)/n of the bytes through each rank (Thakur, Rabenseifner, Gropp 2005, §4).

    Lines in bytes, so two points say all.
    """
    return tuple(
        CollectiveCurve(
            operation=operation,
            low=stage.low,
            high=stage.high,
            points=tuple(
                CollectivePoint(
                    bytes=size,
                    seconds=nanoseconds(
                        _ring_s(_tier_of(cluster, mesh, stage), mesh.group_size(stage), size)
                    ),
                    spread=0.0,
                )
                for size in (LEAST_BYTES, max(largest_bytes, 2 * LEAST_BYTES))
            ),
        )
        for stage in mesh.stages()
        for operation in ("all_gather", "reduce_scatter")
    )


def _tier_of(cluster: ClusterModel, mesh: Mesh, stage: Stage) -> TierModel:
    bounds = enumerate(mesh.tier_bounds)
    return cluster.tiers[next(tier for tier, (low, high) in bounds if low <= stage.low < high)]


def _ring_s(tier: TierModel, ranks: int, nbytes: int) -> float:
    rate = tier.bytes_per_s.value * tier.bytes_share.value
    return (ranks - 1) * (tier.latency_s.value + nbytes / ranks / rate)
