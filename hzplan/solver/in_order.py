"""The searches of a question once more, all messages in one order, which is then a part of the ILP's rows.

So their bound is of what is predicted, up to what no row says (``gap``): levels that suit the order are
found, and no choice in this order is below the bound. Another pace takes the order's numbers up to its own
prefetch + 1, beyond which gradients could wait for themselves.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hzplan.core.order import within
from hzplan.core.schedule import MessageOrder, Pace
from hzplan.solver.candidates import Candidates
from hzplan.solver.evaluate import Evaluation
from hzplan.solver.paths import MS
from hzplan.solver.search import Request, Search

ILP_S = 5.0
"""Seconds that the ILP of one pace takes at most."""


@dataclass
class _Pace:
    """One micro-batch size and pace: its search in any order, and once begun that in this order."""

    any_order: Search
    order: MessageOrder
    ordered: Search | None = None

    @property
    def bound_ms(self) -> float:
        bound = self.any_order.bound_ms
        return bound if self.ordered is None else max(bound, self.ordered.bound_ms)

    @property
    def is_open(self) -> bool:
        return self.ordered is None or self.ordered.has_open_nodes


class InOrder:
    """The search in one message order, begun where ``start`` is; ``found``: the plans in it."""

    def __init__(self, start: Evaluation, searches: Sequence[Search], request: Request) -> None:
        order = start.schedule.order
        assert order is not None
        self.request = request
        self.paces = [_Pace(search, order_at(order, start, search)) for search in searches]
        self.found = Candidates(in_order=True)
        self.found.all.append(start)
        self._useful: dict[int, set[int]] = defaultdict(set)

    @property
    def bound_ns(self) -> float:
        """No choice in this order is predicted below it, nanoseconds."""
        return min(self.found.least_ns, *(pace.bound_ms / MS for pace in self.paces))

    def covers(self, one: Evaluation) -> bool:
        """Whether a plan's order is this one, also as every other pace takes it: a plan of a smaller prefetch
        has less of the order that a deeper one was searched in."""
        order = one.schedule.order
        return order is not None and all(
            pace.order == order_at(order, one, pace.any_order) for pace in self.paces
        )

    def explore(self, nodes: int, deadline: float) -> None:
        """Branch where the bound is the lowest, at most so many times, until all is within the gap."""
        for _ in range(nodes):
            left = [pace for pace in self._left() if pace.is_open]
            if not left or time.monotonic() > deadline:
                return
            pace = min(left, key=lambda one: one.bound_ms)
            if pace.ordered is None:
                pace.ordered = pace.any_order.in_order(pace.order)
            pace.ordered.branch(self.found, self._useful)

    def solve_ilps(self, deadline: float) -> None:
        """An ILP where no node is left to branch on, for an equal share of the time, at most ``ILP_S``."""
        left = sorted(self._left(), key=lambda one: one.bound_ms)
        for number, pace in enumerate(left):
            seconds = min(ILP_S, (deadline - time.monotonic()) / (len(left) - number))
            if pace.ordered is not None and seconds > 0 and pace.ordered.may_improve(self.found):
                pace.ordered.run(self.found, seconds)

    def _left(self) -> list[_Pace]:
        """The paces that may have a plan better by more than the gap."""
        goal = self.found.least_ms / (1 + self.request.gap)
        return [pace for pace in self.paces if pace.bound_ms < goal]


SizeAndPace = tuple[int, Pace]
"""A micro-batch size, and a pace."""


def _pace(one: Evaluation) -> SizeAndPace:
    return one.micro_batch, one.schedule.pace


def pace_of(search: Search) -> SizeAndPace:
    """What a search is of."""
    return search.question.micro_batch, search.question.schedule.pace


def order_at(order: MessageOrder, of: Evaluation, search: Search) -> MessageOrder:
    """A plan's order as another pace takes it: up to prefetch + 1, beyond which gradients could wait for
    themselves."""
    return order if pace_of(search) == _pace(of) else within(order, search.question.schedule.prefetch + 1)
