"""Memory that a model's calls allocate and free, to the byte."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from hzplan.profiler.session.clock import Probe
from hzplan.profiler.session.rounds import no_garbage_collection


@dataclass(frozen=True)
class Segment:
    """Memory between two cuts: what stayed allocated, and the highest level, both relative to its start."""

    retained_bytes: int
    peak_bytes: int


class HostMemory(Probe):
    """Every allocation of a tensor's memory on the CPU, to the byte, from torch's profiler."""

    _MARK = "hzplan cut"

    def __enter__(self) -> HostMemory:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it writes to stderr; read at its first start
        self._quiet = no_garbage_collection()
        self._quiet.__enter__()
        self._profile = profile(profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._profile.__exit__(None, None, None)
        self._quiet.__exit__(None, None, None)

    def cut(self) -> None:
        with record_function(self._MARK):
            pass

    def segments(self) -> list[Segment]:
        """Memory from each cut to the next; allocations before the first cut are left out."""
        results: Any = self._profile.kineto_results
        cpu = torch._C._autograd.DeviceType.CPU
        events: list[tuple[int, int | None]] = []  # (nanoseconds, bytes, or None at a cut)
        for event in results.events():
            name = event.name()
            if name == "[memory]" and event.device_type() == cpu:
                events.append((event.start_ns(), event.nbytes()))
            elif name == self._MARK:
                events.append((event.start_ns(), None))
        found: list[Segment] = []
        level = peak = 0
        begun = False
        for _, nbytes in sorted(events, key=lambda event: event[0]):
            if nbytes is None:
                if begun:
                    found.append(Segment(level, peak))
                level = peak = 0
                begun = True
            else:
                level += nbytes
                peak = max(peak, level)
        return [*found, Segment(level, peak)] if begun else []


class CudaMemory(Probe):
    """What the caching allocator has given out on the current CUDA device."""

    def __enter__(self) -> CudaMemory:
        self._quiet = no_garbage_collection()
        self._quiet.__enter__()
        self._levels: list[tuple[int, int]] = []  # at each cut: (now, highest since the cut before)
        return self

    def __exit__(self, *failure: object) -> None:
        self.cut()
        self._quiet.__exit__(None, None, None)

    def cut(self) -> None:
        self._levels.append((torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))
        torch.cuda.reset_peak_memory_stats()

    def segments(self) -> list[Segment]:
        """Memory from each cut to the next."""
        return [
            Segment(end - start, max(0, peak - start))
            for (start, _), (end, peak) in itertools.pairwise(self._levels)
        ]


def memory_trace(device: torch.device) -> HostMemory | CudaMemory:
    """Follows a device's memory; a context in which one pass runs."""
    return CudaMemory() if device.type == "cuda" else HostMemory()
