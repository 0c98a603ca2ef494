"""One rank's share of a model that is trained with tensor, pipeline or context parallelism beside us.

Given, not chosen: what ranks share leaves the hierarchy, and a profile of the whole model becomes that of
what one rank holds and does. Pure.

Matrices are cut as in Megatron-LM (Shoeybi et al. 2019, §3), activations between them along the sequence
(Korthikanti et al. 2022, §4.2); a pipeline runs one forward and one backward in turn (Narayanan et al. 2021,
§2.2), so its first stage, which is the one planned for, keeps activations of as many micro-batches as there
are stages (fewer where a step has fewer, which is not looked at). Not in the prediction: context
parallelism's own messages, and the pipeline's bubble.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from hzplan.core.hierarchy import Mesh
from hzplan.core.layout import ITEM_BYTES
from hzplan.cost.collectives import check_whole, collectives, largest_gradient_bytes
from hzplan.cost.curves import Curve, interpolate
from hzplan.errors import UserError
from hzplan.formats.cluster import ClusterModel, find_cluster
from hzplan.formats.parallel import ModelParallel
from hzplan.formats.profile import (
    CollectiveCurve,
    Profile,
    RecomputeCost,
    TensorEntry,
    UnitEntry,
    UseCost,
    UseEntry,
    signature,
)

MOST_EXCHANGED_BYTES = 1 << 30
"""Least end of modelled curves, bytes; any value does: what follows has the ring's slope."""

MATRICES_OF_A_BLOCK = 3
"""Matrices from which on a unit counts as attention plus feed-forward, each with its own collectives."""


def share(profile: Profile, parallel: ModelParallel) -> Profile:
    """The profile of one rank's share. UserError where the model or the cluster cannot be shared so.

    ``tensor`` divides the leading dimensions of the mesh, ``pipeline`` the trailing ones.
    """
    check_whole(profile)
    if parallel.tensor > 1 and profile.optimizer.matrix is not None:
        raise UserError(
            f"--model-parallel tp={parallel.tensor}: {profile.optimizer.name} needs all of a matrix, and "
            "tensor parallelism cuts it; profile with --optimizer adamw, or leave tp out"
        )
    units, uses = _first_stage(profile, parallel.pipeline)
    width = _width(profile)
    exchange = _TensorParallelTime(profile, parallel, width)
    shared = tuple(_share_of_unit(unit, parallel.tensor, width) for unit in units)
    specs = [tensor.spec for unit in shared for tensor in unit.tensors]
    fields: dict[str, object] = {
        "parallel": parallel,
        "model": profile.model.model_copy(
            update={"parameters": sum(spec.numel for spec in specs), "signature": signature(specs)}
        ),
        "units": shared,
        "uses": tuple(_share_of_use(use, units, parallel, exchange) for use in uses),
        "stragglers": (),
    }
    return profile.replaced(**fields | _cluster(profile, parallel, shared))


def _cluster(profile: Profile, parallel: ModelParallel, units: tuple[UnitEntry, ...]) -> dict[str, object]:
    """The profile's fields on the cluster, without the dimensions that model parallelism takes."""
    sizes = _remaining([prod(tier) for tier in profile.mesh.tiers], parallel, str(profile.mesh))
    kept = [tier for tier, size in enumerate(sizes) if size > 1] or [0]
    found: dict[str, object] = {}
    if profile.interference:
        found["interference"] = tuple(profile.interference[tier] for tier in kept)
    if profile.calibrated is not None:
        factors = tuple(profile.calibrated.tiers[tier] for tier in kept)
        found["calibrated"] = profile.calibrated.model_copy(update={"tiers": factors})
    model = _rates(profile)
    if model is not None:
        mesh = Mesh.of_tiers(*(sizes[tier] for tier in kept))
        links = model.model_copy(update={"tiers": tuple(model.tiers[tier] for tier in kept)})
        found["collectives"] = collectives(links, mesh, largest_gradient_bytes(units, profile.model.dtype))
    else:
        mesh, found["collectives"] = _within(profile, parallel, kept)
    names = tuple(profile.cluster.tier_names[tier] for tier in kept)
    found["cluster"] = profile.cluster.model_copy(update={"mesh": str(mesh), "tier_names": names})
    return found


def _remaining(sizes: Sequence[int], parallel: ModelParallel, mesh: str) -> list[int]:
    """Ranks of every tier when tensor parallelism has taken the fastest and pipeline the slowest ones."""
    found = list(sizes)
    for order, taken, short in (
        (range(len(found)), parallel.tensor, "tp"),
        (reversed(range(len(found))), parallel.pipeline, "pp"),
    ):
        left = taken
        for tier in order:
            if left % found[tier] == 0:
                left, found[tier] = left // found[tier], 1
            elif found[tier] % left == 0:
                left, found[tier] = 1, found[tier] // left
            if left == 1 or found[tier] > 1:  # what is left must not be taken from beyond
                break
        if left > 1:
            raise UserError(f"--model-parallel {parallel}: {short}={taken} does not divide the mesh {mesh}")
    if prod(found) % parallel.context:
        raise UserError(
            f"--model-parallel {parallel}: cp={parallel.context} does not divide the {prod(found)} ranks left"
        )
    return found


def _rates(profile: Profile) -> ClusterModel | None:
    """The cluster whose links curves can be modelled from; None where the profile's own curves are better:
    measured, calibrated, or of a cluster that does not come with hzplan."""
    if profile.modelled is None or profile.calibrated is not None:
        return None
    try:
        model, _ = find_cluster(profile.modelled.cluster)
    except UserError:
        return None
    return model if len(model.tiers) == len(profile.mesh.tiers) else None


def _within(
    profile: Profile, parallel: ModelParallel, kept: Sequence[int]
) -> tuple[Mesh, tuple[CollectiveCurve, ...]]:
    """The mesh and measured curves of the levels between tensor and pipeline parallelism.

    They were measured with all sibling groups active, as the groups of all model-parallel ranks will be.
    """
    mesh = profile.mesh
    first = _level_of(mesh.shards, parallel.tensor, f"tp={parallel.tensor}", mesh)
    last = _level_of(mesh.shards, mesh.world // parallel.pipeline, f"pp={parallel.pipeline}", mesh)
    tiers = [mesh.dims[max(low, first) : min(high, last)] for low, high in mesh.tier_bounds]
    inner = Mesh(tuple(tiers[tier] or (1,) for tier in kept))
    places = {
        level: place
        for place, level in enumerate(
            level for tier in kept for level in range(*mesh.tier_bounds[tier]) if first <= level < last
        )
    }
    curves = tuple(
        curve.model_copy(update={"low": places[curve.low], "high": places[curve.high - 1] + 1})
        for curve in profile.collectives
        if curve.low in places and curve.high - 1 in places
    )
    return inner, curves


def _level_of(shards: Sequence[int], count: int, what: str, mesh: Mesh) -> int:
    if count not in shards:
        raise UserError(
            f"--model-parallel {what}: no level of the mesh {mesh} has that many ranks; profile "
            "with a --mesh that is split there"
        )
    return shards.index(count)


def _width(profile: Profile) -> int:
    """The model's hidden size: what most vectors have (norms), else the shortest side of a matrix."""
    shapes = [tensor.shape for unit in profile.units for tensor in unit.tensors]
    vectors = [shape[0] for shape in shapes if len(shape) == 1]
    if vectors:
        return max(sorted(set(vectors)), key=vectors.count)
    return min((min(shape) for shape in shapes if shape), default=1)


def _share_of_unit(unit: UnitEntry, tensor_parallel: int, width: int) -> UnitEntry:
    tensors = tuple(_share_of_tensor(tensor, tensor_parallel, width) for tensor in unit.tensors)
    return unit.model_copy(update={"tensors": tensors})


def _share_of_tensor(tensor: TensorEntry, count: int, width: int) -> TensorEntry:
    """Along the first side that is not the hidden size and divides, else along any that does, else whole;
    vectors of the hidden size (norms, biases after a sum) are whole on every rank."""
    if count == 1 or not _is_cut(tensor, width):
        return tensor
    sides = [at for at, size in enumerate(tensor.shape) if size % count == 0]
    side = next((at for at in sides if tensor.shape[at] != width), next(iter(sides), None))
    if side is None:
        return tensor
    shape = tuple(size // count if at == side else size for at, size in enumerate(tensor.shape))
    return tensor.model_copy(update={"shape": shape})


def _is_cut(tensor: TensorEntry, width: int) -> bool:
    return len(tensor.shape) > 1 or (len(tensor.shape) == 1 and tensor.shape[0] != width)


def _first_stage(profile: Profile, stages: int) -> tuple[tuple[UnitEntry, ...], tuple[UseEntry, ...]]:
    """The units and uses of the first pipeline stage, when stages are as equally long as units allow."""
    if stages == 1:
        return profile.units, profile.uses
    forward = [use.unit for use in profile.uses if use.phase == "forward"]
    if len(set(forward)) != len(forward):
        raise UserError("--model-parallel pp: a unit is used twice in a forward pass; no stage can hold it")
    if stages > len(forward):
        raise UserError(f"--model-parallel pp={stages}: the model has {len(forward)} units to divide")
    lengths = dict.fromkeys(forward, 0.0)
    for use in profile.uses:
        lengths[use.unit] += use.costs[0].seconds
    count = next(_parts([lengths[unit] for unit in forward], stages))
    here = set(forward[:count])
    uses = tuple(use for use in profile.uses if use.unit in here)
    units = tuple(
        unit.model_copy(update={"requires": tuple(name for name in unit.requires if name in here)})
        for unit in profile.units
        if unit.name in here
    )
    return units, uses


def _parts(lengths: Sequence[float], count: int) -> Iterator[int]:
    """Sizes of ``count`` non-empty runs whose longest one is as short as possible, by bisection."""
    low, high = max(lengths), sum(lengths)
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_greedy(lengths, middle, count)) <= count else (middle, high)
    yield from _greedy(lengths, high, count)


def _greedy(lengths: Sequence[float], most: float, count: int) -> list[int]:
    """Sizes of runs of at most ``most`` seconds that leave at least one unit for every run to come."""
    sizes, total = [0], 0.0
    for index, length in enumerate(lengths):
        if sizes[-1] and (total + length > most or len(lengths) - index <= count - len(sizes)):
            sizes.append(0)
            total = 0.0
        sizes[-1] += 1
        total += length
    return sizes


class _TensorParallelTime:
    """Seconds of tensor parallelism's own collectives in a use: gathers and reductions of activations."""

    def __init__(self, profile: Profile, parallel: ModelParallel, width: int) -> None:
        self._tensor = parallel.tensor
        self._bytes = profile.model.seq_len // parallel.context * width * ITEM_BYTES[profile.model.dtype]
        matrices = {unit.name: sum(len(t.shape) > 1 for t in unit.tensors) for unit in profile.units}
        self._pairs = {
            name: 2 if count >= MATRICES_OF_A_BLOCK else min(count, 1) for name, count in matrices.items()
        }
        self._curves = _among_neighbours(profile, parallel) if parallel.tensor > 1 else []

    def seconds(self, unit: str, micro_batch: int) -> float:
        """Seconds per pass of a unit: a gather before and a reduce-scatter after each pair of matrices."""
        nbytes = self._bytes * micro_batch
        return self._pairs[unit] * sum(interpolate(curve, nbytes // ranks) for ranks, curve in self._curves)


def _among_neighbours(profile: Profile, parallel: ModelParallel) -> list[tuple[int, Curve]]:
    """The curves of gather and reduce-scatter among tensor-parallel ranks, tier by tier, each with the number
    of shards by which its messages are smaller than the whole."""
    mesh = profile.mesh
    found: list[tuple[int, Curve]] = []
    curves: tuple[CollectiveCurve, ...] = profile.collectives
    model = _rates(profile)
    if model is not None:  # on a mesh of its own, which need not be one of the profile's levels
        sizes = [prod(tier) for tier in mesh.tiers]
        without = _remaining(sizes, parallel.model_copy(update={"pipeline": 1, "context": 1}), str(mesh))
        mesh = Mesh(tuple((size // rest,) for size, rest in zip(sizes, without, strict=True)))
        curves = collectives(model, mesh, MOST_EXCHANGED_BYTES)
    level = _level_of(mesh.shards, parallel.tensor, f"tp={parallel.tensor}", mesh)
    for tier in range(len(mesh.tiers)):
        stage = mesh.stage_in_tier(tier, 0, level)
        for curve in curves:
            if (
                stage is not None
                and (curve.low, curve.high) == stage
                and curve.operation in ("all_gather", "reduce_scatter")
            ):
                points = [(point.bytes, point.seconds) for point in curve.points]
                found.append((mesh.shards[stage.low], points))
    return found


def _share_of_use(
    use: UseEntry, units: Sequence[UnitEntry], parallel: ModelParallel, exchange: _TensorParallelTime
) -> UseEntry:
    unit = next(unit for unit in units if unit.name == use.unit)
    item = ITEM_BYTES[unit.tensors[0].dtype] if unit.tensors else 0
    largest = max((tensor.spec.numel * item for tensor in unit.tensors if tensor.trainable), default=0)
    gradient = largest if use.phase == "backward" else 0
    return use.model_copy(
        update={
            "costs": tuple(
                _share_of_cost(cost, gradient, parallel, exchange.seconds(use.unit, cost.micro_batch))
                for cost in use.costs
            )
        }
    )


def _share_of_cost(cost: UseCost, gradient: int, parallel: ModelParallel, exchange_s: float) -> UseCost:
    """Work and activations are divided by the ranks that share a stage. Activations are there once for every
    micro-batch under way; the gradient of a weight, of ``gradient`` bytes in the whole model, once."""
    ways = parallel.tensor * parallel.context

    def bytes_of(retained: int, peak: int) -> dict[str, int]:
        weight = min(gradient, peak)
        more = (parallel.pipeline - 1) * max(0, retained // ways)
        return {
            "retained_bytes": parallel.pipeline * int(retained / ways),
            "peak_bytes": -(-(peak - weight) // ways) + weight // parallel.tensor + more,
        }

    def again(whole: RecomputeCost) -> RecomputeCost:
        return RecomputeCost(
            seconds=round(whole.seconds / ways + (exchange_s if whole.seconds else 0.0), 9),
            **bytes_of(whole.retained_bytes, whole.peak_bytes),
        )

    return cost.with_again(again).model_copy(
        update={
            "seconds": round(cost.seconds / ways + exchange_s, 9),
            "straggler_seconds": round(cost.straggler_seconds / ways, 9),
            "flops": cost.flops // ways,
            **bytes_of(cost.retained_bytes, cost.peak_bytes),
        }
    )
