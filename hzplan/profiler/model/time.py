"""Seconds of each use of a unit at each micro-batch size, and a profile's uses with them."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

from hzplan.core.recompute import HOST, WAYS, Way
from hzplan.core.schedule import Use
from hzplan.errors import UserError
from hzplan.formats.profile import UnitEntry, UseCost, UseEntry
from hzplan.models.recompute import leaves, switched
from hzplan.profiler.model.build import RunnableModel
from hzplan.profiler.model.calls import RecordedCalls
from hzplan.profiler.model.memory import Segment
from hzplan.profiler.model.passes import NOT_FIXED, Pass, record_recomputation
from hzplan.profiler.model.reads import unread_uses
from hzplan.profiler.model.recompute import (
    RecomputeCosts,
    recompute_differences,
    recompute_from_forwards,
    use_entries,
    without_time,
)
from hzplan.profiler.session.clock import clock
from hzplan.profiler.session.processors import Processors
from hzplan.profiler.session.ranks import Ranks
from hzplan.profiler.session.rounds import THOROUGH, Effort, rounds
from hzplan.profiler.session.statistics import nanoseconds, spread, trimmed_mean

MIN_BLOCKS = 2
MAX_BLOCKS = 5
STEADY_SPREAD = 0.03
"""Blocks end early when the spread of a rank's whole passes is below this, at the median rank."""

Repeats = Sequence[Sequence[Sequence[float]]]
"""Seconds by repeat, rank and use."""


class _Block(NamedTuple):
    """Of several passes on a rank the seconds of each use, and of processor time."""

    rows: list[list[float]]
    processor_s: list[float]


class _Timed(NamedTuple):
    """A pass: ``repeats`` none where it once failed or had other uses; ``least_s``: its processor time, of
    all ranks that share processors over the number of these, 0 where a device computes."""

    repeats: list[list[list[float]]]
    least_s: float


def measure_uses(
    ranks: Ranks,
    model: RunnableModel,
    passes: Sequence[Pass],
    progress: Callable[[float], None],
    effort: Effort = THOROUGH,
    *,
    recompute: bool = True,
) -> tuple[tuple[UseEntry, ...], float]:
    """Time every pass, without recomputation and, where ``recompute``, with it, in blocks of one size, to
    which the allocator gets used; the uses, the same on every rank, and this rank's own median seconds of the
    last pass.

    Raises UserError when the model does not use its units in the same order every time.
    """
    shapes = model.shapes if model.weight_shared else None
    uses = passes[0].uses
    if any(recorded.uses != uses for recorded in passes):
        raise UserError(f"{model.name}: {NOT_FIXED} the micro-batch size")
    again: dict[Way, list[Pass]] = {}
    with switched(model.units) as switch:
        on_host = effort.host_on_cpu or ranks.device.type != "cpu"
        for way in [way for way in WAYS if on_host or way != HOST] if recompute and not shapes else ():
            again[way] = record_recomputation(ranks, model.calls, passes, switch, way, warm=effort.warm)
        saved = again.pop(HOST, [])  # whose copies take their time on the side
        timed = [*passes, *itertools.chain.from_iterable(again.values())]
        times = _times(ranks, model.calls, timed, progress, effort)
    if not all(one.repeats for one in times[: len(passes)]):
        raise UserError(f"{model.name}: {NOT_FIXED} chance or earlier calls")
    kinds = [use_kinds(model.entries, uses, recorded.flops) for recorded in passes]

    def costs_of(some: Sequence[Pass]) -> list[list[UseCost]]:
        """None where a pass failed: a model that could recompute a few times may not always."""
        own = [times[timed.index(recorded)] for recorded in some]
        return [
            use_costs(recorded.micro_batch, kind, recorded.flops, recorded.memory, *found)
            for recorded, kind, found in zip(some, kinds, own, strict=True)
            if all(found.repeats for found in own)
        ]

    costs = costs_of(passes)
    if shapes:
        reads = list(shapes.reads)
        full = shapes.recompute.get("full", {})
        ways: RecomputeCosts = {
            "full": {
                size: recompute_from_forwards(uses, own, full[size])
                for own in costs
                if (size := own[0].micro_batch) in full
            }
        }
    else:
        unread = frozenset.intersection(*ranks.gather(unread_uses(model.calls, model.units, passes[0].step)))
        reads = [index not in unread for index in range(len(uses))]
        ways = {
            way: {
                own[0].micro_batch: recompute_differences(uses, own, then)
                for own, then in zip(costs, recomputed, strict=True)
            }
            for way, some in again.items()
            if (recomputed := costs_of(some))
        }
        ways |= (
            {HOST: {recorded.micro_batch: without_time(recorded.memory) for recorded in saved}}
            if saved
            else {}
        )
    own_seconds = statistics.median(sum(by_rank[ranks.rank]) for by_rank in times[len(passes) - 1].repeats)
    return use_entries(uses, reads, costs, ways, leaves(model.units)), own_seconds


def use_kinds(units: Sequence[UnitEntry], uses: Sequence[Use], flops: Sequence[int]) -> list[Hashable]:
    """Each use's kind, which decides how long it takes: the same work, on tensors of the same shapes."""
    shapes = {
        unit.name: (unit.module, tuple((t.shape, t.dtype, t.trainable) for t in unit.tensors))
        for unit in units
    }
    return [(use.phase, shapes[use.unit], count) for use, count in zip(uses, flops, strict=True)]


def use_costs(
    micro_batch: int,
    kinds: Sequence[Hashable],
    flops: Sequence[int],
    memory: Sequence[Segment],
    repeats: Repeats,
    least_s: float = 0.0,
) -> list[UseCost]:
    """The cost of every use. Those of a kind share their samples, so equal layers cost the same.

    Means, scaled to add up to the median of whole passes: where ranks share a core, a use takes as long
    as alone, or several times that, and a step sees the sum. The spread is that of the means, too.

    ``least_s``: the processor time of a pass, of all ranks that share processors over the number of these.
    Who is served first is done before that, and in a step would leave its processor to others and wait; so
    the mean is taken to be that at least, and the slowest rank is late by as much less.
    """
    rows = [row for by_rank in repeats for row in by_rank]
    positions: dict[Hashable, list[int]] = defaultdict(list)
    for index, kind in enumerate(kinds):
        positions[kind].append(index)
    samples = {kind: [row[i] for row in rows for i in indices] for kind, indices in positions.items()}
    repeat_means = {
        kind: [statistics.fmean(row[i] for row in by_rank for i in indices) for by_rank in repeats]
        for kind, indices in positions.items()
    }
    delays = {
        kind: [
            max(row[i] for row in by_rank) - statistics.fmean(row[i] for row in by_rank)
            for by_rank in repeats
            for i in indices
        ]
        for kind, indices in positions.items()
    }
    means = {kind: trimmed_mean(seconds) for kind, seconds in samples.items()}
    own_s = statistics.median(map(sum, rows))
    scale = own_s / sum(means[kind] for kind in kinds)
    longer = max(1.0, least_s / own_s)
    return [
        UseCost(
            micro_batch=micro_batch,
            seconds=nanoseconds(means[kind] * scale * longer),
            spread=spread(repeat_means[kind]),
            straggler_seconds=nanoseconds(
                max(0.0, trimmed_mean(delays[kind]) - means[kind] * scale * (longer - 1.0))
            ),
            flops=count,
            retained_bytes=segment.retained_bytes,
            peak_bytes=segment.peak_bytes,
        )
        for kind, count, segment in zip(kinds, flops, memory, strict=True)
    ]


def _times(
    ranks: Ranks,
    calls: RecordedCalls,
    passes: Sequence[Pass],
    progress: Callable[[float], None],
    effort: Effort,
) -> list[_Timed]:
    """Every pass, the same on every rank."""
    processors = Processors.of(ranks) if ranks.device.type == "cpu" else None
    results = rounds(
        ranks,
        [partial(_block, ranks, calls, recorded, effort.block) for recorded in passes],
        at_least=MIN_BLOCKS,
        at_most=MAX_BLOCKS,
        budget_s=effort.pass_s * len(passes),
        progress=progress,
        enough=lambda so_far: all(map(_steady, so_far)),
    )
    return [_timed(result, processors) for result in results]


def _timed(result: Sequence[Sequence[_Block]], processors: Processors | None) -> _Timed:
    """From the blocks of a pass by round and rank."""
    if not all(block.rows for by_rank in result for block in by_rank):
        return _Timed([], 0.0)
    repeats, least = list[list[list[float]]](), list[float]()
    for by_rank in result:  # blocks' passes, side by side
        repeats += map(list, zip(*(block.rows for block in by_rank), strict=True))
        if processors is not None:
            least += map(processors.time_s, zip(*(block.processor_s for block in by_rank), strict=True))
    return _Timed(repeats, statistics.median(least) if least else 0.0)


def _block(ranks: Ranks, calls: RecordedCalls, recorded: Pass, count: int) -> _Block:
    """So many passes; no rows when one failed or had other uses. A failure on one rank must not keep the
    others waiting."""
    rows, processor_s = list[list[float]](), list[float]()
    as_recorded = True
    for _ in range(count):
        ranks.barrier()
        timer, spent = clock(ranks.device), time.process_time()
        try:
            as_recorded &= calls.run(recorded.step, timer) == recorded.uses
        except Exception:  # the user's model, which has run before
            as_recorded = False
        processor_s.append(time.process_time() - spent)
        rows.append(timer.seconds())
    return _Block(rows if as_recorded else [], processor_s)


def _steady(blocks: Sequence[Sequence[_Block]]) -> bool:
    """Whether whole passes scatter little; ``blocks`` by round, then rank."""
    by_rank = [
        [sum(row) for block in own for row in block.rows]
        for own in zip(*blocks, strict=True)
        if all(block.rows for block in own)
    ]
    return bool(by_rank) and statistics.median(map(spread, by_rank)) < STEADY_SPREAD
