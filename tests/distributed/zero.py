"""Plans that DeepSpeed can say: its engine made from the exported file alone, beside hzplan.

DeepSpeed changes much of the process that it lives in, so the two have processes of their own.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hzplan.core.hierarchy import Levels
from hzplan.export.deepspeed import export
from hzplan.formats.plan import Plan
from hzplan.models.workload import Workload, load
from hzplan.runtime.apply import parallelize
from tests.plans import make_plan

MODEL = "gpt:nano"
STEPS = 4
RATE = 1e-3

SCHEMES = {
    "ZeRO-0": Levels(0, 0, 0),
    "ZeRO-1": Levels(0, 0, 2),
    "ZeRO-2": Levels(0, 2, 2),
    "ZeRO-3": Levels(2, 2, 2),
    "hpZ": Levels(1, 2, 2),
}
"""All that it has, on two nodes of two ranks."""


def plan_of(scheme: str, dtype: str) -> Plan:
    """A plan of this scheme; the rest at random."""
    rng = random.Random(f"zero {scheme} {dtype}")
    return make_plan(
        MODEL,
        mesh="2|2",
        levels=SCHEMES[scheme],
        micro_batch=rng.choice((1, 2)),
        accumulation=rng.choice((1, 2)),
        prefetch=rng.choice((1, 2)),
        clip=True,
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
    )


def _batch(workload: Workload, plan: Plan, step: int, index: int) -> Any:
    place = 1000 * step + 10 * index + dist.get_rank()
    return workload.batch(plan.batch.micro_batch, torch.Generator().manual_seed(place))


def ours(payload: dict[str, Any]) -> list[list[float]]:
    """On every rank; rank 0's losses, by plan and micro-batch."""
    workload, found = load(MODEL), []
    for scheme, dtype in payload["cases"]:
        plan = plan_of(scheme, dtype)
        torch.manual_seed(7)
        model, optimizer = parallelize(workload.build(), plan, torch.optim.AdamW, lr=RATE)
        losses = []
        for step in range(STEPS):
            for index in range(plan.batch.accumulation):
                loss = workload.loss(model, _batch(workload, plan, step, index))
                (loss / plan.batch.accumulation).backward()
                losses.append(float(loss.detach()))
            optimizer.clip_grad_norm_(1.0)  # as the file says
            optimizer.step()
        optimizer.engine.close()
        found.append(losses)
    return found


def theirs(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """On every rank; by plan: where something got lost, and rank 0's losses."""
    rank = str(dist.get_rank())
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": rank, "LOCAL_RANK": rank}
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "LOCAL_SIZE": str(dist.get_world_size())}
    import deepspeed

    workload, found = load(MODEL), []
    for scheme, dtype in payload["cases"]:
        plan = plan_of(scheme, dtype)
        path = Path(payload["folder"], f"{scheme}-{dtype}-{rank}.json")
        made = export(path, plan, lambda name: dict(workload.build().named_parameters())[name].numel())
        path.write_text(made.text)
        torch.manual_seed(7)
        model = workload.build()
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=RATE), config=str(path)
        )
        losses = []
        for step in range(STEPS):
            for index in range(plan.batch.accumulation):
                loss = workload.loss(engine, _batch(workload, plan, step, index))
                engine.backward(loss)  # which divides by the accumulation itself
                engine.step()
                losses.append(float(loss.detach()))
        engine.destroy()
        found.append({"losses": losses, "lost": [one.where for one in made.lost]})
    return found
