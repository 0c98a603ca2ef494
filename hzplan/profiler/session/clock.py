"""Timing turns."""

from __future__ import annotations

import itertools
import time
from typing import Protocol

import torch

from hzplan.profiler.session.probe import Probe


class Clock(Probe, Protocol):
    """A probe that times turns."""

    def seconds(self) -> list[float]:
        """The length of every turn."""


class HostClock:
    """Times what the calling thread computes."""

    def __init__(self) -> None:
        self._cuts: list[float] = []
        self._end = 0.0

    def cut(self) -> None:
        """A turn begins."""
        self._cuts.append(time.perf_counter())

    def end(self) -> None:
        """The backward is over."""
        self._end = time.perf_counter()

    def seconds(self) -> list[float]:
        """The length of every turn."""
        return [end - start for start, end in itertools.pairwise([*self._cuts, self._end])]


class CudaClock:
    """Times what the current CUDA stream computes, without holding it up."""

    def __init__(self) -> None:
        self._cuts: list[torch.cuda.Event] = []
        self._end: torch.cuda.Event | None = None

    def cut(self) -> None:
        """A turn begins."""
        self._cuts.append(self._now())

    def end(self) -> None:
        """The backward is over."""
        self._end = self._now()

    def seconds(self) -> list[float]:
        """The length of every turn; waits for the device."""
        assert self._end is not None
        self._end.synchronize()
        marks = [*self._cuts, self._end]
        return [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(marks)]

    @staticmethod
    def _now() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def clock(device: torch.device) -> Clock:
    """Times what a device computes."""
    return CudaClock() if device.type == "cuda" else HostClock()
