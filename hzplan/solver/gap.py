"""What a plan's gap comes from. Pure.

Between the proven bound and the predicted step lie the plan's objective, and replays of the plan with one
more thing each that the objective leaves out. A part is the difference that its thing makes, in this order;
parts add up to the gap. A wait can make a later replay shorter as well, so a part may be negative.
"""

from __future__ import annotations

from typing import NamedTuple

from hzplan.cost.interference import Interference
from hzplan.cost.simulate import replay_shared
from hzplan.solver.evaluate import Evaluation

SHOWN = 0.002
"""Parts below this share of the bound are not worth a reader's time."""


class Part(NamedTuple):
    """A part of a gap: ``share`` of the bound, its ``cause``, and what would make it smaller."""

    share: float
    cause: str
    lever: str


def parts(one: Evaluation, bound_ns: float) -> list[Part]:
    """The parts of the gap between a bound, in nanoseconds, and a plan's predicted step."""
    interference = one.model.interference
    none = Interference.none(one.schedule.tiers)
    waking = Interference.none(one.schedule.tiers, interference.wakeup_ns)

    def period(cost: Interference) -> float:
        return replay_shared(one.schedule, one.durations_ns, cost).period_ns

    steps = [
        (one.in_order_ns, "the search", "a longer --time-limit, a smaller --gap"),
        (period(none), "messages that share a link", "a faster slow tier, or fewer bytes on it"),
        (period(waking), "wake-ups between streams", "fewer, larger units"),
        (period(interference), "communication and computation slowing each other", "fewer bytes under way"),
        (one.predicted.period_ns, "stragglers", "the ranks that hzplan profile names"),
    ]
    found, before = [], bound_ns
    for reached, cause, lever in steps:
        found.append(Part((reached - before) / max(bound_ns, 1.0), cause, lever))
        before = reached
    return found


def described(found: list[Part]) -> str:
    """The parts worth naming, the largest first, and the largest one's lever; empty where there is none."""
    named = sorted((part for part in found if abs(part.share) >= SHOWN), reverse=True)
    if not named:
        return ""
    listed = "; ".join(f"{part.cause} {part.share:.1%}" for part in named)
    return f"{listed}. The first would shrink with {named[0].lever}"
