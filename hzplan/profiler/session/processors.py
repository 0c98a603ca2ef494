"""Processor time of ranks that share processors."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hzplan.profiler.session.ranks import Ranks

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_CGROUPS, _CGROUP = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_CGROUP_LIMIT = _CGROUP / "cpu.max"
_SESSIONS_FIRST, _SESSION = Path("/proc/sys/kernel/sched_autogroup_enabled"), Path("/proc/self/autogroup")
COMPUTE_S = 0.3
"""Least seconds of compute that is watched, many slices of a scheduler."""


class Shared(NamedTuple):
    """What a rank runs on: ranks for which all of it is equal share it.

    ``kernel`` and not the host's name: containers, and namespaces with a network of their own, have names of
    their own and share processors all the same. ``limit``: how many processors its container may use.
    """

    kernel: str
    processors: tuple[int, ...]
    limit: float

    @classmethod
    def here(cls) -> Shared:
        """This process's."""
        processors = tuple(range(os.cpu_count() or 1))
        if hasattr(os, "sched_getaffinity"):
            processors = tuple(sorted(os.sched_getaffinity(0)))
        kernel, limit = platform.node(), float(len(processors))
        with suppress(OSError):
            kernel = _BOOT.read_text().strip()
        with suppress(OSError, ValueError):  # no cgroup, or "max"
            quota, period = map(int, _CGROUP_LIMIT.read_text().split())
            limit = min(limit, quota / period)
        return cls(kernel, processors, limit)


class Processors(NamedTuple):
    """By rank what it runs on."""

    by_rank: tuple[Shared, ...]

    @classmethod
    def of(cls, ranks: Ranks) -> Processors:
        """Every rank calls it, and gets the same."""
        return cls(tuple(ranks.gather(Shared.here())))

    def time_s(self, seconds: Sequence[float]) -> float:
        """From each rank's seconds of processor time those of ranks that share processors, over the number of
        these; where ranks run on different ones, the most."""
        total = dict.fromkeys(self.by_rank, 0.0)
        for shared, spent in zip(self.by_rank, seconds, strict=True):
            total[shared] += spent
        return max(spent / shared.limit for shared, spent in total.items())


def of_sessions(ranks: Ranks, processors: Processors) -> str | None:
    """A line of advice where more ranks than processors are sessions of their own, as under torchrun, and
    Linux shares processors between sessions first; else None. Every rank calls it.

    Some kernels serve sessions very unevenly: ranks, and with them messages, then wait for seconds.
    """
    sessions = ranks.gather(_session())
    for shared in set(processors.by_rank):
        here = [one for one, at in zip(sessions, processors.by_rank, strict=True) if at == shared]
        if len(here) > shared.limit and len(set(here)) > 1:
            return (
                "ranks share processors, and each is a session, which some Linux kernels serve very "
                "unevenly; where times scatter: sysctl kernel.sched_autogroup_enabled=0, "
                "or on one host --nproc N"
            )
    return None


def _session() -> str:
    """The name of this process's session, where Linux shares processors between sessions; else nothing."""
    with suppress(OSError, IndexError, ValueError):
        if _SESSIONS_FIRST.read_text().strip() == "1" and not _limited_apart():
            return _SESSION.read_text().split()[0]
    return ""


def _limited_apart() -> bool:
    """Whether a control group that is not the root shares out processors; then sessions do not."""
    unified = "/"
    for line in _CGROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            return path != "/"
        if not controllers:
            unified = path
    own = _CGROUP / unified.lstrip("/")
    return any((folder / "cpu.max").exists() for folder in (own, *own.parents))


def compute_share(ranks: Ranks, processors: Processors, compute: Callable[[], None]) -> float:
    """The share of processors that ``compute`` keeps busy, called by all ranks at once."""
    ranks.barrier()
    began, spent = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < COMPUTE_S:
        compute()
    # Each rank until its own last call ended, as ranks need not end together.
    share = (time.process_time() - spent) / (time.perf_counter() - began)
    return min(1.0, processors.time_s(ranks.gather(share)))
