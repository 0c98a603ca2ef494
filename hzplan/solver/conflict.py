"""Why nothing fits: which of the things asked for exclude each other, and what each would give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hzplan.formats.profile import Profile
from hzplan.solver.search import Request
from hzplan.solver.solve import searches_of

MEMORY = "--memory"


@dataclass(frozen=True)
class Conflict:
    """``groups``: the budget and pins that exclude each other, none of which could stay away (an irreducible
    set); ``relief``: by pin of it, the least memory in bytes without that pin."""

    groups: tuple[str, ...]
    relief: Mapping[str, int]


def conflict(profile: Profile, request: Request) -> Conflict:
    """For a question that nothing fits, by a deletion filter: a pin without which still nothing fits is let
    go for good; those that remain are needed, and so is the budget, because without one anything fits."""
    needed = list(request.pins)
    for pin in request.pins:
        fewer = [other for other in needed if other != pin]
        if least_bytes(profile, replace(request, pins=tuple(fewer))) > request.memory_bytes:
            needed = fewer
    relief = {
        pin: least_bytes(profile, replace(request, pins=tuple(other for other in needed if other != pin)))
        for pin in needed
    }
    return Conflict((MEMORY, *(f"--pin {pin!r}" for pin in needed)), relief)


def least_bytes(profile: Profile, request: Request) -> int:
    """The smallest memory that fits a question: with one use ahead and one gradient buffer."""
    depth = min(request.depths)
    searches = searches_of(profile, replace(request, depths=(depth,)))
    leanest = [search for search in searches if search.question.schedule.gradient_buffers == 1]
    return min(search.smallest.memory.peak for search in leanest)
