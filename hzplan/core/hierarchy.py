"""The sharding hierarchy: levels, slices and process groups of a data-parallel world.

Ranks are numbered so that neighbours share the fastest link. The world is a mesh whose dimensions
``r_1 … r_L`` go from the fastest to the slowest link, grouped into tiers. Level ``k`` cuts a buffer into
``S_k = r_1·…·r_k`` slices. With coordinates ``rank = c_1 + r_1·(c_2 + r_2·(…))`` the slice that a rank
holds at level ``k`` has the index ``(…(c_1·r_2 + c_2)·r_3 + …)·r_k + c_k``: the fastest dimension is the
most significant digit, so a rank's level-(k+1) slice lies inside its level-k slice, and a stage between
two levels needs no re-layout. Pure arithmetic, standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from hzplan.core.matrices import EXCHANGED, OWNED, REPEATED, MatrixWay

MAX_LEVELS = 8
"""Dimensions of a mesh at most."""
SPLIT_LEVELS = 4
"""Levels into which ``Mesh.of_tiers`` splits; finer splits multiply the solver's patterns and gain little."""


class Stage(NamedTuple):
    """A phase of a hierarchical collective: from level ``low`` to ``high`` > ``low``, inside one tier; or all
    levels at once (``Mesh.whole``)."""

    low: int
    high: int


class Levels(NamedTuple):
    """A triple (ℓp, ℓg, ℓo): the sharding levels of a tensor's parameter, gradient and optimizer state; and
    of a matrix under a matrix optimizer how its update gets the whole of it (``core.matrices``).

    ``flat``: of a tensor of which every rank has all, that its gradient is summed by one all-reduce over all
    ranks, as DDP does, and not tier by tier.
    """

    param: int
    grad: int
    optim: int
    matrix: MatrixWay = ""
    flat: bool = False

    @property
    def legal(self) -> bool:
        """Whether the optimizer state is sharded at least as finely as parameter and gradient."""
        return 0 <= self.param <= self.optim and 0 <= self.grad <= self.optim

    @property
    def three(self) -> tuple[int, int, int]:
        """The levels alone."""
        return self.param, self.grad, self.optim

    def shards(self, mesh: Mesh) -> tuple[int, int, int]:
        """Into how many slices parameter, gradient and optimizer state are cut."""
        return mesh.shards[self.param], mesh.shards[self.grad], mesh.shards[self.optim]

    def assembles(self, mesh: Mesh) -> bool:
        """Whether a matrix has to be brought together from slices for its update."""
        return self.matrix in (REPEATED, EXCHANGED) and mesh.shards[self.optim] > 1

    def of(self, *, trainable: bool, matrix: bool = False) -> Levels:
        """The levels of a tensor under this triple: a frozen tensor has only a parameter level, and the
        update of a matrix gets the whole of it, in some way; no other's does."""
        if not trainable:
            return Levels(self.param, self.param, self.param)
        return self._replace(matrix=(self.matrix or REPEATED) if matrix else "")


@dataclass(frozen=True)
class Mesh:
    """A data-parallel world as tiers of dimensions, fastest first; ``((2, 4), (16,))`` is ``2,4|16``.

    Raises ValueError when a dimension is below 1, there is no dimension, or there are more than 8 levels.
    """

    tiers: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.tiers or not all(self.tiers):
            raise ValueError("a mesh needs at least one tier, and each tier at least one dimension")
        if any(size < 1 for size in self.dims):
            raise ValueError(f"mesh {self}: every dimension must be at least 1")
        if len(self.dims) > MAX_LEVELS:
            raise ValueError(f"mesh {self}: at most {MAX_LEVELS} dimensions are supported")

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read ``"2,4|16"`` (brackets and blanks allowed); the inverse of ``str``."""
        inner = text.strip().removeprefix("[").removesuffix("]")
        try:
            tiers = tuple(tuple(int(size) for size in tier.split(",")) for tier in inner.split("|"))
        except ValueError:
            raise ValueError(
                f"mesh {text!r}: write sizes fastest first, tiers split by |, for instance 8|16"
            ) from None
        return cls(tiers)

    @classmethod
    def of_tiers(cls, *sizes: int) -> Mesh:
        """A mesh with one tier per size, each split into factors as long as that gives at most 4 levels."""
        factors = [_prime_factors(size) for size in sizes]
        while sum(map(len, factors)) > SPLIT_LEVELS and any(len(tier) > 1 for tier in factors):
            # Join the neighbours with the smallest product; of equals the slowest.
            _, _, tier, place = min(
                (factors[tier][place] * factors[tier][place + 1], -tier, tier, -place)
                for tier in range(len(factors))
                for place in range(len(factors[tier]) - 1)
            )
            pair = factors[tier][-place : -place + 2]
            factors[tier][-place : -place + 2] = [prod(pair)]
        return cls(tuple(tuple(tier) for tier in factors))

    def __str__(self) -> str:
        return "|".join(",".join(map(str, tier)) for tier in self.tiers)

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """All dimensions ``r_1 … r_L``, fastest first."""
        return tuple(size for tier in self.tiers for size in tier)

    @property
    def levels(self) -> int:
        """The finest level ``L``: every rank holds 1/world."""
        return len(self.dims)

    @cached_property
    def shards(self) -> tuple[int, ...]:
        """``S_k`` for every level 0 … L."""
        return tuple(prod(self.dims[:k]) for k in range(self.levels + 1))

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.shards[-1]

    @cached_property
    def tier_bounds(self) -> tuple[tuple[int, int], ...]:
        """For every tier the levels ``(low, high)`` that it spans."""
        bounds, low = [], 0
        for tier in self.tiers:
            bounds.append((low, low + len(tier)))
            low += len(tier)
        return tuple(bounds)

    def tier_of(self, level: int) -> int:
        """The tier of the dimension from ``level`` to the next, and so of a stage that begins there."""
        return next(tier for tier, (low, high) in enumerate(self.tier_bounds) if low <= level < high)

    def level_of(self, shards: int) -> int:
        """The coarsest level with this many shards; ValueError when no level has it."""
        if shards not in self.shards:
            raise ValueError(f"mesh {self} has no level with {shards} shards; it has {list(self.shards)}")
        return self.shards.index(shards)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """``(c_1, …, c_L)`` of a rank, fastest dimension first."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside of a world of {self.world}")
        coordinates = []
        for size in self.dims:
            rank, digit = divmod(rank, size)
            coordinates.append(digit)
        return tuple(coordinates)

    def rank_at(self, coordinates: tuple[int, ...]) -> int:
        """The inverse of ``coordinates``."""
        rank = 0
        for size, digit in zip(reversed(self.dims), reversed(coordinates), strict=True):
            rank = rank * size + digit
        return rank

    def tier_between(self, rank: int, other: int) -> int:
        """The index of the slowest tier between two ranks; 0 for a rank and itself."""
        pairs = list(zip(self.coordinates(rank), self.coordinates(other), strict=True))
        apart = [any(a != b for a, b in pairs[low:high]) for low, high in self.tier_bounds]
        return max((tier for tier, differ in enumerate(apart) if differ), default=0)

    def slice_index(self, rank: int, level: int) -> int:
        """The index of the slice that the rank holds, out of ``S_level``."""
        index = 0
        for size, digit in zip(self.dims[:level], self.coordinates(rank)[:level], strict=True):
            index = index * size + digit
        return index

    def holder(self, index: int, level: int) -> int:
        """The lowest rank that holds a slice of a level; holders of a level are ranks 0 … S_level − 1."""
        digits = []
        for size in reversed(self.dims[:level]):
            index, digit = divmod(index, size)
            digits.append(digit)
        rank = 0
        for size, digit in zip(reversed(self.dims[:level]), digits, strict=True):
            rank = rank * size + digit
        return rank

    def slice_bounds(self, rank: int, level: int, numel: int) -> tuple[int, int]:
        """First and past-the-last element of the rank's slice of a buffer of ``numel`` elements.

        ``numel`` must be a multiple of ``S_level`` (buckets are padded to it), else ValueError.
        """
        size, rest = divmod(numel, self.shards[level])
        if rest:
            raise ValueError(f"{numel} elements do not divide into {self.shards[level]} slices")
        index = self.slice_index(rank, level)
        return index * size, (index + 1) * size

    def group(self, rank: int, stage: Stage) -> tuple[int, ...]:
        """The ranks of the process group of ``rank`` in a stage, in slice order.

        They share the level-``low`` slice; their level-``high`` slices tile it in the order returned.
        """
        low, high = stage
        coordinates = self.coordinates(rank)
        members = [
            self.rank_at(coordinates[:low] + digits + coordinates[high:])
            for digits in _digits(self.dims[low:high])
        ]
        return tuple(members)

    def groups(self, stage: Stage) -> tuple[tuple[int, ...], ...]:
        """All sibling groups of a stage; together they hold every rank once."""
        found: list[tuple[int, ...]] = []
        seen: set[int] = set()
        for rank in range(self.world):
            if rank not in seen:
                found.append(self.group(rank, stage))
                seen.update(found[-1])
        return tuple(found)

    def group_size(self, stage: Stage) -> int:
        """The number of ranks in each group of a stage."""
        return self.shards[stage.high] // self.shards[stage.low]

    def stage_in_tier(self, tier: int, low: int, high: int) -> Stage | None:
        """The part of a tier between two levels as a stage; None where its groups have one rank."""
        tier_low, tier_high = self.tier_bounds[tier]
        stage = Stage(max(low, tier_low), min(high, tier_high))
        if stage.low >= stage.high or self.group_size(stage) == 1:
            return None
        return stage

    def stages(self) -> tuple[Stage, ...]:
        """Every stage that a plan can use: all spans of levels inside a tier whose groups have several
        ranks."""
        return tuple(
            stage
            for low, high in self.tier_bounds
            for start in range(low, high)
            for end in range(start + 1, high + 1)
            if self.group_size(stage := Stage(start, end)) > 1
        )

    @property
    def whole(self) -> Stage | None:
        """All ranks as one group; None where they are of one tier."""
        several = [tier for tier in self.tiers if prod(tier) > 1]
        return Stage(0, self.level_of(self.world)) if len(several) > 1 else None

    def triples(self, *, matrices: bool = False, flat: bool = False) -> tuple[Levels, ...]:
        """Every legal triple (ℓp, ℓg, ℓo), without levels that have no more shards than the one before.

        ``matrices``: in all ways that a matrix optimizer's update can get the whole of a matrix; ``flat``:
        whole tensors are summed at once.
        """
        distinct = [k for k in range(self.levels + 1) if k == 0 or self.shards[k] != self.shards[k - 1]]
        found = [
            levels
            for optim in distinct
            for grad in distinct
            for param in distinct
            for matrix in (self.matrix_ways(optim) if matrices else ("",))
            if (levels := Levels(param, grad, optim, matrix)).legal
        ]
        return tuple(
            levels._replace(flat=True) if flat and levels.three == (0, 0, 0) else levels for levels in found
        )

    def matrix_ways(self, optim: int) -> tuple[MatrixWay, ...]:
        """In what ways an update gets the whole of a matrix whose optimizer state is at a level."""
        return (EXCHANGED, OWNED, REPEATED) if self.shards[optim] > 1 else (REPEATED,)


def _digits(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Count through mixed-radix digits, the first one most significant."""
    if not sizes:
        yield ()
        return
    for digit in range(sizes[0]):
        for rest in _digits(sizes[1:]):
            yield (digit, *rest)


def _prime_factors(size: int) -> list[int]:
    factors, divisor = [], 2
    while divisor * divisor <= size:
        while size % divisor == 0:
            factors.append(divisor)
            size //= divisor
        divisor += 1
    if size > 1 or not factors:
        factors.append(size)
    return factors
