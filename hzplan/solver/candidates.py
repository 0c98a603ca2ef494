"""The plans found so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hzplan.solver.evaluate import Evaluation
from hzplan.solver.paths import MS


class Candidates:
    """The incumbents of a search: every plan that was replayed and fits.

    ``in_order``: whether their objective is that of their own message order, not that of any. ``admits``:
    whether a plan may be the answer, where a target ties units together that a search chooses for one by one;
    ``instead``: what takes the place of one that may not.
    """

    def __init__(
        self,
        *,
        in_order: bool = False,
        admits: Callable[[Evaluation], bool] = lambda one: True,
        instead: Callable[[Evaluation], Iterable[Evaluation]] = lambda one: (),
    ) -> None:
        self.all: list[Evaluation] = []
        self.in_order, self.admits, self._instead = in_order, admits, instead

    def add(self, one: Evaluation) -> None:
        """Add a plan that fits, or what takes its place."""
        self.all += [one] if self.admits(one) else self._instead(one)

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
