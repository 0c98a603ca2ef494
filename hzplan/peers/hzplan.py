"""This project's own runtime as a contender, under the plan or under any other choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hzplan.formats.plan import Plan
from hzplan.peers.contender import Setting, Trainer
from hzplan.runtime.apply import parallelize
from hzplan.runtime.executor import Streams


class Hzplan(Trainer):
    """A plan, executed."""

    def __init__(
        self,
        setting: Setting,
        *,
        name: str = "hzplan",
        plan: Plan | None = None,
        streams: Streams = Streams.TIERS,
        timed: bool = True,
    ) -> None:
        """``plan``: instead of the setting's, for the same model and batch; ``streams``: how it overlaps;
        ``timed``: whether waits of every step are wanted, which on a GPU its own steps pay for."""
        self.name, self.plan, self.streams, self.timed = name, plan or setting.plan, streams, timed
        super().__init__(setting)

    def prepare(self) -> None:
        made, arguments = self.setting.optimizer_class()
        self.model, self.optimizer = self._sharded = parallelize(
            self.setting.build_model(), self.plan, made, streams=self.streams, **arguments
        )
        if self.timed:
            self._sharded[1].engine.executor.time_every_step()

    def clip(self) -> None:
        self._sharded[1].clip_grad_norm_(self.setting.clip_norm)

    def on_host(self) -> Sequence[Tensor]:
        return self._sharded[1].engine.tasks.on_host

    def finish(self) -> None:
        self._sharded[1].engine.executor.synchronize()

    def waits_s(self) -> Mapping[str, float]:
        record = self._sharded[1].engine.executor.record
        names = {f"tier {tier}": name for tier, name in enumerate(self.plan.cluster.tier_names)}
        return {names.get(cause, cause): seconds for cause, seconds in record.exposed_s.items()}

    def close(self) -> None:
        self._sharded[1].engine.close()
