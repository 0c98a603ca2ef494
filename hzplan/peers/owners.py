"""Muon under DDP with owners: each rank updates some of the matrices, whole, and broadcasts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from hzplan.core.matrices import Shape, hosts, newton_schulz_flops
from hzplan.peers.contender import NotHere, Setting
from hzplan.peers.ddp import DDP
from hzplan.peers.gathered_muon import groups
from hzplan.runtime.muon import Muon

Owners = Literal["round-robin", "size", "work"]
OWNERS: Mapping[str, Owners] = {
    "owners": "round-robin",
    "owners-size": "size",
    "owners-work": "work",
}
"""The peers whose ranks own matrices whole, and how these are dealt out: in turn, or the largest, or that
with the most work, to whoever has least."""


class OwnersMuon(DDP):
    """DDP, each rank updating the matrices that it owns and broadcasting them; all others by everyone."""

    def __init__(self, setting: Setting, *, name: str = "owners", buckets: int = 0) -> None:
        super().__init__(setting, name=name, buckets=buckets)

    def make_optimizer(self) -> None:
        made, arguments = self.setting.optimizer_class()
        if made is not Muon:
            raise NotHere("owners are of matrices, which only Muon has")
        self.optimizer = _Owners(
            made, groups(self.model, self.setting.plan), arguments, self.setting, OWNERS[self.name]
        )


class _Owners(Optimizer):
    """Steps of the matrices that a rank owns, and their broadcast."""

    def __init__(
        self,
        made: Callable[..., Optimizer],
        of: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        setting: Setting,
        how: Owners,
    ) -> None:
        matrices, others = (group["params"] for group in of)
        owner = owners([tuple(matrix.shape) for matrix in matrices], setting.world, how)
        self._owned = list(zip(matrices, owner, strict=True))
        own = [matrix for matrix, rank in self._owned if rank == setting.rank]
        self._inner = made(
            [{**group, "params": params} for group, params in zip(of, (own, others), strict=True) if params],
            **arguments,
        )
        super().__init__([*matrices, *others], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self._inner.step()
        sent = [dist.broadcast(matrix.data, rank, async_op=True) for matrix, rank in self._owned]
        for one in sent:
            assert one is not None
            one.wait()


def owners(shapes: Sequence[tuple[int, ...]], ranks: int, how: Owners) -> tuple[int, ...]:
    """By matrix its owner: in turn; or the largest first, by elements or by work, to whoever has least."""
    if how == "round-robin":
        return tuple(index % ranks for index in range(len(shapes)))
    kinds = [Shape.of(shape) for shape in shapes]
    if how == "size":
        return hosts([one.many * one.numel for one in kinds], ranks)
    return hosts([one.many * newton_schulz_flops(one.rows, one.columns) for one in kinds], ranks)
