"""Models that are no chain of blocks, trained in shards and by one process; what runs on the ranks."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hzplan.hierarchy import Levels, Mesh
from hzplan.models.hooks import attach
from hzplan.models.units import find_units
from hzplan.runtime.apply import Choice, apply, full_parameters
from hzplan.runtime.engine import Engine, Mode
from hzplan.schedule import Kind, Task, Use

STEPS, ACCUMULATION, WIDTH = 4, 3, 6


class Scaled(nn.Module):
    """Parameters of its own around blocks: one gradient is complete first of all, the other last."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 300))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift
        for layer in self.layers:
            x = layer(x)
        return x * self.scale[:WIDTH]


class Twice(nn.Module):
    """One block is called twice, and one of its parameters takes part only the second time."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.gate = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

        def forward(self, x: Tensor, gated: bool) -> Tensor:
            x = self.linear(x).tanh()
            return x * self.gate if gated else x

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Twice.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for gated in (False, True):
            for layer in self.layers:
                x = layer(x, gated)
        return x


class Checkpointed(nn.Module):
    """Every block is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Single(nn.Module):
    """One trained unit: its gradients of two micro-batches follow each other at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for name, parameter in self.named_parameters():
            parameter.requires_grad = name.startswith("layers.1.")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Unused(nn.Module):
    """A parameter inside a block that takes no part, and outputs in a dict."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.idle = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"out": self.linear(x).tanh(), "aside": x.detach()}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Unused.Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)["out"]
        return x


class Parallel(nn.Module):
    """Branches side by side: which is first in backward is autograd's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.right = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mix = nn.Parameter(torch.tensor([0.3, 0.7]))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.left(x) + self.mix[0] * self.right(x) + self.mix[1] * x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    model.__name__.lower(): model for model in (Scaled, Twice, Checkpointed, Single, Unused)
}
LEVELS = [(1, 1, 1), (0, 1, 1), (1, 0, 1), (0, 0, 0)]


def loss_of(model: nn.Module, step: int, micro_batch: int, rank: int) -> Tensor:
    """Different numbers for every step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(1 + step * 1000 + micro_batch * 10 + rank)
    return model(torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)).square().sum(1).mean()


def fresh(name: str) -> nn.Module:
    """The same initial values everywhere."""
    torch.manual_seed(0)
    return MODELS[name]().double()


def uses_of(name: str) -> tuple[Use, ...]:
    """The recorded uses of one forward and backward."""
    model, found = fresh(name), []

    class Recorder:
        def enter(self, unit: str, phase: Any) -> None:
            found.append(Use(unit, phase))

        def gradient(self, parameter: nn.Parameter) -> None:
            pass

        def backward_end(self) -> None:
            pass

    attach(find_units(model), Recorder())
    loss_of(model, 0, 0, 0).backward()
    return tuple(found)


def one_process(name: str, world: int) -> dict[str, Tensor]:
    """The weights after training on every rank's data; parameters without a gradient have one of zero."""
    model = fresh(name)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.5, weight_decay=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro_batch in range(ACCUMULATION):
            for rank in range(world):
                (loss_of(model, step, micro_batch, rank) / (ACCUMULATION * world)).backward()
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return copy.deepcopy(dict(model.named_parameters()))


def train(name: str, levels: tuple[int, int, int], prefetch: int) -> tuple[float, bool]:
    """Largest error of a weight, and whether every step followed the schedule; background tasks dawdle."""
    model, rng = fresh(name), random.Random(0)
    mesh, run = Mesh.parse(str(dist.get_world_size())), Engine.run
    names = {n: Levels(*levels) for n, _ in model.named_parameters()}
    choice = Choice(mesh, names, uses_of(name), prefetch, ACCUMULATION, False)
    model, optimizer = apply(model, choice, torch.optim.SGD, lr=0.1, momentum=0.5, weight_decay=0.1)

    def late(self: Engine, task: Task) -> None:
        if task.kind in (Kind.REDUCE, Kind.FINAL_REDUCE, Kind.SYNC, Kind.UNSHARD):
            time.sleep(rng.uniform(0, 0.003))
        run(self, task)

    scheduled = True
    with patch.object(Engine, "run", late):
        for step in range(STEPS):
            for micro_batch in range(ACCUMULATION):
                (loss_of(model, step, micro_batch, dist.get_rank()) / ACCUMULATION).backward()
            scheduled &= optimizer.engine.mode is Mode.SCHEDULED
            optimizer.step()
        weights = full_parameters(optimizer)
    optimizer.engine.close()
    expected = one_process(name, dist.get_world_size())
    errors = [float((weights[n] - value).detach().norm()) for n, value in expected.items()]
    return (max(errors) if all(e == e for e in errors) else 1e300), scheduled


def run_all(_: Any) -> dict[str, tuple[float, bool]]:
    """Every model at every level and prefetch depth."""
    return {
        f"{name} {levels} {prefetch}": train(name, levels, prefetch)
        for name in MODELS
        for levels in LEVELS
        for prefetch in (1, 3)
    }
