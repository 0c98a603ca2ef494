"""A checkpoint's index: what was saved, where each part of it lies, and how to tell that it is whole.

The folder is one that torch's own distributed checkpoint wrote. Its ``.metadata`` is a pickle, which we do
not read; this file says the same in JSON, and has the checksums.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hzplan.core.layout import boxes
from hzplan.errors import UserError
from hzplan.formats.base import NonNegativeInt, PositiveInt, Strict, fingerprint, read, to_text, write_text

FORM, VERSION = "hzplan-checkpoint", 1
FILE = "checkpoint.json"
DATA = re.compile(r"__\d+_\d+\.distcp|\.metadata")

MODEL, STATE, RNG = "model.", "optimizer.state.", "rng."
"""Prefixes of tensor names in the index."""

PLACE = 3
"""A chunk's first numbers: which file, the first byte, how many; offsets and sizes of the box follow."""

DTYPES = (
    *("float64", "float32", "bfloat16", "float16", "complex128", "complex64", "complex32", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)


class StoredFile(Strict):
    """A file of the folder."""

    name: Annotated[str, Field(pattern=f"^({DATA.pattern})$")]
    nbytes: NonNegativeInt
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

    def problem(self, folder: Path) -> str | None:
        """The difference of the file on disk from its record, in words; None where it is whole."""
        path = folder / self.name
        try:
            size = path.stat().st_size
            if size != self.nbytes:
                return f"{self.name} has {size} bytes, {self.nbytes} were written"
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            return f"{self.name} cannot be read ({error.strerror})"
        return None if found == self.sha256 else f"{self.name} is not what was written (its checksum differs)"


class StoredTensor(Strict):
    """A tensor and its boxes, which tile it."""

    dtype: Literal[DTYPES]  # type: ignore[valid-type]
    shape: tuple[NonNegativeInt, ...]
    chunks: tuple[tuple[NonNegativeInt, ...], ...]

    @model_validator(mode="after")
    def _tiles(self) -> Self:
        dims, reached = len(self.shape), 0
        strides = [prod(self.shape[dim + 1 :]) for dim in range(dims)]
        parts = []
        for chunk in self.chunks:
            offsets, sizes = chunk[PLACE : PLACE + dims], chunk[PLACE + dims :]
            if len(chunk) != PLACE + 2 * dims:
                raise ValueError("a chunk has not one offset and one size for every dimension")
            start = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
            if boxes(self.shape, start, start + prod(sizes)) != [(offsets, sizes)]:
                raise ValueError("a chunk is no box of the tensor's shape that lies in one piece")
            parts.append((start, start + prod(sizes)))
        for start, end in sorted(parts):
            if start != reached:
                raise ValueError("chunks do not tile the tensor")
            reached = end
        if reached != prod(self.shape):
            raise ValueError("chunks do not tile the tensor")
        return self


class Checkpoint(Strict):
    """What a folder holds: the state after ``step`` steps, in which ``samples`` sequences were trained on.

    ``optimizer``: its class. ``extra`` is the user's own, a learning-rate scheduler's state for instance.
    ``sha256``: of this file with that field empty.
    """

    format: Literal["hzplan-checkpoint"] = "hzplan-checkpoint"
    version: Literal[1] = 1
    step: NonNegativeInt
    samples: NonNegativeInt
    world: PositiveInt
    model: str
    optimizer: str
    torch: str
    extra: dict[str, Any]
    files: tuple[StoredFile, ...]
    tensors: dict[str, StoredTensor]
    sha256: str = ""

    @model_validator(mode="after")
    def _places(self) -> Self:
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                if chunk[0] >= len(self.files) or chunk[1] + chunk[2] > self.files[chunk[0]].nbytes:
                    raise ValueError(f"a chunk of {name!r} lies outside of every file")
        return self

    @cached_property
    def states(self) -> Mapping[str, Mapping[str, StoredTensor]]:
        """The optimizer's state tensors, by parameter and key."""
        found: dict[str, dict[str, StoredTensor]] = {}
        for name, tensor in self.tensors.items():
            if name.startswith(STATE):
                owner, _, key = name.removeprefix(STATE).rpartition(".")
                found.setdefault(owner, {})[key] = tensor
        return found

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
        """Write it, sealed, into the folder."""
        write_text(folder / FILE, to_text(self.sealed()))
