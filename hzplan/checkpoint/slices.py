"""Where the slices of buckets lie in the files of ranks, laid out by every rank alike when saving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hzplan.core.hierarchy import Mesh
from hzplan.core.layout import ALIGNMENT_BYTES, BucketLayout
from hzplan.formats.checkpoint import ITEM_BYTES, StoredArray, StoredBucket, StoredParameter

State = Mapping[str, Mapping[str, Sequence[int]]]
"""What all ranks together have of the optimizer's state: by key and dtype, numbers of parameters.

Parameters are numbered through all buckets, in their order.
"""


def lay_out_file(layouts: Sequence[BucketLayout], mesh: Mesh, state: State) -> tuple[StoredBucket, ...]:
    """The buckets as a checkpoint's index describes them: each array's first byte in every rank's file.

    A trained bucket is cut as finely as the mesh allows, so that all ranks together save each element once;
    a frozen one as its parameters are. Buckets of fewer slices come last: other ranks' files end before them.
    """
    by_bucket: list[dict[tuple[str, str], list[int]]] = [
        {("", layout.master_dtype if layout.trainable else layout.dtype): [*range(len(layout.tensors))]}
        for layout in layouts
    ]
    place_of = [(bucket, at) for bucket, layout in enumerate(layouts) for at in range(len(layout.tensors))]
    for key, dtypes in sorted(state.items()):
        for dtype, numbers in sorted(dtypes.items()):
            for bucket, number in map(place_of.__getitem__, sorted(numbers)):
                by_bucket[bucket].setdefault((key, dtype), []).append(number)
    slices = [mesh.world if layout.trainable else mesh.shards[layout.levels.param] for layout in layouts]
    arrays: list[list[StoredArray]] = [[] for _ in layouts]
    end = 0
    for bucket in sorted(range(len(layouts)), key=lambda bucket: -slices[bucket]):
        for (key, dtype), numbers in by_bucket[bucket].items():
            first = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            arrays[bucket].append(StoredArray(key=key, dtype=dtype, first_byte=first, tensors=tuple(numbers)))
            end = first + layouts[bucket].numel // slices[bucket] * ITEM_BYTES[dtype]
    return tuple(
        StoredBucket(
            slices=slices[bucket],
            numel=layout.numel,
            tensors=tuple(
                StoredParameter(name=tensor.name, shape=tensor.shape, offset=offset)
                for tensor, offset in zip(layout.tensors, layout.offsets, strict=True)
            ),
            arrays=tuple(arrays[bucket]),
        )
        for bucket, layout in enumerate(layouts)
    )


def ranges_of(buckets: Sequence[StoredBucket], mesh: Mesh, rank: int) -> set[tuple[str, int, int]]:
    """The ranges of tensors that a rank's file has slices of: name, first and past-the-last element."""
    found = set()
    for bucket in buckets:
        if rank >= bucket.slices:
            continue
        size = bucket.slice_elements
        start = mesh.slice_index(rank, mesh.level_of(bucket.slices)) * size
        for array in bucket.arrays:
            for tensor in map(bucket.tensors.__getitem__, array.tensors):
                low, high = max(start, tensor.offset), min(start + size, tensor.end)
                if low < high:
                    found.add((tensor.named(array.key), low - tensor.offset, high - tensor.offset))
    return found
