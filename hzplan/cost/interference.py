"""What compute and communication cost each other while both run. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

MAX_COMPUTE_LOSS = 0.95
"""Of compute's speed, to a tier."""


@dataclass(frozen=True)
class Interference:
    """What compute and communication cost each other while both run, by tier.

    ``compute_loss``: the share of compute throughput that communication on a tier takes; of several tiers
    each takes its share of what the others leave, as all share processors. ``communication_slowdown``: the
    duration of a tier's tasks while compute runs, over their duration alone. ``contention``: the duration of
    several tasks of a tier at once, over their duration one after the other. ``wakeup_ns``: from the end of
    one stream's task to the begin of another stream's that waited for it.
    """

    compute_loss: tuple[float, ...]
    communication_slowdown: tuple[float, ...]
    contention: tuple[float, ...]
    wakeup_ns: float = 0.0

    @classmethod
    def none(cls, tiers: int, wakeup_ns: float = 0.0) -> Interference:
        """Nobody disturbs anybody."""
        return cls((0.0,) * tiers, (1.0,) * tiers, (1.0,) * tiers, wakeup_ns)

    @cached_property
    def compute_loss_bound(self) -> tuple[float, ...]:
        """By tier a share that compute loses whatever else is at work: for every set S of tiers the sum of
        theirs is at most 1 − Π_S (1 − compute_loss), the share that S takes.

        Tiers in order of what they take, each share that of what those before it leave: with S alone there
        would be no less left for any of S, so the sum over S is no more than S takes, which telescopes.
        """
        left, found = 1.0, [0.0] * len(self.compute_loss)
        for tier in sorted(range(len(self.compute_loss)), key=lambda tier: -self.compute_loss[tier]):
            found[tier] = left * self.compute_loss[tier]
            left *= 1.0 - self.compute_loss[tier]
        return tuple(found)
