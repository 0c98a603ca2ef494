"""Stragglers: ranks that compute more slowly than the others, or are behind a slower link."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from hzplan.core.hierarchy import Mesh, Stage
from hzplan.formats.profile import StragglerEntry
from hzplan.profiler.session.ranks import Ranks
from hzplan.runtime.backends.groups import process_group

SLOW = 1.3
"""Least slowdown, over the median of the others, at which a rank is named."""
SHIFTS = 4
"""Other ranks of its group that a rank sends to at most, one after the other."""
REPEATS = 3
MESSAGE_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}


def slow_compute(ranks: Ranks, seconds: float) -> tuple[StragglerEntry, ...]:
    """Ranks whose forward and backward take longer than the others'; every rank calls it with its own."""
    by_rank = ranks.gather(seconds)
    slow = {rank: times for rank, times in enumerate(slower_than_others(by_rank)) if times > SLOW}
    return entries(ranks, "compute", slow)


def slow_links(ranks: Ranks, mesh: Mesh) -> tuple[StragglerEntry, ...]:
    """Ranks to and from whom messages take longer, tier by tier; every rank calls it.

    Of two ranks nobody can say whose end of the link is slow: only groups of three and more are looked at.
    """
    slow: dict[int, float] = {}
    for low, high in mesh.tier_bounds:
        stage = Stage(low, high)
        if mesh.group_size(stage) < 3:
            continue
        seconds = dict[tuple[int, int], float]()
        for of_rank in ranks.gather(_arrivals(ranks, mesh, stage)):
            seconds |= of_rank
        for rank, times in slow_ends(seconds, ranks.size, partial(_members, mesh, stage)).items():
            slow[rank] = max(times, slow.get(rank, 0.0))
    return entries(ranks, "links", slow)


def slower_than_others(seconds: Sequence[float]) -> list[float]:
    """For every rank how many times as long it takes as the median of the others; 1 for a rank alone."""
    return [
        own / statistics.median(others) if (others := [*seconds[:rank], *seconds[rank + 1 :]]) else 1.0
        for rank, own in enumerate(seconds)
    ]


def slow_ends(
    seconds: Mapping[tuple[int, int], float], size: int, group_of: Callable[[int], Sequence[int]]
) -> dict[int, float]:
    """Ranks at an end of every slow transfer, and how many times as long theirs take as other ranks'.

    ``seconds``: by sender and receiver; ``group_of``: the ranks that a rank exchanges with.
    """
    found: dict[int, float] = {}
    for rank in range(size):
        group = {*group_of(rank)}
        own = [s for ends, s in seconds.items() if rank in ends]
        others = [s for ends, s in seconds.items() if rank not in ends and {*ends} <= group]
        if own and others and (times := min(own) / statistics.median(others)) > SLOW:
            found[rank] = max(times, statistics.median(own) / statistics.median(others))
    return found


def entries(
    ranks: Ranks, what: Literal["compute", "links"], slow: Mapping[int, float]
) -> tuple[StragglerEntry, ...]:
    """One for every host with slow ranks; every rank calls it."""
    hosts = ranks.gather(_host())
    by_host: dict[str, list[int]] = {}
    for rank in sorted(slow):
        by_host.setdefault(hosts[rank], []).append(rank)
    return tuple(
        StragglerEntry(
            what=what, host=host, ranks=tuple(listed), slowdown=round(max(slow[rank] for rank in listed), 2)
        )
        for host, listed in by_host.items()
    )


def _arrivals(ranks: Ranks, mesh: Mesh, stage: Stage) -> dict[tuple[int, int], float]:
    """Median seconds until a message arrives, by its sender and this rank; all ranks send at once."""
    members = mesh.group(ranks.rank, stage)
    place, size = members.index(ranks.rank), len(members)
    group = process_group(mesh, "unshard", stage, ranks.rank, range(ranks.size), ranks.device)
    message = torch.zeros(MESSAGE_BYTES[ranks.device.type], dtype=torch.uint8, device=ranks.device)
    received = torch.empty_like(message)
    found: dict[tuple[int, int], float] = {}
    for shift in range(1, min(size - 1, SHIFTS) + 1):
        to, sender = members[(place + shift) % size], members[(place - shift) % size]
        samples = []
        for _ in range(REPEATS + 1):
            ranks.barrier()
            began = time.perf_counter()
            receive, send = (
                dist.P2POp(dist.irecv, received, sender, group),
                dist.P2POp(dist.isend, message, to, group),
            )
            works = dist.batch_isend_irecv([receive, send])
            works[0].wait()
            ranks.finish_device()
            samples.append(time.perf_counter() - began)
            for work in works[1:]:
                work.wait()
        found[sender, ranks.rank] = statistics.median(samples[1:])  # the first one connects
    return found


def _members(mesh: Mesh, stage: Stage, rank: int) -> Sequence[int]:
    return mesh.group(rank, stage)


def _host() -> str:
    node = os.environ.get("GROUP_RANK")
    return platform.node() if node is None else f"{platform.node()}, node {node}"
