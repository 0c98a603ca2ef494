"""Rounding a fractional solution of the relaxation to a plan. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from hzplan.solver.question import Question
from hzplan.solver.relaxation import Relaxation

Choice = dict[str, int]


def rounded(lp: Relaxation) -> Choice | None:
    """One pattern index per unit, near the fractional solution, or None where none was found that fits.

    Like units take patterns in proportion to their summed shares. Where that does not fit, units change to
    the leanest pattern that they have a share of. Then units change to the heaviest one that still fits: it
    is the faster one, because all patterns with a share cost the same at the duals.
    """
    question, choice = lp.question, Choice()
    shares = {unit: lp.shares(unit) for unit in question.pools}
    carried: dict[int, Counter[int]] = defaultdict(Counter)
    for unit, of in shares.items():
        carry = carried[id(question.pools[unit])]
        for pattern, share in of.items():
            carry[pattern] += share  # type: ignore[assignment]  # a sum of shares
        choice[unit] = max(of, key=lambda pattern: carry[pattern])
        carry[choice[unit]] -= 1
    weights = {unit: lp.memory_ms(unit) for unit in shares}
    by_weight = {unit: sorted(of, key=weights[unit].__getitem__) for unit, of in shares.items()}
    gains = {unit: float(of[choice[unit]] - of[by_weight[unit][0]]) for unit, of in weights.items()}
    filled = _MemoryOf(question, choice)
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


class _MemoryOf:
    """A choice with its memory, updated as single units change their pattern."""

    def __init__(self, question: Question, choice: Choice) -> None:
        self.use, self.budget_mib, self.host_budget_mib = (
            question.memory_use,
            question.budget_mib,
            question.host_budget_mib,
        )
        self.choice = choice
        self.place = {unit: number for number, unit in enumerate(choice)}
        self.resident = sum(float(self.use.resident[unit][p]) for unit, p in choice.items())
        self.host = sum(float(sizes[choice[unit]]) for unit, sizes in self.use.host.items())
        self.held = [np.zeros(len(choice)) for _ in self.use.shared]
        for held, buffer in zip(self.held, self.use.shared, strict=True):
            for unit, sizes in buffer.sizes.items():
                held[self.place[unit]] = sizes[choice[unit]]
        self.at_events = [buffer.events.at(choice) for buffer in self.use.shared]

    def fits(self) -> bool:
        """Whether the choice is within both budgets, the device's and the host's."""
        total = self.resident
        for held, needed in zip(self.held, self.at_events, strict=True):
            total += max(float(held.max()), float(needed.max(initial=0.0)))
        return total <= self.budget_mib and self.host <= self.host_budget_mib

    def change(self, unit: str, pattern: int) -> None:
        """Give a unit another pattern."""
        resident = self.use.resident[unit]
        self.resident += float(resident[pattern]) - float(resident[self.choice[unit]])
        if unit in self.use.host:
            sizes = self.use.host[unit]
            self.host += float(sizes[pattern]) - float(sizes[self.choice[unit]])
        for number, buffer in enumerate(self.use.shared):
            if unit in buffer.sizes:
                self.held[number][self.place[unit]] = buffer.sizes[unit][pattern]
            added = buffer.events.added.get(unit)
            if added is not None:
                self.at_events[number] = self.at_events[number] + added[pattern] - added[self.choice[unit]]
        self.choice[unit] = pattern
