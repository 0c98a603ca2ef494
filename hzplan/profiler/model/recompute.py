"""Recomputation in a profile: which units can, and what each of their uses then takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from hzplan.core.schedule import Use
from hzplan.formats.profile import RecomputeCost, UseCost, UseEntry
from hzplan.profiler.session.statistics import nanoseconds

WORTH = 0.1
"""Of what a unit keeps for its backward: recomputation that saves less is no choice."""

Again = Mapping[int, Sequence[RecomputeCost]]
"""By micro-batch size: what every use takes where all units that can compute their forward again."""


def with_again(uses: Sequence[UseEntry], again: Again, able: Collection[str]) -> tuple[UseEntry, ...]:
    """The uses with what recomputation costs, of units that are ``able`` and save something by it."""
    if not again:
        return tuple(uses)
    kept = {unit for unit in able if _gains(uses, again, unit)}
    return tuple(
        use.model_copy(
            update={
                "costs": tuple(
                    cost.model_copy(update={"recompute": again[cost.micro_batch][index]})
                    for cost in use.costs
                )
            }
        )
        if use.unit in kept
        else use
        for index, use in enumerate(uses)
    )


def _gains(uses: Sequence[UseEntry], again: Again, unit: str) -> bool:
    """Whether every forward has its backward after all forwards, when parameters are there, and clearly fewer
    bytes stay between them."""
    mine = [(index, use) for index, use in enumerate(uses) if use.unit == unit]
    phases = [use.phase for _, use in mine]
    half = len(phases) // 2
    in_order = phases == ["forward"] * half + ["backward"] * half
    if not half or not in_order or not all(use.reads_parameters for _, use in mine):
        return False
    kept, then = defaultdict[int, int](int), defaultdict[int, int](int)
    for index, use in mine[:half]:
        for cost in use.costs:
            kept[cost.micro_batch] += cost.retained_bytes
            then[cost.micro_batch] += again[cost.micro_batch][index].retained_bytes
    return all(then[size] < (1 - WORTH) * kept[size] for size in kept)


def differences(costs: Sequence[UseCost], again: Sequence[UseCost]) -> list[RecomputeCost]:
    """Of uses that were measured without recomputation and with it."""
    return [
        RecomputeCost(
            seconds=nanoseconds(max(0.0, more.seconds - cost.seconds)),
            retained_bytes=more.retained_bytes,
            peak_bytes=more.peak_bytes,
        )
        for cost, more in zip(costs, again, strict=True)
    ]


def by_forwards(
    uses: Sequence[Use], costs: Sequence[UseCost], memory: Iterable[tuple[int, int]]
) -> list[RecomputeCost]:
    """Where only memory is known (retained, peak): a backward takes longer by the forward that it belongs to,
    the last one first."""
    forwards: dict[str, list[float]] = defaultdict(list)
    found = []
    for use, cost, (retained, peak) in zip(uses, costs, memory, strict=True):
        if use.phase == "forward":
            forwards[use.unit].append(cost.seconds)
        stack = forwards[use.unit]
        longer = stack.pop() if use.phase == "backward" and stack else 0.0
        found.append(RecomputeCost(seconds=longer, retained_bytes=retained, peak_bytes=peak))
    return found
