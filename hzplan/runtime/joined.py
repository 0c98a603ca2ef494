"""Gradients that one task all-reduces lie side by side, and so are one message instead of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hzplan.core.schedule import Kind, Schedule
from hzplan.core.stages import Collective
from hzplan.runtime.backends.base import Buffers
from hzplan.runtime.bucket import Bucket
from hzplan.runtime.unit import UnitState


def lay_side_by_side(units: Mapping[str, UnitState], schedule: Schedule) -> None:
    """Give the buckets of each task that are all-reduced alike their gradients in one tensor."""
    for task in schedule.tasks:
        if task.kind is not Kind.FINAL_REDUCE:
            continue
        alike: dict[object, list[Bucket]] = {}
        for bucket in (bucket for name in task.units for bucket in units[name].trainable_buckets):
            if (one := _all_reduced_whole(bucket, task.tier)) is not None:
                assert bucket.grad is not None
                alike.setdefault((one, bucket.grad.dtype), []).append(bucket)
        for buckets in alike.values():
            if len(buckets) > 1:
                _join(buckets)


def _all_reduced_whole(bucket: Bucket, tier: int) -> Collective | None:
    """What all-reduces all that a rank keeps of a bucket's gradients; None where nothing does."""
    for one in bucket.collectives(Kind.FINAL_REDUCE, tier):
        of_grad = bucket.mesh.shards[bucket.layout.levels.grad]
        if one.operation == "all_reduce" and bucket.mesh.shards[one.stage.low] == of_grad:
            return one
    return None


def _join(buckets: Sequence[Bucket]) -> None:
    sizes = [bucket.grad.numel() for bucket in buckets if bucket.grad is not None]
    first = buckets[0].grad
    assert first is not None and len(sizes) == len(buckets)
    for bucket, values in zip(buckets, first.new_zeros(sum(sizes)).split(sizes), strict=True):
        bucket.keep_gradients_in(values)


def joined(buffers: Sequence[Buffers], place: int, size: int) -> list[Buffers]:
    """All-reduces with neighbours in memory as one, each ``part`` at this rank's place in the group, whose
    order may be another than that of slices. ``place``, ``size``: this rank's in the group, and the group's
    own."""
    found: list[Buffers] = []
    for one in (one._replace(part=one.whole.view(size, -1)[place]) for one in buffers):
        if found and _adjoin(found[-1], one):
            whole = found[-1].whole
            whole = whole.as_strided((whole.numel() + one.whole.numel(),), (1,), whole.storage_offset())
            found[-1] = one._replace(whole=whole, part=whole.view(size, -1)[place])
        else:
            found.append(one)
    return found


def _adjoin(first: Buffers, second: Buffers) -> bool:
    a, b = first.whole, second.whole
    same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and first.form == second.form
    return same and a.dtype == b.dtype and a.storage_offset() + a.numel() == b.storage_offset()
