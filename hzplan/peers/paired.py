"""How much slower one is than another, from rounds in which both took a turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement
from math import exp, log

MIN_ROUNDS = 6
"""Fewer rounds give no 95% interval: 2 · 2⁻⁵ > 5%."""


@dataclass(frozen=True)
class Ratio:
    """A paired ratio of times and its interval of at least 95% confidence; above 1: the first is slower."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval."""
        return (self.high - self.low) / 2


def paired_ratio(slower: Sequence[float], faster: Sequence[float]) -> Ratio:
    """Ratio of two times, measured together round by round; both in seconds, above 0, of equal length.

    The Hodges-Lehmann estimate on logarithms (the median of all pairs' means, Walsh averages) with the
    interval that inverts Wilcoxon's signed-rank test: exact for any symmetric noise, and one round that the
    machine spoilt moves it little. With fewer than ``MIN_ROUNDS`` rounds it just spans the extremes.

    Raises ValueError when the lengths differ or there is no round.
    """
    differences = [log(a / b) for a, b in zip(slower, faster, strict=True)]
    if not differences:
        raise ValueError("no round was measured")
    walsh = sorted((a + b) / 2 for a, b in combinations_with_replacement(differences, 2))
    cut = _cut(len(differences))
    return Ratio(exp(_median(walsh)), exp(walsh[cut]), exp(walsh[-1 - cut]))


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@cache
def _cut(rounds: int) -> int:
    """How many Walsh averages lie outside at each end: the largest d with P(signed-rank sum ≤ d) ≤ 2.5%."""
    ways = [1]  # of reaching each signed-rank sum, the signs being coins
    for rank in range(1, rounds + 1):
        ways = [
            (ways[total] if total < len(ways) else 0) + (ways[total - rank] if total >= rank else 0)
            for total in range(len(ways) + rank)
        ]
    reached = 0
    for total, count in enumerate(ways):
        reached += count
        if reached > 0.025 * 2**rounds:
            return max(0, total - 1)
    raise AssertionError("the sums of all signs have probability 1")
