"""What is read where the calls of a forward and backward begin, such as the time."""

from __future__ import annotations

import itertools
import time

import torch
from torch import Tensor


class Probe:
    """Is told where the calls of units begin in one forward and backward; this one reads nothing."""

    def cut(self) -> None:
        """A call begins, and the one before it ends; the first cut comes before the forward."""

    def gradient(self, gradient: Tensor) -> None:
        """A parameter's gradient is complete and about to be taken away."""

    def end(self) -> None:
        """The backward is over; what is freed after it still belongs to the last call."""


class HostClock(Probe):
    """Times what the calling thread computes."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def cut(self) -> None:
        self._times.append(time.perf_counter())

    end = cut

    def seconds(self) -> list[float]:
        """The length of every call."""
        return [end - start for start, end in itertools.pairwise(self._times)]


class CudaClock(Probe):
    """Times what the current CUDA stream computes, without holding it up."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def cut(self) -> None:
        self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[-1].record()

    end = cut

    def seconds(self) -> list[float]:
        """The length of every call; waits for the device."""
        if self._events:
            self._events[-1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(self._events)]


def clock(device: torch.device) -> HostClock | CudaClock:
    """Times what a device computes."""
    return CudaClock() if device.type == "cuda" else HostClock()
