"""CUDA streams and events as the launcher sees them."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import torch

from hzplan.errors import UserError
from hzplan.runtime import launcher

URGENT, NOT_URGENT = -1, 0
"""CUDA's priorities. Communication is short, and others wait for it: it goes first."""


class Event:
    """See ``launcher.Event``."""

    def __init__(self, stream: torch.cuda.Stream, *, timed: bool) -> None:
        self._event = torch.cuda.Event(enable_timing=timed)
        self._event.record(stream)

    def synchronize(self) -> None:
        """See ``launcher.Event``."""
        self._event.synchronize()

    def is_reached(self) -> bool:
        """See ``launcher.Event``."""
        return bool(self._event.query())

    def after_s(self, earlier: launcher.Event) -> float:
        """See ``launcher.Event``."""
        assert isinstance(earlier, Event)
        return float(earlier._event.elapsed_time(self._event)) / 1e3

    def hold(self, stream: torch.cuda.Stream) -> None:
        """A stream waits for it."""
        stream.wait_event(self._event)


class Queue:
    """See ``launcher.Queue``."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def record(self, *, timed: bool = False) -> Event:
        """See ``launcher.Queue``."""
        return Event(self._stream, timed=timed)

    def wait(self, event: launcher.Event) -> None:
        """See ``launcher.Queue``."""
        assert isinstance(event, Event)
        event.hold(self._stream)

    def current(self) -> AbstractContextManager[object]:
        """See ``launcher.Queue``."""
        return torch.cuda.stream(self._stream)


class Device:
    """See ``launcher.Device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compute: torch.cuda.Stream | None = None

    def here(self) -> Queue:
        """See ``launcher.Device``. UserError where a CUDA graph is being captured, and on another stream than
        at first: autograd delivers gradients on the one that was current when the model was parallelized."""
        if torch.cuda.is_current_stream_capturing():
            raise UserError(
                "a plan's step is being captured into a CUDA graph, which would leave out what the host does "
                "between units; capture what is inside of a unit only"
            )
        stream = torch.cuda.current_stream(self._device)
        if self._compute is None:
            self._compute = stream
        if stream != self._compute:
            raise UserError(
                "the step runs on another CUDA stream than hzplan.parallelize was called on; call both under "
                "the same torch.cuda.stream, or none"
            )
        return Queue(stream)

    def queue(self, name: str) -> Queue:
        """See ``launcher.Device``."""
        priority = NOT_URGENT if name == "optim" else URGENT
        return Queue(torch.cuda.Stream(self._device, priority=priority))

    def now_s(self) -> float:
        """See ``launcher.Device``."""
        return time.perf_counter()
