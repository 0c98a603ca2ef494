"""Forward passes without gradients, such as evaluations, with parameters prefetched as in a step's forward.

The recorded uses up to the first backward one are a schedule of their own, of unshards and compute only. Its
live ranges are part of the step's, so that the step's assignment of buffers serves it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import takewhile

from hzplan.core.schedule import Schedule, build
from hzplan.runtime.executor import Executor
from hzplan.runtime.launcher import Launcher
from hzplan.runtime.unit import UnitState


class Evaluation:
    """Follows forward passes; nothing else may be under way from a pass's begin to its end.

    ``position``: of the use whose turn it is; -1 between passes.
    """

    def __init__(
        self,
        schedule: Schedule,
        units: Mapping[str, UnitState],
        executor: Callable[[Schedule], Executor | Launcher],
    ) -> None:
        """``schedule``: the training step's."""
        forward = tuple(takewhile(lambda use: use.phase == "forward", schedule.uses))
        self.schedule = build(
            *(forward, schedule.requires, ()),
            tiers=schedule.tiers,
            prefetch=schedule.prefetch,
            accumulation=1,
            clip=True,
        )
        self.executor = executor(self.schedule)
        self._units, self._compute = units, self.schedule.compute
        self._needs = [self.schedule.reads(use) for use in forward]
        self.position = -1

    def begins_with(self, unit: str) -> bool:
        """Whether a call of a unit is the first of a pass."""
        return self.schedule.uses[0].unit == unit

    def follows(self, unit: str) -> bool:
        """Whether a call of a unit is the next one of the pass under way."""
        following = self.position + 1
        return 0 < following < len(self._needs) and self.schedule.uses[following].unit == unit

    def begin(self) -> None:
        """Begin a pass: all units are sharded, and nothing is under way."""
        self.executor.begin_step()
        self._begin_turn(0)

    def go_on(self) -> None:
        """The turn is over, the next one begins; units that it does not need are resharded."""
        for name in self._needs[self.position]:
            if name not in self._needs[self.position + 1]:
                self._units[name].to_sharded()
        self.executor.end(self._compute[self.position])
        self._begin_turn(self.position + 1)

    def end(self) -> None:
        """The pass is over, or ended early: wait for what was prefetched, and reshard all."""
        if self.position < 0:
            return
        self.position = -1
        self.executor.skip_step()
        for unit in self._units.values():
            unit.to_sharded()

    def _begin_turn(self, position: int) -> None:
        self.executor.start(self._compute[position])
        for name in self._needs[position]:
            self._units[name].to_unsharded()
        self.position = position
