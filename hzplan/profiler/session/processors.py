"""Processor time of ranks that share processors: how long those are busy with what the ranks do."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hzplan.profiler.session.ranks import Ranks

_BOOT = Path("/proc/sys/kernel/random/boot_id")
COMPUTE_S = 0.3
"""Least seconds of compute that is watched, many slices of a scheduler."""


@dataclass(frozen=True)
class Processors:
    """``shared``: by rank what it runs on, the kernel and the processors that it may use.

    Not the host's name: containers, and namespaces with a network of their own, have names of their own and
    share processors all the same.
    """

    shared: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, ranks: Ranks) -> Processors:
        """Every rank calls it, and gets the same."""
        return cls(tuple(ranks.gather((_kernel(), _allowed()))))

    def busy_s(self, seconds: list[float]) -> float:
        """Seconds for which processors are busy with so many of processor time, by rank; where ranks run on
        different ones, the busiest."""
        total = dict.fromkeys(self.shared, 0.0)
        for of, spent in zip(self.shared, seconds, strict=True):
            total[of] += spent
        return max(spent / len(processors) for (_, processors), spent in total.items())


def compute_busy(ranks: Ranks, processors: Processors, compute: Callable[[], None]) -> float:
    """The share of processors that ``compute`` keeps busy, called by all ranks at once."""
    ranks.barrier()
    began, spent = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < COMPUTE_S:
        compute()
    # Each rank until its own last call ended: processor time over time is a rank's own share of processors.
    share = (time.process_time() - spent) / (time.perf_counter() - began)
    return min(1.0, processors.busy_s(ranks.gather(share)))


def _kernel() -> str:
    with suppress(OSError):
        return _BOOT.read_text().strip()
    return platform.node()


def _allowed() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))
