"""What rounding costs while training: looked at now and then, and given up where it costs too much."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hzplan.runtime.bucket import Forms

FIRST, EVERY = (1, 10), 100
"""After these steps, and after each so many, ranks compare what rounding has cost."""

MOST_ERROR = 0.1
"""The share of a sample's norm that its rounding error may have. Of a million normally distributed values it
is 0.009 in int8 blocks at random, 0.0065 to the nearest, and 0.026 in fp8 (``packing``, measured)."""


class RoundingGuard:
    """Compares, over all ranks, the largest error that messages had; where it is above ``MOST_ERROR``
    everything travels exactly from then on, on every rank.

    ``largest``: by tier what it was at the last of ``looks``; ``given_up``: the tier and the error that ended
    it.
    """

    def __init__(self, forms: Forms, tiers: int) -> None:
        self._forms, self._tiers = forms, tiers
        self.largest: dict[int, float] = {}
        self.looks = 0
        self.given_up: tuple[int, float] | None = None

    @property
    def said(self) -> str | None:
        """What travels narrow, in words; None where nothing does."""
        wire = self._forms.wire
        return None if wire is None else wire.text

    def due(self, step: int) -> bool:
        """Whether to look after so many steps; the same on all ranks. Errors are noted in such steps only."""
        self._forms.errors.active = self._is_due(step + 1)
        return self._is_due(step)

    def _is_due(self, step: int) -> bool:
        return self._forms.wire is not None and (step in FIRST or step % EVERY == 0)

    def look(self, device: torch.device, largest_of_all: Callable[[Tensor], None]) -> bool:
        """Compare; every rank calls it, and where it says so nothing is rounded any more. ``largest_of_all``:
        the largest over ranks, in place."""
        found = torch.zeros(self._tiers, device=device)
        for tier, share in self._forms.errors.taken().items():
            found[tier] = share
        largest_of_all(found)
        self.looks += 1
        self.largest = {tier: float(share) for tier, share in enumerate(found.tolist()) if share > 0}
        worst = max(self.largest, key=lambda tier: self.largest[tier], default=None)
        if worst is None or self.largest[worst] <= MOST_ERROR:
            return False
        self.given_up = worst, self.largest[worst]
        self._forms.wire = None
        return True
