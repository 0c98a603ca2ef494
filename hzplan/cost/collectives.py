"""Collectives of clusters that nobody measured, by formula; and a modelled profile on more or fewer nodes."""

from __future__ import annotations

from math import log2, prod
from typing import TypeVar

from hzplan.core.hierarchy import Mesh, Stage
from hzplan.core.layout import ITEM_BYTES, MASTER_DTYPE, Dtype
from hzplan.errors import UserError
from hzplan.formats.cluster import ClusterModel, TierModel, find_cluster
from hzplan.formats.profile import (
    CollectiveCurve,
    CollectivePoint,
    Profile,
    RecomputeCost,
    UnitEntry,
    UseCost,
    UseEntry,
)

Cost = TypeVar("Cost", UseCost, RecomputeCost)

LEAST_BYTES = 1 << 10
"""Smallest message of a modelled curve, bytes."""
MOST_NODES = 1 << 20
"""Upper limit of --nodes, so that products of sizes stay inside 64 bits."""


def lateness(cluster: ClusterModel, mesh: Mesh) -> float:
    """How many times as long as the mean the slowest rank computes: the largest of many grows with the
    logarithm of their number."""
    return 1.0 + sum(
        (tier.lateness.value if tier.lateness is not None else 0.0) * log2(prod(ranks))
        for tier, ranks in zip(cluster.tiers, mesh.tiers, strict=True)
    )


def collectives(
    cluster: ClusterModel, mesh: Mesh, largest_bytes: int, *, flat: bool = False
) -> tuple[CollectiveCurve, ...]:
    """Modelled curves of all stages, from the smallest message to ``largest_bytes`` at least.

    Each message takes the faster of a tier's algorithms, each of which is linear in bytes: a curve has two
    points, and one more where it goes over from PAT to the ring. ``flat``: groups over several tiers are not
    taken tier by tier, as our runtime does, but by one ring, which passes every rank of the tiers inside.
    """
    return tuple(
        CollectiveCurve(operation=operation, low=stage.low, high=stage.high, points=points)
        for stage in mesh.stages()
        for tier in [cluster.tiers[mesh.tier_of(stage.low)]]
        for inside in [mesh.shards[mesh.tier_bounds[mesh.tier_of(stage.low)][0]] if flat else 1]
        for points in [_points(tier, mesh.group_size(stage), largest_bytes, inside)]
        for operation in ("all_gather", "reduce_scatter")
    )


def _points(tier: TierModel, ranks: int, largest_bytes: int, inside: int) -> tuple[CollectivePoint, ...]:
    lines = _lines(tier, ranks, inside)
    (ring, ring_slope), (pat, pat_slope) = lines[0], lines[-1]
    bend = LEAST_BYTES  # no bend
    if pat < ring and pat_slope > ring_slope:
        bend = max(bend, round((ring - pat) / (pat_slope - ring_slope)))
    return tuple(
        CollectivePoint(
            bytes=size,
            seconds=round(min(latency + size * slope for latency, slope in lines), 9),
            spread=0.0,
        )
        for size in sorted({LEAST_BYTES, bend, max(largest_bytes, 2 * bend)})
    )


def _lines(tier: TierModel, ranks: int, inside: int) -> list[tuple[float, float]]:
    """Latency in seconds, and seconds per byte of the whole buffer, of each algorithm: the ring, then PAT.

    (n − 1)/n of the bytes go through each rank. A ring has n − 1 hops (Thakur, Rabenseifner, Gropp 2005, §4),
    ``inside`` times as many where it passes that many ranks of each group. Links are slower the more groups
    send at once, by ``congestion`` for each doubling.
    PAT has ⌈log₂ n⌉ rounds while its messages are small, and something for each rank: the form, and the share
    of the ring's rate, are those by which NCCL chooses between the two.
    """
    congestion = tier.congestion.value if tier.congestion is not None else 0.0
    rate = tier.bytes_per_s.value * tier.bytes_share.value / (1.0 + congestion * log2(ranks))
    per_byte = (ranks - 1) / ranks / rate
    found = [((ranks * inside - 1) * tier.latency_s.value, per_byte)]
    if (pat := tier.pat) is not None and inside == 1:
        rounds = (ranks - 1).bit_length()
        found.append(
            (rounds * pat.latency_s.value + ranks * pat.rank_s.value, per_byte / pat.bytes_share.value)
        )
    return found


def largest_gradient_bytes(units: tuple[UnitEntry, ...], dtype: Dtype) -> int:
    """Bytes of the largest unit's gradients."""
    largest = max(sum(tensor.spec.numel for tensor in unit.tensors) for unit in units)
    return largest * ITEM_BYTES[MASTER_DTYPE[dtype]]


def nodes_of(profile: Profile) -> int:
    """The number of groups that the outermost tier joins."""
    return prod(profile.mesh.tiers[-1])


def check_whole(profile: Profile) -> None:
    """UserError for the profile of a rank's share of a model: its curves are not those of whole nodes."""
    if profile.parallel is not None:
        raise UserError(
            f"the profile is of a rank's share ({profile.parallel}); solve the whole model's again, with "
            "--nodes and --model-parallel"
        )


def comes_with_hzplan(cluster: str) -> bool:
    """Whether a cluster can be modelled anew by its name."""
    try:
        find_cluster(cluster)
    except UserError:
        return False
    return True


def with_nodes(profile: Profile, nodes: int) -> Profile:
    """A modelled profile on ``nodes`` nodes, calibrated as it was; UserError for a measured one, or for a
    user's own cluster."""
    if not 1 <= nodes <= MOST_NODES:
        raise UserError(f"--nodes {nodes}: a cluster has at least 1 node, and at most {MOST_NODES}")
    check_whole(profile)
    if profile.modelled is None:
        raise UserError(f"--nodes {nodes}: the profile was measured on its nodes; profile on that many")
    try:
        cluster, _ = find_cluster(profile.modelled.cluster)
    except UserError:
        raise UserError(
            f"--nodes {nodes}: cluster {profile.modelled.cluster} does not come with hzplan; profile again "
            f"with --nodes {nodes}"
        ) from None
    mesh = Mesh.of_tiers(*map(prod, profile.mesh.tiers[:-1]), nodes)
    largest = largest_gradient_bytes(profile.units, profile.model.dtype)
    later = lateness(cluster, mesh) / lateness(cluster, profile.mesh)
    curves = collectives(cluster, mesh, largest)
    if profile.calibrated is not None:
        factors = profile.calibrated.tiers
        curves = tuple(_times(curve, factors[mesh.tier_of(curve.high - 1)]) for curve in curves)
    return profile.replaced(
        cluster=profile.cluster.model_copy(update={"mesh": str(mesh)}),
        collectives=curves,
        uses=tuple(_later(use, later) for use in profile.uses) if later != 1.0 else profile.uses,
    )


def _later(use: UseEntry, times: float) -> UseEntry:
    """A use that takes so many times as long, because more ranks wait for the slowest."""

    def later(cost: Cost) -> Cost:
        return cost.model_copy(update={"seconds": round(cost.seconds * times, 9)})

    costs = tuple(later(cost).with_again(later) for cost in use.costs)
    return use.model_copy(update={"costs": costs})


def with_ranks(profile: Profile, world: int) -> Profile:
    """A profile with more or fewer groups in its outermost tier, for ``world`` ranks in all.

    Curves inside a group stay. Across n groups a ring carries (n − 1)/n of the bytes, so seconds of the
    outermost tier change by that ratio, and those of sums over all tiers by that of all ranks; latency is
    neglected there. (A modelled one is modelled anew where its cluster comes with hzplan.) UserError where
    ``world`` is no multiple of a group, or where only one group was measured.
    """
    check_whole(profile)
    inner, before = profile.mesh.tiers[:-1], prod(profile.mesh.tiers[-1])
    each = prod(prod(tier) for tier in inner)
    if world % each or world < 1:
        raise UserError(
            f"{world} ranks: the profile has nodes of {each}, which they do not fill; start whole nodes, or "
            "profile there"
        )
    groups = world // each
    if profile.modelled is not None and (groups > before or comes_with_hzplan(profile.modelled.cluster)):
        return with_nodes(profile, groups)
    if before == 1 and groups > 1:
        raise UserError(f"{world} ranks: nothing between several was measured; profile there")
    mesh = Mesh.of_tiers(*map(prod, inner), groups) if groups > 1 or not inner else Mesh(inner)
    mesh = Mesh((*inner, *mesh.tiers[len(inner) :]))
    tiers, (low, high) = len(mesh.tiers), profile.mesh.tier_bounds[-1]
    across = {
        curve.operation: curve for curve in profile.collectives if (curve.low, curve.high) == (low, high)
    }
    curves = [curve for curve in profile.collectives if curve.high <= low]
    for stage in (stage for stage in mesh.stages() if stage.low >= low):
        factor = _carried(mesh.group_size(stage)) / _carried(before)
        curves += [_moved(_times(curve, factor), stage) for curve in across.values()]
    if groups > 1 and profile.sums_over_tiers and mesh.whole is not None:
        factor = _carried(mesh.world) / _carried(profile.mesh.world)
        over_all = [c for c in profile.collectives if (c.low, c.high) == profile.mesh.whole]
        curves += [_moved(_times(curve, factor), mesh.whole) for curve in over_all]
    calibrated = profile.calibrated
    if calibrated is not None:
        calibrated = calibrated.model_copy(update={"tiers": calibrated.tiers[:tiers]})
    return profile.replaced(
        cluster=profile.cluster.model_copy(
            update={"mesh": str(mesh), "tier_names": profile.cluster.tier_names[:tiers]}
        ),
        collectives=tuple(curves),
        interference=profile.interference[:tiers],
        stragglers=(),
        calibrated=calibrated,
    )


def _carried(ranks: int) -> float:
    """The share of a buffer's bytes that a ring of so many ranks carries past each of them."""
    return (ranks - 1) / ranks


def _times(curve: CollectiveCurve, factor: float) -> CollectiveCurve:
    def times(point: CollectivePoint) -> CollectivePoint:
        taken = point.processor_seconds
        return point.model_copy(
            update={
                "seconds": round(point.seconds * factor, 9),
                "processor_seconds": None if taken is None else round(taken * factor, 9),
            }
        )

    return curve.model_copy(update={"points": tuple(map(times, curve.points))})


def _moved(curve: CollectiveCurve, stage: Stage) -> CollectiveCurve:
    return curve.model_copy(update={"low": stage.low, "high": stage.high})
