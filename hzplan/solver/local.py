"""Local search in the simulator.

The ILP gives every task the whole of its link and does not slow compute; the simulator knows better. So the
plans found are changed a little, as long as that makes the predicted step shorter (``improve``), and the plan
to be written plainer and leaner (``plainer``, ``leaner``) as long as its step stays within a ceiling. How
often is tried depends on the size of the schedule alone, so that the outcome does not depend on the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product
from typing import NamedTuple

from hzplan.core.hierarchy import Levels
from hzplan.core.layout import TensorSpec
from hzplan.core.recompute import Way
from hzplan.cost.lateness import Late
from hzplan.cost.simulate import events
from hzplan.solver.evaluate import Evaluation, Modes, within
from hzplan.solver.patterns import MAX_BUCKETS
from hzplan.solver.schemes import slack_bytes

MOST_EVENTS = 240_000
"""Task ends that are simulated from one start at most; they take one or two seconds."""
LEAST_GAIN = 1e-4
"""Share of a step by which a candidate must be shorter to replace the best plan."""

Pattern = tuple[Levels, ...]
LevelsByUnit = Mapping[str, Pattern]
Replay = Callable[[LevelsByUnit, Modes], Evaluation]
"""Replays levels and modes under one micro-batch size and pace."""


class Choosable(NamedTuple):
    """Like units, and the ways in which each may be recomputed; None: it may keep everything."""

    units: tuple[str, ...]
    ways: tuple[Way | None, ...]


@dataclass(frozen=True)
class Surroundings:
    """The neighbourhood of the local search: what may be changed in a plan.

    ``alike``: groups of units with the same tensors; ``tensors``: by unit, its tensors;
    ``known``: by the first unit of a group, the patterns that found plans have; ``triples``: all legal ones;
    ``recomputable``, ``offloadable``: groups of like units whose recomputation, in some ways, or offload is
    free to choose.
    """

    alike: Sequence[Sequence[str]]
    tensors: Mapping[str, Sequence[TensorSpec]]
    known: Mapping[str, Sequence[Pattern]]
    triples: Sequence[Levels]
    recomputable: Sequence[Choosable] = ()
    offloadable: Sequence[Sequence[str]] = ()


def improve(
    start: Evaluation,
    replays: Sequence[Replay],
    around: Surroundings,
    fits: Callable[[Evaluation], bool],
    late: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """The fastest plan that steps to faster neighbours reach from ``start``.

    ``replays``: one for every pace, the start's first; ``late``: whether time is over.
    """
    best, replay = start, replays[0]
    tries = max(len(replays), MOST_EVENTS // events(start.schedule, _late(start)))
    for other in replays[1:]:
        if late():
            return best
        tries -= 1
        candidate = other(best.levels, best.modes)
        if fits(candidate) and _shorter(candidate, best):
            best, replay = candidate, other
    seen: set[object] = set()
    improved = True
    while improved:
        improved = False
        for choice, modes in _neighbours(best, around):
            key = tuple(sorted(choice.items())), modes
            if key in seen:
                continue
            if tries <= 0 or late():
                return best
            seen.add(key)
            tries -= 1
            candidate = replay(choice, modes)
            if fits(candidate) and _shorter(candidate, best):
                best, improved = candidate, True
                break
    return best


def plainer(
    start: Evaluation,
    replay: Replay,
    around: Surroundings,
    fits: Callable[[Evaluation], bool],
    ceiling: float,
    late: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """The start with fewer different patterns among like units, as long as its step is within the ceiling.

    All units of a kind take one pattern; or those with one pattern take another's; or like patterns become
    neighbours, so that a reader sees runs of layers.
    """

    tries = MOST_EVENTS // events(start.schedule, _late(start)) // 2

    def good(levels: LevelsByUnit) -> Evaluation | None:
        nonlocal tries
        one = replay(levels, best.modes)
        if tries <= 0 or late() or not fits(one) or one.floor_ns > ceiling:
            return None
        tries -= 1
        return one if within(one, ceiling) else None

    best = start
    for units in around.alike:
        while len(used := _used(best.levels, units)) > 1:
            merged = ({**best.levels, **dict.fromkeys(units, pattern)} for pattern in used)
            pairs = ((mine, other) for mine in reversed(used) for other in used if other != mine)
            merged_pairs = (
                {**best.levels, **{unit: other for unit in units if best.levels[unit] == mine}}
                for mine, other in pairs
            )
            choices = merged if len(used) == 2 else chain(merged, merged_pairs)
            found = next((one for choice in choices if (one := good(choice)) is not None), None)
            if found is None:
                break
            best = found
        used = _used(best.levels, units)
        for order in (used, used[::-1]) if len(used) > 1 else ():
            in_runs = [pattern for pattern in order for unit in units if best.levels[unit] == pattern]
            if (one := good({**best.levels, **dict(zip(units, in_runs, strict=True))})) is not None:
                best = one
                break
    return best


def _used(levels: LevelsByUnit, units: Sequence[str]) -> list[Pattern]:
    """The patterns of some units, the most frequent first."""
    return [pattern for pattern, _ in Counter(levels[unit] for unit in units).most_common()]


def leaner(
    start: Evaluation,
    replays: Sequence[Replay],
    around: Surroundings,
    fits: Callable[[Evaluation], bool],
    ceiling: float,
    late: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """The leanest plan within the ceiling that changes to all like units at once reach from ``start``.

    ``replays``: one for every pace, the start's first. Memory is known without a simulation, so the leanest
    neighbours are tried first.
    """
    best, replay = start, replays[0]
    tries = max(len(replays), MOST_EVENTS // events(start.schedule, _late(start)) // 4)
    slow: set[object] = set()
    while not late():
        goal = best.memory.peak - slack_bytes(best.memory.peak)
        found = [(other(best.levels, best.modes), other) for other in replays]
        found += [(replay(*choice), replay) for choice in _lighter(best, around)]
        lighter = [(one, other) for one, other in found if one.memory.peak < goal and one.floor_ns <= ceiling]
        for one, other in sorted(lighter, key=lambda pair: pair[0].memory.peak):
            key = _key(one)
            if key in slow or not fits(one):
                continue
            if tries <= 0 or late():
                return best
            tries -= 1
            if within(one, ceiling):
                best, replay = one, other
                break
            slow.add(key)
        else:
            return best
    return best


def _lighter(best: Evaluation, around: Surroundings) -> Iterator[tuple[LevelsByUnit, Modes]]:
    """Neighbours that may need less memory and keep like units alike.

    All units of a group are recomputed in a way, or one more; all are offloaded; or a pattern changes to
    another triple, as a whole or in one bucket.
    """
    recompute, offload = best.modes
    for some, ways in around.recomputable:
        for way in ways:
            yield best.levels, Modes(recompute.with_(some, way), offload)
            following = [unit for unit in some if recompute.get(unit) != way][:1]
            yield best.levels, Modes(recompute.with_(following, way), offload)
    for units in around.offloadable:
        yield best.levels, Modes(recompute, offload | {*units})
    for units in around.alike:
        for choice in _retripled(best.levels, units, _whole_and_buckets, around):
            yield choice, best.modes


def _shorter(one: Evaluation, other: Evaluation) -> bool:
    goal = other.predicted.period_ns * (1 - LEAST_GAIN)
    return one.objective_ns < goal and one.predicted.period_ns < goal  # the objective is a lower bound


def _late(one: Evaluation) -> list[Late] | None:
    return one.model.late_ns(one.schedule, one.micro_batch)


def _key(one: Evaluation) -> object:
    schedule = one.schedule
    return tuple(sorted(one.levels.items())), one.modes, schedule.pace, schedule.order


def _neighbours(best: Evaluation, around: Surroundings) -> Iterator[tuple[LevelsByUnit, Modes]]:
    """All neighbours of a plan, those that change most first.

    All units of a group are recomputed in one way or none, or offloaded or none; or they take a pattern known
    from other plans; or one of their buckets takes another triple; or one of their tensors does; or one unit
    alone takes a known pattern, or one triple for all of its tensors, or another way, or flips its offload;
    or two like units exchange their patterns.
    """
    recompute, offload = best.modes
    for some, ways in around.recomputable:
        for way in ways[::-1]:
            yield best.levels, Modes(recompute.with_(some, way), offload)
    for units in around.offloadable:
        yield best.levels, Modes(recompute, offload - {*units})
        yield best.levels, Modes(recompute, offload | {*units})
    for choice in _other_levels(best.levels, around):
        yield choice, best.modes
    for some, ways in around.recomputable:
        for unit, way in product(some, ways):
            if recompute.get(unit) != way:
                yield best.levels, Modes(recompute.with_([unit], way), offload)
    for units in around.offloadable:
        for unit in units:
            yield best.levels, Modes(recompute, offload ^ {unit})
    for units in around.alike:  # last, because there are most of these
        for one, other in combinations(units, 2):
            if best.levels[one] != best.levels[other]:
                exchanged = {one: best.levels[other], other: best.levels[one]}
                yield {**best.levels, **exchanged}, best.modes


def _other_levels(levels: LevelsByUnit, around: Surroundings) -> Iterator[LevelsByUnit]:
    for units in around.alike:
        for pattern in around.known[units[0]]:
            yield {**levels, **dict.fromkeys(units, pattern)}
    for parts in (_buckets, _tensors):
        for units in around.alike:
            yield from _retripled(levels, units, parts, around)
    for units in around.alike:
        for unit in units:
            for pattern in around.known[units[0]]:
                yield {**levels, unit: pattern}
    for units in around.alike:
        for unit in units:
            for triple in around.triples:
                plain = _changed(levels[unit], {*range(len(levels[unit]))}, triple, around.tensors[units[0]])
                yield {**levels, unit: plain}


def _retripled(
    levels: LevelsByUnit,
    units: Sequence[str],
    parts: Callable[[Pattern], list[set[int]]],
    around: Surroundings,
) -> Iterator[LevelsByUnit]:
    """Another triple for a part of a pattern, in all of the like units that have it."""
    for pattern in dict.fromkeys(levels[unit] for unit in units):
        holders = [unit for unit in units if levels[unit] == pattern]
        for part, triple in product(parts(pattern), around.triples):
            changed = _changed(pattern, part, triple, around.tensors[units[0]])
            if len(set(changed)) <= MAX_BUCKETS:
                yield {**levels, **dict.fromkeys(holders, changed)}


def _whole_and_buckets(pattern: Pattern) -> list[set[int]]:
    buckets = _buckets(pattern)
    return buckets if len(buckets) == 1 else [{*range(len(pattern))}, *buckets]


def _buckets(pattern: Pattern) -> list[set[int]]:
    return [{i for i, triple in enumerate(pattern) if triple == of} for of in dict.fromkeys(pattern)]


def _tensors(pattern: Pattern) -> list[set[int]]:
    return [{index} for index in range(len(pattern))]


def _changed(pattern: Pattern, part: set[int], triple: Levels, tensors: Sequence[TensorSpec]) -> Pattern:
    """Another triple for some of the tensors; a frozen one has a parameter level only."""
    return tuple(
        triple.of(trainable=tensor.trainable, matrix=tensor.matrix) if index in part else old
        for index, (old, tensor) in enumerate(zip(pattern, tensors, strict=True))
    )
