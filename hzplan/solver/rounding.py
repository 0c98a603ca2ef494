"""A plan from the shares of a relaxation. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from hzplan.solver.problem import Question
from hzplan.solver.relaxation import Relaxation

Choice = dict[str, int]


def rounded(lp: Relaxation) -> Choice | None:
    """The choice that follows the shares of every pattern from unit to unit, if it can be made to fit.

    What is too much takes the leanest pattern that its unit has a share of; then what fits takes the
    heaviest, which is the faster one, because all that have a share cost the same at the duals.
    """
    question, choice = lp.question, Choice()
    shares = {unit: lp.shares(unit) for unit in question.families}
    carried: dict[int, Counter[int]] = defaultdict(Counter)
    for unit, of in shares.items():
        carry = carried[id(question.families[unit])]
        for pattern, share in of.items():
            carry[pattern] += share  # type: ignore[assignment]  # a sum of shares
        choice[unit] = max(of, key=lambda pattern: carry[pattern])
        carry[choice[unit]] -= 1
    weights = {unit: lp.memory_ms(unit) for unit in shares}
    by_weight = {unit: sorted(of, key=weights[unit].__getitem__) for unit, of in shares.items()}
    gains = {unit: float(of[choice[unit]] - of[by_weight[unit][0]]) for unit, of in weights.items()}
    filled = _Filled(question, choice)
    for unit in sorted(gains, key=lambda unit: -gains[unit]):
        if filled.fits():
            break
        filled.change(unit, by_weight[unit][0])
    if not filled.fits():
        return None
    for unit, patterns in by_weight.items():
        kept = filled.choice[unit]
        for pattern in reversed(patterns[patterns.index(kept) + 1 :]):
            filled.change(unit, pattern)
            if filled.fits():
                break
            filled.change(unit, kept)
    return filled.choice


class _Filled:
    """A choice and the memory that it takes, unit by unit."""

    def __init__(self, question: Question, choice: Choice) -> None:
        self.room, self.budget_mib, self.host_mib = question.room, question.room_mib, question.host_mib
        self.choice = choice
        self.place = {unit: number for number, unit in enumerate(choice)}
        self.resident = sum(float(self.room.resident[unit][p]) for unit, p in choice.items())
        self.host = sum(float(sizes[choice[unit]]) for unit, sizes in self.room.host.items())
        self.held = [np.zeros(len(choice)) for _ in self.room.shared]
        for held, buffer in zip(self.held, self.room.shared, strict=True):
            for unit, sizes in buffer.sizes.items():
                held[self.place[unit]] = sizes[choice[unit]]
        self.at_events = [buffer.events.at(choice) for buffer in self.room.shared]

    def fits(self) -> bool:
        """Whether it is within the budget."""
        total = self.resident
        for held, needed in zip(self.held, self.at_events, strict=True):
            total += max(float(held.max()), float(needed.max(initial=0.0)))
        return total <= self.budget_mib and self.host <= self.host_mib

    def change(self, unit: str, pattern: int) -> None:
        """Another pattern for a unit."""
        resident = self.room.resident[unit]
        self.resident += float(resident[pattern]) - float(resident[self.choice[unit]])
        if unit in self.room.host:
            sizes = self.room.host[unit]
            self.host += float(sizes[pattern]) - float(sizes[self.choice[unit]])
        for number, buffer in enumerate(self.room.shared):
            if unit in buffer.sizes:
                self.held[number][self.place[unit]] = buffer.sizes[unit][pattern]
            added = buffer.events.added.get(unit)
            if added is not None:
                self.at_events[number] = self.at_events[number] + added[pattern] - added[self.choice[unit]]
        self.choice[unit] = pattern
