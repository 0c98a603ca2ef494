"""Stages of hierarchical collectives that a bucket walks in a communication task. Pure."""

from __future__ import annotations

from hzplan.core.hierarchy import Mesh, Stage
from hzplan.core.layout import BucketLayout
from hzplan.core.schedule import Kind


def stages_of(kind: Kind, tier: int, bucket: BucketLayout, mesh: Mesh) -> list[Stage]:
    """The stages of a task of a kind on a tier, in order; none where the bucket has nothing to do.

    ``UNSHARD``: 0 to ℓp; ``PARAM_GATHER``: ℓp to ℓo (updated parameters); ``GRAD_GATHER``: ℓo to the finest
    level L (the sum goes back to the replicas); ``REDUCE``: 0 to ℓg, accumulating into the gradient slice;
    ``FINAL_REDUCE``: that, then ℓg to L in place.
    """
    param, grad, optim = bucket.levels.param, bucket.levels.grad, bucket.levels.optim
    spans = {
        Kind.UNSHARD: [(0, param)],
        Kind.PARAM_GATHER: [(param, optim)],
        Kind.GRAD_GATHER: [(optim, mesh.levels)],
        Kind.REDUCE: [(0, grad)],
        Kind.FINAL_REDUCE: [(0, grad), (grad, mesh.levels)],
    }
    if kind is not Kind.UNSHARD and not bucket.trainable:
        return []
    stages = (mesh.stage_in_tier(tier, *span) for span in spans.get(kind, []))
    return [stage for stage in stages if stage is not None]
