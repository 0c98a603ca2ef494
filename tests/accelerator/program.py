"""What one rank has put into its device's streams: operations, their memory, and what holds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

ALIGNMENT = 64
POISON = 0xFF
"""Every byte of memory that nobody has written: NaN, or -1, which is no index."""


class Place(NamedTuple):
    """An event: so many operations of a stream are done."""

    stream: str
    done: int


@dataclass(frozen=True)
class View:
    """A tensor: a view of a block of memory. Offsets and strides in elements."""

    block: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def bytes_span(self) -> tuple[int, int]:
        """First byte and the one after the last, in the block."""
        if 0 in self.size:
            return 0, 0
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return self.offset * self.dtype.itemsize, (self.offset + last + 1) * self.dtype.itemsize


@dataclass(frozen=True)
class Collective:
    """A rank's part of one: ``group`` is the same on all of its ``ranks``, which are by place."""

    group: str
    ranks: tuple[int, ...]
    operation: str
    whole: View
    part: View


@dataclass
class Operation:
    """``function(*arguments)``, tensors being ``View``s; what it returns goes to ``outputs``.

    ``waits``: events that hold it, besides the operation before it in its stream. ``order``: its number among
    all operations of the rank, as the host has launched them. ``label``: for messages.
    """

    stream: str
    label: str
    order: int
    waits: tuple[Place, ...]
    reads: tuple[View, ...]
    writes: tuple[View, ...]
    function: Callable[..., Any] | None = None
    arguments: tuple[Any, dict[str, Any]] = ((), {})
    outputs: Any = None
    collective: Collective | None = None


@dataclass
class Program:
    """All operations of a rank, by stream and in the order of launches.

    ``blocks``: bytes of each block of memory. ``begin``: values of those that were there before, ``end``: of
    those that are there after the last operation as well; as bytes.
    """

    rank: int
    streams: dict[str, list[Operation]] = field(default_factory=dict)
    launched: list[Operation] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    begin: dict[int, torch.Tensor] = field(default_factory=dict)
    end: dict[int, torch.Tensor] = field(default_factory=dict)
    host_reads: int = 0
    """How often the host has waited for a value; not the waits for events of steps long over."""

    def add(self, operation: Operation) -> None:
        """Put an operation into its stream."""
        self.streams.setdefault(operation.stream, []).append(operation)
        self.launched.append(operation)
