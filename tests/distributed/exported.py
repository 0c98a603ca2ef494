"""Plans that FSDP2 can say: trained as exported, and under hzplan, from equal weights on equal batches.

In the second most of memory is activations and state, as in real models; in the first buffers are.

python -m tests.distributed.exported
python -m tests.distributed.exported benchmarks.models:tall 4
"""

from __future__ import annotations

import importlib.util
import random
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.recompute import WAYS, only
from hzplan.export.fsdp2 import export
from hzplan.formats.plan import Plan
from hzplan.models.workload import Workload, load
from hzplan.runtime.apply import parallelize
from hzplan.training.measure import peak_memory_bytes
from tests.distributed.ranks import on_ranks
from tests.plans import make_plan

STEPS = 4
CLIP = 0.5
"""Low enough to act."""
CPU = torch.device("cpu")


def random_plan(seed: int, workload: Workload, micro_batch: int) -> Plan:
    """Of four ranks; FSDP2 can say every unit's levels."""
    rng = random.Random(f"export {seed}")
    mesh = Mesh.parse(rng.choice(("4", "2|2")))
    whole = mesh.levels
    accumulation = rng.choice((1, 2))
    known = [Levels(whole, whole, whole), Levels(0, whole, whole)]
    known += [Levels(level, level, level) for level in range(1, whole)]
    if accumulation > 1:  # else there is nothing that a whole gradient is kept for
        known += [Levels(0, 0, level) for level in range(1, whole + 1)] + [Levels(whole, 0, whole)]
    at = rng.choice(known)
    mixed = rng.random() < 0.6
    chosen: dict[str, Levels] = {}
    return make_plan(
        workload,
        mesh=str(mesh),
        levels=lambda unit: chosen.setdefault(_group(unit), rng.choice(known) if mixed else at),
        micro_batch=micro_batch,
        accumulation=accumulation,
        prefetch=rng.choice((1, 2)),
        clip=True,
        dtype=rng.choice(("float32", "float32", "bfloat16")),
        recompute=only(
            "layers.1", rng.choice((None, None, *(way for way in WAYS if way not in ("host", "chunks"))))
        ),
    )


def _group(unit: str) -> str:
    """Units that share a tensor are one group of FSDP2's."""
    return "root" if unit in ("embed", "head") else unit


def trained(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """On every rank; rank 0's answer: losses and peaks of both, by plan."""
    found = []
    workload = load(payload["model"])
    elements = {name: tensor.numel() for name, tensor in workload.build().named_parameters()}
    for seed in range(payload["plans"]):
        plan = random_plan(seed, workload, payload["micro_batch"])
        path = Path(payload["folder"], f"plan{seed}.json")
        made = export(path, plan, elements.__getitem__)
        script = path.with_suffix(".py")
        if dist.get_rank() == 0:
            script.write_text(made.text)
        dist.barrier()
        recipe = _module(script)
        ours, our_peak = _ours(plan, workload)
        theirs, their_peak = _theirs(plan, workload, recipe)
        found.append(
            {
                "seed": seed,
                "dtype": plan.model.dtype,
                "lost": [f"{one.where}: {one.what}" for one in made.lost],
                "losses": [ours, theirs],
                "peaks": [our_peak, their_peak],
            }
        )
    return found


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _batch(workload: Workload, plan: Plan, step: int, index: int) -> Any:
    place = 1000 * step + 10 * index + dist.get_rank()
    return workload.batch(plan.batch.micro_batch, torch.Generator().manual_seed(place))


def _ours(plan: Plan, workload: Workload) -> tuple[list[float], int]:
    torch.manual_seed(7)
    model, optimizer = parallelize(workload.build(), plan, torch.optim.SGD, lr=0.05, momentum=0.9)
    losses: list[float] = []

    def step(number: int) -> None:
        for index in range(plan.batch.accumulation):
            loss = workload.loss(model, _batch(workload, plan, number, index)) / plan.batch.accumulation
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.engine.synchronize()

    for number in range(STEPS - 1):
        step(number)
    peak = peak_memory_bytes(lambda: step(STEPS - 1), CPU)
    optimizer.engine.close()
    return losses, peak


def _theirs(plan: Plan, workload: Workload, recipe: ModuleType) -> tuple[list[float], int]:
    torch.manual_seed(7)
    model = recipe.build(workload.build) if plan.prefetch == 1 else recipe.shard(workload.build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses: list[float] = []

    def step(number: int) -> None:
        for index in range(recipe.ACCUMULATION):
            recipe.before_micro_batch(model, last=index == recipe.ACCUMULATION - 1)
            loss = workload.loss(model, _batch(workload, plan, number, index)) / recipe.ACCUMULATION
            loss.backward()
            losses.append(float(loss.detach()))
        recipe.clip(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()

    for number in range(STEPS - 1):
        step(number)
    return losses, peak_memory_bytes(lambda: step(STEPS - 1), CPU)


if __name__ == "__main__":
    model, micro_batch = sys.argv[1:] or ("gpt:tiny", "1")
    with tempfile.TemporaryDirectory() as place:
        asked = {"model": model, "micro_batch": int(micro_batch), "plans": 12, "folder": place}
        for plan in on_ranks(4, "tests.distributed.exported:trained", asked, Path(place)):
            mine, other = plan["losses"]
            apart = max(abs(one - another) / abs(another) for one, another in zip(mine, other, strict=True))
            ratio = plan["peaks"][1] / plan["peaks"][0]
            print(f"plan {plan['seed']}, {plan['dtype']}: losses {apart:.0e} apart, peak {ratio:.2f} of ours")
