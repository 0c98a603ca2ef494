"""Models that are no chain of blocks, trained in shards and by one process; what runs on the ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.schedule import Task, Use
from hzplan.errors import UserError
from hzplan.runtime.apply import Choice, apply, full_parameters
from hzplan.runtime.optimizer import ShardedOptimizer
from hzplan.runtime.tasks import Tasks
from tests.distributed.lean import lean

STEPS, ACCUMULATION, WIDTH = 4, 3, 6


class Scaled(nn.Module):
    """Parameters of its own around blocks: one gradient is complete first of all, the other last."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 300))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.cut = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift
        for index, layer in enumerate(self.layers):
            x = layer(x.detach() if self.cut and index == 2 else x)
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
    """Branches side by side, of which autograd chooses one; the model's output is its head's."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.right = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mix = nn.Parameter(torch.tensor([0.3, 0.7]))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.left(x) + self.mix[0] * self.right(x) + self.mix[1] * x)


class Aside(nn.Module):
    """A head that training does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.aside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, aside: bool = False) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.aside(x) if aside else x


MODELS: dict[str, Callable[[], nn.Module]] = {
    model.__name__.lower(): model for model in (Scaled, Twice, Checkpointed, Single, Unused, Aside, Parallel)
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


@cache
def uses_of(name: str) -> tuple[Use, ...]:
    """The recorded uses of one forward and backward."""
    return _lean(name)[0]


@cache
def _lean(name: str) -> tuple[tuple[Use, ...], dict[str, Any]]:
    model = fresh(name)
    return lean(model, lambda: loss_of(model, 0, 0, 0))


@cache
def one_process(name: str, world: int) -> dict[str, Tensor]:
    """The weights after training on every rank's data."""
    model = fresh(name)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.5, weight_decay=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro_batch in range(ACCUMULATION):
            for rank in range(world):
                (loss_of(model, step, micro_batch, rank) / (ACCUMULATION * world)).backward()
        optimizer.step()
    return {n: value.detach() for n, value in model.named_parameters()}


def choice(name: str, levels: tuple[int, int, int], prefetch: int, *, clip: bool = False) -> Choice:
    """The same levels for all tensors, over all ranks."""
    names = {n: Levels(*levels) for n, _ in fresh(name).named_parameters()}
    mesh = Mesh.parse(str(dist.get_world_size()))
    uses, requires = _lean(name)
    return Choice(mesh, names, uses, prefetch, ACCUMULATION, clip, requires=requires)


def start(
    name: str, levels: tuple[int, int, int], prefetch: int, *, clip: bool = False
) -> tuple[nn.Module, ShardedOptimizer]:
    """The model in shards over all ranks, and its optimizer."""
    arguments = {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.1}
    return apply(fresh(name), choice(name, levels, prefetch, clip=clip), torch.optim.SGD, **arguments)


def error(optimizer: ShardedOptimizer, expected: dict[str, Tensor]) -> float:
    """The largest error of a weight; not a number is infinitely wrong."""
    weights = full_parameters(optimizer)
    errors = [float((weights[name] - value).norm()) for name, value in expected.items()]
    return max(errors) if all(e == e for e in errors) else 1e300


@contextmanager
def dawdling() -> Iterator[None]:
    """Every background task begins late, at random."""
    rng, run = random.Random(0), Tasks.run

    def late(self: Tasks, task: Task, scratch: int = 0) -> None:
        time.sleep(rng.uniform(0, 0.003))
        run(self, task, scratch)

    with patch.object(Tasks, "run", late):
        yield


def train(name: str, levels: tuple[int, int, int], prefetch: int) -> tuple[float, bool]:
    """The error after training, and whether every step followed the schedule."""
    model, optimizer = start(name, levels, prefetch)
    scheduled = True
    try:
        with dawdling():
            for step in range(STEPS):
                for micro_batch in range(ACCUMULATION):
                    (loss_of(model, step, micro_batch, dist.get_rank()) / ACCUMULATION).backward()
                scheduled &= optimizer.engine.step_state.scheduled
                optimizer.step()
        return error(optimizer, one_process(name, dist.get_world_size())), scheduled
    finally:
        optimizer.engine.close()


def run_models(cases: list[tuple[str, tuple[int, int, int], int]]) -> list[Any]:
    """For every case what ``train`` returns, or what it raised."""
    found: list[Any] = []
    for name, levels, prefetch in cases:
        try:
            found.append(train(name, levels, prefetch))
        except RuntimeError as raised:  # on every rank alike
            found.append(str(raised))
    return found


# ---- loops that do more than step after step ---------------------------------------------------------------


def run_loops(_: Any) -> dict[str, Any]:
    """Each loop's error, sharded all the way; what it raised where that is the point."""
    with dawdling():
        loops: tuple[Callable[[], Any], ...] = (
            evaluates_before_step,
            schedules_rate,
            forgets_backward,
            ends_backward_early,
            unclipped,
            aside,
        )
        return {loop.__name__: loop() for loop in loops}


def nothing(model: nn.Module, step: int, micro_batch: int) -> None:
    """Before a micro-batch."""


Before = Callable[[nn.Module, int, int], None]


def steps_of(model: nn.Module, step: int, ranks: range, before: Before) -> None:
    """All micro-batches of a step."""
    for micro_batch in range(ACCUMULATION):
        before(model, step, micro_batch)
        for rank in ranks:
            (loss_of(model, step, micro_batch, rank) / (ACCUMULATION * len(ranks))).backward()


def compare(
    name: str, between: Callable[[nn.Module, Any, int], None], before: Before = nothing, *, clip: bool = False
) -> float:
    """Train in shards and in one process, ``between`` following the last backward of every step."""
    world, rank = dist.get_world_size(), dist.get_rank()
    single = fresh(name)
    plain = torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.5, weight_decay=0.1)
    model, optimizer = start(name, (1, 1, 1), 1, clip=clip)
    for step in range(STEPS):
        plain.zero_grad()
        steps_of(single, step, range(world), before)
        between(single, plain, step)
        steps_of(model, step, range(rank, rank + 1), before)
        between(model, optimizer, step)
    found = error(optimizer, {n: value.detach() for n, value in single.named_parameters()})
    optimizer.engine.close()
    return found


def evaluates_before_step() -> float:
    """Clips, then evaluates, then steps; every other time."""

    def between(model: nn.Module, optimizer: Any, step: int) -> None:
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.clip_grad_norm_(0.5)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if step % 2 == 0:
            with torch.no_grad():
                loss_of(model, 99, 0, 0)
        optimizer.step()

    return compare("checkpointed", between, clip=True)


def schedules_rate() -> float:
    """A learning rate that changes with every step."""
    schedulers: dict[int, Any] = {}

    def between(model: nn.Module, optimizer: Any, step: int) -> None:
        if id(optimizer) not in schedulers:
            schedulers[id(optimizer)] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.step()
        schedulers[id(optimizer)].step()

    return compare("checkpointed", between)


def forgets_backward() -> float:
    """A forward with gradients enabled that nothing follows, between steps."""

    def between(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.step()
        if step % 2 == 0:
            loss_of(model, 99, 0, 0)

    return compare("checkpointed", between)


def ends_backward_early() -> float:
    """Every other step's last backward stops half-way, when some units have been updated already."""

    def before(model: nn.Module, step: int, micro_batch: int) -> None:
        assert isinstance(model, Scaled)
        model.cut = step % 2 == 1 and micro_batch == ACCUMULATION - 1

    return compare("scaled", lambda model, optimizer, step: optimizer.step(), before)


def unclipped() -> dict[str, str]:
    """What a plan without clipping refuses between backward and step(), when units are updated already."""

    def clips(model: nn.Module, optimizer: ShardedOptimizer) -> None:
        optimizer.clip_grad_norm_(1.0)

    def changes_rate(model: nn.Module, optimizer: ShardedOptimizer) -> None:
        optimizer.param_groups[0]["lr"] *= 2
        optimizer.step()

    def evaluates(model: nn.Module, optimizer: ShardedOptimizer) -> None:
        with torch.no_grad():
            loss_of(model, 99, 0, 0)

    found = {}
    for deed in (clips, changes_rate, evaluates):
        model, optimizer = start("scaled", (1, 1, 1), 1)
        steps_of(model, 0, range(1), nothing)
        try:
            deed(model, optimizer)
            found[deed.__name__] = ""
        except UserError as refused:
            found[deed.__name__] = str(refused)
        optimizer.engine.close()
    return found


def aside() -> dict[str, Any]:
    """A unit that training does not use is evaluated; then it has a gradient, which is refused."""
    single = fresh("aside")
    model, optimizer = start("aside", (1, 1, 1), 1)
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        off = float((model(x, aside=True) - single(x, aside=True)).norm())
    try:
        model(x, aside=True).sum().backward()
        raised = ""
    except RuntimeError as refused:
        raised = str(refused)
    optimizer.engine.close()
    return {"error": off, "raised": raised}
