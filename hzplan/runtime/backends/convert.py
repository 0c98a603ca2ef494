"""Values of one dtype turned into another inside the memory that they lie in, without any other."""

from __future__ import annotations

import torch
from torch import Tensor

ROOM_ELEMENTS = 64
"""Where source and target overlap too closely, so many elements at once go through memory of their own."""


def front(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """The first bytes of a contiguous buffer [n], as n elements of a narrower dtype."""
    return buffer.view(dtype)[: buffer.numel()]


def back(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """The last bytes of a contiguous buffer [n], as n elements of a narrower dtype."""
    return buffer.view(dtype)[-buffer.numel() :]


class Conversion:
    """Copies ``source`` [n] into ``target`` [n] of another dtype; both contiguous, perhaps in one storage.

    Like ``memmove``: elements go one after the other in the direction in which none is overwritten before it
    was read, as many at once as do not touch what they become. Where those grow by a constant factor, as
    between a buffer and its front or back, there are O(log n) copies, which are prepared here.

    Raises ValueError where neither direction works.
    """

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._room = target.new_empty(ROOM_ELEMENTS)
        self._copies: list[tuple[Tensor, Tensor]] = []  # (target, source), in order
        n, read, written = source.numel(), source.element_size(), target.element_size()
        # How far the target of element i lies behind its source, in bytes: linear in i.
        shift, growth = target.data_ptr() - source.data_ptr(), written - read
        if shift >= n * read or -shift >= n * written:
            self._copies.append((target, source))
            return
        ends = (1, n - 1) if n > 1 else ()
        forward = all(shift + i * growth <= 0 for i in ends)
        if not forward and not all(shift + i * growth >= 0 for i in ends):
            raise ValueError("in either direction something would be overwritten before it was read")
        done = 0
        while done < n:
            left = n - done
            behind = shift + growth * (done if forward else left)
            size = (
                max(-behind // written, behind // read)
                if forward
                else max(behind // written, -behind // read)
            )
            apart = size >= min(ROOM_ELEMENTS, left)
            size = min(left, max(size, ROOM_ELEMENTS))
            first = done if forward else left - size
            into, of = target[first : first + size], source[first : first + size]
            room = self._room[:size]
            self._copies += [(into, of)] if apart else [(room, of), (into, room)]
            done += size

    def run(self) -> None:
        """Copy."""
        for target, source in self._copies:
            target.copy_(source)
