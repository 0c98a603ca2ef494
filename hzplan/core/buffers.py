"""Buffer assignment: which slot of a buffer pool each unit uses, and scratch memory for receiving. Pure.

Cost model, ILP and runtime all use it, so that the bytes counted are the bytes allocated.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hzplan.core.layout import ITEM_BYTES, TensorSpec
from hzplan.core.schedule import Interval, Schedule
from hzplan.core.wire import BLOCK, CHUNK, CHUNK_ON_DEVICE, Wire

MAX_IN_FLIGHT = 2
"""Exchanges of one tier that reduce at the same time: one begins while the other ends."""

MAX_SCRATCH_BYTES = 2 << 20
"""Scratch memory of one tier for receiving, bytes, all in-flight exchanges together. Larger buffers do not
raise bandwidth."""

LEAST_SCRATCH_BYTES = 2 * BLOCK * ITEM_BYTES["float64"]
"""Room for two portions of a block each."""

K = TypeVar("K", bound=Hashable)


def assign_buffers(live_ranges: Mapping[K, Sequence[Interval]], sizes_bytes: Mapping[K, int]) -> dict[K, int]:
    """Assign every buffer a slot such that buffers alive at the same time have different slots.

    ``live_ranges`` holds the closed intervals of positions in which a buffer is in use. A buffer keeps its
    slot for good: autograd has saved views of its address. A slot is as large as its largest buffer. Greedy,
    once largest first and once in order of first use; the smaller total wins, so the result depends on
    nothing but the arguments.
    """
    by_size = sorted(live_ranges, key=lambda key: -sizes_bytes[key])
    by_time = sorted(live_ranges, key=lambda key: live_ranges[key][0])
    candidates = [_greedy(order, live_ranges) for order in (by_size, by_time)]
    return min(candidates, key=lambda slots: sum(slot_sizes(slots, sizes_bytes)))


def slot_sizes(slots: Mapping[K, int], sizes_bytes: Mapping[K, int]) -> list[int]:
    """Bytes of every slot: the size of its largest buffer."""
    sizes = [0] * (max(slots.values(), default=-1) + 1)
    for key, slot in slots.items():
        sizes[slot] = max(sizes[slot], sizes_bytes[key])
    return sizes


def _greedy(order: Iterable[K], live_ranges: Mapping[K, Sequence[Interval]]) -> dict[K, int]:
    """Greedy graph colouring: every buffer gets the first slot that is free over its live ranges."""
    slots: dict[K, int] = {}
    busy: list[list[Interval]] = []  # by slot: intervals in use, sorted and disjoint
    for key in order:
        own = _merged(live_ranges[key])
        slot = next((slot for slot, others in enumerate(busy) if not _meet(own, others)), len(busy))
        if slot == len(busy):
            busy.append([])
        for interval in own:
            insort(busy[slot], interval)
        slots[key] = slot
    return slots


def _merged(intervals: Sequence[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for low, high in sorted(intervals):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def _meet(own: Sequence[Interval], others: Sequence[Interval]) -> bool:
    """Whether an interval of one list overlaps one of the other; each list is sorted and disjoint."""
    for low, high in own:
        before = bisect_right(others, high, key=lambda other: other[0])
        if before and others[before - 1][1] >= low:
            return True
    return False


@dataclass(frozen=True)
class Slots:
    """The slot of each unit's unshard and gradient buffer; independent of the levels chosen."""

    unshard: Mapping[str, int]
    gradient: Mapping[str, int]


def assign_slots(schedule: Schedule, tensors: Mapping[str, Sequence[TensorSpec]]) -> Slots:
    """Assign slots by the schedule's live ranges; a buffer's size is that of its unit's tensors."""
    sizes = {unit: sum(t.nbytes for t in specs) for unit, specs in tensors.items()}
    return Slots(
        assign_buffers(schedule.unshard_live_ranges, sizes),
        assign_buffers(schedule.gradient_live_ranges, sizes),
    )


MATRIX_SLOTS = 2
"""Buffers for matrices that are brought together: one group's come while another's go."""


def matrix_slots(sizes_bytes: Sequence[int]) -> list[int]:
    """Bytes of every buffer for matrices, which groups of ``sizes_bytes`` have in turn."""
    return [max(sizes_bytes[slot::MATRIX_SLOTS], default=0) for slot in range(MATRIX_SLOTS)]


def scratch_bytes(received_bytes: int) -> int:
    """Scratch of one tier, bytes, for exchanges in which a rank receives up to ``received_bytes`` from a
    peer.

    Each exchange in flight has a part for one such message; larger messages pass through it in portions.
    """
    least = LEAST_SCRATCH_BYTES if received_bytes else 0
    part = max(least, min(MAX_SCRATCH_BYTES // MAX_IN_FLIGHT, received_bytes))
    return MAX_IN_FLIGHT * -(-part // 256) * 256


def rounding_bytes(wire: Wire | None, tier: int, *, on_device: bool) -> int:
    """Bytes in which values of a tier's messages are rounded to blocks: two float32 copies of a chunk, for
    each stream that packs or reads such at the same time."""
    if wire is None:
        return 0
    param, grad = (wire.of(what, tier) in ("int8", "fp8") for what in ("param", "grad"))
    streams = param + MAX_IN_FLIGHT * grad + (param or grad)  # unshards, reductions, gathers
    return streams * 2 * ITEM_BYTES["float32"] * BLOCK * (CHUNK_ON_DEVICE if on_device else CHUNK)
