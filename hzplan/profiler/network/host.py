"""Seconds of copies between a device and the host's memory, in both directions at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from hzplan.formats.profile import CopyPoint, HostEntry
from hzplan.profiler.session.ranks import Ranks
from hzplan.profiler.session.rounds import rounds
from hzplan.profiler.session.statistics import nanoseconds, rising, sizes, spread

FIRST_BYTES = 64 << 10
LAST_BYTES = 256 << 20
FACTOR = 4
MIN_REPEATS = 3
MAX_REPEATS = 10
BUDGET_S = 2.0
"""Seconds of copies after which no other round is begun."""
COPIES = 4
"""Copies in each direction timed together: as in a step, one begins while another ends."""


def measure_host(
    ranks: Ranks, progress: Callable[[float], None], *, largest_bytes: int = LAST_BYTES
) -> HostEntry:
    """A curve from 64 KiB to ``largest_bytes``, all ranks at once; of page-locked memory where a GPU copies.

    A sample is the slowest rank's time of a copy while another goes the other way, a point their median.
    """
    wanted = sizes(FIRST_BYTES, largest_bytes, FACTOR, 1)
    with ThreadPoolExecutor(2, thread_name_prefix="hzplan host") as threads:
        results = rounds(
            ranks,
            [partial(_seconds, ranks, _both(size, ranks.device, threads)) for size in wanted],
            at_least=MIN_REPEATS,
            at_most=MAX_REPEATS,
            budget_s=BUDGET_S,
            progress=progress,
        )
    samples = [[max(by_rank) for by_rank in result] for result in results]
    medians = rising([statistics.median(seconds) for seconds in samples])
    return HostEntry(
        points=tuple(
            CopyPoint(bytes=size, seconds=nanoseconds(median), spread=spread(seconds))
            for size, median, seconds in zip(wanted, medians, samples, strict=True)
        )
    )


def _both(nbytes: int, device: torch.device, threads: ThreadPoolExecutor) -> Callable[[], None]:
    """Copies to the device and from it, side by side as a step's streams do them."""
    on_gpu = device.type == "cuda"
    on_host = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
    on_device = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) if on_gpu else None for _ in range(2)]

    def copy(target: Tensor, source: Tensor, stream: torch.cuda.Stream | None) -> None:
        with torch.cuda.stream(stream):
            for _ in range(COPIES):
                target.copy_(source, non_blocking=True)

    directions = [(on_device[0], on_host[0], streams[0]), (on_host[1], on_device[1], streams[1])]

    def run() -> None:
        for submitted in [threads.submit(copy, *direction) for direction in directions]:
            submitted.result()  # on a GPU the copies are then enqueued

    return run


def _seconds(ranks: Ranks, both: Callable[[], None]) -> float:
    ranks.barrier()
    started = time.perf_counter()
    both()
    ranks.finish_device()
    return (time.perf_counter() - started) / COPIES
