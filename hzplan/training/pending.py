"""A step that has ended, while ranks tell each other of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hzplan.runtime.faults import named


@dataclass(frozen=True)
class Said:
    """What a rank tells the others of a step, beside its loss."""

    asked_to_end: float
    busy_s: float
    memory_bytes: float


class Pending:
    """A step that has ended, while its loss is on its way between ranks.

    One small all-reduce: the sum of losses, and each rank's own numbers in a place of their own.
    """

    def __init__(
        self,
        step: int,
        loss: Tensor,
        step_s: float,
        exposed_comm_s: Mapping[str, float],
        said: Said,
        rank: int,
        world: int,
        route: Callable[[Sequence[int]], str],
    ) -> None:
        self.step, self.step_s, self.exposed_comm_s = step, step_s, exposed_comm_s
        mine = torch.zeros(world, 3, dtype=torch.float64)
        mine[rank] = torch.tensor([said.asked_to_end, said.busy_s, said.memory_bytes], dtype=torch.float64)
        self._world, self._route = world, route
        self._numbers = torch.cat([loss.view(1), mine.view(-1).to(loss.device)])
        self._work = dist.all_reduce(self._numbers, async_op=True) if dist.is_initialized() else None

    def said(self) -> tuple[float, list[Said]]:
        """The mean loss, and every rank's numbers."""
        if self._work is not None:
            with named(f"the mean loss of step {self.step}: all-reduce", self._route):
                self._work.wait()
        loss, *numbers = self._numbers.tolist()
        return loss / self._world, [Said(*numbers[at : at + 3]) for at in range(0, 3 * self._world, 3)]
