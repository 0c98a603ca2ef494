"""Interpolation of measured curves of seconds over sizes. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Curve = Sequence[tuple[int, float]]


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
    high, high_s = curve[-1]
    return high_s + _last_slope(curve) * (size - high)


def latency(curve: Curve, size: float) -> float:
    """Seconds that a message of a size takes beyond its bytes at the rate of the largest: what messages that
    are under way together pay once.

    Not what the smallest message takes, as waiting for an answer and sending can take place at once: then a
    message of a middling size takes the longer of both.
    """
    spent = interpolate(curve, size)
    return min(interpolate(curve, 0), max(0.0, spent - _last_slope(curve) * size))


def _last_slope(curve: Curve) -> float:
    """Seconds per byte between the last two points; of a single point all of its time."""
    high, high_s = curve[-1]
    if len(curve) == 1:
        return high_s / max(high, 1)
    low, low_s = curve[-2]
    return max(0.0, (high_s - low_s) / (high - low))
