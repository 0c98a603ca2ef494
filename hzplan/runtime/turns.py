"""The uses of a step that the runtime has to look at: those from which something follows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass

from hzplan.core.schedule import Kind, Schedule, Task, Use
from hzplan.models.hooks import Phase

Called = tuple[str, Phase]


@dataclass(frozen=True)
class Turns:
    """The turns of a step. A turn lasts until the next one begins, so it may cover uses that have none.

    ``following``: by position the first one after it with a turn; the number of positions where there is
    none. ``passed_over``: by micro-batch the calls that have no turn in it, and so need not be told.
    """

    following: tuple[int, ...]
    passed_over: tuple[frozenset[Called], ...]


def turns(
    uses: Sequence[Use],
    accumulation: int,
    begins: Collection[int],
    ends: Collection[int],
    *,
    all_of_them: bool,
) -> Turns:
    """The turns of ``accumulation`` micro-batches of recorded uses.

    ``begins`` and ``ends``: the positions at whose begin, or end, something is done. An end is seen when
    the next turn begins. The first forward and the first backward of a micro-batch have one, which tell that
    these begin, and so has its last use, which a backward of any loss comes to. All calls of a unit in one
    phase of a micro-batch have one or none, for who is called cannot tell them apart. ``all_of_them``: every
    use has one.
    """
    count = len(uses)
    backward = next((number for number, use in enumerate(uses) if use.phase == "backward"), 0)
    always = {0, backward, count - 1}

    def calls(position: int) -> tuple[int, Called]:
        micro_batch, number = divmod(position, count)
        return micro_batch, (uses[number].unit, uses[number].phase)

    positions = range(count * accumulation)
    looked_at = {
        calls(position)
        for position in positions
        if all_of_them
        or position % count in always
        or position in begins
        or position in ends
        or position - 1 in ends
    }
    having = [position for position in positions if calls(position) in looked_at]
    following = [len(positions)] * len(positions)
    for before, position in zip([-1, *having], having, strict=False):
        for passed in range(max(before, 0), position):
            following[passed] = position
    passed_over: list[set[Called]] = [set() for _ in range(accumulation)]
    for position in positions:
        micro_batch, call = calls(position)
        if (micro_batch, call) not in looked_at:
            passed_over[micro_batch].add(call)
    return Turns(
        tuple(following),
        tuple(frozenset(calls) for calls in passed_over),
    )


def completions(
    schedule: Schedule, keep_whole: Container[str], launches: Callable[[Task], bool]
) -> dict[int, list[str]]:
    """By position the units whose gradients are completed at its end.

    ``keep_whole``: units that keep whole gradients, each in a place of its own. They are looked after in the
    last micro-batch only, before something is launched that may take them, and at the end of each.
    ``launches``: whether anything is launched at a compute task's end.
    """
    count = len(schedule.uses)
    end = count * schedule.accumulation
    found: dict[int, list[str]] = {}
    for position in range(end):
        for unit in schedule.completed_at.get(position % count, ()):
            at = position
            if unit in keep_whole:
                if position < end - count:
                    continue
                while at < end - 1 and not launches(schedule.compute[at]):
                    at += 1
            found.setdefault(at, []).append(unit)
    return found


def copies(schedule: Schedule) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """Of activations on the host the units whose copies on the device are let go at a position's begin, and
    those that room is made for at its end."""
    released: dict[int, list[str]] = {}
    allocated: dict[int, list[str]] = {}
    for compute in schedule.compute:
        for needed in (schedule.tasks[index] for index in compute.needs):
            if needed.kind is Kind.SAVE:
                released.setdefault(compute.position, []).extend(needed.units)
            elif needed.kind is Kind.LOAD:
                launched = next(one for i in needed.needs if (one := schedule.tasks[i]).kind is Kind.COMPUTE)
                allocated.setdefault(launched.position, []).extend(needed.units)
    return released, allocated
