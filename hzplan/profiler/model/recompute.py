"""The uses of a profile, with the cost of recomputing each where that saves memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from hzplan.core.schedule import Use
from hzplan.formats.profile import RecomputeCost, UseCost, UseEntry
from hzplan.profiler.session.statistics import nanoseconds

MIN_SAVING = 0.1
"""Least share of the bytes kept for a unit's backward that recomputation has to save to be a choice."""

RecomputeCosts = Mapping[int, Sequence[RecomputeCost]]
"""By micro-batch size: the cost of every use where all units that can compute their forward again."""


def use_entries(
    uses: Sequence[Use],
    reads: Sequence[bool],
    costs: Sequence[Sequence[UseCost]],
    recompute: RecomputeCosts,
    recomputable: Collection[str],
) -> tuple[UseEntry, ...]:
    """The uses in order. ``costs``: of every use, by micro-batch size, smallest first; recomputation is added
    for units that are ``recomputable`` and save memory by it."""
    entries = [
        UseEntry(unit=use.unit, phase=use.phase, reads_parameters=read, costs=by_size)
        for use, read, by_size in zip(uses, reads, zip(*costs, strict=True), strict=True)
    ]
    if not recompute:
        return tuple(entries)
    saving = {unit for unit in recomputable if _saves(entries, recompute, unit)}
    return tuple(
        entry.model_copy(
            update={
                "costs": tuple(
                    cost.model_copy(update={"recompute": recompute[cost.micro_batch][index]})
                    for cost in entry.costs
                )
            }
        )
        if entry.unit in saving
        else entry
        for index, entry in enumerate(entries)
    )


def _saves(entries: Sequence[UseEntry], recompute: RecomputeCosts, unit: str) -> bool:
    """Whether every forward has its backward after all forwards, when parameters are there, and clearly fewer
    bytes stay between them."""
    own = [(index, entry) for index, entry in enumerate(entries) if entry.unit == unit]
    phases = [entry.phase for _, entry in own]
    half = len(phases) // 2
    in_order = phases == ["forward"] * half + ["backward"] * half
    if not half or not in_order or not all(entry.reads_parameters for _, entry in own):
        return False
    without, recomputed = defaultdict[int, int](int), defaultdict[int, int](int)
    for index, entry in own[:half]:
        for cost in entry.costs:
            without[cost.micro_batch] += cost.retained_bytes
            recomputed[cost.micro_batch] += recompute[cost.micro_batch][index].retained_bytes
    return all(recomputed[size] < (1 - MIN_SAVING) * without[size] for size in without)


def recompute_differences(costs: Sequence[UseCost], recomputed: Sequence[UseCost]) -> list[RecomputeCost]:
    """The cost of recomputation, from uses without it and with it."""
    return [
        RecomputeCost(
            seconds=nanoseconds(max(0.0, then.seconds - cost.seconds)),
            retained_bytes=then.retained_bytes,
            peak_bytes=then.peak_bytes,
        )
        for cost, then in zip(costs, recomputed, strict=True)
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
