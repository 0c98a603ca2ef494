"""Processor time of this process by what its threads are for, from the kernel's account."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

COMPUTE, STREAMS, LIBRARY, OTHER = "compute", "streams", "library", "other"
"""The thread that trains; this runtime's own beside it; the communication library's; all others."""
OURS = "hzplan "
"""How names of the runtime's threads begin."""
LIBRARIES = ("gloo", "pt_gloo", "pt_nccl", "nccl")
"""How the names that the kernel knows of libraries' threads begin, in lower case."""


def by_thread() -> Mapping[str, float]:
    """Seconds of processor time so far, by purpose; empty where the kernel keeps no such account."""
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for folder in Path("/proc/self/task").glob("*"):
        with suppress(OSError, ValueError, IndexError):  # a thread that has ended meanwhile, another kernel
            spent_ns = int((folder / "schedstat").read_text().split()[0])
            ident = int(folder.name)
            name = named.get(ident) or (folder / "comm").read_text().strip()
            purpose = _purpose(ident, name)
            found[purpose] = found.get(purpose, 0.0) + spent_ns / 1e9
    return found


def since(before: Mapping[str, float]) -> dict[str, float]:
    """Seconds by purpose after ``before``."""
    return {purpose: spent - before.get(purpose, 0.0) for purpose, spent in by_thread().items()}


def _purpose(ident: int, name: str) -> str:
    if ident == os.getpid():
        return COMPUTE
    if name.startswith(OURS):
        return STREAMS
    return LIBRARY if name.lower().startswith(LIBRARIES) else OTHER
