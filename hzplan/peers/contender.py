"""A contender: one way to train the same model, on the same batches, from the same weights."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hzplan.formats.plan import Plan
from hzplan.models.workload import Workload, for_training
from hzplan.peers import processors
from hzplan.peers.gathered_muon import GatheredMuon
from hzplan.peers.gathered_muon import groups as matrix_groups
from hzplan.profiler.model.optimizer import optimizer_named
from hzplan.profiler.session.ranks import Ranks
from hzplan.runtime.muon import Muon
from hzplan.training.batches import Batches
from hzplan.training.measure import alive_bytes, peak_memory_bytes
from hzplan.training.step import forward_backward

WARM_UP_STEPS = 2
"""Steps before memory is looked at: in the first one optimizers make their state."""


class NotHere(Exception):
    """A contender cannot take part in this setting; the message says why."""


@dataclass(frozen=True, eq=False)
class Setting:
    """What all contenders have in common.

    ``lr`` stays as it is from the first step to the last; ``text`` is where ``data`` comes from, None where
    the batches are the workload's own or the default text.
    """

    plan: Plan
    workload: Workload
    data: Batches
    lr: float
    seed: int
    clip_norm: float = 1.0
    text: Path | None = None

    @property
    def world(self) -> int:
        """Ranks that train."""
        return self.plan.mesh.world

    @cached_property
    def rank(self) -> int:
        """This process's rank."""
        return dist.get_rank() if dist.is_initialized() else 0

    @cached_property
    def device(self) -> torch.device:
        """Where this rank trains."""
        return Ranks.here().device

    @property
    def accumulation(self) -> int:
        """Micro-batches in a step."""
        return self.plan.batch.accumulation

    @property
    def tokens(self) -> int:
        """Tokens of one step, over all ranks."""
        return self.plan.batch.global_batch * self.workload.seq_len

    @property
    def bf16(self) -> bool:
        """Whether the model computes in bfloat16, its master weights being float32."""
        return self.plan.model.dtype == "bfloat16"

    @property
    def reduce_dtype(self) -> torch.dtype:
        """What gradients travel in."""
        return cast(torch.dtype, getattr(torch, self.plan.reduce_dtype))

    def build_model(self) -> nn.Module:
        """The model with its initial weights, the same for everyone; float32 where it computes in bf16."""
        torch.manual_seed(self.seed)
        dtype = torch.float32 if self.bf16 else getattr(torch, self.plan.model.dtype)
        return for_training(self.workload.build()).to(self.device, dtype)

    def optimizer_class(self) -> tuple[type[Optimizer], dict[str, Any]]:
        """The plan's optimizer and its arguments."""
        made = optimizer_named(self.plan.optimizer)
        return cast(type[Optimizer], made.func), {"lr": self.lr, **made.keywords}


@dataclass(frozen=True)
class Turn:
    """This rank's losses, the lead-in's too, and seconds from the end of the lead-in to that of the last.

    A step ends when ``optimizer.step()`` returns; what it left under way counts in the step after it. So a
    turn has one period of each of its steps, as a long run has, however they overlap. ``waits_s``: how long
    compute stood still in these steps, by what for, where that is known. ``processor_s``: processor time of
    these steps by what threads are for (``processors``), where the kernel says.
    """

    losses: list[float]
    seconds: float
    waits_s: Mapping[str, float]
    processor_s: Mapping[str, float]


class Contender(Protocol):
    """What the comparison asks of everyone. All ranks call the methods together."""

    name: str
    peak_memory_bytes: int
    """Of this rank, within a step, without what other contenders in this process hold."""

    def turn(self, first: int, steps: int) -> Turn:
        """Train step ``first`` as a lead-in, then as many steps against the clock, and finish everything."""

    def close(self) -> None:
        """Take part no more."""


class Trainer:
    """A contender in this process: a model, an optimizer, and what of the step is its own.

    Subclasses set ``model`` and ``optimizer`` in ``prepare`` and override the rest where they differ. After
    construction two steps have been trained, numbers 0 and 1.
    """

    name = ""
    model: nn.Module
    optimizer: Optimizer

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        before = alive_bytes(setting.device)
        self.prepare()
        for step in range(WARM_UP_STEPS):
            self.step(step)
        self.finish()
        peak = peak_memory_bytes(self._last_warm_up, setting.device, ignore=self.on_host())
        self.peak_memory_bytes = peak - before

    def on_host(self) -> Sequence[Tensor]:
        """What is meant to lie in the host's memory, and on a CPU would count as the device's."""
        return ()

    def _last_warm_up(self) -> None:
        self.step(WARM_UP_STEPS)
        self.finish()

    def prepare(self) -> None:
        """Make ``model`` and ``optimizer``."""
        raise NotImplementedError

    def make_optimizer(self) -> None:
        """Make ``optimizer``, the plan's, for all of ``model``."""
        made, arguments = self.setting.optimizer_class()
        if made is Muon:
            self.optimizer = GatheredMuon(matrix_groups(self.model, self.setting.plan), **arguments)
        else:
            self.optimizer = made(self.model.parameters(), **arguments)

    def around(self, last: bool) -> AbstractContextManager[object]:
        """What a micro-batch runs in; ``last``: whether gradients must be complete after it."""
        return nullcontext()

    def data(self) -> Batches:
        """Where micro-batches come from."""
        return self.setting.data

    def clip(self) -> None:
        """Bound the norm of all gradients."""
        nn.utils.clip_grad_norm_(self.model.parameters(), self.setting.clip_norm, foreach=True)

    def zero_grad(self) -> None:
        """Forget the step's gradients."""
        self.optimizer.zero_grad()

    def finish(self) -> None:
        """Return when nothing is under way."""

    def waits_s(self) -> Mapping[str, float]:
        """How long compute stood still in the last step, by what for; empty where that is not known."""
        return {}

    def seed(self, step: int) -> None:
        """Dropout is alike for all contenders."""
        setting = self.setting
        torch.manual_seed((setting.seed * 1_000_003 + step) * setting.world + setting.rank)

    def micro_batches(self, step: int) -> Tensor:
        """Forward and backward of a whole step; this rank's mean loss."""
        setting = self.setting
        self.seed(step)
        return forward_backward(
            self.model,
            setting.workload,
            self.data(),
            step=step,
            accumulation=setting.accumulation,
            rank=setting.rank,
            around=self.around,
        )

    def step(self, step: int) -> float:
        """Train a step; this rank's loss."""
        loss = self.micro_batches(step)
        if self.setting.plan.clip:
            self.clip()
        self.optimizer.step()
        self.zero_grad()
        return float(loss)

    def turn(self, first: int, steps: int) -> Turn:
        """See ``Contender``."""
        losses, waits = [self.step(first)], Counter[str]()
        spent, began = processors.by_thread(), time.perf_counter()
        for step in range(first + 1, first + 1 + steps):
            losses.append(self.step(step))
            waits.update(self.waits_s())
        seconds = time.perf_counter() - began
        self.finish()  # what is left under way, as the lead-in's was
        return Turn(losses, seconds, waits, processors.since(spent))

    def close(self) -> None:
        """See ``Contender``."""
