"""Interference: how much compute and communication slow each other while both run. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

MAX_COMPUTE_LOSS = 0.95
"""Upper limit of the share of compute throughput that communication on one tier may take."""

MOST_TIERS = 3
"""Tiers whose interference is bounded together: the modes of more are too many to enumerate."""
SAME = 1e-9
"""Differences of weights that are rounding."""


class Energy(NamedTuple):
    """A step takes at least ``compute`` times its compute plus ``loads`` times the tiers' loads."""

    compute: float
    loads: tuple[float, ...]

    def at(self, compute: float, loads: Sequence[float]) -> float:
        """The bound for a step's compute and loads, in their unit."""
        return self.compute * compute + sum(a * b for a, b in zip(self.loads, loads, strict=True))


@dataclass(frozen=True)
class Interference:
    """Measured slow-down of compute and communication while both run, by tier.

    ``compute_loss``: the share of compute throughput that communication on a tier takes; of several tiers
    each takes its share of what the others leave, as all share processors. ``communication_slowdown``: the
    duration of a tier's tasks while compute runs, over their duration alone. ``contention``: the duration of
    several tasks of a tier at once, over their duration one after the other. ``wakeup_ns``: from the end of
    one stream's task to the begin of another stream's that waited for it. ``beside_updates``: the duration of
    compute and of updates while both run, over their duration alone; 1 also where updates are short.
    """

    compute_loss: tuple[float, ...]
    communication_slowdown: tuple[float, ...]
    contention: tuple[float, ...]
    wakeup_ns: float = 0.0
    beside_updates: float = 1.0

    @classmethod
    def none(cls, tiers: int, wakeup_ns: float = 0.0) -> Interference:
        """No interference; only wake-up latency, nanoseconds."""
        return cls((0.0,) * tiers, (1.0,) * tiers, (1.0,) * tiers, wakeup_ns)

    @cached_property
    def energies(self) -> tuple[Energy, ...]:
        """Lower bounds on the time of any mixture of compute and communication.

        At every moment some set S of tiers is at work, and compute is or is not. In such a mode compute
        advances by Π_S (1 − compute_loss), and a tier by 1 / communication_slowdown beside compute, by 1
        without. Where weights u of compute and v of the tiers add up to at most 1 in every mode,

            u · advance of compute + Σ v · advance of tier ≤ 1,

        the time is at least u · compute + Σ v · load (weak duality of the linear program that chooses the
        time spent in each mode). The best weights are the vertices of that polytope: they are enumerated for
        up to ``MOST_TIERS`` tiers at once. Where ranks compute at different times the bound holds for their
        mean: the left side is convex in the share of ranks that compute, so it is largest at 0 or 1.
        """
        tiers = range(len(self.compute_loss))
        found = dict[Energy, None]()
        for some in itertools.combinations(tiers, min(len(tiers), MOST_TIERS)):
            for compute, *loads in self._vertices(some):
                shares = dict(zip(some, loads, strict=True))
                found[Energy(compute, tuple(shares.get(tier, 0.0) for tier in tiers))] = None
        return tuple(found)

    def _vertices(self, tiers: Sequence[int]) -> list[tuple[float, ...]]:
        """The vertices that no other is above, with weights of compute and of ``tiers``."""
        rows = []
        for computing, *at_work in itertools.product((0.0, 1.0), repeat=len(tiers) + 1):
            beside = [tier for tier, busy in zip(tiers, at_work, strict=True) if busy]
            speed = prod((1.0 - self.compute_loss[tier] for tier in beside), start=computing)
            rates = (1 / self.communication_slowdown[tier] if computing else 1.0 for tier in tiers)
            rows.append([speed, *(busy * rate for busy, rate in zip(at_work, rates, strict=True))])
        size = len(tiers) + 1
        matrix = np.array([*rows[1:], *(-np.eye(size))])  # the first mode is idle
        limits = np.array([1.0] * (len(rows) - 1) + [0.0] * size)
        points = set()
        for chosen in itertools.combinations(range(len(matrix)), size):
            part = matrix[list(chosen)]
            if abs(np.linalg.det(part)) > SAME:
                point = np.linalg.solve(part, limits[list(chosen)])
                if (matrix @ point <= limits + SAME).all():
                    points.add(tuple(float(weight) for weight in np.maximum(point, 0.0).round(9)))
        return sorted(
            one
            for one in points
            if not any(
                other != one and all(a >= b for a, b in zip(other, one, strict=True)) for other in points
            )
        )
