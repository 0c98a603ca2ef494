"""Bytes of activations, with what is computed again or lies in the host's memory taken off. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hzplan.core.recompute import HOST, NOTHING, Recomputed
from hzplan.core.schedule import Interval, Schedule
from hzplan.formats.profile import RecomputeCost, UseCost, UseEntry


@dataclass(frozen=True)
class Activations:
    """Of every micro-batch size, from a profile's uses; ``costs``: theirs at a size, in order."""

    uses: Sequence[UseEntry]
    costs: Callable[[int], Sequence[UseCost]]

    def saved_bytes(self, unit: str, micro_batch: int) -> int:
        """Bytes that a unit in way ``host`` copies to the host's memory: what it keeps less than one that
        keeps everything."""
        return self._saved_bytes(micro_batch).get(unit, 0)

    def _saved_bytes(self, micro_batch: int) -> dict[str, int]:
        if micro_batch not in self._saved:
            self._saved[micro_batch] = {
                use.unit: max(0, cost.retained_bytes - cost.again[HOST].retained_bytes)
                for use, cost in zip(self.uses, self.costs(micro_batch), strict=True)
                if use.phase == "forward" and HOST in cost.again
            }
        return self._saved[micro_batch]

    @cached_property
    def _saved(self) -> dict[int, dict[str, int]]:
        return {}

    def host_bytes(self, micro_batch: int, schedule: Schedule, recompute: Recomputed) -> int:
        """Bytes in the host's memory."""
        return sum(
            self.saved_bytes(unit, micro_batch) for unit in schedule.saved if recompute.get(unit) == HOST
        )

    def bytes_by_use(
        self, micro_batch: int, recompute: Recomputed = NOTHING, saved: Mapping[str, Interval] | None = None
    ) -> list[int]:
        """Peak bytes of activations and temporaries at every use of a forward and backward.

        The bytes are a sum of one term per use, and of one per unit whose activations are in the host's
        memory in between (``saved``, see ``Schedule``), so linear in the choice of ``recompute``.
        """
        level, found = 0, []
        for use, cost in zip(self.uses, self.costs(micro_batch), strict=True):
            own: UseCost | RecomputeCost = cost
            if (way := recompute.get(use.unit)) is not None and way != HOST:
                own = cost.again.get(way, cost)
            found.append(level + own.peak_bytes)
            level += own.retained_bytes
        for unit, (first, last) in (saved or {}).items():
            if recompute.get(unit) == HOST:
                away = self.saved_bytes(unit, micro_batch)
                found[first : last + 1] = [nbytes - away for nbytes in found[first : last + 1]]
        return found

    def peak_bytes(
        self, micro_batch: int, recompute: Recomputed = NOTHING, schedule: Schedule | None = None
    ) -> int:
        """Peak bytes of activations and temporaries over all uses; of a ``schedule`` whose activations may
        lie in the host's memory with those taken off that do."""
        on_host = schedule is not None and schedule.saved and HOST in recompute.values()
        key = micro_batch, recompute, schedule.copy_uses if schedule is not None and on_host else 0
        if key not in self._peaks:
            saved = schedule.saved if schedule is not None and on_host else None
            self._peaks[key] = max(0, *self.bytes_by_use(micro_batch, recompute, saved))
        return self._peaks[key]

    @cached_property
    def _peaks(self) -> dict[tuple[int, Recomputed, int], int]:
        return {}
