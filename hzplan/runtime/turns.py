"""The uses of a step that the runtime has to look at: those from which something follows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hzplan.core.schedule import Use
from hzplan.models.hooks import Phase

Called = tuple[str, Phase]


@dataclass(frozen=True)
class Turns:
    """The turns of a step. A turn lasts until the next one begins, so it may cover uses that have none.

    ``following``: by position the first one after it with a turn; the number of positions where there is
    none. ``last``: by micro-batch the last position with a turn. ``passed_over``: by micro-batch the calls
    that have no turn in it, and so need not be told.
    """

    following: tuple[int, ...]
    last: tuple[int, ...]
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
    these begin; and all calls of a unit in one phase of a micro-batch have one or none, for who is called
    cannot tell them apart. ``all_of_them``: every use has one.
    """
    count = len(uses)
    firsts = {0, next((number for number, use in enumerate(uses) if use.phase == "backward"), 0)}

    def calls(position: int) -> tuple[int, Called]:
        micro_batch, number = divmod(position, count)
        return micro_batch, (uses[number].unit, uses[number].phase)

    positions = range(count * accumulation)
    looked_at = {
        calls(position)
        for position in positions
        if all_of_them
        or position % count in firsts
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
        tuple(max(p for p in having if p // count == micro_batch) for micro_batch in range(accumulation)),
        tuple(frozenset(calls) for calls in passed_over),
    )
