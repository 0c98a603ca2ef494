"""How late ranks are: their places between the fastest and the slowest, use by use. Pure.

A profile knows, for every use, by how much the slowest rank exceeds the mean. Which rank that is changes from
use to use. A few ranks stand for all; their places are drawn once, are the same for every plan, and repeat
after ``CYCLE`` micro-batches, so that steps repeat as well.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cache
from math import gcd
from typing import NamedTuple

PLACES = (-1.0, -1 / 3, 1 / 3, 1.0)
"""The ranks' places between the fastest (−1) and the slowest (1)."""
RANKS = len(PLACES)
CYCLE = 2
"""Micro-batches after which places repeat."""


class Late(NamedTuple):
    """Of a use: by how much the slowest rank exceeds the mean, and by how much a rank is faster at most."""

    slowest: float = 0.0
    fastest: float = 0.0

    def at(self, place: float) -> float:
        """By how much a rank at a place exceeds the mean."""
        return max(self.slowest * place, -self.fastest)


def steps_per_cycle(accumulation: int) -> int:
    """Steps after which places repeat."""
    return CYCLE // gcd(accumulation, CYCLE)


def places(use: int, micro_batch: int) -> tuple[float, ...]:
    """By rank, its place in a use; micro-batches are counted from the first of all steps."""
    return _drawn(use * CYCLE + micro_batch % CYCLE)


def late_in(accumulation: int, uses: Iterable[tuple[int, int, Late]]) -> tuple[tuple[float, ...], ...]:
    """By step of a cycle and rank, by how much some uses together exceed their durations.

    ``uses``: each with its micro-batch, counted from the step's first.
    """
    found, uses = [], list(uses)
    for step in range(steps_per_cycle(accumulation)):
        of_ranks = [0.0] * RANKS
        for use, micro_batch, late in uses:
            of_use = places(use, step * accumulation + micro_batch)
            of_ranks = [one + late.at(place) for one, place in zip(of_ranks, of_use, strict=True)]
        found.append(tuple(of_ranks))
    return tuple(found)


@cache
def _drawn(seed: int) -> tuple[float, ...]:
    return tuple(random.Random(seed).sample(PLACES, RANKS))
