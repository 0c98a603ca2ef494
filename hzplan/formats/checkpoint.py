"""A checkpoint's index: what was saved, where each element of it lies, and how to tell that it is whole.

Beside the index lies one file for each rank, ``rank-00000.bin`` and so on, of plain values without headers,
little-endian. A rank's slices of the buckets' flat buffers lie in it one after the other, each at the same
byte in the files of all ranks that have such a slice. So the index describes a bucket once, whatever the
number of ranks, and where an element lies is arithmetic: the slice of its bucket, the rank that holds it, the
byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from hzplan.core.hierarchy import Mesh
from hzplan.errors import UserError
from hzplan.formats.base import (
    MAX_FILE_BYTES,
    NonNegativeInt,
    PositiveInt,
    Strict,
    fingerprint,
    read,
    to_text,
    write_text,
)

FORM, VERSION = "hzplan-checkpoint", 2
FILE = "checkpoint.json"

MODEL, STATE, RNG, OWN = "model.", "optimizer.state.", "rng.", "own."
"""Prefixes of tensor names in the index."""

ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("complex128",), 16),
    **dict.fromkeys(("float64", "complex64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "complex32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
}
"""Bytes per element of the dtypes that a checkpoint may have, by torch's name."""


def _known(dtype: str) -> str:
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{dtype!r} is no dtype that a checkpoint may have")
    return dtype


Dtype = Annotated[str, AfterValidator(_known)]

MOST_DIMENSIONS, MOST_ELEMENTS = 64, 1 << 60
"""Upper limits of a tensor, those of torch and of what strides in bytes can say."""


def _possible(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) > MOST_DIMENSIONS or prod(max(1, size) for size in shape) > MOST_ELEMENTS:
        raise ValueError(f"no tensor can have the shape {list(shape)[:8]}")
    return shape


Shape = Annotated[tuple[NonNegativeInt, ...], AfterValidator(_possible)]


def data_file(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.bin"


class Part(NamedTuple):
    """Elements ``[low, high)`` of a tensor, which lie in one piece in the file of a rank, from a byte on."""

    rank: int
    first_byte: int
    low: int
    high: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that a checkpoint has: its dtype and shape, and the slices that it lies in.

    Its elements are those from ``offset`` on of a buffer that is cut into slices of ``slice_elements``. A
    slice begins at ``first_byte`` in the file of the lowest rank that holds it at ``level`` of ``mesh``. A
    tensor that one rank alone has written is one slice, and ``rank`` says whose.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    slice_elements: int
    first_byte: int
    mesh: Mesh
    level: int
    rank: int | None = None

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def parts(self, low: int, high: int) -> Iterator[Part]:
        """Where elements ``[low, high)`` lie, row-major, in their order."""
        item = ITEM_BYTES[self.dtype]
        while low < high:
            index, inside = divmod(self.offset + low, self.slice_elements)
            end = min(high, low + self.slice_elements - inside)
            rank = self.mesh.holder(index, self.level) if self.rank is None else self.rank
            yield Part(rank, self.first_byte + inside * item, low, end)
            low = end


class StoredFile(Strict):
    """Size and checksum of a rank's file."""

    nbytes: NonNegativeInt
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

    def problem(self, path: Path) -> str | None:
        """The difference of the file on disk from its record, in words; None where it is whole."""
        try:
            size = path.stat().st_size
            if size != self.nbytes:
                return f"{path.name} has {size} bytes, {self.nbytes} were written"
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            return f"{path.name} cannot be read ({error.strerror})"
        return None if found == self.sha256 else f"{path.name} is not what was written (its checksum differs)"


class StoredParameter(Strict):
    """A parameter in a bucket: its elements are those from ``offset`` on of the bucket's buffer."""

    name: str
    shape: Shape
    offset: NonNegativeInt

    @property
    def end(self) -> int:
        """The first element of the buffer behind it."""
        return self.offset + prod(self.shape)

    def named(self, key: str) -> str:
        """The name of the parameter's own values where ``key`` is empty, else of that key of its state."""
        return f"{STATE}{self.name}.{key}" if key else f"{MODEL}{self.name}"


class StoredArray(Strict):
    """Values of a bucket, sliced: the parameters' own where ``key`` is empty, else one key of their state.

    ``tensors``: which of the bucket's parameters have it, by number. ``first_byte``: where a slice begins, in
    the file of every rank that has one.
    """

    key: str
    dtype: Dtype
    first_byte: NonNegativeInt
    tensors: tuple[NonNegativeInt, ...]


class StoredBucket(Strict):
    """A flat buffer of ``numel`` elements, cut into ``slices``, which ranks 0 … slices − 1 have, one each."""

    slices: PositiveInt
    numel: PositiveInt
    tensors: tuple[StoredParameter, ...]
    arrays: tuple[StoredArray, ...]

    @model_validator(mode="after")
    def _tiles(self) -> Self:
        if self.numel % self.slices:
            raise ValueError(f"{self.numel} elements do not divide into {self.slices} slices")
        ends = [0, *(tensor.end for tensor in self.tensors)]
        for tensor, end in zip(self.tensors, ends, strict=False):
            if tensor.offset < end:
                raise ValueError(f"{tensor.name!r} overlaps the parameter before it")
        if ends[-1] > self.numel:
            raise ValueError(f"{self.tensors[-1].name!r} ends outside of its bucket")
        for array in self.arrays:
            if any(after <= number for number, after in pairwise(array.tensors)) or any(
                number >= len(self.tensors) for number in array.tensors[-1:]
            ):
                raise ValueError(
                    f"the tensors of array {array.key!r} are not numbers of parameters, ascending"
                )
        return self

    @property
    def slice_elements(self) -> int:
        """Elements of one slice."""
        return self.numel // self.slices

    def end_of(self, array: StoredArray) -> int:
        """The first byte of a file behind the slice of an array."""
        return array.first_byte + self.slice_elements * ITEM_BYTES[array.dtype]


class StoredValue(Strict):
    """A tensor that one rank alone has written, whole: a buffer, a number of the optimizer, a generator."""

    dtype: Dtype
    shape: Shape
    rank: NonNegativeInt
    first_byte: NonNegativeInt

    @property
    def end(self) -> int:
        """The first byte of the file behind it."""
        return self.first_byte + prod(self.shape) * ITEM_BYTES[self.dtype]


class StoredGroup(Strict):
    """A parameter group of the optimizer when it was saved: its parameters, and what JSON can say of its
    options (learning rate, betas, …)."""

    names: tuple[str, ...]
    options: dict[str, Any]


def ends_of_slices(buckets: Iterable[StoredBucket], world: int) -> list[int]:
    """By rank, the first byte of its file behind all slices that it has."""
    ends, reached = [0] * world, 0
    for bucket in sorted(buckets, key=lambda bucket: -bucket.slices):
        reached = max([reached, *map(bucket.end_of, bucket.arrays)])
        ends[: bucket.slices] = [reached] * bucket.slices
    return ends


def sliced(buckets: Iterable[StoredBucket], mesh: Mesh) -> dict[str, StoredTensor]:
    """The tensors that buckets hold, by name; ValueError when two of them have one name."""
    found: dict[str, StoredTensor] = {}
    for bucket in buckets:
        level = mesh.level_of(bucket.slices)
        for array in bucket.arrays:
            for number in array.tensors:
                tensor = bucket.tensors[number]
                name = tensor.named(array.key)
                if name in found:
                    raise ValueError(f"{name!r} is there twice")
                found[name] = StoredTensor(
                    *(array.dtype, tensor.shape, tensor.offset, bucket.slice_elements),
                    *(array.first_byte, mesh, level),
                )
    return found


class Checkpoint(Strict):
    """What a folder holds: the state after ``step`` steps, in which ``samples`` sequences were trained on.

    ``mesh``: of the plan that it was saved under. ``optimizer``: its class. ``extra`` is the user's own, a
    learning-rate scheduler's state for instance. ``files``: by rank. ``aliases``: other names of tensors.
    ``groups``: of the optimizer. ``wire``: what travelled narrow, in words; None where nothing did.
    ``sha256``: of this file with that field empty.
    """

    format: Literal["hzplan-checkpoint"] = "hzplan-checkpoint"
    version: Literal[2] = 2
    step: NonNegativeInt
    samples: NonNegativeInt
    mesh: str
    model: str
    optimizer: str
    torch: str
    extra: dict[str, Any]
    files: tuple[StoredFile, ...]
    buckets: tuple[StoredBucket, ...]
    values: dict[str, StoredValue]
    aliases: dict[str, str]
    groups: tuple[StoredGroup, ...] = ()
    wire: str | None = None
    sha256: str = ""

    @model_validator(mode="after")
    def _places(self) -> Self:
        """No two tensors share a byte or a name, and none ends outside of its file."""
        mesh = Mesh.parse(self.mesh)
        if len(self.files) != mesh.world:
            raise ValueError(f"{len(self.files)} files, but mesh {mesh} has {mesh.world} ranks")
        for bucket in self.buckets:
            mesh.level_of(bucket.slices)  # ValueError where there is none
        arrays = [
            (array.first_byte, bucket.end_of(array)) for bucket in self.buckets for array in bucket.arrays
        ]
        if any(after < end for (_, end), (after, _) in pairwise(sorted(arrays))):
            raise ValueError("two arrays of buckets share bytes")
        reached = ends_of_slices(self.buckets, mesh.world)
        for name, value in sorted(self.values.items(), key=lambda item: item[1].first_byte):
            if value.rank >= mesh.world or value.first_byte < reached[value.rank]:
                raise ValueError(f"{name!r} shares bytes with another tensor, or is in no rank's file")
            reached[value.rank] = value.end
        for rank, (end, file) in enumerate(zip(reached, self.files, strict=True)):
            if end > file.nbytes:
                raise ValueError(f"{data_file(rank)} has {file.nbytes} bytes, and tensors up to byte {end}")
        known = sliced(self.buckets, mesh).keys()
        if twice := known & self.values.keys() or self.aliases.keys() & (known | self.values.keys()):
            raise ValueError(f"{min(twice)!r} is there twice")
        if missing := {*self.aliases.values()} - known - self.values.keys():
            raise ValueError(f"{min(missing)!r} has another name, and is not there")
        return self

    @property
    def world(self) -> int:
        """The number of ranks that it was saved by."""
        return len(self.files)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors, by each of their names."""
        mesh = Mesh.parse(self.mesh)
        found = sliced(self.buckets, mesh)
        for name, value in self.values.items():
            numel = max(1, prod(value.shape))
            found[name] = StoredTensor(
                *(value.dtype, value.shape, 0, numel, value.first_byte, mesh, 0), rank=value.rank
            )
        return found | {alias: found[name] for alias, name in self.aliases.items()}

    @cached_property
    def states(self) -> Mapping[str, Mapping[str, StoredTensor]]:
        """The optimizer's state tensors, by parameter and key."""
        found: dict[str, dict[str, StoredTensor]] = {}
        for name, tensor in self.tensors.items():
            if name.startswith(STATE):
                owner, _, key = name.removeprefix(STATE).rpartition(".")
                found.setdefault(owner, {})[key] = tensor
        return found

    def first_name(self, name: str) -> str:
        """The name under which a tensor was written: one for all names of the same tensor."""
        return self.aliases.get(name, name)

    @classmethod
    def load(cls, folder: Path) -> Checkpoint:
        """Read and check a folder's index; UserError names what is wrong with it."""
        path = folder / FILE
        found = read(path, cls, form=FORM, version=VERSION)
        if found.sha256 != found.sealed().sha256:
            raise UserError(f"{path}: not what was written (its checksum differs)")
        return found

    def sealed(self) -> Checkpoint:
        """The same with its own checksum."""
        return self.model_copy(update={"sha256": fingerprint(self.model_copy(update={"sha256": ""}))})

    def save(self, folder: Path) -> None:
        """Write it, sealed, into the folder. UserError, and no file, where it could not be read back."""
        text = to_text(self.sealed())
        if len(text.encode()) > MAX_FILE_BYTES:
            raise UserError(
                f"{folder / FILE}: would be {len(text) >> 20} MiB, at most {MAX_FILE_BYTES >> 20} MiB can be "
                "read back; keep what is large in 'extra' in a file of your own"
            )
        write_text(folder / FILE, text)
