"""Seconds of collectives over the stages of a mesh, all sibling groups active at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hzplan.core.buffers import MAX_IN_FLIGHT, scratch_bytes
from hzplan.core.hierarchy import Mesh, Stage
from hzplan.formats.profile import CollectiveCurve, CollectivePoint, Operation
from hzplan.profiler.session.ranks import Ranks
from hzplan.profiler.session.rounds import rounds
from hzplan.profiler.session.statistics import nanoseconds, rising, sizes, spread
from hzplan.runtime.collectives import Gather, Reduction
from hzplan.runtime.groups import Communicators

FIRST_BYTES = 4 << 10
LAST_BYTES = 64 << 20
FACTOR = 4
MIN_REPEATS = 3
MAX_REPEATS = 20
STAGE_BUDGET_S = 4.0
BATCH_S = 0.004
"""Calls shorter than this are timed several at once, or the start of the ranks would be the measure."""
MAX_CALLS = 16

OPERATIONS: Mapping[Operation, str] = {
    "all_gather": "unshard",
    "reduce_scatter": "reduce",
    "all_reduce": "reduce",
    "all_to_all": "reduce",
}
"""What is measured, and the stream whose communicator carries it in a step."""


@dataclass(frozen=True)
class Case:
    """A collective to time: ``run`` issues it on ``bytes`` bytes, ``calls`` times in a row per sample."""

    operation: Operation
    stage: Stage
    bytes: int
    calls: int
    run: Callable[[], None]


def measure_links(
    ranks: Ranks, mesh: Mesh, dtype: torch.dtype, largest_bytes: int, progress: Callable[[float], None]
) -> tuple[CollectiveCurve, ...]:
    """A curve for every operation and stage, the same on every rank.

    Sizes are those of the coarser slice, from 4 KiB to the first at or above ``largest_bytes`` (of a whole
    buffer; at most 64 MiB), fewer where a link is so slow that the next would take more than the budget.
    A sample is the slowest rank's time of a call, and a point their median. Curves rise: points where noise
    says otherwise share their mean.
    """
    stages = mesh.stages()
    if not stages:
        return ()
    groups = Communicators(mesh, [(kind, stage) for stage in stages for kind in OPERATIONS.values()])
    cases = [case for stage in stages for case in _cases(ranks, mesh, stage, groups, dtype, largest_bytes)]
    results = rounds(
        ranks,
        [partial(_seconds, ranks, case.run, case.calls) for case in cases],
        at_least=MIN_REPEATS,
        at_most=MAX_REPEATS,
        budget_s=STAGE_BUDGET_S * len(stages),
        progress=progress,
    )
    samples = {
        (case.operation, case.stage, case.bytes): [max(by_rank) for by_rank in result]
        for case, result in zip(cases, results, strict=True)
    }
    return tuple(
        _curve(
            operation,
            stage,
            {nbytes: s for (other, at, nbytes), s in samples.items() if (other, at) == (operation, stage)},
        )
        for stage in stages
        for operation in OPERATIONS
    )


def measure_norm(ranks: Ranks) -> float:
    """Seconds until all ranks know the sum of one number of each: the slowest rank's, the median."""
    if ranks.size == 1:
        return 0.0
    number = torch.zeros((), dtype=torch.float64, device=ranks.device)
    seconds = [_seconds(ranks, partial(_all_reduce, number, None), 1) for _ in range(MAX_REPEATS)]
    return nanoseconds(statistics.median(map(max, zip(*ranks.gather(seconds), strict=True))))


def _cases(
    ranks: Ranks, mesh: Mesh, stage: Stage, groups: Communicators, dtype: torch.dtype, largest_bytes: int
) -> Iterator[Case]:
    """What to time for a stage, each called before; every rank decides alike."""
    size = mesh.group_size(stage)
    place = mesh.group(ranks.rank, stage).index(ranks.rank)
    last = min(largest_bytes, LAST_BYTES) // mesh.shards[stage.low]
    wanted = sizes(FIRST_BYTES, last, FACTOR, size * dtype.itemsize)
    whole = torch.empty(wanted[-1] // dtype.itemsize, dtype=dtype, device=ranks.device).zero_()
    # As much as the runtime gives a reduction.
    scratch = torch.zeros(
        scratch_bytes(whole.nbytes // size) // MAX_IN_FLIGHT // dtype.itemsize,
        dtype=dtype,
        device=ranks.device,
    )
    for operation, kind in OPERATIONS.items():
        issue = partial(collective, operation, groups[kind, stage], size, place, scratch=scratch)
        for index, nbytes in enumerate(wanted):
            run = issue(whole[: nbytes // dtype.itemsize])
            run()
            once = max(ranks.gather(_seconds(ranks, run, 1)))
            yield Case(operation, stage, nbytes, max(1, min(MAX_CALLS, int(BATCH_S / once))), run)
            if index >= 1 and once * FACTOR * MIN_REPEATS > STAGE_BUDGET_S / len(OPERATIONS):
                break


def collective(
    operation: Operation,
    group: dist.ProcessGroup,
    size: int,
    place: int,
    whole: Tensor,
    scratch: Tensor,
) -> Callable[[], None]:
    """A call as the runtime issues it: in place, with this rank's the ``place``-th of ``size`` parts."""
    length = whole.numel() // size
    part = whole[place * length : (place + 1) * length]
    if operation == "all_gather":
        return Gather(whole, part, group).run
    if operation == "reduce_scatter":
        return Reduction(part, whole, group, scratch).run
    if operation == "all_to_all":
        return partial(_all_to_all, torch.empty_like(whole), whole, group)
    return partial(_all_reduce, whole, group)


def _all_reduce(whole: Tensor, group: dist.ProcessGroup | None) -> None:
    dist.all_reduce(whole, group=group)


def _all_to_all(arrives: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(arrives, whole, group=group)


def _seconds(ranks: Ranks, run: Callable[[], None], calls: int) -> float:
    """This rank's time of a call, from a barrier of the whole world on."""
    ranks.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        run()
    ranks.finish_device()
    return (time.perf_counter() - started) / calls


def _curve(operation: Operation, stage: Stage, samples: Mapping[int, list[float]]) -> CollectiveCurve:
    medians = rising([statistics.median(seconds) for seconds in samples.values()])
    return CollectiveCurve(
        operation=operation,
        low=stage.low,
        high=stage.high,
        points=tuple(
            CollectivePoint(bytes=nbytes, seconds=nanoseconds(median), spread=spread(seconds))
            for (nbytes, seconds), median in zip(samples.items(), medians, strict=True)
        ),
    )
