"""Compiled units under a plan, against one process that compiles nothing."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hzplan.core.hierarchy import Levels
from hzplan.models.workload import load
from hzplan.runtime.apply import Choice, apply
from tests.plans import make_plan

STEPS, LR = 4, 0.1


def differences(payload: dict[str, Any]) -> list[float]:
    """Of losses, relative, for every levels in ``payload``; units compiled by its backend."""
    workload, world, rank = load("gpt:nano"), dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    initial = workload.build().double()
    expected = _alone(copy.deepcopy(initial), world)
    found = []
    for levels in payload["levels"]:
        model = copy.deepcopy(initial)
        for layer in model.get_submodule("layers"):
            layer.compile(backend=payload["backend"])
        plan = make_plan("gpt:nano", mesh="2", levels=Levels(*levels))
        choice = replace(Choice.of(plan), dtype=None, reduce_dtype=None)  # float64, as the model is
        _, optimizer = apply(model, choice, torch.optim.SGD, lr=LR)
        losses = torch.zeros(STEPS, dtype=torch.float64)
        for step in range(STEPS):
            loss = workload.loss(model, _batch(step, rank))
            loss.backward()
            optimizer.step()
            losses[step] = loss.detach() / world
        optimizer.engine.close()
        dist.all_reduce(losses)
        found.append(max(abs(a - b) / b for a, b in zip(losses.tolist(), expected, strict=True)))
    return found


def _batch(step: int, rank: int) -> Any:
    return load("gpt:nano").batch(2, torch.Generator().manual_seed(10 * step + rank))


def _alone(model: nn.Module, ranks: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for rank in range(ranks):
            loss = load("gpt:nano").loss(model, _batch(step, rank)) / ranks
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses
