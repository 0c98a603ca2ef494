"""Operations that touch the same memory without an order between them: a rank by itself, all orders at once.

Happens-before is what streams, events and the host's waits give on one device; that a collective also waits
for other ranks is left out, so no order is owed to their timing.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from tests.accelerator.program import Operation, Program, View


class Race(NamedTuple):
    """Two operations in the order of their launches."""

    first: str
    second: str
    block: int


class _Access(NamedTuple):
    low: int
    high: int
    is_write: bool
    stream: str
    place: int
    label: str


def races(program: Program, most: int = 10) -> list[Race]:
    """Up to ``most`` of a rank's."""
    known: dict[str, list[dict[str, int]]] = defaultdict(list)  # by stream: what each operation comes after
    accesses: dict[int, dict[tuple[int, int, bool, str], _Access]] = defaultdict(dict)
    found: list[Race] = []
    for operation in program.launched:
        stream = operation.stream
        before = dict(known[stream][-1]) if known[stream] else {}
        for place in operation.waits:
            for other, done in known[place.stream][place.done - 1].items():
                before[other] = max(before.get(other, 0), done)
        place_here = len(known[stream])
        before[stream] = place_here + 1
        known[stream].append(before)
        for view, is_write in _touched(operation):
            low, high = view.bytes_span()
            of_block = accesses[view.block]
            for one in of_block.values():
                apart = one.high <= low or high <= one.low or not (is_write or one.is_write)
                if not apart and before.get(one.stream, 0) <= one.place:
                    label = f"{operation.label} in {stream}"
                    found.append(Race(f"{one.label} in {one.stream}", label, view.block))
                    if len(found) >= most:
                        return found
            of_block[low, high, is_write, stream] = _Access(
                *(low, high, is_write, stream, place_here, operation.label)
            )
    return found


def _touched(operation: Operation) -> list[tuple[View, bool]]:
    return [*((view, False) for view in operation.reads), *((view, True) for view in operation.writes)]
