"""Matrices under a matrix optimizer: how an update gets the whole of one, and who computes it. Pure.

A matrix optimizer such as Muon computes a matrix's update from all of its elements, in two halves that work
element by element (momentum before, the step after) and one that does not (Newton–Schulz between). Its ways:

``repeated``: every rank of the level-ℓo group gathers the whole, and computes the same. ``exchanged``: each
matrix goes to one rank of the group, its host, and its update comes back (two all-to-alls). ``owned``: slices
of the bucket end at the borders of tensors, so that one rank has all of one, and nothing travels.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

NamedWay = Literal["repeated", "exchanged", "owned"]
MatrixWay = Literal["", NamedWay]
"""How a tensor's update gets the whole of it; "" where it works element by element."""

REPEATED: MatrixWay = "repeated"
EXCHANGED: MatrixWay = "exchanged"
OWNED: MatrixWay = "owned"
MATRIX_WAYS: tuple[MatrixWay, ...] = (REPEATED, EXCHANGED, OWNED)

STEPS = 5
"""Newton–Schulz iterations by default, as torch.optim.Muon has them."""

SWAPS = 64
"""Most passes over an assignment in search of a better one; two or three are usual."""


class Shape(NamedTuple):
    """Matrices of a tensor: how many, of how many rows and columns. Leading dimensions count matrices, as of
    experts that are kept in one tensor."""

    many: int
    rows: int
    columns: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> Shape:
        """Of a tensor of at least two dimensions."""
        return cls(prod(shape[:-2]), shape[-2], shape[-1])

    @property
    def numel(self) -> int:
        """Elements of one of them."""
        return self.rows * self.columns


def newton_schulz_flops(rows: int, columns: int, steps: int = STEPS) -> int:
    """Floating-point operations of the quintic iteration on one matrix, s = min, b = max of its sides.

    An iteration is three products: X·Xᵀ and P·X (2s²b each) and G·G (2s³): ``steps`` · (4s²b + 2s³).
    """
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)


def hosts(work: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Who of ``ranks`` computes which: by piece of work the rank, so that the largest sum is small.

    The longest first to the rank with the least (Graham 1969), then single moves and swaps away from the rank
    with the most for as long as one of them helps. It depends on nothing but the arguments.
    """
    loads = [0] * ranks
    heap = [(0, rank) for rank in range(ranks)]
    found = [0] * len(work)
    for index in sorted(range(len(work)), key=lambda index: (-work[index], index)):
        load, rank = heapq.heappop(heap)
        found[index] = rank
        loads[rank] = load + work[index]
        heapq.heappush(heap, (loads[rank], rank))
    for _ in range(SWAPS):
        if not _improve(work, found, loads):
            break
    return tuple(found)


def _improve(work: Sequence[int], found: list[int], loads: list[int]) -> bool:
    """Move or swap one piece of work of the busiest rank so that the larger of the two loads falls."""
    busiest = max(range(len(loads)), key=lambda rank: (loads[rank], -rank))
    own = [index for index, rank in enumerate(found) if rank == busiest]
    least = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
    gap = loads[busiest] - loads[least]
    for index in own:
        if work[index] < gap:
            _give(work, found, loads, index, least)
            return work[index] > 0
    others = sorted({(loads[rank], rank) for rank in range(len(loads)) if loads[rank] < loads[busiest]})
    for load, rank in others:
        theirs = {work[index]: index for index, of in reversed([*enumerate(found)]) if of == rank}
        for index in own:
            for size, other in theirs.items():
                if 0 < work[index] - size < loads[busiest] - load:
                    _give(work, found, loads, index, rank)
                    _give(work, found, loads, other, busiest)
                    return True
    return False


def _give(work: Sequence[int], found: list[int], loads: list[int], index: int, rank: int) -> None:
    loads[found[index]] -= work[index]
    loads[rank] += work[index]
    found[index] = rank


@dataclass(frozen=True)
class Placed:
    """A matrix in a bucket: elements ``[offset, offset + numel)`` of its whole buffer of ``of`` elements."""

    bucket: int
    tensor: int
    offset: int
    rows: int
    columns: int
    of: int

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.rows * self.columns

    def part(self, place: int, slices: int) -> tuple[int, int]:
        """Which elements of the bucket's buffer a slice has of it; (0, 0) where none."""
        length = self.of // slices
        low = max(self.offset, place * length)
        high = min(self.offset + self.numel, (place + 1) * length)
        return (low, high) if low < high else (0, 0)


class Part(NamedTuple):
    """Elements ``[low, high)`` of a bucket's buffer, of matrix number ``matrix``; in another at ``start``."""

    matrix: int
    low: int
    high: int
    start: int

    @property
    def end(self) -> int:
        """Past the last element in that buffer."""
        return self.start + self.high - self.low


class Route(NamedTuple):
    """What one rank sends and receives to bring matrices to their hosts; the way back is the reverse.

    ``own``: the parts of its slices, in the order in which they leave, and ``sent`` elements by host;
    ``hosted``: the parts of the matrices that it computes, in the order in which they arrive, and
    ``received`` elements by sender.
    """

    own: tuple[Part, ...]
    sent: tuple[int, ...]
    hosted: tuple[Part, ...]
    received: tuple[int, ...]


def route(matrices: Sequence[Placed], host: Sequence[int], place: int, slices: int) -> Route:
    """The route of the rank at ``place`` of a group with one slice each; ``host``: by matrix, who has it."""
    by_host: list[list[int]] = [[] for _ in range(slices)]
    for index, rank in enumerate(host):
        by_host[rank].append(index)

    def parts(pairs: Iterable[tuple[int, Iterable[int]]]) -> tuple[tuple[Part, ...], tuple[int, ...]]:
        """The parts that the given slices have of the given matrices, one after the other."""
        found, sizes, start = [], [], 0
        for of, indices in pairs:
            begins = start
            for index in indices:
                low, high = matrices[index].part(of, slices)
                if low < high:
                    found.append(Part(index, low, high, start))
                    start += high - low
            sizes.append(start - begins)
        return tuple(found), tuple(sizes)

    own, sent = parts((place, indices) for indices in by_host)
    hosted, received = parts((of, by_host[place]) for of in range(slices))
    return Route(own, sent, hosted, received)
