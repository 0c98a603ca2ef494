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
    (low, low_s), (high, high_s) = curve[-2], curve[-1]
    return high_s + max(0.0, (high_s - low_s) / (high - low)) * (size - high)
