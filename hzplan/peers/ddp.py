"""Whole replicas: torch's DistributedDataParallel, with plain and with sharded optimizer state (ZeRO-1)."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from hzplan.peers.contender import Setting, Trainer
from hzplan.peers.gathered_muon import groups
from hzplan.runtime.muon import Muon

BUCKETS = 6
"""A model smaller than a few of DDP's default buckets is cut into this many, or it would overlap nothing."""
DEFAULT_BUCKET_MB = 25.0


class Local(Trainer):
    """Every rank for itself, without communication: what a step costs when it is free."""

    name = "alone"

    def prepare(self) -> None:
        self.model = self.setting.build_model()
        self.make_optimizer()

    def around(self, last: bool) -> AbstractContextManager[object]:
        return autocast(self.setting)


class DDP(Trainer):
    """Gradients are all-reduced in buckets while backward runs."""

    def __init__(self, setting: Setting, *, name: str = "ddp", buckets: int = 0) -> None:
        self.name, self.buckets = name, buckets
        super().__init__(setting)

    def prepare(self) -> None:
        model = self.setting.build_model()
        self.model = self._replicas = replicas(model, self.setting, buckets=self.buckets)
        self.make_optimizer()

    def around(self, last: bool) -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(autocast(self.setting))
        if not last:
            stack.enter_context(self._replicas.no_sync())
        return stack


class Zero1(DDP):
    """DDP, each rank updating a part of the parameters and broadcasting it."""

    def __init__(self, setting: Setting, *, name: str = "zero1", buckets: int = 0) -> None:
        super().__init__(setting, name=name, buckets=buckets)

    def make_optimizer(self) -> None:
        made, arguments = self.setting.optimizer_class()
        self.optimizer = ZeroRedundancyOptimizer(
            groups(self.model, self.setting.plan) if made is Muon else self.model.parameters(),
            optimizer_class=made,
            parameters_as_bucket_view=True,
            **arguments,
        )


def replicas(
    model: nn.Module, setting: Setting, group: dist.ProcessGroup | None = None, *, buckets: int = 0
) -> DistributedDataParallel:
    """DDP over a group (by default the world), gradients travelling in the plan's dtype."""
    made = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=bucket_mb(model, buckets), gradient_as_bucket_view=True
    )
    if setting.reduce_dtype == torch.bfloat16:
        # By its own name DDP takes torch's hook for NCCL only.
        made.register_comm_hook(group, lambda state, bucket: bf16_compress_hook(state, bucket))  # noqa: PLW0108
    return made


def bucket_mb(model: nn.Module, buckets: int = 0) -> float:
    """One of so many parts; by default (0) DDP's own bucket, or one of a few parts of a model that is
    small."""
    parts = max(0.5, sum(parameter.nbytes for parameter in model.parameters()) / 2**20 / (buckets or BUCKETS))
    return parts if buckets else min(DEFAULT_BUCKET_MB, parts)


def autocast(setting: Setting) -> AbstractContextManager[object]:
    """bf16 as users of replicas have it: float32 weights, matrix products in bfloat16."""
    return torch.autocast(setting.device.type, torch.bfloat16, enabled=setting.bf16)
