"""Where a run is, in numbers that do not depend on its plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """Between two steps: after how many of them, and after how many sequences in all."""

    step: int
    samples: int


START = Position(0, 0)
