"""The plans found so far."""

from __future__ import annotations

from hzplan.solver.evaluate import Evaluation
from hzplan.solver.paths import MS


class Candidates:
    """The incumbents of a search: every plan that was replayed and fits."""

    def __init__(self) -> None:
        self.all: list[Evaluation] = []

    @property
    def least_ms(self) -> float:
        """The smallest objective so far, milliseconds; infinite without a plan."""
        return self.least_ns * MS

    @property
    def least_ns(self) -> float:
        """The smallest objective so far, nanoseconds; infinite without a plan."""
        least = float("inf")
        for one in self.all:
            if one.floor_ns < least:
                least = min(least, one.objective_ns)
        return least
