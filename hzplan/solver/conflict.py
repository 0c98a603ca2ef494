"""Why nothing fits: which of the things asked for exclude each other, and what each would give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hzplan.cost.collectives import nodes_of, with_nodes
from hzplan.errors import UserError
from hzplan.formats.profile import Profile
from hzplan.solver.search import Request
from hzplan.solver.solve import searches_of

MEMORY, BAN = "--memory", "--recompute none"


@dataclass(frozen=True)
class Conflict:
    """An irreducible infeasible set. ``groups``: the budget and the options that exclude each other;
    ``relief``: by option in it, the smallest memory that would fit without that option, bytes."""

    groups: tuple[str, ...]
    relief: Mapping[str, int]


def decided(profile: Profile, request: Request) -> dict[str, Request]:
    """By option that fixes a choice, as typed on the command line, the question without that option."""
    found = {f"--pin {pin!r}": _without(request, pin) for pin in request.pins}
    if request.recompute == "none" and any(cost.recompute for use in profile.uses for cost in use.costs):
        found[BAN] = replace(request, recompute="choose")
    return found


def conflict(profile: Profile, request: Request) -> Conflict:
    """The irreducible infeasible set of a question that nothing fits, by a deletion filter.

    An option is dropped where nothing fits without it either. The options that remain are all needed, and so
    is the budget, because without a budget every plan fits.
    """
    for name in decided(profile, request):
        fewer = decided(profile, request)[name]
        if least_bytes(profile, fewer) > request.memory_bytes:
            request = fewer
    relief = {name: least_bytes(profile, fewer) for name, fewer in decided(profile, request).items()}
    return Conflict((MEMORY, *relief), relief)


def _without(request: Request, pin: str) -> Request:
    return replace(request, pins=tuple(other for other in request.pins if other != pin))


def more_nodes(profile: Profile, request: Request) -> tuple[int, int] | None:
    """(twice the nodes, the smallest memory that fits there in bytes); None where the profile is measured, or
    the batch does not divide."""
    try:
        nodes = 2 * nodes_of(profile)
        return nodes, least_bytes(with_nodes(profile, nodes), request)
    except UserError:
        return None


def moved_to_host(profile: Profile, request: Request) -> int | None:
    """The smallest device memory that fits with unlimited host memory, bytes; None where that is no less."""
    if profile.host is None:
        return None
    found = least_bytes(profile, replace(request, host_bytes=2**60))
    return found if found < least_bytes(profile, request) else None


def least_bytes(profile: Profile, request: Request) -> int:
    """The smallest memory that fits a question, bytes: with the least prefetch and one gradient buffer, or
    few matrices brought together at a time."""
    depth = min(request.depths)
    searches = searches_of(profile, replace(request, depths=(depth,)))
    paces = ((search, search.question.schedule.pace) for search in searches)
    leanest = [search for search, pace in paces if pace.gradient_buffers == 1 or pace.matrix_units]
    return min(search.smallest.memory.peak for search in leanest)
