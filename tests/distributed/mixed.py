"""bf16 compute with fp32 master weights against one process that does the same by hand; runs on the ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hzplan.core.hierarchy import Mesh
from hzplan.runtime.apply import apply, full_parameters
from tests.distributed import shapes
from tests.distributed.oracle import (
    Case,
    batch,
    fresh_model,
    loss_of,
    options,
    param_groups,
    random_cases,
    sharded,
    train,
)


@dataclass(frozen=True)
class Found:
    """``losses``: the largest relative error of a step's loss; ``update``: of all weights' first update."""

    losses: float
    update: float


def cases() -> list[Case]:
    """Known schemes; different levels for every tensor, frozen tensors, groups and several optimizers."""
    known = [("4", (1, 1, 1)), ("2|2", (0, 0, 2)), ("2|2", (2, 0, 2)), ("1|3", (0, 1, 1)), ("3", (0, 0, 0))]
    schemes = [Case(mesh, levels, accumulation=2) for mesh, levels in known]
    found = [*schemes, *(replace(case, seed=case.seed + 500) for case in random_cases(6))]
    return [replace(case, dtype="bfloat16", steps=12) for case in found]


def run_cases(payload: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """On every rank; on rank 0 what ``compare`` finds, by case."""
    found = {case.name: compare(case) for case in (Case(**fields) for fields in payload)}
    return {name: asdict(errors) for name, errors in found.items() if errors}


def compare(case: Case) -> Found | None:
    """Train in shards and by hand. One step of SGD shows gradients as they were reduced, and masters."""
    once = replace(case, steps=1, optimizer="SGD")
    losses, _ = in_shards(case)
    _, weights = in_shards(once)
    if dist.get_rank():
        return None
    expected, _ = by_hand(case)
    _, exact = by_hand(once)
    before = {n: p.detach() for n, p in fresh_model(once).named_parameters() if p.requires_grad}
    assert all(weights[name].dtype == torch.float32 for name in before)
    errors = [
        float((weights[name] - exact[name]).norm() / (exact[name] - value).norm())
        for name, value in before.items()
    ]
    return Found(max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True)), max(errors))


def narrow_cases() -> list[Case]:
    """Gradients that travel in bfloat16: through one stage and several, copied for it and in place."""
    known = [
        ("4", (1, 1, 1)),
        ("4", (0, 0, 0)),
        ("2|2", (0, 0, 0)),
        ("2|2", (1, 1, 1)),
        ("2|2", (0, 1, 2)),
        ("2|2", (2, 2, 2)),
    ]
    found = [Case(mesh, levels, accumulation=2) for mesh, levels in known]
    found += [Case("2|2", None, accumulation=2, clip=False, seed=7), Case("2,2", None, seed=8)]
    return [
        replace(case, dtype=dtype, reduce_dtype="bfloat16", steps=1, optimizer="SGD")
        for case in found
        for dtype in ("float32", "bfloat16")
    ]


def run_narrow(payload: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By case: the error of the first update, beside no rounding on the way; replicas' difference."""
    found = {}
    for case in (Case(**fields) for fields in payload):
        _, weights = in_shards(case)
        _, exact = in_shards(replace(case, reduce_dtype=None))
        before = dict(fresh_model(case).named_parameters())
        errors = [float((w - exact[n]).norm() / (exact[n] - before[n]).norm()) for n, w in weights.items()]
        flat = torch.cat([weight.flatten() for weight in weights.values()])
        everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, flat)
        apart = max(float((other - flat).abs().max()) for other in everyone)
        found[case.name] = {"update": max(errors), "apart": apart}
    return found


def in_shards(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and the weights by name."""
    model, optimizer = sharded(case)
    losses = train(case, model, optimizer)
    weights = full_parameters(optimizer)
    optimizer.engine.close()
    return losses, weights


def by_hand(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """One process that sees every rank's data: the losses, and the master weights by name.

    Forward and backward in bfloat16 on rounded masters; the mean of all gradients and the update in float32.
    """
    world = Mesh.parse(case.mesh).world
    master = fresh_model(case)
    working = fresh_model(case).bfloat16()
    optimizer = getattr(torch.optim, case.optimizer)(param_groups(case, master), **options(case))
    losses = []
    for step in range(case.steps):
        optimizer.zero_grad()
        total = 0.0
        for micro_batch in range(case.accumulation):
            for rank in range(world):
                loss = loss_of(working, batch(step, micro_batch, rank)) / case.accumulation
                loss.backward()
                total += float(loss.detach()) / world
                take_gradients(master, working, 1 / world)
        if case.clip:
            nn.utils.clip_grad_norm_(master.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for value, parameter in zip(master.parameters(), working.parameters(), strict=True):
                parameter.copy_(value)
        losses.append(total)
    return losses, {name: parameter.detach() for name, parameter in master.named_parameters()}


def take_gradients(master: nn.Module, working: nn.Module, scale: float) -> None:
    """Add the working model's bfloat16 gradients to the masters', in float32."""
    for value, parameter in zip(master.parameters(), working.parameters(), strict=True):
        if parameter.grad is not None:
            gradient = parameter.grad.float() * scale
            value.grad = gradient if value.grad is None else value.grad + gradient
            parameter.grad = None


# ---- models that are no chain of blocks --------------------------------------------------------------------


def run_shapes(cases: list[tuple[str, tuple[int, int, int]]]) -> list[dict[str, float]]:
    """For every model and levels: the errors of evaluations and of the first update of all weights."""
    return [asdict(compare_shape(name, levels)) for name, levels in cases]


def compare_shape(name: str, levels: tuple[int, int, int]) -> Found:
    """Steps with an evaluation after each, in shards and by hand.

    The model is given float64 batches: they are cast where they enter a unit.
    """
    choice = replace(shapes.choice(name, levels, prefetch=1), dtype="bfloat16")
    model, optimizer = apply(shapes.fresh(name).float(), choice, torch.optim.SGD, lr=0.1)
    master, working = shapes.fresh(name).float(), shapes.fresh(name).bfloat16()
    working.register_forward_pre_hook(lambda module, inputs: (inputs[0].bfloat16(),))
    before = {n: p.detach().clone() for n, p in master.named_parameters() if p.requires_grad}
    world, rank, count = dist.get_world_size(), dist.get_rank(), shapes.ACCUMULATION
    losses, updates = [], []
    for step in range(2):
        for micro_batch in range(count):
            (shapes.loss_of(model, step, micro_batch, rank) / count).backward()
            for other in range(world):
                (shapes.loss_of(working, step, micro_batch, other) / count).backward()
                take_gradients(master, working, 1 / world)
        optimizer.step()
        with torch.no_grad():
            for value, parameter in zip(master.parameters(), working.parameters(), strict=True):
                if value.grad is not None:
                    value -= 0.1 * value.grad
                    value.grad = None
                parameter.copy_(value)
            here, there = (float(shapes.loss_of(m, 99, 0, 0)) for m in (model, working))
        losses.append(abs(here / there - 1))
        if not step:
            updates = shape_errors(full_parameters(optimizer), dict(master.named_parameters()), before)
    optimizer.engine.close()
    return Found(max(losses), max(updates))


def shape_errors(
    weights: dict[str, Tensor], exact: dict[str, nn.Parameter], before: dict[str, Tensor]
) -> list[float]:
    """By how much each update is off, as a share of it; what takes no part must stay what it was."""
    found = []
    for name, value in before.items():
        wanted = exact[name].detach()
        update, error = float((wanted - value).norm()), float((weights[name] - wanted).norm())
        found.append(error / update if update else error)
    return found
