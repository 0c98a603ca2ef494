"""The plans found so far."""

from __future__ import annotations

from hzplan.solver.evaluate import Evaluation
from hzplan.solver.paths import MS


class Candidates:
    """The incumbents of a search: every plan that was replayed and fits.

    ``in_order``: whether their objective is that of their own message order, not that of any.
    """

    def __init__(self, *, in_order: bool = False) -> None:
        self.all: list[Evaluation] = []
        self.in_order = in_order

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
                least = min(least, one.in_order_ns if self.in_order else one.objective_ns)
        return least
