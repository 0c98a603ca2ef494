"""Seconds of collectives over the stages of a mesh, all sibling groups active at once.

A sample is the slowest rank's time, a point of a curve the median of samples. Where noise says that more
bytes take less time, the points share their mean (``statistics.rising``). Where ranks share processors their
processor time is measured beside it: messages that hide each other's latency do not hide that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hzplan.core.buffers import MAX_IN_FLIGHT, scratch_bytes
from hzplan.core.hierarchy import Mesh, Stage
from hzplan.formats.profile import CollectiveCurve, CollectivePoint, Operation
from hzplan.profiler.session.processors import Processors
from hzplan.profiler.session.ranks import Ranks
from hzplan.profiler.session.rounds import rounds
from hzplan.profiler.session.statistics import nanoseconds, rising, sizes, spread
from hzplan.runtime.backends.base import Buffers
from hzplan.runtime.backends.groups import ProcessGroup
from hzplan.runtime.backends.packing import Form
from hzplan.runtime.world import ProcessWorld

FIRST_BYTES = 4 << 10
LAST_BYTES = 64 << 20
FACTOR = 4
MIN_REPEATS = 3
MAX_REPEATS = 20
STAGE_BUDGET_S = 4.0
"""Seconds for the samples of one stage, all operations and sizes together."""
BATCH_S = 0.004
"""Least seconds of a sample; shorter calls are timed several in a row, as ranks do not start at once."""
MAX_CALLS = 16

OPERATIONS: tuple[Operation, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
"""The measured collectives; a stage's share a communicator, since they are timed one at a time."""


@dataclass(frozen=True)
class TimedCollective:
    """A collective to time: ``run`` issues it on ``bytes`` bytes, ``calls`` times in a row per sample."""

    operation: Operation
    stage: Stage
    bytes: int
    calls: int
    run: Callable[[], object]


class _Sample(NamedTuple):
    """Seconds of a call on a rank, and of processor time of all of its threads."""

    seconds: float
    processor_s: float


def measure_links(
    ranks: Ranks,
    mesh: Mesh,
    dtype: torch.dtype,
    largest_bytes: int,
    joined_bytes: int,
    progress: Callable[[float], None],
    processors: Processors | None = None,
) -> tuple[CollectiveCurve, ...]:
    """A curve for every operation and stage, the same on every rank.

    Sizes are those of the coarser slice, from 4 KiB to the first at or above ``largest_bytes`` (of a whole
    buffer; at most 64 MiB), of all-reduces to ``joined_bytes``, for gradients of several units are summed as
    one; fewer where a link is so slow that the next would take more than the budget.
    A sample is the slowest rank's time of a call, and a point their median. Curves rise: points where noise
    says otherwise share their mean. ``processors``: those that ranks share, and whose time counts.
    """
    stages = timed_stages(mesh)
    if not stages:
        return ()
    timed = [
        each
        for stage, operations in stages.items()
        for each in _timed_collectives(ranks, mesh, stage, operations, dtype, largest_bytes, joined_bytes)
    ]
    results = rounds(
        ranks,
        [partial(_sample, ranks, each.run, each.calls) for each in timed],
        at_least=MIN_REPEATS,
        at_most=MAX_REPEATS,
        budget_s=STAGE_BUDGET_S * len(stages),
        progress=progress,
    )
    samples = {
        (each.operation, each.stage, each.bytes): result for each, result in zip(timed, results, strict=True)
    }
    return tuple(
        _curve(
            *(operation, stage),
            {nbytes: s for (other, at, nbytes), s in samples.items() if (other, at) == (operation, stage)},
            processors,
        )
        for stage, operations in stages.items()
        for operation in operations
    )


def timed_stages(mesh: Mesh) -> dict[Stage, tuple[Operation, ...]]:
    """The operations that are timed by stage; over all tiers at once that of DDP."""
    found: dict[Stage, tuple[Operation, ...]] = dict.fromkeys(mesh.stages(), OPERATIONS)
    return found if mesh.whole is None else found | {mesh.whole: ("all_reduce",)}


def measure_norm(ranks: Ranks) -> float:
    """Seconds until all ranks know the sum of one number of each: the slowest rank's, the median."""
    if ranks.size == 1:
        return 0.0
    number = torch.zeros((), dtype=torch.float64, device=ranks.device)
    add = partial(ProcessWorld().all_reduce, number)
    seconds = [_sample(ranks, add, 1).seconds for _ in range(MAX_REPEATS)]
    return nanoseconds(statistics.median(map(max, zip(*ranks.gather(seconds), strict=True))))


def _timed_collectives(
    ranks: Ranks,
    mesh: Mesh,
    stage: Stage,
    operations: Sequence[Operation],
    dtype: torch.dtype,
    largest_bytes: int,
    joined_bytes: int,
) -> Iterator[TimedCollective]:
    """The collectives to time for a stage, each warmed up by a call; every rank decides alike."""
    size = mesh.group_size(stage)
    wanted = {
        operation: sizes(
            FIRST_BYTES,
            min(joined_bytes if operation == "all_reduce" else largest_bytes, LAST_BYTES)
            // mesh.shards[stage.low],
            *(FACTOR, size * dtype.itemsize),
        )
        for operation in operations
    }
    whole = torch.empty(
        max(many[-1] for many in wanted.values()) // dtype.itemsize, dtype=dtype, device=ranks.device
    ).zero_()
    # As much as the runtime gives a reduction.
    scratch = torch.zeros(
        scratch_bytes(whole.nbytes // size) // MAX_IN_FLIGHT // dtype.itemsize,
        dtype=dtype,
        device=ranks.device,
    )
    kind = "reduce" if stage == mesh.whole else "unshard"
    group = ProcessWorld().new_group(mesh, kind, stage, ranks.device)
    for operation in operations:
        issue = partial(collective, operation, group, scratch=scratch)
        for index, nbytes in enumerate(wanted[operation]):
            run = issue(whole[: nbytes // dtype.itemsize])
            run()
            once = max(ranks.gather(_sample(ranks, run, 1).seconds))
            yield TimedCollective(operation, stage, nbytes, max(1, min(MAX_CALLS, int(BATCH_S / once))), run)
            if index >= 1 and once * FACTOR * MIN_REPEATS > STAGE_BUDGET_S / len(OPERATIONS):
                break


def collective(
    operation: Operation, group: ProcessGroup, whole: Tensor, scratch: Tensor, form: Form | None = None
) -> Callable[[], object]:
    """A call as the runtime issues it, in place; all-to-all as torch issues it. ``form``: what travels."""
    buffers = Buffers(whole, whole.view(group.size, -1)[group.place], form)
    if operation == "all_gather":
        return group.all_gather([buffers]).run
    if operation == "reduce_scatter":
        return group.reduce_scatter([buffers], scratch).run
    if operation == "all_to_all":
        return partial(dist.all_to_all_single, torch.empty_like(whole), whole, group=group.handle)
    return group.all_reduce([buffers], scratch).run


def _sample(ranks: Ranks, run: Callable[[], object], calls: int) -> _Sample:
    """This rank's time of a call, from a barrier of the whole world on."""
    ranks.barrier()
    started, spent = time.perf_counter(), time.process_time()
    for _ in range(calls):
        run()
    ranks.finish_device()
    return _Sample((time.perf_counter() - started) / calls, (time.process_time() - spent) / calls)


def _curve(
    operation: Operation,
    stage: Stage,
    by_size: Mapping[int, list[list[_Sample]]],
    processors: Processors | None,
) -> CollectiveCurve:
    """From samples by size, round and rank."""
    samples = [[max(one.seconds for one in ranks) for ranks in rounds] for rounds in by_size.values()]
    medians = rising([statistics.median(seconds) for seconds in samples])
    taken: Sequence[float | None] = [None] * len(samples)
    if processors is not None:
        taken = rising(
            [
                statistics.median(processors.time_s([one.processor_s for one in ranks]) for ranks in rounds)
                for rounds in by_size.values()
            ]
        )
    return CollectiveCurve(
        operation=operation,
        low=stage.low,
        high=stage.high,
        points=tuple(
            CollectivePoint(
                bytes=nbytes,
                seconds=nanoseconds(median),
                spread=spread(seconds),
                processor_seconds=None if one is None else nanoseconds(one),
            )
            for nbytes, seconds, median, one in zip(by_size, samples, medians, taken, strict=True)
        ),
    )
