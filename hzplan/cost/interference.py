"""Interference: how much compute and communication slow each other while both run. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

MAX_COMPUTE_LOSS = 0.95
"""Upper limit of the share of compute throughput that communication on one tier may take."""


@dataclass(frozen=True)
class Interference:
    """Measured slow-down of compute and communication while both run, by tier.

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
        """No interference; only wake-up latency, nanoseconds."""
        return cls((0.0,) * tiers, (1.0,) * tiers, (1.0,) * tiers, wakeup_ns)

    @cached_property
    def compute_loss_bound(self) -> tuple[float, ...]:
        """By tier a lower bound on the share of throughput that compute loses to it, whatever other tiers do.

        For every set S of tiers the bounds sum to at most 1 − Π_S (1 − compute_loss), the loss to S. Proof:
        sort tiers by falling loss; each bound is the tier's share of the throughput that the tiers before it
        leave. With S alone no less would be left for any tier of S, and the sum over S telescopes.
        """
        left, found = 1.0, [0.0] * len(self.compute_loss)
        for tier in sorted(range(len(self.compute_loss)), key=lambda tier: -self.compute_loss[tier]):
            found[tier] = left * self.compute_loss[tier]
            left *= 1.0 - self.compute_loss[tier]
        return tuple(found)
