"""Hierarchical collectives that a bucket walks in a communication task, stage by stage. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Literal, NamedTuple

from hzplan.core.hierarchy import Levels, Mesh, Stage
from hzplan.core.layout import ITEM_BYTES, BucketLayout
from hzplan.core.matrices import EXCHANGED, REPEATED
from hzplan.core.schedule import EXCHANGE_STREAM, Kind
from hzplan.core.wire import Format, Wire, fits

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
_Maybe = tuple[Operation, Stage | None]


class Collective(NamedTuple):
    """What the ranks of a stage do together."""

    operation: Operation
    stage: Stage


def collectives_of(kind: Kind, tier: int, bucket: BucketLayout, mesh: Mesh) -> tuple[Collective, ...]:
    """A bucket's collectives in a task of a kind on a tier, in order; none where it has nothing to do.

    ``UNSHARD``: 0 to ℓp; ``PARAM_GATHER``: ℓp to ℓo (updated parameters); ``GRAD_GATHER``: ℓo to the finest
    level L (the sum goes back to the replicas); ``REDUCE``: 0 to ℓg, accumulating into the gradient slice;
    ``FINAL_REDUCE``: that, then ℓg to L in place. Where nothing lies between this last reduce-scatter and the
    gather of the same stage, they are one all-reduce, in ``FINAL_REDUCE``: libraries have it, and nobody
    wakes up between. Not where the same task reduces to ℓg before, for it begins with its all-reduces.
    ``Levels.flat``: one all-reduce over all ranks, on the slowest tier.
    ``ASSEMBLE``: matrices that are repeated are gathered from ℓo to 0, those that are exchanged go to their
    hosts in the level-ℓo group; ``RETURN``: their updates come back. That group may span tiers, and its
    messages are those of the slowest.
    """
    if kind is not Kind.UNSHARD and not bucket.trainable:
        return ()
    return _collectives(kind, tier, bucket.levels, mesh)


PARAMETERS = (Kind.UNSHARD, Kind.PARAM_GATHER)
"""The kinds of tasks in which parameters travel; in others gradients do, or matrices."""


GROUP_OF: Mapping[Kind, str] = {
    Kind.UNSHARD: "unshard",
    Kind.REDUCE: "reduce",
    Kind.FINAL_REDUCE: "reduce",
    Kind.GRAD_GATHER: "gather",
    Kind.PARAM_GATHER: "gather",
    Kind.ASSEMBLE: EXCHANGE_STREAM,
    Kind.RETURN: EXCHANGE_STREAM,
}
"""The stream kind whose communicators a task's collectives take."""


def communicators(buckets: Iterable[BucketLayout], mesh: Mesh) -> set[tuple[str, Stage]]:
    """(Stream kind, stage) of the communicators that a plan uses.

    Unshard, reduce and gather of one stage have a communicator each, for collectives on one communicator are
    ordered by their launch, and streams must not order each other; in a message order, where a tier has one
    stream, they share one.
    """
    kinds = {(bucket.levels, bucket.trainable): bucket for bucket in buckets}
    return {
        (group, stage)
        for bucket in kinds.values()
        for kind, group in GROUP_OF.items()
        for tier in range(len(mesh.tiers))
        for _, stage in collectives_of(kind, tier, bucket, mesh)
    }


def format_of(
    wire: Wire | None, kind: Kind, tier: int, bucket: BucketLayout, stage: Stage, mesh: Mesh
) -> Format:
    """What a bucket's values travel in, in a collective of a task.

    Updated parameters go as they are where they are the only copy that is trained: their owner would have
    them rounded after every step, and others would not have what it has.
    """
    if wire is None or not bucket.narrow or kind in (Kind.ASSEMBLE, Kind.RETURN):
        return "exact"
    if kind is Kind.PARAM_GATHER and not bucket.keeps_master:
        return "exact"
    of_parameters = kind in PARAMETERS
    form = wire.of("param" if of_parameters else "grad", tier)
    item = ITEM_BYTES[bucket.dtype if of_parameters else bucket.master_dtype]
    return form if fits(form, bucket.numel // mesh.shards[stage.high], item) else "exact"


@cache
def _collectives(kind: Kind, tier: int, levels: Levels, mesh: Mesh) -> tuple[Collective, ...]:
    if levels.flat and kind in (Kind.FINAL_REDUCE, Kind.GRAD_GATHER):
        whole = mesh.whole if kind is Kind.FINAL_REDUCE and tier == _slowest(mesh, mesh.levels) else None
        return () if whole is None else (Collective("all_reduce", whole),)
    param, grad, optim, way, _ = levels
    summed = mesh.stage_in_tier(tier, grad, mesh.levels)
    replicated = mesh.stage_in_tier(tier, optim, mesh.levels)
    is_last = mesh.shards[mesh.tier_bounds[tier][1]] == mesh.world
    arriving = mesh.stage_in_tier(tier, 0, grad)
    back_to_back = is_last and summed == replicated and arriving is None
    exchanged: _Maybe = ("all_to_all", _spanned(mesh, optim) if tier == _slowest(mesh, optim) else None)
    by_kind: dict[Kind, list[_Maybe]] = {
        Kind.ASSEMBLE: [exchanged if way == EXCHANGED else ("all_gather", mesh.stage_in_tier(tier, 0, optim))]
        if way in (EXCHANGED, REPEATED)
        else [],
        Kind.RETURN: [exchanged] if way == EXCHANGED else [],
        Kind.UNSHARD: [("all_gather", mesh.stage_in_tier(tier, 0, param))],
        Kind.PARAM_GATHER: [("all_gather", mesh.stage_in_tier(tier, param, optim))],
        Kind.GRAD_GATHER: [("all_gather", None if back_to_back else replicated)],
        Kind.REDUCE: [("reduce_scatter", arriving)],
        Kind.FINAL_REDUCE: [
            ("reduce_scatter", arriving),
            ("all_reduce" if back_to_back else "reduce_scatter", summed),
        ],
    }
    return tuple(Collective(name, stage) for name, stage in by_kind.get(kind, []) if stage is not None)


def _slowest(mesh: Mesh, level: int) -> int:
    """The slowest tier that a level's groups of ranks, each with a slice, span."""
    sizes = [mesh.stage_in_tier(tier, 0, level) is not None for tier in range(len(mesh.tiers))]
    return max((tier for tier, spans in enumerate(sizes) if spans), default=0)


def _spanned(mesh: Mesh, level: int) -> Stage | None:
    """All of those ranks; None where it is one."""
    return Stage(0, level) if mesh.shards[level] > 1 else None
