"""The tree of a branch and bound, kept for its proof: splits of the plans, and multipliers in the leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hzplan.formats.certificate import Multipliers, Node

Limits = Mapping[int, tuple[float, float]]
"""Lower and upper limit by index. Indices of shared buffers come first (limits in MiB), then those of the
groups of like units (limits of how many are recomputed)."""

Split = tuple[int, float, float]
"""Index among the limits, the largest value of the lower part, the smallest of the upper part."""

ONLY_COMPUTE = Multipliers(rows=((0, 1.0),))
"""The proof of what is known before a search begins: a step lasts at least as long as all compute."""


@dataclass
class Tree:
    """A node: the ``multipliers`` with the highest bound (``value``, ms) so far, and its two parts, if it was
    split."""

    multipliers: Multipliers = ONLY_COMPUTE
    value: float = 0.0
    split: Split | None = None
    parts: tuple[Tree, ...] = ()

    def see(self, value: float, multipliers: Multipliers) -> None:
        """Keep multipliers whose bound is higher."""
        if value > self.value:
            self.value, self.multipliers = value, multipliers

    def divide(self, split: Split) -> tuple[Tree, ...]:
        """Split the node; what was proven of it is true of both parts."""
        self.split = split
        self.parts = Tree(self.multipliers, self.value), Tree(self.multipliers, self.value)
        return self.parts

    @property
    def bound_ms(self) -> float:
        """The least of the leaves' values, ms."""
        return min(leaf.value for leaf in self._within(float("inf")) if not leaf.split)

    def nodes(self, enough_ms: float = float("inf")) -> Iterator[Node]:
        """Every node before its parts; what has a value that is enough is not split."""
        for one in self._within(enough_ms):
            split = one.split if one.value < enough_ms else None
            yield Node(split=split) if split else Node(multipliers=one.multipliers)

    def _within(self, enough_ms: float) -> Iterator[Tree]:
        waiting = [self]
        while waiting:
            one = waiting.pop()
            if one.value < enough_ms:
                waiting += reversed(one.parts)
            yield one


def halves(limits: Limits, split: Split) -> tuple[Limits, Limits]:
    """The limits of the two parts of a split."""
    index, below, above = split
    low, high = limits.get(index, (0.0, float("inf")))
    return {**limits, index: (low, below)}, {**limits, index: (above, high)}
