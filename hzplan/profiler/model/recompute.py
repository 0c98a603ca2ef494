"""The uses of a profile, with the cost of recomputing each where that saves memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import le
from typing import NamedTuple

from hzplan.core.recompute import HOST, PARTIAL_WAYS, WAYS, Way
from hzplan.core.schedule import Use
from hzplan.formats.profile import RecomputeCost, UseCost, UseEntry
from hzplan.profiler.model.memory import Segment
from hzplan.profiler.session.statistics import nanoseconds

MIN_SAVING = 0.1
"""Least share of the bytes kept for a unit's backward that recomputation has to save to be a choice."""

RecomputeCosts = Mapping[Way, Mapping[int, Sequence[RecomputeCost]]]
"""By way and micro-batch size: the cost of every use where all units that can compute their forward again."""


def use_entries(
    uses: Sequence[Use],
    reads: Sequence[bool],
    costs: Sequence[Sequence[UseCost]],
    recompute: RecomputeCosts,
    recomputable: Collection[str],
) -> tuple[UseEntry, ...]:
    """The uses in order. ``costs``: of every use, by micro-batch size, smallest first; ways to recompute are
    added for units that are ``recomputable`` and save memory by them."""
    entries = [
        UseEntry(unit=use.unit, phase=use.phase, reads_parameters=read, costs=by_size)
        for use, read, by_size in zip(uses, reads, zip(*costs, strict=True), strict=True)
    ]
    if not recompute:  # of reused costs, which have their ways
        return tuple(entries)
    sums = {
        unit: {way: found for way in WAYS if (found := _sums(entries, recompute.get(way), unit)) is not None}
        for unit in recomputable
    }
    kept = {unit: _useful(of_unit) for unit, of_unit in sums.items()}

    def with_ways(index: int, entry: UseEntry, cost: UseCost) -> UseCost:
        again = {way: recompute[way][cost.micro_batch][index] for way in kept.get(entry.unit, ())}
        partial = {way: again[way] for way in PARTIAL_WAYS if way in again}
        return cost.model_copy(update={"recompute": again.get("full"), "partial": partial or None})

    return tuple(
        entry.model_copy(update={"costs": tuple(with_ways(index, entry, cost) for cost in entry.costs)})
        for index, entry in enumerate(entries)
    )


class _Sums(NamedTuple):
    """Of a unit in a micro-batch, by size: seconds that recomputation adds, and bytes between forward and
    backward; ``all_kept``: those bytes without it."""

    seconds: tuple[float, ...]
    kept: tuple[int, ...]
    all_kept: tuple[int, ...]


def _sums(
    entries: Sequence[UseEntry], recompute: Mapping[int, Sequence[RecomputeCost]] | None, unit: str
) -> _Sums | None:
    """None where a way is not known, or a forward has not its backward after all forwards, when parameters
    are there."""
    own = [(index, entry) for index, entry in enumerate(entries) if entry.unit == unit]
    phases = [entry.phase for _, entry in own]
    half = len(phases) // 2
    in_order = phases == ["forward"] * half + ["backward"] * half
    if not recompute or not half or not in_order or not all(entry.reads_parameters for _, entry in own):
        return None
    sizes = [cost.micro_batch for cost in own[0][1].costs]
    return _Sums(
        tuple(sum(recompute[size][index].seconds for index, _ in own) for size in sizes),
        tuple(sum(recompute[size][index].retained_bytes for index, _ in own[:half]) for size in sizes),
        tuple(sum(entry.costs[at].retained_bytes for _, entry in own[:half]) for at in range(len(sizes))),
    )


def _useful(sums: Mapping[Way, _Sums]) -> list[Way]:
    """The ways that clearly save memory, and than which none that saves as much takes as little time."""
    saving: dict[Way, _Sums] = {
        way: one
        for way, one in sums.items()
        if all(kept < (1 - MIN_SAVING) * before for kept, before in zip(one.kept, one.all_kept, strict=True))
    }

    def undercut(way: Way, one: _Sums) -> bool:
        return any(
            HOST not in (way, name)  # copies take no time of compute's, and what they take is not known here
            and all(map(le, other.seconds, one.seconds))
            and all(map(le, other.kept, one.kept))
            and (other != one or WAYS.index(name) > WAYS.index(way))
            for name, other in saving.items()
        )

    return [way for way, one in saving.items() if way == "full" or not undercut(way, one)]


def recompute_differences(
    uses: Sequence[Use], costs: Sequence[UseCost], recomputed: Sequence[UseCost]
) -> list[RecomputeCost]:
    """The cost of recomputation, from uses without it and with it. What one use of a unit takes less, as the
    backward of a loss in chunks, its others are not charged."""
    longer = [then.seconds - cost.seconds for cost, then in zip(costs, recomputed, strict=True)]
    less: dict[str, float] = defaultdict(float)
    for use, seconds in zip(uses, longer, strict=True):
        less[use.unit] += max(0.0, -seconds)
    charged = []
    for use, seconds in zip(uses, longer, strict=True):
        saved = min(less[use.unit], max(0.0, seconds))
        less[use.unit] -= saved
        charged.append(max(0.0, seconds) - saved)
    return [
        RecomputeCost(
            seconds=nanoseconds(seconds), retained_bytes=then.retained_bytes, peak_bytes=then.peak_bytes
        )
        for seconds, then in zip(charged, recomputed, strict=True)
    ]


def without_time(memory: Iterable[Segment | UseCost]) -> list[RecomputeCost]:
    """The cost of a way that takes no time of compute's, from its memory."""
    return [
        RecomputeCost(seconds=0.0, retained_bytes=one.retained_bytes, peak_bytes=one.peak_bytes)
        for one in memory
    ]


def recompute_from_forwards(
    uses: Sequence[Use], costs: Sequence[UseCost], recomputed: Sequence[UseCost]
) -> list[RecomputeCost]:
    """The cost of recomputation where only its memory is known, from ``recomputed``: a backward takes longer
    by the forward that it belongs to, the last one first."""
    forwards: dict[str, list[float]] = defaultdict(list)
    found = []
    for use, cost, then in zip(uses, costs, recomputed, strict=True):
        stack = forwards[use.unit]
        if use.phase == "forward":
            stack.append(cost.seconds)
        longer = stack.pop() if use.phase == "backward" and stack else 0.0
        found.append(
            RecomputeCost(seconds=longer, retained_bytes=then.retained_bytes, peak_bytes=then.peak_bytes)
        )
    return found
