"""Plans that are recorded: a small model on ranks that are threads, compared with plain torch."""

from __future__ import annotations

import gc
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.recompute import Recomputed, Way
from hzplan.core.schedule import MessageOrder, Use
from hzplan.models import hooks
from hzplan.runtime.apply import Choice, apply, full_parameters
from hzplan.runtime.bucket import Bucket
from hzplan.runtime.executor import Streams
from hzplan.runtime.optimizer import ShardedOptimizer
from tests.accelerator.program import Program
from tests.accelerator.ranks import Meetings, World, simulated_nccl
from tests.accelerator.recording import Device, Recorder, host_copies_seen

WIDTH, ROWS, BLOCKS, STEPS = 6, 3, 3, 3
LAYER_BYTES = 8 * (WIDTH + 3) * WIDTH
"""Of a layer's gradients without experts, in float64."""


class Layer(nn.Module):
    """Parameters of several sizes; with ``experts``, rows go to one of them."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(self.norm(x)).tanh()
        if self.experts:
            chosen = found.sum(1).abs().mul(7).long() % len(self.experts)
            routed = torch.zeros_like(found)
            for index, expert in enumerate(self.experts):
                rows = (chosen == index).nonzero()[:, 0]
                if len(rows):  # else its parameters have no gradient
                    routed = routed.index_add(0, rows, expert(found[rows]))
            found = routed
        return x + found


class Layers(nn.Module):
    """A chain of layers."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(experts) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass(frozen=True)
class Case:
    """``levels``: of parameters, gradients and optimizer state; of all tensors, of vectors and matrices, or
    of each layer. ``ahead``: of the message order, for each layer and tier. ``evaluates``: after the first
    micro-batch of a step, and between steps. ``skips``: steps whose gradients are left unused;
    ``left_out``: those whose gradients are not finite, on one rank.
    ``schedules_rate``: the learning rate is a tensor that changes in place."""

    name: str
    mesh: str
    levels: tuple[tuple[int, int, int], ...]
    accumulation: int = 1
    clip: bool = True
    prefetch: int = 1
    dtype: str = "float64"
    reduce_dtype: str | None = None
    gradient_buffers: int | None = None
    message_bytes: int = 0
    ahead: int | None = None
    recompute: Way | None = None
    offload: bool = False
    experts: int = 0
    evaluates: bool = False
    skips: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()
    schedules_rate: bool = False
    steps: int = STEPS
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    momentum: float = 0.0
    streams: Streams = Streams.TIERS

    def model(self) -> Layers:
        """The same on every rank."""
        torch.manual_seed(0)
        model = Layers(self.experts)
        return model.double() if self.dtype == "float64" else model

    def choice(self) -> Choice:
        """The plan."""
        mesh = Mesh.parse(self.mesh)
        names = [f"layers.{index}" for index in range(BLOCKS)]
        uses = [Use(name, "forward") for name in names]
        uses += [Use(name, "backward") for name in reversed(names)]
        order = None
        if self.ahead is not None:
            order = MessageOrder(tuple((name, (self.ahead,) * len(mesh.tiers)) for name in names), 1)
        return Choice(
            *(mesh, {name: self._levels(name, tensor) for name, tensor in self.model().named_parameters()}),
            *(tuple(uses), self.prefetch, self.accumulation, self.clip, self.dtype),
            reduce_dtype=self.reduce_dtype,
            gradient_buffers=self.gradient_buffers,
            message_bytes=self.message_bytes,
            message_order=order,
            recompute=Recomputed.of(names if self.recompute else (), self.recompute or "full"),
            offload=frozenset(names[::2] if self.offload else ()),
        )

    def _levels(self, name: str, tensor: Tensor) -> Levels:
        place = int(name.split(".")[1]) if len(self.levels) == BLOCKS else tensor.dim() - 1
        return Levels(*self.levels[place if len(self.levels) > 1 else 0])

    def arguments(self) -> dict[str, Any]:
        """Of the optimizer."""
        rate = torch.tensor(0.05) if self.schedules_rate else 0.05
        if self.momentum:  # whether it is fused is left to hzplan
            return {"lr": rate, "momentum": self.momentum}
        return {"lr": rate, "weight_decay": 0.3, "fused": True}

    def loss(self, found: Tensor) -> Tensor:
        """Of a model's output."""
        return (found if self.dtype == "float64" else found.float()).square().mean()

    def batch(self, step: int, micro_batch: int, rank: int) -> Tensor:
        """[ROWS, WIDTH]."""
        generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
        dtype = torch.float64 if self.dtype == "float64" else torch.float32
        found = torch.randn(ROWS, WIDTH, generator=generator, dtype=dtype)
        return found / 0.0 if step in self.left_out and rank == 1 else found


BOTH = ((2, 2, 2),)
MOMENTUM: dict[str, Any] = {"optimizer": torch.optim.SGD, "momentum": 0.9, "experts": 6}
CASES = [
    Case("parameters of all ranks' slices", "2|2", BOTH),
    Case("slices of a node, two micro-batches", "2|2", ((1, 2, 2),), accumulation=2),
    Case("whole parameters, updates in backward", "2|2", ((0, 1, 2),), clip=False),
    Case("bfloat16", "2|2", ((1, 1, 2),), dtype="bfloat16", reduce_dtype="bfloat16"),
    Case(
        "recomputation, two gradient buffers", "2|2", BOTH, prefetch=2, gradient_buffers=2, recompute="full"
    ),
    Case("elementwise operations again", "2|2", BOTH, accumulation=2, recompute="elementwise"),
    Case("every other product again", "2|2", ((1, 2, 2),), dtype="bfloat16", recompute="operations"),
    Case("offload", "2|2", ((1, 2, 2),), dtype="bfloat16", offload=True),
    Case("offload, updates in backward", "2|2", ((1, 2, 2),), accumulation=2, clip=False, offload=True),
    Case("units reduced together", "2|2", ((0, 0, 2), (0, 0, 0)), accumulation=2, message_bytes=1 << 30),
    Case("whole gradients, updates in backward", "2|2", ((0, 0, 0),), accumulation=2, clip=False),
    Case("whole gradients together", "2|2", ((0, 0, 2),), accumulation=2, clip=False, message_bytes=1 << 30),
    Case("slices reduced together", "2|2", BOTH, gradient_buffers=1, message_bytes=2 * LAYER_BYTES),
    Case("an order of messages", "2|2", ((1, 2, 2),), ahead=2),
    Case("an order of messages, updates in backward", "2|2", BOTH, accumulation=3, clip=False, ahead=3),
    Case("levels that differ", "2|2", ((0, 0, 2), (2, 2, 2), (1, 1, 1)), accumulation=2),
    Case("experts", "2|2", BOTH, experts=2, prefetch=2),
    Case("experts without rows, updates in backward", "2|2", BOTH, experts=6, clip=False),
    Case("two levels inside a node", "2,2|2", ((0, 0, 3), (3, 3, 3), (1, 2, 3)), steps=2),
    Case("buckets of several levels", "2,2|2", ((1, 2, 3), (3, 3, 3)), steps=2),
    Case("evaluations", "2|2", ((1, 2, 2),), accumulation=2, evaluates=True),
    Case("evaluations between messages in order", "2|2", BOTH, ahead=2, evaluates=True),
    Case("a skipped step", "2|2", ((1, 2, 2),), skips=(1,)),
    Case("a step left out on the device", "2|2", BOTH, dtype="float32", left_out=(1,)),
    Case("a step left out by the host", "2|2", BOTH, left_out=(1,)),
    Case("gradients' size counts", "2|2", BOTH, dtype="float32", optimizer=torch.optim.SGD),
    Case("a first step left out, momentum", "2|2", BOTH, dtype="float32", left_out=(0,), **MOMENTUM),
    Case("a rate that changes in place", "2|2", BOTH, clip=False, schedules_rate=True),
    Case("one stream for all", "2|2", ((1, 2, 2),), streams=Streams.ONE),
    Case("three tiers", "2|2|2", ((2, 3, 3),), steps=2),
    Case("three tiers, updates in backward", "2|2|2", ((1, 2, 3),), accumulation=2, clip=False, steps=2),
    Case("three tiers, an order of messages", "2|2|2", ((3, 3, 3),), ahead=2, steps=2),
]


@contextmanager
def as_on_devices() -> Iterator[None]:
    """The tensors are a CPU's, where autograd would add small gradients up by itself; and matrices are large
    enough for a hook, as most are."""
    with (
        patch.object(Bucket, "adds_up", lambda self, index: False),
        patch.object(hooks, "SMALL_ELEMENTS", WIDTH * WIDTH),
    ):
        yield


def recorded(case: Case) -> list[Program]:
    """Every rank's program. AssertionError where the parameters differ from plain torch's."""
    choice = case.choice()
    size = choice.mesh.world
    meetings, programs = Meetings(), dict[int, Program]()
    found: dict[int, dict[str, Tensor]] = {}
    errors: list[str] = []
    models = [case.model() for _ in range(size)]

    def run(rank: int) -> None:
        world, recorder = World(meetings, rank, size), Recorder(rank)
        try:
            model, optimizer = apply(
                *(models[rank], choice, case.optimizer),
                world=world,
                queues=Device(recorder),
                streams=case.streams,
                **case.arguments(),
            )
            assert isinstance(optimizer, ShardedOptimizer)
            batches = [
                [case.batch(step, number, rank) for number in range(case.accumulation)]
                for step in range(case.steps)
            ]
            world.recorder = recorder
            with recorder:
                for step, of_step in enumerate(batches):
                    for number, batch in enumerate(of_step):
                        case.loss(model(batch)).backward()
                        assert optimizer.engine.step_state.scheduled, "the step leaves its schedule"
                        if case.evaluates and number == 0:
                            with torch.no_grad():
                                model(batch)
                    if case.clip:
                        optimizer.clip_grad_norm_(0.5, skip_nonfinite=bool(case.left_out))
                    if step in case.skips:
                        optimizer.skip_step()
                    else:
                        optimizer.step()
                    if case.evaluates:
                        with torch.no_grad():
                            model(of_step[0])
                    if case.schedules_rate:
                        optimizer.param_groups[0]["lr"].mul_(0.5)
            world.recorder = None
            programs[rank] = recorder.finish()
            found[rank] = full_parameters(optimizer)
            optimizer.engine.close()
        except Exception:
            errors.append(f"rank {rank}: {traceback.format_exc()}")
            meetings.abort()

    gc.collect()
    gc.disable()  # a thread would free what another rank's cycles hold
    try:
        with simulated_nccl(), host_copies_seen(), as_on_devices(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        gc.enable()
    assert not errors, "\n".join(errors)
    _compare(case, size, found)
    return [programs[rank] for rank in range(size)]


def _compare(case: Case, size: int, found: dict[int, dict[str, Tensor]]) -> None:
    """With one process that has all batches: 1e-11 in float64, 1e-6 in float32, and what bfloat16 leaves."""
    single = case.model()
    plain = case.optimizer(single.parameters(), **case.arguments())
    for step in range(case.steps):
        for micro_batch in range(case.accumulation):
            for rank in range(size):
                (case.loss(single(case.batch(step, micro_batch, rank))) / size).backward()
        if case.clip:
            nn.utils.clip_grad_norm_(single.parameters(), 0.5)
        if step not in case.skips + case.left_out:
            plain.step()
        plain.zero_grad()
        if case.schedules_rate:
            plain.param_groups[0]["lr"].mul_(0.5)
    tolerance = {"float64": 1e-11, "float32": 1e-6}.get(case.dtype, 0.1)
    for of_rank in found.values():
        for name, parameter in single.named_parameters():
            torch.testing.assert_close(of_rank[name], parameter.detach(), rtol=tolerance, atol=tolerance)
