"""What a plan's gap comes from. Pure.

Between the proven bound and the predicted step lie the plan's objective, and what the objective does not
know: shared links and wake-ups, and the part of interference and of late ranks that no row says. Each of
these is what the distance from objective to replay grows by when both are given it, in this order; parts add
up to the gap. A wait can also hide behind another, so a part may be negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hzplan.cost.interference import Interference
from hzplan.cost.simulate import objective_ns, replay_shared
from hzplan.solver.evaluate import Evaluation

SHOWN = 0.002
"""Parts below this share of the bound are not worth a reader's time."""


SEARCH = "the search", "a longer --time-limit, a smaller --gap"


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
    updating = replace(waking, beside_updates=interference.beside_updates)

    def left(cost: Interference, processor_ns: Sequence[float] | None = None) -> float:
        """What the objective does not know when no rank is late."""
        replayed = replay_shared(one.schedule, one.durations_ns, cost, processor_ns=processor_ns).period_ns
        return replayed - objective_ns(one.schedule, one.durations_ns, cost, processor_ns=processor_ns)

    found = [Part((one.in_order_ns - bound_ns) / max(bound_ns, 1.0), *SEARCH)]
    before = 0.0
    for unknown, cause, lever in (
        (left(none), "messages that share a link", "a faster slow tier, or fewer bytes on it"),
        (left(waking), "wake-ups between streams", "fewer, larger units"),
        (left(updating), "updates of matrices beside compute", "more ranks that share them"),
        (left(interference), "communication and computation slowing each other", "fewer bytes under way"),
        (left(interference, one.processor_ns), "processors that ranks share", "fewer, larger messages"),
        (one.predicted.period_ns - one.in_order_ns, "late ranks", "the ranks that hzplan profile names"),
    ):
        found.append(Part((unknown - before) / max(bound_ns, 1.0), cause, lever))
        before = unknown
    return found


def described(found: list[Part]) -> str:
    """The parts worth naming, the largest first, and the largest one's lever; empty where there is none."""
    named = sorted((part for part in found if abs(part.share) >= SHOWN), reverse=True)
    if not named:
        return ""
    listed = "; ".join(f"{part.cause} {part.share:.1%}" for part in named)
    return f"{listed}. The first would shrink with {named[0].lever}"
