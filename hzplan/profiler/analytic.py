"""A profile without a cluster: rates from ``cost_models/``, and a model in shapes or on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from hzplan.core.hierarchy import Mesh
from hzplan.core.layout import ITEM_BYTES, MASTER_DTYPE, Dtype
from hzplan.core.matrices import STEPS
from hzplan.core.recompute import HOST
from hzplan.core.wire import BLOCK, FORMATS, packed_bytes
from hzplan.cost.collectives import collectives, largest_gradient_bytes, lateness
from hzplan.errors import UserError
from hzplan.formats.cluster import ClusterModel, DeviceModel
from hzplan.formats.links import Links
from hzplan.formats.profile import (
    ClusterEntry,
    CopyPoint,
    HostEntry,
    InterferenceEntry,
    MatrixEntry,
    MatrixPoint,
    ModelledEntry,
    OptimizerEntry,
    OptimizerPoint,
    Profile,
    RoundingEntry,
    RoundingPoint,
    UseCost,
)
from hzplan.models.workload import Workload
from hzplan.profiler.measure import measure_with
from hzplan.profiler.model.entries import joined_units, largest_elements, matrix_shapes, model_entry
from hzplan.profiler.model.kernels import Kernels, Pricing
from hzplan.profiler.model.matrices import for_optimizer
from hzplan.profiler.model.operations import Operated, Product
from hzplan.profiler.model.optimizer import footprint
from hzplan.profiler.model.recompute import RecomputeCosts, recompute_differences, use_entries, without_time
from hzplan.profiler.model.selective import Recompute, selective
from hzplan.profiler.model.shapes import Shapes, trace_shapes
from hzplan.profiler.network.links import LAST_BYTES
from hzplan.profiler.session.machine import provenance, rank_memory_bytes
from hzplan.profiler.session.ranks import Ranks
from hzplan.profiler.session.statistics import nanoseconds

LEAST_ELEMENTS = 1 << 10
LEAST_COPIED_BYTES, MOST_COPIED_BYTES = 1 << 16, 1 << 30
ROUNDED_LEAST, ROUNDED_MOST = BLOCK, 1 << 28


def analyse(
    workload: Workload,
    cluster: ClusterModel,
    device: DeviceModel,
    *,
    mesh: Mesh,
    micro_batches: Sequence[int],
    dtype: Dtype,
    optimizer: str,
    kernels: Kernels = "eager",
    attention: str | None = None,
    recompute: Recompute = "full",
    progress: Callable[[str, float], None] = lambda text, fraction: None,
) -> Profile:
    """The profile of a model on a cluster that is not there. One process, no memory to speak of.

    ``mesh`` has the cluster's tiers. ``kernels``: one for each operation, or fused by a compiler;
    ``attention``: generation of the attention kernel, None: the device's usual one; ``recompute``: what units
    that are recomputed compute again.

    Raises UserError for a dtype or an attention kernel that the device does not have, and for a model that
    cannot run so, as one whose forward looks at values.
    """
    pricing = Pricing(device, dtype, kernels, attention, recompute)
    check_tiers(cluster, mesh)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    workload = for_optimizer(workload, optimizer)
    shapes = trace_shapes(workload, torch_dtype, sorted(set(micro_batches)), mesh.world, progress)
    progress("modelled", 1.0)
    return modelled(workload, shapes, cluster, pricing, mesh=mesh, optimizer=optimizer)


def modelled(
    workload: Workload,
    shapes: Shapes,
    cluster: ClusterModel,
    pricing: Pricing,
    *,
    mesh: Mesh,
    optimizer: str,
    flat: bool = False,
) -> Profile:
    """The profile of a model whose shapes are known.

    Seconds of operations are those of ``pricing``, times what the slowest rank takes longer; those of
    collectives are ``cost.collectives``'. ``flat``: groups over several tiers have one ring over all ranks.
    """
    device, dtype = pricing.device, pricing.dtype
    peak, slowest = pricing.peak, lateness(cluster, mesh)

    def priced(costs: Sequence[UseCost], operations: Sequence[Operated]) -> list[UseCost]:
        return [
            cost.model_copy(update={"seconds": nanoseconds(slowest * pricing.seconds(operated))})
            for cost, operated in zip(costs, operations, strict=True)
        ]

    costs = {size: priced(found, shapes.operations[size]) for size, found in shapes.costs.items()}
    recompute: RecomputeCosts = {
        way: {
            size: without_time(found)
            if way == HOST
            else recompute_differences(
                shapes.uses, costs[size], priced(found, shapes.recompute_operations[way][size])
            )
            for size, found in by_size.items()
        }
        for way, by_size in shapes.recompute.items()
    }
    if pricing.recompute != "full":  # instead of the ways that this runtime has
        recompute = {
            "full": {
                size: selective(
                    *(pricing.recompute, shapes.uses, costs[size], whole, shapes.operations[size]),
                    ITEM_BYTES[dtype],
                    lambda operations: slowest * pricing.kernels_s(operations),
                )
                for size, whole in recompute.get("full", {}).items()
            }
        }
    uses = use_entries(shapes.uses, shapes.reads, [*costs.values()], recompute, shapes.recomputable)
    return Profile(
        provenance=provenance(),
        modelled=ModelledEntry(cluster=cluster.name, device=device.name, kernels=pricing.kernels),
        model=model_entry(workload, shapes.units, dtype),
        cluster=_cluster(cluster, mesh, int(device.memory_bytes.value), peak),
        optimizer=_optimizer(optimizer, pricing, largest_elements(shapes.units), matrix_shapes(shapes.units)),
        units=joined_units(shapes.units, uses),
        uses=uses,
        collectives=collectives(cluster, mesh, largest_gradient_bytes(shapes.units, dtype), flat=flat),
        interference=_interference(cluster, device),
        host=_host(device),
        rounding=_rounding(device),
    )


def measure_for(
    cluster: ClusterModel,
    device: DeviceModel,
    workload: Workload,
    *,
    mesh: Mesh,
    micro_batches: Sequence[int],
    dtype: Dtype,
    optimizer: str,
    progress: Callable[[str, float], None],
    earlier: Mapping[str, Profile] | None = None,
    message: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Measure a model in one process, on a device as the cluster's, whose links are not there.

    Those are as ``analyse`` has them, and so is the link to the host's memory; what a rank may use is this
    device's memory. Other arguments and errors as for ``measure``; UserError also where there is no device
    of the cluster's kind, or the mesh has other tiers.
    """
    check_tiers(cluster, mesh)
    ranks = Ranks.here()
    if ranks.device.type != _kind(cluster):
        raise UserError(
            f"cluster {cluster.name} has {cluster.device}, and here is only a {ranks.device.type} to measure "
            "on; add --analytic, or profile on such a device"
        )
    peak = max(rate.value for rate in device.flops_per_s.values())  # until this device's is measured
    links = Links(
        provenance=provenance(),
        cluster=_cluster(cluster, mesh, rank_memory_bytes(ranks), peak),
        collectives=collectives(cluster, mesh, LAST_BYTES),
        interference=_interference(cluster, device),
        host=_host(device),
        rounding=_rounding(device),
    )
    profile = measure_with(
        links,
        workload,
        micro_batches=micro_batches,
        dtype=dtype,
        optimizer=optimizer,
        progress=progress,
        earlier=earlier,
        message=message,
    )
    return profile.model_copy(update={"modelled": ModelledEntry(cluster=cluster.name)})


def check_tiers(cluster: ClusterModel, mesh: Mesh) -> None:
    """UserError where a mesh does not have a cluster's tiers."""
    if len(mesh.tiers) != len(cluster.tiers):
        raise UserError(f"mesh {mesh} does not have the {len(cluster.tiers)} tiers of cluster {cluster.name}")


def _cluster(cluster: ClusterModel, mesh: Mesh, memory_bytes: int, peak_flops: float) -> ClusterEntry:
    return ClusterEntry(
        mesh=str(mesh),
        tier_names=tuple(tier.name for tier in cluster.tiers),
        backend=cluster.backend,
        device=_kind(cluster),
        memory_bytes=memory_bytes,
        peak_flops=peak_flops,
        reduce_scatter_by_exchange=cluster.backend == "gloo",
    )


def _kind(cluster: ClusterModel) -> str:
    """Of its devices, torch's name."""
    return "cuda" if cluster.backend == "nccl" else "cpu"


def _interference(cluster: ClusterModel, device: DeviceModel) -> tuple[InterferenceEntry, ...]:
    """A collective's CTAs keep their SMs from compute, and are not slowed by it; empty where numbers are
    missing."""
    ctas = [tier.ctas.value for tier in cluster.tiers if tier.ctas is not None]
    if device.sms is None or len(ctas) < len(cluster.tiers):
        return ()
    return tuple(
        InterferenceEntry(
            compute_loss=round(min(1.0, count / device.sms.value), 4), communication_slowdown=1.0, ctas=count
        )
        for count in ctas
    )


def _host(device: DeviceModel) -> HostEntry | None:
    """Copies take a launch, and their bytes over the link's rate."""
    if device.host_bytes_per_s is None:
        return None
    share = device.host_share.value if device.host_share is not None else 1.0
    rate = device.host_bytes_per_s.value * share
    sizes = (LEAST_COPIED_BYTES, MOST_COPIED_BYTES)
    points = [(size, nanoseconds(device.launch_s.value + size / rate)) for size in sizes]
    return HostEntry(points=tuple(CopyPoint(bytes=b, seconds=s, spread=0.0) for b, s in points))


def _rounding(device: DeviceModel) -> tuple[RoundingEntry, ...]:
    """Values are read and written by one kernel each way, float32 on the one side. Blocks stay in the
    registers of who finds their scale."""
    share = device.bytes_share.value
    launch_s, rate = device.launch_s.value, device.bytes_per_s.value * share
    return tuple(
        RoundingEntry(
            format=form,
            points=tuple(
                RoundingPoint(elements=size, pack_seconds=seconds, unpack_seconds=seconds)
                for size in (ROUNDED_LEAST, ROUNDED_MOST)
                for nbytes in [4 * size + packed_bytes(form, size, 4)]
                for seconds in [nanoseconds(launch_s + nbytes / rate)]
            ),
        )
        for form in FORMATS
        if form != "exact"
    )


@lru_cache
def _footprint(name: str, dtype: Dtype) -> tuple[int, float]:
    """State tensors and temporaries of an optimizer, which are the same on every device."""
    return footprint(name, getattr(torch, dtype), torch.device("cpu"))


def _optimizer(
    name: str, pricing: Pricing, largest: int, matrices: Sequence[tuple[int, int]]
) -> OptimizerEntry:
    """A fused step: parameter, gradient and state are read, parameter, state and the clipped gradient written
    (without clipping gradients are read once more, to see whether they are finite), and masters cast. A norm
    reads gradients."""
    dtype, launch_s = pricing.dtype, pricing.device.launch_s.value
    state, temporary = _footprint(name, dtype)
    item = ITEM_BYTES[MASTER_DTYPE[dtype]]
    per_element = (4 + 2 * state) * item
    if MASTER_DTYPE[dtype] != dtype:
        per_element += item + ITEM_BYTES[dtype]

    def points(per_element: int) -> tuple[OptimizerPoint, ...]:
        return tuple(
            OptimizerPoint(
                elements=elements,
                seconds=nanoseconds(launch_s + elements * per_element / pricing.bytes_per_s),
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
        matrix=_matrix(pricing, points, item, matrices) if matrices else None,
    )


def _matrix(
    pricing: Pricing,
    points: Callable[[int], tuple[OptimizerPoint, ...]],
    item: int,
    shapes: Sequence[tuple[int, int]],
) -> MatrixEntry:
    """Muon's updates of matrices. Before orthogonalising the gradient is scaled, momentum read and written
    and the sum of both written and cast; afterwards parameters are read and written twice, and cast. An
    iteration is three products of 16-bit matrices, of which two add what they read."""
    sixteen = replace(pricing, dtype="bfloat16", _known={})
    wide = ITEM_BYTES[pricing.dtype] if ITEM_BYTES[pricing.dtype] != item else 0

    def seconds(rows: int, columns: int) -> float:
        short, long = sorted((rows, columns))

        def product(n: int, k: int, read: int) -> float:
            nbytes = 2 * (short * k + k * n + short * n * (1 + read))
            return sixteen.operation(Product(1, short, n, k, nbytes))

        iteration = product(short, long, 0) + product(short, short, 1) + product(long, short, 1)
        launches = 3 * STEPS * pricing.device.launch_s.value
        moved = 3 * 2 * short * long / pricing.bytes_per_s  # norm and division
        return max(STEPS * iteration, launches) + moved

    return MatrixEntry(
        state_per_element=1,
        begin=points(8 * item + ITEM_BYTES["bfloat16"]),
        finish=points(4 * item + ITEM_BYTES["bfloat16"] + (item + wide if wide else 0)),
        products=tuple(
            MatrixPoint(rows=rows, columns=columns, seconds=nanoseconds(seconds(rows, columns)), spread=0.0)
            for rows, columns in shapes
        ),
    )
