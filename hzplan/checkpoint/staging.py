"""Copies of what is saved, in the host's memory, so that training can go on while they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hzplan.checkpoint.entries import Entry
from hzplan.core.layout import ALIGNMENT_BYTES


class Staging:
    """Where copies go: what a device has to one pinned buffer, which is kept for the next save.

    Copies to pinned memory run at the link's full rate, one behind the other, and the host waits once.
    """

    def __init__(self) -> None:
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def copies(self, entries: Sequence[Entry]) -> list[Entry]:
        """The entries with copies of their values; copies of an earlier call must not be in use any more."""
        at = [0]
        for entry in entries:
            nbytes = entry.values.nbytes if _on_device(entry.values) else 0
            at.append(at[-1] + -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        if len(self._pinned) < at[-1]:
            self._pinned = torch.empty(0, dtype=torch.uint8)  # before the larger one is made
            self._pinned = _pinned(at[-1])
        found = []
        for entry, first in zip(entries, at, strict=False):
            values = entry.values.detach()
            if _on_device(values):
                room = self._pinned[first : first + values.nbytes].view(values.dtype).view(values.shape)
                found.append(replace(entry, values=room.copy_(values, non_blocking=True)))
            else:
                found.append(replace(entry, values=values.clone()))
        if at[-1]:
            _wait()
        return found


def _on_device(values: Tensor) -> bool:
    return values.is_cuda


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _wait() -> None:
    """Until the copies that this thread has launched are done."""
    torch.cuda.current_stream().synchronize()
