"""A plan from the shares of a relaxation. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

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
    for unit in sorted(gains, key=lambda unit: -gains[unit]):
        if fits(question, choice):
            break
        choice[unit] = by_weight[unit][0]
    if not fits(question, choice):
        return None
    for unit, patterns in by_weight.items():
        for pattern in reversed(patterns[patterns.index(choice[unit]) + 1 :]):
            if fits(question, {**choice, unit: pattern}):
                choice[unit] = pattern
                break
    return choice


def fits(question: Question, choice: Mapping[str, int]) -> bool:
    """Whether a choice is within the budget."""
    room = question.room
    total = sum(float(room.resident[unit][pattern]) for unit, pattern in choice.items())
    for buffer in room.shared:
        largest = max(float(sizes[choice[unit]]) for unit, sizes in buffer.sizes.items())
        total += max(0.0, largest - buffer.free_mib)
    return total <= question.room_mib
