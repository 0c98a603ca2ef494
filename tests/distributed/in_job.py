"""``hzplan.auto`` on ranks: measured, planned and trained in one job; runs on the ranks."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hzplan
from hzplan.errors import UserError
from hzplan.models.gpt import GPT, PRESETS

MICRO_BATCH, STEPS = 2, 3


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"][:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["tokens"][:, 1:].flatten())


def batch(step: int, index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * index + dist.get_rank())
    return {"tokens": torch.randint(0, 64, (MICRO_BATCH, 17), generator=generator)}


def trained(folder: str) -> list[dict[str, Any]]:
    """On every rank: twice from the same weights, then from what was kept; and what is refused."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = GPT(PRESETS["nano"])
        said: list[str] = []
        began = time.monotonic()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*tensors of state")
            made, optimizer, plan = hzplan.auto(
                model,
                torch.optim.SGD,
                global_batch=MICRO_BATCH * dist.get_world_size() * 2,
                sample=batch(0, 0),
                loss=loss,
                memory_bytes=1 << 30,
                cache=folder,
                say=said.append,
                lr=0.1,
                momentum=0.5,
            )
        seconds = time.monotonic() - began
        losses = []
        for step in range(STEPS):
            for index in range(plan.batch.accumulation):
                value = loss(made, batch(step, index)) / plan.batch.accumulation
                value.backward()
                losses.append(float(value.detach()))
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        optimizer.engine.close()
        found.append({"losses": losses, "seconds": seconds, "said": said, "plan": plan.model_dump_json()})
    found.append({"refused": [_refused(folder, **wrong) for wrong in WRONG]})
    return found


def with_matrices(folder: str) -> dict[str, Any]:
    """On every rank: under Muon, in groups of the caller's own, one matrix of which AdamW updates."""
    torch.manual_seed(0)
    model = GPT(PRESETS["nano"])
    optimizer = hzplan.Muon.of(model, others=["*.out.weight"], lr=0.02, adamw={"lr": 0.005})
    groups = [dict(group) for group in optimizer.param_groups]
    made, sharded, plan = hzplan.auto(
        model,
        hzplan.Muon,
        global_batch=MICRO_BATCH * dist.get_world_size(),
        sample=batch(0, 0),
        loss=loss,
        memory_bytes=1 << 30,
        gauge_s=1.0,
        cache=folder,
        say=lambda text: None,
        params=groups,
    )
    losses = []
    for _ in range(6):
        value = loss(made, batch(0, 0))
        value.backward()
        losses.append(float(value.detach()))
        sharded.clip_grad_norm_(1.0)
        sharded.step()
    sharded.engine.close()
    matrices = [name for unit in plan.units for b in unit.buckets if b.matrix for name in b.tensors]
    return {"losses": losses, "matrices": matrices, "rates": [g["lr"] for g in sharded.param_groups]}


def told(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A loss that ranks tell each other."""
    found = loss(model, batch)
    dist.all_reduce(found.detach())
    return found


WRONG: tuple[dict[str, Any], ...] = (
    {"global_batch": 3},
    {"sample": {"tokens": torch.tensor(1)}},
    {"optimizer_class": torch.optim.Adagrad},
    {"memory_bytes": 1000},
    {"loss": None},
    {"loss": told},
    {"dtype": "float7"},
)


def _refused(folder: str, **wrong: Any) -> str:
    given = {
        "optimizer_class": torch.optim.SGD,
        "global_batch": 2 * MICRO_BATCH * dist.get_world_size(),
        "sample": batch(0, 0),
        "loss": loss,
        "memory_bytes": 1 << 30,
        "cache": Path(folder),
        "say": lambda text: None,
        "lr": 0.1,
        "momentum": 0.5,
    } | wrong
    torch.manual_seed(0)
    try:
        hzplan.auto(GPT(PRESETS["nano"]), given.pop("optimizer_class"), **given)
    except UserError as error:
        return str(error)
    return "nothing"
