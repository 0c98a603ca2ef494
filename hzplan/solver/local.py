"""Local search in the simulator.

The ILP gives every task the whole of its link and does not slow compute; the simulator knows better. So the
plans found are changed a little, as long as that makes the predicted step shorter. How often is tried depends
on the size of the schedule alone, so that the outcome does not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from hzplan.hierarchy import Levels
from hzplan.simulate import events
from hzplan.solver.evaluate import Evaluation, Modes
from hzplan.solver.patterns import MAX_BUCKETS

MOST_EVENTS = 240_000
"""Ends of tasks that are simulated from one start; a second or two."""
WORTH = 1e-4
"""A shorter step is taken for one when it is shorter by this share."""

Pattern = tuple[Levels, ...]
Choice = Mapping[str, Pattern]


@dataclass(frozen=True)
class Surroundings:
    """``alike``: units that have the same tensors, in groups; ``trained``: which of a unit's tensors are;
    ``known``: for the first unit of a group, patterns that some plan has used; ``triples``: all legal ones.
    ``switched``: units for which it may be chosen whether their forward is computed again, like ones in
    groups; ``moved``: likewise whether their optimizer state is in the host's memory.
    """

    alike: Sequence[Sequence[str]]
    trained: Mapping[str, Sequence[bool]]
    known: Mapping[str, Sequence[Pattern]]
    triples: Sequence[Levels]
    switched: Sequence[Sequence[str]] = ()
    moved: Sequence[Sequence[str]] = ()


def improve(
    start: Evaluation,
    replays: Sequence[Callable[[Choice, Modes], Evaluation]],
    around: Surroundings,
    fits: Callable[[Evaluation], bool],
    late: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """The start, or a better plan that fits. ``replays``: one for every pace, the start's first; ``late``:
    whether to stop."""
    best, replay = start, replays[0]
    slowest = start.model.late_ns(start.schedule, start.micro_batch)
    tries = max(len(replays), MOST_EVENTS // events(start.schedule, slowest))
    for other in replays[1:]:
        if late():
            return best
        tries -= 1
        candidate = other(best.levels, best.modes)
        if fits(candidate) and _shorter(candidate, best):
            best, replay = candidate, other
    seen: set[tuple[tuple[tuple[str, Pattern], ...], Modes]] = set()
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


def _shorter(one: Evaluation, other: Evaluation) -> bool:
    goal = other.predicted.period_ns * (1 - WORTH)
    return one.objective_ns < goal and one.predicted.period_ns < goal  # the objective is a lower bound


def _neighbours(best: Evaluation, around: Surroundings) -> Iterator[tuple[Choice, Modes]]:
    """What is a step away, what changes most first.

    All units of a kind are recomputed or none, or offloaded or none; or they take a pattern known from other
    plans; or one of their buckets takes another triple; or one of their tensors does; or one unit alone takes
    a known pattern, or one triple for all of its tensors, or is recomputed or not, or offloaded or not; or
    two like units exchange their patterns.
    """
    again, moved = best.modes
    for some in around.switched:
        yield best.levels, Modes(again | {*some}, moved)
        yield best.levels, Modes(again - {*some}, moved)
    for some in around.moved:
        yield best.levels, Modes(again, moved - {*some})
        yield best.levels, Modes(again, moved | {*some})
    for choice in _other_levels(best.levels, around):
        yield choice, best.modes
    for some in around.switched:
        for unit in some:
            yield best.levels, Modes(again ^ {unit}, moved)
    for some in around.moved:
        for unit in some:
            yield best.levels, Modes(again, moved ^ {unit})
    for units in around.alike:  # last, because there are most of these
        for one, other in combinations(units, 2):
            if best.levels[one] != best.levels[other]:
                exchanged = {one: best.levels[other], other: best.levels[one]}
                yield {**best.levels, **exchanged}, best.modes


def _other_levels(levels: Choice, around: Surroundings) -> Iterator[Choice]:
    for units in around.alike:
        for pattern in around.known[units[0]]:
            yield {**levels, **dict.fromkeys(units, pattern)}
    for parts in (_buckets, _tensors):
        for units in around.alike:
            for pattern in dict.fromkeys(levels[unit] for unit in units):
                holders = [unit for unit in units if levels[unit] == pattern]
                for part in parts(pattern):
                    for triple in around.triples:
                        changed = _changed(pattern, part, triple, around.trained[units[0]])
                        if len(set(changed)) <= MAX_BUCKETS:
                            yield {**levels, **dict.fromkeys(holders, changed)}
    for units in around.alike:
        for unit in units:
            for pattern in around.known[units[0]]:
                yield {**levels, unit: pattern}
    for units in around.alike:
        for unit in units:
            for triple in around.triples:
                plain = _changed(levels[unit], {*range(len(levels[unit]))}, triple, around.trained[units[0]])
                yield {**levels, unit: plain}


def _buckets(pattern: Pattern) -> list[set[int]]:
    return [{i for i, triple in enumerate(pattern) if triple == of} for of in dict.fromkeys(pattern)]


def _tensors(pattern: Pattern) -> list[set[int]]:
    return [{index} for index in range(len(pattern))]


def _changed(pattern: Pattern, part: set[int], triple: Levels, trained: Sequence[bool]) -> Pattern:
    """Another triple for some of the tensors; a frozen one has a parameter level only."""
    frozen = Levels(triple.param, triple.param, triple.param)
    return tuple(
        (triple if trained[index] else frozen) if index in part else old for index, old in enumerate(pattern)
    )
