"""A run of FSDP2's that hzplan takes over, and gives back.

python -m tests.distributed.taken_over
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hzplan import Checkpoints, load_dcp, parallelize
from hzplan.checkpoint import to_dcp
from hzplan.checkpoint.folder import whole_at
from hzplan.core.hierarchy import Levels
from hzplan.models.workload import load
from tests.distributed.ranks import on_ranks
from tests.plans import make_plan

MODEL = "gpt:nano"
BEFORE, AFTER = 3, 2
"""Steps before the run changes hands, and after."""
SEQUENCES = 8
"""Of a step, over all ranks."""


def _fsdp2(dims: tuple[int, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model: Any = load(MODEL).build()
    names = ("replicate", "shard")[-len(dims) :]
    mesh = init_device_mesh("cpu", dims, mesh_dim_names=names)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _loss(model: nn.Module, step: int) -> Tensor:
    """Of this rank's part of a step's sequences, which are the same for every number of ranks."""
    workload, mine = load(MODEL), SEQUENCES // dist.get_world_size()
    batch = workload.batch(SEQUENCES, torch.Generator().manual_seed(step))
    first = dist.get_rank() * mine
    return workload.loss(model, batch[first : first + mine])


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = _loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


def begin(payload: dict[str, Any]) -> list[float]:
    """FSDP2 trains, saves, and trains on; the losses after."""
    model, optimizer = _fsdp2(tuple(payload["dims"]))
    _train(model, optimizer, range(BEFORE))
    options = StateDictOptions(flatten_optimizer_state_dict=payload["flat"])
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=payload["from"])
    return _train(model, optimizer, range(BEFORE, BEFORE + AFTER))


def take_over(payload: dict[str, Any]) -> dict[str, Any]:
    """hzplan takes it over, saves it as its own and as FSDP2's, and trains on; the losses after."""
    world = dist.get_world_size()
    plan = make_plan(
        MODEL, mesh=payload["mesh"], levels=Levels(*payload["levels"]), micro_batch=SEQUENCES // world
    )
    torch.manual_seed(9)
    model, optimizer = parallelize(load(MODEL).build(), plan, torch.optim.AdamW, lr=1e-2)
    step = load_dcp(payload["from"], model, optimizer)
    checkpoints = Checkpoints(payload["ours"])
    checkpoints.save(model, optimizer, step)
    checkpoints.wait()
    if dist.get_rank() == 0:
        found = whole_at(Path(payload["ours"], f"step-{step:08d}"))
        to_dcp.export(found.path, found.index, Path(payload["to"]))
    losses = _train(model, optimizer, range(step, step + AFTER))
    optimizer.engine.close()
    return {"step": step, "losses": losses}


def give_back(payload: dict[str, Any]) -> dict[str, Any]:
    """FSDP2 loads what hzplan wrote; what of it differs from what FSDP2 had saved, and the losses after."""
    model, optimizer = _fsdp2(tuple(payload["dims"]))
    options = StateDictOptions(flatten_optimizer_state_dict=payload["flat"])
    read = []
    for folder in (payload["from"], payload["to"]):
        weights, state = get_state_dict(model, optimizer, options=options)
        wanted = {"model": weights, "optimizer": state}
        dcp.load(wanted, checkpoint_id=folder)
        read.append({name: _here(value) for name, value in _flat(wanted).items()})
    theirs, ours = read
    differ = sorted({*theirs} ^ {*ours}) + [n for n in theirs if n in ours and not _same(theirs[n], ours[n])]
    set_state_dict(
        model,
        optimizer,
        model_state_dict=wanted["model"],
        optim_state_dict=wanted["optimizer"],
        options=options,
    )
    losses = _train(model, optimizer, range(BEFORE, BEFORE + AFTER))
    tensors = sum(isinstance(value, Tensor) for value in ours.values())
    return {"differ": differ, "tensors": tensors, "losses": losses}


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, of in value.items() for k, v in _flat(of, f"{name}.{key}").items()}
    if isinstance(value, list) and any(isinstance(of, dict) for of in value):
        return {k: v for key, of in enumerate(value) for k, v in _flat(of, f"{name}.{key}").items()}
    return {name: value}


def _here(value: Any) -> Any:
    """This rank's part, as it is now."""
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.detach().clone() if isinstance(local, Tensor) else local


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def taken_over(folder: Path, dims: tuple[int, ...], mesh: str, levels: tuple[int, ...], flat: bool) -> Any:
    """A run on four ranks of FSDP2's, two or four of hzplan's, and four of FSDP2's again."""
    payload = {
        "dims": dims,
        "mesh": mesh,
        "levels": levels,
        "flat": flat,
        **{name: str(folder / name) for name in ("from", "ours", "to")},
    }
    world = 2 if mesh == "2" else 4
    found = {}
    for name, ranks in (("begin", 4), ("take_over", world), ("give_back", 4)):
        place = folder / f"ranks-{name}"
        place.mkdir()
        found[name] = on_ranks(ranks, f"tests.distributed.taken_over:{name}", payload, place)
    return found


if __name__ == "__main__":
    for case in (((4,), "2", (1, 1, 1), False), ((2, 2), "2|2", (1, 0, 2), True)):
        with tempfile.TemporaryDirectory() as where:
            print(case, taken_over(Path(where), *case))
