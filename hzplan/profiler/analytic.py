"""A profile without a cluster: shapes under fake tensors, rates from ``cost_models/``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hzplan.errors import UserError
from hzplan.formats.cluster import ClusterModel, Device
from hzplan.formats.profile import (
    ClusterEntry,
    CopyPoint,
    HostEntry,
    ModelledEntry,
    OptimizerEntry,
    OptimizerPoint,
    Profile,
    UseCost,
    UseEntry,
)
from hzplan.hierarchy import Mesh
from hzplan.layout import ITEM_BYTES, MASTER_DTYPE, Dtype
from hzplan.models.workload import Workload
from hzplan.profiler.again import differences, with_again
from hzplan.profiler.entries import joined_units, model_entry
from hzplan.profiler.fake import FakeTurn, Rates
from hzplan.profiler.machine import provenance
from hzplan.profiler.optimizer import footprint
from hzplan.profiler.samples import nanoseconds
from hzplan.profiler.shapes import Shapes, in_shapes
from hzplan.rings import collectives, travelling_bytes

LEAST_ELEMENTS = 1 << 10
LEAST_COPIED_BYTES, MOST_COPIED_BYTES = 1 << 16, 1 << 30


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
    shapes = in_shapes(workload, dtype, sizes, rates, mesh.world, progress)
    entries, uses = shapes.entries, _uses(shapes)
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
        collectives=collectives(cluster, mesh, travelling_bytes(entries, dtype)),
        host=_host(device),
    )


def _uses(shapes: Shapes) -> tuple[UseEntry, ...]:
    costs = {size: _costs(size, turns) for size, turns in shapes.turns.items()}
    again = {size: differences(costs[size], _costs(size, turns)) for size, turns in shapes.again.items()}
    uses = [
        UseEntry(
            unit=use.unit,
            phase=use.phase,
            reads=shapes.reads(use),
            costs=tuple(of[index] for of in costs.values()),
        )
        for index, use in enumerate(shapes.uses)
    ]
    return with_again(uses, again, shapes.leaves)


def _costs(size: int, turns: Sequence[FakeTurn]) -> list[UseCost]:
    return [
        UseCost(
            micro_batch=size,
            seconds=nanoseconds(turn.seconds),
            spread=0.0,
            flops=turn.flops,
            retained_bytes=turn.retained_bytes,
            peak_bytes=turn.peak_bytes,
        )
        for turn in turns
    ]


def _host(device: Device) -> HostEntry | None:
    """Copies take a launch, and their bytes over the link's rate."""
    if device.host_bytes_per_s is None:
        return None
    share = device.host_share.value if device.host_share is not None else 1.0
    rate = device.host_bytes_per_s.value * share
    sizes = (LEAST_COPIED_BYTES, MOST_COPIED_BYTES)
    points = [(size, nanoseconds(device.launch_s.value + size / rate)) for size in sizes]
    return HostEntry(points=tuple(CopyPoint(bytes=b, seconds=s, spread=0.0) for b, s in points))


def _optimizer(name: str, dtype: Dtype, rates: Rates, largest: int) -> OptimizerEntry:
    """A gradient is scaled in place, as clipping does; then a fused step: parameter, gradient and state are
    read, parameter and state written, and masters cast. A norm reads gradients."""
    state, temporary = footprint(name, getattr(torch, dtype), torch.device("cpu"))
    item = ITEM_BYTES[MASTER_DTYPE[dtype]]
    per_element = (5 + 2 * state) * item
    if MASTER_DTYPE[dtype] != dtype:
        per_element += item + ITEM_BYTES[dtype]

    def points(per_element: int) -> tuple[OptimizerPoint, ...]:
        return tuple(
            OptimizerPoint(
                elements=elements,
                seconds=nanoseconds(rates.launch_s + elements * per_element / rates.bytes_per_s),
                spread=0.0,
            )
            for elements in sorted({LEAST_ELEMENTS, max(largest, LEAST_ELEMENTS + 1)})
        )

    return OptimizerEntry(
        name=name,
        state_per_element=state,
        temporary_per_element=temporary,
        points=points(per_element),
        norm=points(item),
    )
