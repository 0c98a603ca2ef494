"""Statistics of repeated measurements: means without outliers, spread, and curves that rise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(samples: Sequence[float]) -> float:
    """Half the distance between the quartiles, over the median, to 4 digits; 0 for fewer than two."""
    middle = statistics.median(samples)
    if len(samples) < 2 or middle <= 0:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return round((high - low) / 2 / middle, 4)


TRIMMED = 0.05
"""Share of samples at each end that a mean leaves out: rare disturbances are no property of the machine."""


def trimmed_mean(samples: Sequence[float]) -> float:
    """The mean without the smallest and the largest twentieth, or one of each where there are five."""
    out = max(int(len(samples) * TRIMMED), int(len(samples) >= 5))
    return statistics.fmean(sorted(samples)[out : len(samples) - out])


def nanoseconds(seconds: float) -> float:
    """Seconds rounded to nanoseconds, a profile's resolution."""
    return round(seconds, 9)


def rising(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to ``values`` in least squares (pool adjacent violators).

    More bytes never take less time; where noise says so, neighbours share their mean. Unlike a running
    maximum, one disturbed point does not lift all that follow.
    """
    pools: list[tuple[float, int]] = []  # (mean, how many)
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            other, others = pools.pop()
            mean = (mean * count + other * others) / (count + others)
            count += others
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def sizes(first: int, last: int, factor: int, multiple: int) -> list[int]:
    """``first``, ``first·factor``, … up to the first one that reaches ``last``; multiples of ``multiple``."""
    found = [first]
    while found[-1] < last:
        found.append(found[-1] * factor)
    return list(dict.fromkeys(-(-size // multiple) * multiple for size in found))
