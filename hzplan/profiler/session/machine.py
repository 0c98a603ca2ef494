"""A rank's machine: memory, FLOPs per second, and the versions that measure."""

from __future__ import annotations

import os
import platform
import statistics
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

import hzplan
from hzplan.formats.profile import ProvenanceEntry
from hzplan.profiler.session.ranks import Ranks, local_ranks

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")

PEAK_SIZES = (256, 1024, 4096)
"""Rows of the square matrices that are multiplied."""
PEAK_REPEATS = 3
PEAK_BATCH_S = 0.06
"""Least seconds of a sample, more than a scheduler's slice, so that ranks on one core compete for it."""
PEAK_MAX_CALLS = 64
PEAK_LONGEST_S = 0.5
"""No larger product is tried that is expected to take more seconds."""


def rank_memory_bytes(ranks: Ranks) -> int:
    """The CUDA device's memory; on CPU an equal share of the host's, or of what its container may use."""
    if ranks.device.type == "cuda":
        return int(torch.cuda.mem_get_info(ranks.device)[1])
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no cgroup, or "max"
        total = min(total, int(_CGROUP_LIMIT.read_text()))
    return max(1, min(ranks.gather(total // local_ranks(ranks))))


def untracked_bytes(ranks: Ranks) -> int:
    """Bytes of a CUDA device that torch's allocator does not have: the context, libraries, communicators, and
    what other processes have there. The rank's with most; 0 on CPU."""
    if ranks.device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(ranks.device)
    return max(ranks.gather(total - free - torch.cuda.memory_reserved(ranks.device)))


def peak_flops(ranks: Ranks, dtype: torch.dtype) -> float:
    """FLOPs per second of a rank's best matrix products while all ranks compute; the middle rank's.

    Ever larger products, until one takes long: some dtypes are very slow on some devices.
    """
    best = 0.0
    for size in PEAK_SIZES:
        a = torch.ones(size, size, dtype=dtype, device=ranks.device)
        out = a @ a
        once = max(ranks.gather(_products(ranks, a, out, 1)))
        calls = max(1, min(PEAK_MAX_CALLS, int(PEAK_BATCH_S / once)))
        seconds = min(_products(ranks, a, out, calls) for _ in range(PEAK_REPEATS)) / calls
        best = max(best, 2 * size**3 / statistics.median(ranks.gather(seconds)))
        if once * 4**3 > PEAK_LONGEST_S:  # the next product's time
            break
    return round(best, -6)


def _products(ranks: Ranks, a: Tensor, out: Tensor, calls: int) -> float:
    ranks.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        torch.mm(a, a, out=out)
    ranks.finish_device()
    return time.perf_counter() - started


def provenance(ranks_per_host: int | None = None) -> ProvenanceEntry:
    """Now, and the versions of what measures; ``ranks_per_host``: how many measure beside each other."""
    return ProvenanceEntry(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        hzplan=hzplan.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        cpus=os.cpu_count() or 1,
        ranks_per_host=ranks_per_host,
    )
