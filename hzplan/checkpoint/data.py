"""The files of values that lie beside a checkpoint's index: written by one rank each, read at any element."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hzplan.checkpoint.entries import Entry
from hzplan.errors import UserError
from hzplan.formats.checkpoint import Checkpoint, StoredFile, data_file

BLOCK_BYTES = 1 << 26
"""Most bytes of values that are converted, or brought to a device, at once."""


def write(path: Path, placed: Iterable[tuple[int, Tensor]], nbytes: int) -> StoredFile:
    """Write tensors in the host's memory to a new file, each at its byte, zeros between, ``nbytes`` in all.

    The file is on the disk when this returns; the checksum is of what was to be written. OSError as writing
    has it.
    """
    digest, at = hashlib.sha256(), 0
    with path.open("xb") as file:

        def put(content: memoryview) -> None:
            file.write(content)
            digest.update(content)

        def fill_up(end: int) -> None:
            assert at <= end, "two tensors share bytes"
            for first in range(at, end, BLOCK_BYTES):
                put(memoryview(bytes(min(BLOCK_BYTES, end - first))))

        for first_byte, values in sorted(placed, key=lambda item: item[0]):
            fill_up(first_byte)
            put(_bytes(values.contiguous()))
            at = first_byte + values.nbytes
        fill_up(nbytes)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(nbytes=nbytes, sha256=digest.hexdigest())


class _Read(NamedTuple):
    """Elements that lie in one piece in a file, and the flat tensor that they go to."""

    first_byte: int
    target: Tensor
    stored: torch.dtype


def fill(folder: Path, index: Checkpoint, entries: Iterable[Entry]) -> None:
    """Read entries' values from a checkpoint, in this process; they may have another dtype or device than it.

    Each file is opened once, and only what is asked for is read. UserError when the checkpoint lacks a part.
    """
    by_rank: dict[int, list[_Read]] = {}
    beside: list[tuple[Tensor, Tensor]] = []  # values that are not contiguous, and what is read for them
    for entry in entries:
        stored = index.tensors.get(entry.name)
        if stored is None:
            raise UserError(f"{folder}: {entry.name} is not in it; give the model that was trained")
        if stored.shape != entry.shape:
            raise UserError(
                f"{folder}: {entry.name} is {list(stored.shape)}, and {list(entry.shape)} in this model"
            )
        values = entry.values.detach()
        if not values.is_contiguous():
            beside.append((values, torch.empty_like(values, memory_format=torch.contiguous_format)))
            values = beside[-1][1]
        flat = values.view(-1)
        for part in stored.parts(entry.start, entry.end):
            target = flat[part.low - entry.start : part.high - entry.start]
            read = _Read(part.first_byte, target, getattr(torch, stored.dtype))
            by_rank.setdefault(part.rank, []).append(read)
    for rank, reads in sorted(by_rank.items()):
        path = folder / data_file(rank)
        try:
            with path.open("rb", buffering=0) as file:
                for read in sorted(reads, key=lambda read: read.first_byte):
                    _read(file.fileno(), read)
        except EOFError:
            raise UserError(f"{path}: ends before what the index says lies there") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    for values, contiguous in beside:
        values.copy_(contiguous)


def _read(handle: int, read: _Read) -> None:
    """One piece; EOFError where the file ends before it."""
    target = read.target
    if target.device.type == "cpu" and target.dtype == read.stored:
        _read_bytes(handle, read.first_byte, _bytes(target))
        return
    block = BLOCK_BYTES // read.stored.itemsize
    for low in range(0, target.numel(), block):
        part = target[low : low + block]
        values = torch.empty(part.numel(), dtype=read.stored)
        _read_bytes(handle, read.first_byte + low * read.stored.itemsize, _bytes(values))
        part.copy_(values)


def _read_bytes(handle: int, first_byte: int, room: memoryview) -> None:
    taken = 0
    while taken < len(room):
        count = os.preadv(handle, [room[taken:]], first_byte + taken)
        if count == 0:
            raise EOFError
        taken += count


def _bytes(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host."""
    content: Any = values.reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)
