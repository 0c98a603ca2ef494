"""Looks at what all ranks say of their steps, and names the one that is slow, or that grows."""

from __future__ import annotations

import os
import socket
import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from hzplan.profiler.session.ranks import Ranks

WINDOW = 6
"""Steps whose median counts."""

SLOW_STEP = 2.0
"""How many times as long as the others' median a rank computes that is named."""

LEAST_S = 1e-3
"""Ranks that compute shorter than this differ by chance."""

SETTLED = 50
"""Steps after which a rank has all the memory that it needs."""

GROWN = 1.25
LEAST_GROWTH_BYTES = 128 << 20
"""Growth that is named, and named again when there is as much more: in proportion, and at least."""


class Watch:
    """Of one run. ``hosts``: by rank, for people to find the machine."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = list(hosts)
        self._busy: deque[Sequence[float]] = deque(maxlen=WINDOW)
        self._named: set[int] = set()  # ranks that are known to be slow
        self._before: dict[int, float] = {}  # bytes that growth is measured against
        self._steps = 0

    def note(self, busy_s: Sequence[float], memory_bytes: Sequence[float]) -> list[str]:
        """What is new after a step, a line each: by rank, seconds without waiting (below 0 where they are not
        known) and bytes in use."""
        self._steps += 1
        if min(busy_s) >= 0:
            self._busy.append(busy_s)
        return [*self._slow(), *self._growing(memory_bytes)]

    def _slow(self) -> list[str]:
        if len(self._busy) < WINDOW or len(self._hosts) < 2:
            return []
        of_rank = [statistics.median(times) for times in zip(*self._busy, strict=True)]
        found = []
        for rank, mine in enumerate(of_rank):
            others = statistics.median(of_rank[:rank] + of_rank[rank + 1 :])
            if mine < max(SLOW_STEP * others, LEAST_S):
                self._named.discard(rank)
            elif rank not in self._named:
                self._named.add(rank)
                found.append(
                    f"{self._name(rank)} is slow: it computes {mine / max(others, 1e-9):.1f} times as long "
                    f"as the others ({mine * 1e3:.0f} against {others * 1e3:.0f} ms of a step), and everyone "
                    "waits for it; look at its machine"
                )
        return found

    def _growing(self, memory_bytes: Sequence[float]) -> list[str]:
        if self._steps < SETTLED:
            return []
        found = []
        for rank, now in enumerate(memory_bytes):
            before = self._before.setdefault(rank, now)
            if now > before * GROWN and now > before + LEAST_GROWTH_BYTES:
                self._before[rank] = now
                found.append(
                    f"{self._name(rank)} grows: {now / 2**20:,.0f} MiB in use, {before / 2**20:,.0f} MiB "
                    "some steps ago; something in its loop keeps what it should let go"
                )
        return found

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}"


def memory_in_use(device: torch.device) -> int:
    """Bytes that this process holds: of a GPU's memory, or the host's (0 where the system does not say)."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def hosts() -> list[str]:
    """The names of all ranks' machines; every rank calls it."""
    return Ranks.here().gather(socket.gethostname())
