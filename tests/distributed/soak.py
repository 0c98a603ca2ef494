"""One training under one random plan after the other, beside one process: ``make soak``."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hzplan.runtime.apply import apply, full_parameters
from tests.distributed.oracle import Case, batch, choice, fresh_model, loss_of, param_groups, worst
from tests.distributed.ranks import on_ranks

WORLD = 4
LR = 1e-3
"""Low: a higher rate makes of rounding noise, which no order of sums avoids, more in 2,000 steps."""

AS_CONTROL = 10.0
"""How many times the control's errors ours may be: noise grows by chance."""
LEAST = 1e-12
"""Errors below are rounding, whatever the control's."""


def cases(number: int) -> list[Case]:
    """Random legal plans of four ranks, with a triple for every tensor."""
    found = []
    for seed in range(number):
        rng = random.Random(1_000_000 + seed)
        found.append(
            Case(
                rng.choice(("4", "2|2", "2,2")),
                accumulation=rng.choice((1, 2)),
                prefetch=rng.choice((1, 2, 3)),
                clip=rng.random() < 0.5,
                seed=seed,
                lean=rng.random() < 0.5,
            )
        )
    return found


def soak(payload: dict[str, int]) -> dict[str, float]:
    """On every rank: the largest error of a loss and of a weight, and how far training came.

    The optimizer's state begins anew with every plan, in both; weights go on. A control says what rounding
    alone makes of 2,000 steps: one process that sums the ranks' gradients in the opposite order.
    """
    weights = reference = control = {
        name: p.detach() for name, p in fresh_model(Case("1")).named_parameters()
    }
    loss_error = weight_error = control_loss = control_weight = 0.0
    first, began = None, time.monotonic()
    plans = cases(payload["steps"] // payload["every"])
    for number, case in enumerate(plans):
        case = replace(case, steps=payload["every"])
        offset = number * case.steps
        losses, weights = _sharded(case, weights, offset)
        expected, reference = _one_process(case, reference, offset, range(WORLD))
        again, control = _one_process(case, control, offset, reversed(range(WORLD)))
        loss_error = worst([loss_error, _apart(losses, expected)])
        weight_error = worst([weight_error, _norm_apart(weights, reference)])
        control_loss = worst([control_loss, _apart(again, expected)])
        control_weight = worst([control_weight, _norm_apart(control, reference)])
        first = losses[0] if first is None else first
        if dist.get_rank() == 0 and payload["shown"]:
            print(
                f"step {offset + case.steps}: {case.name}, loss {losses[-1]:.4f}, errors {loss_error:.1e} "
                f"and {weight_error:.1e} (control {control_loss:.1e} and {control_weight:.1e}), "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
    assert first is not None
    return {
        "loss_error": loss_error,
        "weight_error": weight_error,
        "control_loss_error": control_loss,
        "control_weight_error": control_weight,
        "first": first,
        "last": losses[-1],
    }


def as_exact(found: dict[str, float]) -> bool:
    """Whether the errors are those of rounding."""
    return all(
        found[f"{what}_error"] <= max(LEAST, AS_CONTROL * found[f"control_{what}_error"])
        for what in ("loss", "weight")
    )


def _apart(losses: list[float], expected: list[float]) -> float:
    return worst([abs(a - b) for a, b in zip(losses, expected, strict=True)])


def _norm_apart(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return worst([float((weights[name] - value).norm()) for name, value in expected.items()])


def _loaded(case: Case, weights: dict[str, Tensor]) -> nn.Module:
    model = fresh_model(case)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def _sharded(case: Case, weights: dict[str, Tensor], offset: int) -> tuple[list[float], dict[str, Tensor]]:
    model = _loaded(case, weights)
    model, optimizer = apply(model, choice(case), params=param_groups(case, model), lr=LR)
    losses = []
    for step in range(case.steps):
        total = torch.zeros((), dtype=torch.float64)
        for micro_batch in range(case.accumulation):
            loss = loss_of(model, batch(offset + step, micro_batch, dist.get_rank())) / case.accumulation
            loss.backward()
            total += loss.detach()
        if case.clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(total)
    found = full_parameters(optimizer)
    optimizer.engine.close()
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return list(map(float, mean / WORLD)), found


def _one_process(
    case: Case, weights: dict[str, Tensor], offset: int, ranks: Iterable[int]
) -> tuple[list[float], dict[str, Tensor]]:
    model, order = _loaded(case, weights), list(ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for step in range(case.steps):
        optimizer.zero_grad()
        total = 0.0
        for micro_batch in range(case.accumulation):
            for rank in order:
                loss = loss_of(model, batch(offset + step, micro_batch, rank)) / (case.accumulation * WORLD)
                loss.backward()
                total += float(loss.detach())
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def main(steps: int = 2000, every: int = 20) -> dict[str, Any]:
    """Run it; the errors."""
    payload = {"steps": steps, "every": every, "shown": True}
    with tempfile.TemporaryDirectory() as folder:
        return on_ranks(WORLD, "tests.distributed.soak:soak", payload, Path(folder))


if __name__ == "__main__":
    found = main(*map(int, sys.argv[1:]))
    print(found)
    sys.exit(not as_exact(found))
