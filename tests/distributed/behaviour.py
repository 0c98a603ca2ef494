"""What runs on the ranks for the tests of order, timing, mutations and unscheduled micro-batches."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.schedule import Kind, MessageOrder, Schedule, Task, Use
from hzplan.runtime.apply import Choice, apply, full_parameters, schedule_of
from hzplan.runtime.engine import Engine
from hzplan.runtime.tasks import Tasks
from tests.distributed.oracle import Case, batch, loss_of, reference, sharded, train, worst

SHARDED = Case("2|2", (2, 2, 2), accumulation=2, prefetch=1, steps=4)
MIXED = Case("2|2", None, accumulation=2, prefetch=2, steps=4, seed=11)
FREE = replace(MIXED, clip=False, seed=12)
SYNCED = Case("2|2", (1, 1, 2), accumulation=1, prefetch=1, steps=4)
ZERO1 = Case("2|2", (0, 0, 2), accumulation=1, prefetch=1, steps=4)


def errors(case: Case) -> tuple[float, float]:
    """Like ``oracle.compare``; a mutant may also end in NaN, which counts as infinitely wrong."""
    model, optimizer = sharded(case)
    losses = train(case, model, optimizer)
    weights = full_parameters(optimizer)
    optimizer.engine.close()
    expected_losses, expected = reference(case)
    return (
        worst([abs(a - b) for a, b in zip(losses, expected_losses, strict=True)]),
        worst([float((weights[name] - expected[name]).detach().norm()) for name in expected]),
    )


# ---- order ---------------------------------------------------------------------------------------------


def launch_order(_: Any) -> dict[str, Any]:
    """What was launched and what ran, beside the schedule, on rank 0 and compared over ranks."""
    found = {}
    for case in (SHARDED, MIXED, FREE, SYNCED):
        model, optimizer = sharded(case)
        train(case, model, optimizer)
        executor = optimizer.engine.executor
        executor.synchronize()
        record, schedule = executor.record, executor.schedule
        launches = [record.launched] * dist.get_world_size()
        dist.all_gather_object(launches, record.launched)
        found[case.name] = {
            "scheduled": [
                task.index
                for task in schedule.tasks
                if task.stream != "compute" and not optimizer.engine.tasks.idle(task)
            ],
            "launched": launches,
            "scheduled_by_stream": {
                stream: busy
                for stream, tasks in schedule.streams.items()
                if stream != "compute"
                and (busy := [task.index for task in tasks if not optimizer.engine.tasks.idle(task)])
            },
            "ran_by_stream": record.begun,
        }
        optimizer.engine.close()
    return found


# ---- timing --------------------------------------------------------------------------------------------


@contextmanager
def delays(choose: Callable[[Task], float]) -> Iterator[None]:
    """Every background task first sleeps for the seconds that ``choose`` gives it."""
    run = Tasks.run

    def late(self: Tasks, task: Task, scratch: int = 0) -> None:
        time.sleep(choose(task))
        run(self, task, scratch)

    with patch.object(Tasks, "run", late):
        yield


def random_delays(number: int) -> dict[str, list[list[float]]]:
    """By case: the losses of a run without delays, and of runs with random ones, others on every rank."""
    found: dict[str, list[list[float]]] = {}
    for seed in range(number + 1):
        rng = random.Random(100 * seed + dist.get_rank())
        for case in (MIXED, FREE):
            with delays(lambda task, rng=rng, most=0.003 if seed else 0.0: rng.uniform(0, most)):  # type: ignore[misc]
                model, optimizer = sharded(case)
                found.setdefault(case.name, []).append(train(case, model, optimizer))
                optimizer.engine.close()
    return found


# ---- allocations ---------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Counts the bytes of new storage that a thread's operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        out = func(*args, **kwargs)
        self.operations += 1
        self.nbytes += sum(
            tensor.untyped_storage().nbytes() for tensor in _tensors(out) if _storage(tensor) not in known
        )
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def allocations(_: Any) -> dict[str, dict[str, Any]]:
    """Per case: bytes that communication tasks allocate after the second step, operations, buffers moved."""
    found = {}
    for case in (SHARDED, MIXED, FREE, SYNCED, replace(MIXED, dtype="bfloat16")):
        run, counts = Tasks.run, {"nbytes": 0, "operations": 0}

        def counted(self: Tasks, task: Task, scratch: int = 0, run: Any = run, counts: Any = counts) -> None:
            if task.kind is Kind.UPDATE:
                run(self, task, scratch)
                return
            with Allocations() as mode:
                run(self, task, scratch)
            for name in counts:
                counts[name] += getattr(mode, name)

        model, optimizer = sharded(case)
        engine = optimizer.engine
        train(replace(case, steps=2), model, optimizer)
        engine.executor.synchronize()
        before = _addresses(engine)
        with patch.object(Tasks, "run", counted):
            engine.executor._run = engine.tasks.run
            train(case, model, optimizer)
            engine.executor.synchronize()
        found[case.name] = counts | {"moved": before != _addresses(engine)}
        engine.close()
    return found


def _addresses(engine: Engine) -> list[int]:
    """Where every buffer of the runtime lies."""
    buckets = [bucket for unit in engine.units.values() for bucket in unit.buckets]
    kept = [t for b in buckets for t in (b.param, b.unsharded, b.master, b.grad) if t is not None]
    return [
        tensor.data_ptr()
        for tensor in [*kept, *(s for of_tier in engine.tasks.buffers.scratch for s in of_tier)]
    ]


# ---- mutations -----------------------------------------------------------------------------------------


@contextmanager
def without_edges(drop: Callable[[Schedule, Task, Task], bool]) -> Iterator[None]:
    """Schedules lack the edges (before, task) that ``drop`` names."""

    def mutated(units: Any, choice: Choice) -> Schedule:
        schedule = schedule_of(units, choice)
        tasks = schedule.tasks

        def kept(edges: tuple[int, ...], task: Task) -> tuple[int, ...]:
            return tuple(u for u in edges if not drop(schedule, tasks[u], task))

        return replace(
            schedule,
            tasks=tuple(
                replace(t, needs=kept(t.needs, t), needs_previous=kept(t.needs_previous, t)) for t in tasks
            ),
        )

    with patch("hzplan.runtime.apply.schedule_of", mutated):
        yield


@contextmanager
def shuffled_buffers() -> Iterator[None]:
    """Backward gathers parameters to another address than forward did."""
    enter = Engine.enter

    def moved(self: Engine, unit: str, phase: Any) -> None:
        backward = phase == "backward"
        if getattr(self, "moved", None) != backward:
            self.executor.synchronize()
            for state in self.units.values():
                for bucket in state.buckets:
                    if bucket.sharded:
                        buffers = [bucket.unsharded, bucket.unsharded.clone()]
                        bucket.unsharded = bucket.__dict__.setdefault("buffers", buffers)[backward]
                        bucket.param_views = bucket.views(bucket.unsharded)
            self.moved = backward  # type: ignore[attr-defined]
            if backward:  # what was prefetched for backward went to the old address
                for state in self.units.values():
                    state.to_sharded()
        enter(self, unit, phase)

    with patch.object(Engine, "enter", moved):
        yield


def mutations(_: Any) -> dict[str, tuple[float, float]]:
    """The errors of each mutant, and of the same delays without the mutation."""

    def slow(*kinds: Kind) -> Any:
        return delays(lambda task: 0.01 if task.kind in kinds else 0.0)

    found = {}
    with slow(Kind.PARAM_GATHER, Kind.UNSHARD, Kind.REDUCE, Kind.FINAL_REDUCE):
        for case in (SHARDED, FREE, SYNCED, ZERO1):
            found[f"unmutated {case.name}"] = errors(case)
    with shuffled_buffers():
        found["shuffled unshard buffers"] = errors(SHARDED)
    # Slower reductions than syncs: a step's syncs are over before the next one's are launched.
    late = delays(lambda task: {Kind.PARAM_GATHER: 0.01, Kind.FINAL_REDUCE: 0.03}.get(task.kind, 0.0))
    with late, without_edges(lambda s, u, v: u.kind is Kind.PARAM_GATHER and v.kind is Kind.UNSHARD):
        found["slice gathered before its param sync"] = errors(SYNCED)
        found["parameter read before its param sync"] = errors(ZERO1)

    def once(schedule: Schedule, before: Task, task: Task) -> bool:
        """The first block's forward; later uses still wait, or steps would overtake each other."""
        return before.kind is Kind.UNSHARD and task.kind is Kind.COMPUTE and task.position == 2

    with slow(Kind.UNSHARD), without_edges(once):
        found["compute does not wait for unshard"] = errors(SHARDED)
    return found


# ---- unscheduled micro-batches --------------------------------------------------------------------------


class Reluctant(nn.Linear):
    """One whose own parameters may get no gradient."""

    silent = False

    def forward(self, x: Tensor) -> Tensor:
        if self.silent:
            return nn.functional.linear(x, self.weight.detach(), self.bias.detach())
        return super().forward(x)


class Branching(nn.Module):
    """Three blocks, of which one may be left out; a weight that the last block shares with the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Reluctant(6, 6), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.layers[0][0].weight  # type: ignore[union-attr,index,assignment]

    def forward(self, x: Tensor, skip: int = -1, dead: int = -1) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index == dead:
                x = x + layer(x).detach()
            elif index != skip:
                x = layer(x)
        return self.last(x)


def _branching_step(model: nn.Module, kind: str, rank: int, step: int) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    if kind == "skip":
        return model(x, skip=1).square().mean()
    if kind == "unlike":  # the middle block has no gradient, the one after it on some ranks
        model.layers[2][0].silent = bool(rank % 2)  # type: ignore[union-attr,index]
        return model(x, dead=1).square().mean()
    model.layers[2][0].silent = False  # type: ignore[union-attr,index]
    if kind == "twice":
        return model(x).square().mean() + model(x * 2).square().mean()
    return model(x).square().mean()


def unscheduled(_: Any) -> dict[str, list[float]]:
    """Errors of weights (and of evaluations) after steps that leave the recorded sequence."""
    kinds = ["plain", "skip", "plain", "twice", "evaluate", "plain", "evaluate inside", "skip", "plain"]
    kinds += ["unlike", "plain"]
    found: dict[str, list[float]] = {}
    mesh, world, rank = Mesh.parse("2|2"), dist.get_world_size(), dist.get_rank()
    places = (Levels(2, 2, 2), Levels(1, 1, 2), Levels(0, 0, 0), Levels(2, 0, 2), Levels(0, 2, 2))
    for levels, ordered in [*((place, False) for place in places), *((place, True) for place in places[:2])]:
        torch.manual_seed(0)
        single = Branching().double()
        torch.manual_seed(0)
        model = Branching().double()
        uses = [Use(u, p) for u, p in _sequence(model)]
        names = {name: levels for name, _ in model.named_parameters()}
        clip = levels != Levels(1, 1, 2)
        offload = frozenset(use.unit for use in uses) if levels in (Levels(2, 2, 2), Levels(1, 1, 2)) else ()
        choice = Choice(mesh, names, tuple(uses), 1, 2, clip, offload=frozenset(offload))
        if ordered:
            ahead = tuple((unit, (0, 2)) for unit in dict.fromkeys(use.unit for use in uses))
            choice = replace(choice, message_order=MessageOrder(ahead, 1))
        model, optimizer = apply(model, choice, torch.optim.SGD, lr=0.1, momentum=0.5)
        plain = torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.5)
        off, modes = [], []
        for step, kind in enumerate(kinds):
            if kind == "evaluate":
                off.append(_evaluate(model, single, step))
            plain.zero_grad()
            for micro in range(2):
                if kind == "evaluate inside" and micro == 1:
                    off.append(_evaluate(model, single, step))
                (_branching_step(model, kind, rank, 2 * step + micro) / 2).backward()
                for other in range(world):
                    (_branching_step(single, kind, other, 2 * step + micro) / 2 / world).backward()
            modes.append(optimizer.engine.step_state.scheduled)
            if step == 3 and clip:  # after a wait for the gradients too
                optimizer.engine.wait_gradients()
                off.append(_evaluate(model, single, step))
            optimizer.step()
            plain.step()
        weights = full_parameters(optimizer)
        off += [float((weights[name] - value).norm()) for name, value in single.named_parameters()]
        name = f"{tuple(levels)}{' in order' * ordered}"
        found[name] = off
        found[f"{name} scheduled"] = [float(mode) for mode in modes]
        optimizer.engine.close()
    return found


def _sequence(model: nn.Module) -> list[tuple[str, Any]]:
    from hzplan.models.hooks import attach
    from hzplan.models.units import find_units

    found: list[tuple[str, Any]] = []

    class Recorder:
        def enter(self, unit: str, phase: Any) -> None:
            found.append((unit, phase))

        def gradient(self, parameter: nn.Parameter) -> None:
            parameter.grad = None

        def backward_end(self) -> None:
            pass

    detach = attach(find_units(model), Recorder())
    _branching_step(model, "plain", 0, 0).backward()
    detach()
    return found


def _evaluate(model: nn.Module, single: nn.Module, step: int) -> float:
    with torch.no_grad():
        values = [_branching_step(m, "skip" if step % 2 else "plain", 9, step) for m in (model, single)]
    return abs(float(values[0] - values[1]))


def misuse(_: Any) -> dict[str, str]:
    """What is refused, and how a sharded parameter reads outside its turn."""
    found = {}
    model, optimizer = sharded(SHARDED)
    try:
        optimizer.step()
    except RuntimeError as error:
        found["step too early"] = str(error)
    loss_of(model, batch(0, 0, 0)).backward()
    weight = dict(model.named_parameters())["layers.0.attention.qkv.weight"]
    found["outside its turn"] = str(bool(weight.isnan().all()))
    optimizer.engine.close()
    return found
