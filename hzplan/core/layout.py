"""The layout of tensors inside a bucket's flat buffer.

Cost model, ILP and runtime all use it, so that the bytes counted are the bytes allocated. Pure arithmetic,
standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import itemgetter
from typing import Literal

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.matrices import OWNED, Placed, Shape, hosts
from hzplan.core.wire import BLOCK, Wire

ALIGNMENT_BYTES = 256
"""Alignment of every tensor in a bucket, and of every bucket in its unit's buffers, bytes."""

SLICE_ELEMENTS, LARGE_SLICE_ELEMENTS = 8, 128
"""A slice has a multiple of so many elements: it begins at a multiple of 16 bytes in bfloat16, the narrowest
dtype that travels, and a large one of 256. NCCL and fused optimizers read and write elements one by one
otherwise."""

LARGE_SLICE_BYTES = 1 << 16
LARGE_NARROW_SLICE = 8 * BLOCK
"""A slice of so many elements is large too where they travel in blocks."""

Dtype = Literal["float64", "float32", "bfloat16"]

ITEM_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2}
"""Bytes per element of the dtypes that parameters may have, by torch's name; float16 needs loss scaling."""

MASTER_DTYPE: Mapping[str, Dtype] = {"float64": "float64", "float32": "float32", "bfloat16": "float32"}
"""By dtype of parameters, the dtype of their master weights, their accumulated and reduced gradients, and
their optimizer state."""

REDUCE_DTYPES: Mapping[str, tuple[Dtype, ...]] = {
    "float64": ("float64",),
    "float32": ("float32", "bfloat16"),
    "bfloat16": ("float32", "bfloat16"),
}
"""By dtype of the computation, the dtypes that gradients may be communicated in; the first is the default and
rounds nothing."""


@dataclass(frozen=True)
class TensorSpec:
    """A parameter: its name in the model, shape, dtype (torch's name), whether it is trained, whether a
    matrix optimizer updates it (``core.matrices``), and whether it travels narrow (``core.wire``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    matrix: bool = False
    narrow: bool = False

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes, without alignment."""
        return self.numel * ITEM_BYTES[self.dtype]

    def computed_in(self, dtype: str) -> TensorSpec:
        """The tensor as a plan that computes in ``dtype`` shards it.

        A parameter that holds master weights for that dtype is cast; any other stays what it is.
        """
        return replace(self, dtype=dtype) if self.dtype == MASTER_DTYPE[dtype] else self


def marked(tensors: Iterable[TensorSpec], wire: Wire | None) -> tuple[TensorSpec, ...]:
    """The tensors, with which of them travel narrow."""
    if wire is None or wire.is_exact:
        return tuple(tensors)
    return tuple(replace(t, narrow=wire.narrows(t.name, t.shape)) for t in tensors)


def gradient_bytes(tensors: Iterable[TensorSpec]) -> int:
    """Bytes of the gradients of those that are trained, as they are kept."""
    return sum(t.numel * ITEM_BYTES[MASTER_DTYPE[t.dtype]] for t in tensors if t.trainable)


@dataclass(frozen=True)
class BucketLayout:
    """Tensors of one unit with the same levels, dtype and flags, laid in one flat buffer.

    ``offsets`` and ``numel`` count elements; ``numel`` includes alignment and the padding to the shards of
    the finest level that the bucket's communication walks through.
    """

    tensors: tuple[TensorSpec, ...]
    levels: Levels
    offsets: tuple[int, ...]
    numel: int

    @property
    def dtype(self) -> str:
        """The dtype that all tensors share."""
        return self.tensors[0].dtype

    @property
    def trainable(self) -> bool:
        """Whether the bucket has gradients and optimizer state."""
        return self.tensors[0].trainable

    @property
    def narrow(self) -> bool:
        """Whether the bucket travels in the formats of the wire."""
        return self.tensors[0].narrow

    @property
    def nbytes(self) -> int:
        """Bytes of the whole, unsharded buffer of parameters."""
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def master_dtype(self) -> str:
        """The dtype of master weights, gradients and optimizer state; they have the parameters' offsets."""
        return MASTER_DTYPE[self.dtype]

    @property
    def master_nbytes(self) -> int:
        """Bytes of a whole buffer of gradients, or of master weights."""
        return self.numel * ITEM_BYTES[self.master_dtype]

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of the bucket in its unit's buffer of parameters, up to where the next one may begin."""
        return -(-self.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @property
    def gradient_buffer_nbytes(self) -> int:
        """Bytes of the bucket in its unit's buffer of gradients, up to where the next one may begin."""
        return -(-self.master_nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def matrices(self, bucket: int) -> list[Placed]:
        """The matrices of the bucket, which is number ``bucket``; a tensor may hold several."""
        return [
            Placed(bucket, index, offset + number * shape.numel, shape.rows, shape.columns, self.numel)
            for index, (tensor, offset) in enumerate(zip(self.tensors, self.offsets, strict=True))
            for shape in [Shape.of(tensor.shape)]
            for number in range(shape.many)
        ]

    @property
    def keeps_master(self) -> bool:
        """Whether master weights are kept beside the parameters, rather than being the parameters."""
        return self.trainable and self.master_dtype != self.dtype

    def pieces(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """The tensors' parts inside ``[start, end)``: (index of the tensor, first, past-the-last element)."""
        found = []
        for index, (tensor, offset) in enumerate(zip(self.tensors, self.offsets, strict=True)):
            low, high = max(start, offset), min(end, offset + tensor.numel)
            if low < high:
                found.append((index, low, high))
        return found


def lay_out(tensors: Sequence[TensorSpec], levels: Levels, mesh: Mesh) -> BucketLayout:
    """Lay tensors one after the other, each aligned to 256 bytes, and pad to the finest level used, whose
    slices are aligned too.

    A trained bucket's gradients are reduced down to the finest level of the mesh, whatever its own levels
    (an all-reduce is a reduce-scatter down the hierarchy and an all-gather back up); a frozen one is only
    cut at its parameter level. Where tensors are owned, each lies inside of one slice at the level of the
    optimizer state.
    """
    if levels.matrix == OWNED:
        return _owned(tensors, levels, mesh)
    align = _alignment(tensors[0])
    offsets, end = [], 0
    for tensor in tensors:
        start = -(-end // align) * align
        offsets.append(start)
        end = start + tensor.numel
    slices = mesh.world if tensors[0].trainable else mesh.shards[levels.param]
    length = -(-end // slices)
    is_large = length * ITEM_BYTES[tensors[0].dtype] >= LARGE_SLICE_BYTES
    is_large |= tensors[0].narrow and length >= LARGE_NARROW_SLICE
    multiple = slices * (LARGE_SLICE_ELEMENTS if is_large else SLICE_ELEMENTS)
    return BucketLayout(tuple(tensors), levels, tuple(offsets), max(1, -(-end // multiple)) * multiple)


def _alignment(tensor: TensorSpec) -> int:
    """Elements of a bucket's dtype at whose multiples tensors begin; none shares a block with another."""
    align = ALIGNMENT_BYTES // ITEM_BYTES[tensor.dtype]
    return max(align, BLOCK) if tensor.narrow else align


def _owned(tensors: Sequence[TensorSpec], levels: Levels, mesh: Mesh) -> BucketLayout:
    """Tensors whole in slices, so that the fullest is short; the others are padded to its length."""
    owners = mesh.shards[levels.optim]
    align = _alignment(tensors[0])
    within, ends = [], [0] * owners
    owner_of = hosts([tensor.numel for tensor in tensors], owners)
    for tensor, owner in zip(tensors, owner_of, strict=True):
        within.append(-(-ends[owner] // align) * align)
        ends[owner] = within[-1] + tensor.numel
    multiple = mesh.world // owners * max(align, LARGE_SLICE_ELEMENTS)
    length = max(1, -(-max(ends) // multiple)) * multiple
    starts = [owner * length + start for owner, start in zip(owner_of, within, strict=True)]
    placed = sorted(zip(starts, tensors, strict=True), key=itemgetter(0))
    offsets, laid = tuple(start for start, _ in placed), tuple(tensor for _, tensor in placed)
    return BucketLayout(laid, levels, offsets, length * owners)


def bucketise(choices: Iterable[tuple[TensorSpec, Levels]], mesh: Mesh) -> tuple[BucketLayout, ...]:
    """Group a unit's tensors into buckets by (levels, dtype, trainable, narrow), in order of first
    appearance.

    A frozen tensor has a parameter level only; its other levels are set to the same value.
    """
    groups: dict[tuple[Levels, str, bool, bool], list[TensorSpec]] = {}
    for tensor, levels in choices:
        levels = levels.of(trainable=tensor.trainable, matrix=bool(levels.matrix))
        groups.setdefault((levels, tensor.dtype, tensor.trainable, tensor.narrow), []).append(tensor)
    return tuple(lay_out(tensors, key[0], mesh) for key, tensors in groups.items())


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, one of each per dimension."""


def boxes(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """Elements ``[start, end)`` of a row-major tensor as few boxes, in order, each of them contiguous.

    At most ``2 * dimensions - 1``: the first row's rest, whole rows, the last row's beginning; and so on
    inside of those rows.
    """
    if start >= end:
        return []
    if not shape:
        return [((), ())]
    inner = shape[1:]
    row = prod(inner)
    first, last = -(-start // row), end // row  # whole rows
    if first > last:
        return _in_row(inner, last, start - last * row, end - last * row)
    found = _in_row(inner, first - 1, start - (first - 1) * row, row) if start < first * row else []
    if first < last:
        found.append(((first, *(0 for _ in inner)), (last - first, *inner)))
    return found + _in_row(inner, last, 0, end - last * row)


def _in_row(inner: tuple[int, ...], row: int, start: int, end: int) -> list[Box]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes(inner, start, end)]
