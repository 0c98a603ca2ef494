"""Optimizer state and activations in the host's memory against the same on the device; runs on the ranks."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hzplan.core.schedule import Kind
from hzplan.runtime.apply import full_parameters
from hzplan.runtime.optimizer import ShardedOptimizer
from tests.distributed.behaviour import delays
from tests.distributed.oracle import Case, batch, loss_of, sharded

STEPS = 6
COPIES = (Kind.FETCH, Kind.STORE, Kind.SAVE, Kind.LOAD)
OPTIMIZERS = ("AdamW", "Adagrad", "NAdam", "SGD", "RMSprop", "ASGD")


def case_of(seed: int) -> Case:
    """Random levels; every optimizer that keeps something."""
    rng = random.Random(seed)
    return Case(
        rng.choice(("2", "1|2", "2|1")),
        None,
        accumulation=rng.choice((1, 2)),
        prefetch=rng.choice((1, 2)),
        steps=STEPS,
        clip=seed % 2 == 0,
        dtype=rng.choice(("float32", "bfloat16")),
        optimizer=OPTIMIZERS[seed % len(OPTIMIZERS)],
        frozen=rng.random() < 0.3,
        groups=rng.random() < 0.3,
        seed=seed,
    )


def differing(payload: list[int]) -> dict[str, list[str]]:
    """On every rank: by seed what is not the same to the bit. Copies are slow, each by another time."""
    found = {}
    for seed in payload:
        case, rng = case_of(seed), random.Random(100 * seed + dist.get_rank())
        model, optimizer = sharded(case)
        expected = contents(case, model, optimizer)
        optimizer.engine.close()
        slow = delays(lambda t, r=rng: r.uniform(0, 0.01) if t.kind in COPIES else 0.0)  # type: ignore[misc]
        with slow:
            model, optimizer = sharded(replace(case, offload=True))
            assert any(unit.offload for unit in optimizer.engine.units.values())
            assert case.prefetch > 1 or any(
                task.kind is Kind.LOAD for task in optimizer.engine.schedule.tasks
            )
            mine = contents(case, model, optimizer)
            optimizer.engine.close()
        assert mine.keys() == expected.keys() and len(expected) > 10
        found[str(seed)] = [name for name, value in mine.items() if not torch.equal(value, expected[name])]
    return found


def contents(case: Case, model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """Weights, losses and optimizer state after some steps: one skipped, one partly outside of the schedule,
    an evaluation between."""
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        total = torch.zeros(())
        for micro_batch in range(case.accumulation):
            if step == 3 and micro_batch:  # the rest of the step is taken outside of the schedule
                evaluate(model)
            loss = loss_of(model, batch(step, micro_batch, dist.get_rank())) / case.accumulation
            loss.backward()
            total += loss.detach()
        if case.clip:
            optimizer.clip_grad_norm_(1.0)
        if step == 1 and case.clip:
            optimizer.skip_step()
        else:
            optimizer.step()
        if step == 2:
            total += evaluate(model)
        found[f"loss {step}"] = total
    found |= {f"weight {name}": value for name, value in full_parameters(optimizer).items()}
    for piece in optimizer.updates.pieces:
        place = f"{piece.unit} {piece.bucket.layout.tensors[piece.index].name}"
        for key, value in optimizer.updates.state_of(piece).items():
            if isinstance(value, Tensor):
                found[f"state {place} {key}"] = value.clone()
    return found


@torch.no_grad()
def evaluate(model: nn.Module) -> Tensor:
    """Of the same tokens on every rank."""
    return loss_of(model, batch(99, 0, 0))
