"""Seconds of collectives over the stages of a mesh, all sibling groups active at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hzplan.formats.profile import CollectiveCurve, CollectivePoint, Operation
from hzplan.hierarchy import Mesh, Stage
from hzplan.profiler.ranks import Ranks
from hzplan.profiler.samples import nanoseconds, rising, sizes, spread
from hzplan.runtime.collectives import all_gather, reduce_scatter
from hzplan.runtime.groups import Communicators

FIRST_BYTES = 4 << 10
LAST_BYTES = 64 << 20
FACTOR = 4
STAGE_BUDGET_S = 4.0
MIN_REPEATS = 3
MAX_REPEATS = 15
BATCH_S = 0.004
"""Calls shorter than this are timed several at once, or the start of the ranks would be the measure."""
MAX_CALLS = 16

OPERATIONS: Mapping[Operation, str] = {
    "all_gather": "unshard",
    "reduce_scatter": "reduce",
    "all_reduce": "reduce",
}
"""What is measured, and the stream whose communicator carries it in a step."""


@dataclass(frozen=True)
class Sample:
    """One size: seconds of a call per repeat, the slowest rank's; and seconds spent measuring."""

    seconds: tuple[float, ...]
    spent_s: float


def measure_links(
    ranks: Ranks, mesh: Mesh, dtype: torch.dtype, largest_bytes: int, progress: Callable[[float], None]
) -> tuple[CollectiveCurve, ...]:
    """A curve for every operation and stage, the same on every rank.

    Sizes are those of the coarser slice, from 4 KiB to the first at or above ``largest_bytes`` (of a whole
    buffer; at most 64 MiB), fewer where links are so slow that a stage would take much more than its budget.
    Curves rise: points where noise says otherwise share their mean.
    """
    stages = mesh.stages()
    groups = Communicators(mesh, [(kind, stage) for stage in stages for kind in OPERATIONS.values()])
    curves: list[CollectiveCurve] = []
    for stage in stages:
        size = mesh.group_size(stage)
        place = mesh.group(ranks.rank, stage).index(ranks.rank)
        last = min(largest_bytes, LAST_BYTES) // mesh.shards[stage.low]
        wanted = sizes(FIRST_BYTES, last, FACTOR, size * dtype.itemsize)
        whole = torch.empty(wanted[-1] // dtype.itemsize, dtype=dtype, device=ranks.device).zero_()
        scratch = torch.empty_like(whole).zero_()
        for operation, kind in OPERATIONS.items():
            call = _call(operation, groups[kind, stage], size, place, scratch)
            points: list[tuple[int, Sample]] = []
            spent = 0.0
            budget = STAGE_BUDGET_S / len(OPERATIONS)
            for index, nbytes in enumerate(wanted):
                if len(points) >= 2 and spent > budget:
                    break
                left = max(0.0, budget - spent) / (len(wanted) - index)
                sample = _sample(ranks, call, whole[: nbytes // dtype.itemsize], left)
                points.append((nbytes, sample))
                spent += sample.spent_s
                progress((len(curves) + (index + 1) / len(wanted)) / (len(stages) * len(OPERATIONS)))
            curves.append(_curve(operation, stage, points))
    return tuple(curves)


def _call(
    operation: Operation, group: dist.ProcessGroup, size: int, place: int, scratch: Tensor
) -> Callable[[Tensor], None]:
    """The collective exactly as the runtime issues it, in place."""

    def part(whole: Tensor) -> Tensor:
        length = whole.numel() // size
        return whole[place * length : (place + 1) * length]

    def gather(whole: Tensor) -> None:
        all_gather(whole, part(whole), group)

    def scatter(whole: Tensor) -> None:
        reduce_scatter(part(whole), whole, group, scratch)

    def reduce(whole: Tensor) -> None:
        dist.all_reduce(whole, group=group)

    calls: dict[Operation, Callable[[Tensor], None]] = {
        "all_gather": gather,
        "reduce_scatter": scatter,
        "all_reduce": reduce,
    }
    return calls[operation]


def _sample(ranks: Ranks, call: Callable[[Tensor], None], whole: Tensor, budget_s: float) -> Sample:
    """Repeat a call in batches that begin at a barrier of all ranks; every rank decides alike."""
    started = time.perf_counter()
    call(whole)
    once = max(ranks.gather(_batch(ranks, call, whole, 1)))
    calls = max(1, min(MAX_CALLS, int(BATCH_S / max(once, 1e-9))))
    repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(budget_s / (once * calls))))
    by_rank = ranks.gather([_batch(ranks, call, whole, calls) for _ in range(repeats)])
    seconds = tuple(max(batch) / calls for batch in zip(*by_rank, strict=True))
    return Sample(seconds, max(ranks.gather(time.perf_counter() - started)))


def _batch(ranks: Ranks, call: Callable[[Tensor], None], whole: Tensor, calls: int) -> float:
    ranks.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        call(whole)
    ranks.finish_device()
    return time.perf_counter() - started


def _curve(operation: Operation, stage: Stage, points: list[tuple[int, Sample]]) -> CollectiveCurve:
    medians = rising([statistics.median(sample.seconds) for _, sample in points])
    return CollectiveCurve(
        operation=operation,
        low=stage.low,
        high=stage.high,
        points=tuple(
            CollectivePoint(bytes=nbytes, seconds=nanoseconds(seconds), spread=spread(sample.seconds))
            for (nbytes, sample), seconds in zip(points, medians, strict=True)
        ),
    )
