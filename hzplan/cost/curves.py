"""Interpolation of measured curves of seconds over sizes. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Curve = Sequence[tuple[int, float]]
TOGETHER = 4
"""Messages of units that travel together: the steps of plans have few such groups, of few units each."""


def interpolate(curve: Curve, size: float) -> float:
    """Seconds at a size, interpolated from (size, seconds) points of rising size.

    Linear between points. Below the first point its time, as a message costs at least its latency. Above the
    last point the slope of the last two, at least 0; from a single point in proportion to the size.
    """
    first_size, first_seconds = curve[0]
    if size <= first_size or len(curve) == 1:
        return first_seconds if size <= first_size else first_seconds * size / max(first_size, 1)
    for (low, low_s), (high, high_s) in itertools.pairwise(curve):
        if size <= high:
            return low_s + (high_s - low_s) * (size - low) / (high - low)
    (low, low_s), (high, high_s) = curve[-2], curve[-1]
    return high_s + max(0.0, (high_s - low_s) / (high - low)) * (size - high)


def latency(curve: Curve, size: float) -> float:
    """Seconds that ``TOGETHER`` messages of a size pay once when they are under way together, as they then
    take as long as one with all of their bytes; at most the time of the first point.

    Not always what the smallest message takes: waiting for an answer and sending can take place at once, and
    then a message of a middling size takes about the longer of both. Of a line it is its latency.
    """
    first_size, first_seconds = curve[0]
    size = max(size, first_size, 1)
    alone, joined = interpolate(curve, size), interpolate(curve, TOGETHER * size)
    per_byte = (joined - alone) / ((TOGETHER - 1) * size)
    return min(first_seconds, max(0.0, alone - per_byte * (size - first_size)))
