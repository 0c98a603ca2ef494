"""What repeated passes say of every use: seconds, scatter, and how late the slowest rank is."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence

from hzplan.core.schedule import Use
from hzplan.formats.profile import UnitEntry, UseCost
from hzplan.profiler.model.memory import Segment
from hzplan.profiler.session.statistics import nanoseconds, spread, trimmed_mean

Repeats = Sequence[Sequence[Sequence[float]]]
"""Seconds by repeat, rank and use."""


def kinds(units: Sequence[UnitEntry], uses: Sequence[Use], flops: Sequence[int]) -> list[Hashable]:
    """What decides how long a use takes: uses of one kind do the same work, on tensors of the same shapes."""
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
) -> list[UseCost]:
    """The cost of every use. Those of a kind share their samples, so equal layers cost the same.

    Means, scaled to add up to the median of whole passes: ranks that take turns on a core make a use as long
    as it is alone, or several times that, and what decides a step is what that comes to. So the spread too is
    that of repeats' means.
    """
    rows = [row for by_rank in repeats for row in by_rank]
    places: dict[Hashable, list[int]] = defaultdict(list)
    for index, kind in enumerate(kinds):
        places[kind].append(index)
    samples = {kind: [row[i] for row in rows for i in indices] for kind, indices in places.items()}
    of_repeats = {
        kind: [statistics.fmean(row[i] for row in by_rank for i in indices) for by_rank in repeats]
        for kind, indices in places.items()
    }
    late = {
        kind: [
            max(row[i] for row in by_rank) - statistics.fmean(row[i] for row in by_rank)
            for by_rank in repeats
            for i in indices
        ]
        for kind, indices in places.items()
    }
    means = {kind: trimmed_mean(found) for kind, found in samples.items()}
    scale = statistics.median(map(sum, rows)) / sum(means[kind] for kind in kinds)
    return [
        UseCost(
            micro_batch=micro_batch,
            seconds=nanoseconds(means[kind] * scale),
            spread=spread(of_repeats[kind]),
            straggler_seconds=nanoseconds(trimmed_mean(late[kind])),
            flops=count,
            retained_bytes=segment.retained_bytes,
            peak_bytes=segment.peak_bytes,
        )
        for kind, count, segment in zip(kinds, flops, memory, strict=True)
    ]
