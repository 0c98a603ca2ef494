"""Small units travel with a large neighbour: a norm's few bytes cost as many messages as a block's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hzplan.schedule import Use

SMALL = 16
"""A unit is small beside another that has so many times its bytes."""


def joined(
    requires: Mapping[str, tuple[str, ...]], nbytes: Mapping[str, int], uses: Sequence[Use]
) -> dict[str, tuple[str, ...]]:
    """What each unit's uses need whole when small units go with the neighbour of all their uses.

    Units that go together need each other: they are then gathered and reduced in one task. Only those are
    joined that no other unit's needs tie already, and that are used as often as the neighbour, next to it.
    Of two neighbours it is the one nearer to an end of the model, so that repeated blocks stay alike.
    """
    places: dict[str, list[int]] = {}
    for index, use in enumerate(uses):
        places.setdefault(use.unit, []).append(index)
    free = {
        unit
        for unit in places
        if requires[unit] == (unit,) and not any(unit in needs for u, needs in requires.items() if u != unit)
    }
    middle = sum(use.phase == "forward" for use in uses) / 2
    carrier: dict[str, str] = {}
    for unit in free:
        beside = [
            {uses[i].unit for i in (place - 1, place + 1) if 0 <= i < len(uses)} for place in places[unit]
        ]
        candidates = [
            other
            for other in set.intersection(*beside) & free
            if nbytes[unit] * SMALL <= nbytes[other] and len(places[other]) == len(places[unit])
        ]
        if candidates:
            carrier[unit] = max(candidates, key=lambda other: (abs(places[other][0] - middle), other))
    together: dict[str, list[str]] = {}
    for unit in requires:
        if unit in carrier and carrier[unit] not in carrier:  # nobody is carried by what is carried itself
            together.setdefault(carrier[unit], [carrier[unit]]).append(unit)
    found = dict(requires)
    for members in together.values():
        for unit in members:
            found[unit] = (unit, *(other for other in members if other != unit))
    return found
