"""Checkpoints saved under one random plan and world, loaded under another: the same values, to the bit.

On ranks of one job that meet anew for every plan, as many of them as it is for.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hzplan import Checkpoints, full_parameters, parallelize
from hzplan.checkpoint.data import fill
from hzplan.checkpoint.entries import whole
from hzplan.core.hierarchy import Mesh
from hzplan.core.matrices import MATRIX_WAYS
from hzplan.errors import UserError
from hzplan.formats.checkpoint import Checkpoint
from hzplan.formats.plan import Plan
from hzplan.models.workload import Workload, load
from hzplan.runtime.muon import Muon
from hzplan.runtime.optimizer import ShardedOptimizer
from tests.distributed.ranks import on_ranks
from tests.plans import make_plan

MESHES = ("1", "2", "3", "4", "2|2", "2,2", "5", "6", "2|3", "3,2", "7", "8", "2|2|2", "2,2|2", "4|2", "2|4")
STEPS = 2


def random_plan(rng: random.Random, meshes: tuple[str, ...], dtype: str, optimizer: str) -> Plan:
    """Of gpt:nano: a triple for every unit, some of them offloaded."""
    mesh = rng.choice(meshes)
    triples = Mesh.parse(mesh).triples()
    host = random.Random(f"{mesh} {rng.random()}")
    units = ("embed", "layers.0", "layers.1", "norm", "head")
    away = [unit for unit in units if host.random() < 0.4]
    return make_plan(
        "gpt:nano",
        mesh=mesh,
        levels=lambda unit: rng.choice(triples),
        prefetch=rng.choice((1, 2)),
        clip=rng.random() < 0.5,
        optimizer=optimizer,
        dtype=dtype,  # type: ignore[arg-type]
        micro_batch=1,
        offload=[unit for unit in away if optimizer != "muon" or not unit.startswith("layers")],
        matrix=host.choice(MATRIX_WAYS) if optimizer == "muon" else "",
    )


def pair(seed: int, most: int) -> tuple[Plan, Plan]:
    """Two plans of at most so many ranks; their dtypes may differ, master weights do not."""
    rng = random.Random(f"pair {seed}")
    meshes = tuple(mesh for mesh in MESHES if Mesh.parse(mesh).world <= most)
    optimizer = rng.choice(("adamw", "sgd-momentum", "adam", "muon"))
    plans = [random_plan(rng, meshes, rng.choice(("float32", "bfloat16")), optimizer) for _ in range(2)]
    return plans[0], plans[1]


@contextmanager
def _job(store: dist.Store, name: str, rank: int, world: int) -> Iterator[None]:
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adam": (torch.optim.Adam, {}),
    "sgd-momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "muon": (Muon, {}),
}


def _made(plan: Plan, seed: int) -> tuple[nn.Module, ShardedOptimizer]:
    torch.manual_seed(seed)
    optimizer, arguments = OPTIMIZERS[plan.optimizer]
    return parallelize(load("gpt:nano").build(), plan, optimizer, lr=1e-2, **arguments)


def _train(plan: Plan, workload: Workload, model: nn.Module, optimizer: ShardedOptimizer) -> None:
    for step in range(STEPS):
        workload.loss(
            model, workload.batch(1, torch.Generator().manual_seed(100 * step + dist.get_rank()))
        ).backward()
        if plan.clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()


def contents(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole, without the ranks' generators."""
    index = Checkpoint.load(path)
    room = {
        name: torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for name, tensor in index.tensors.items()
        if not name.startswith("rng.")
    }
    fill(path, index, [whole(name, tensor) for name, tensor in room.items()])
    return room


def differences(seed: int, most: int, rank: int, store: dist.Store, folder: Path) -> list[str]:
    """What differs after a save under one plan, a load under the other, and a save there; on rank 0."""
    workload = load("gpt:nano")
    one, other = pair(seed, most)
    values: list[dict[str, Tensor]] = []
    for turn, plan in enumerate((one, other)):
        world = plan.mesh.world
        if rank < world:
            with _job(store, f"{seed} {turn}", rank, world):
                model, optimizer = _made(plan, seed if turn == 0 else seed + 1)
                if turn == 0:
                    _train(plan, workload, model, optimizer)
                else:
                    assert Checkpoints(folder / "0").load(model, optimizer) is not None
                checkpoints = Checkpoints(folder / str(turn))
                checkpoints.save(model, optimizer, 1)
                checkpoints.wait()
                values.append(full_parameters(optimizer))
                optimizer.engine.close()
                dist.barrier()
        _meet(store, f"{seed} {turn} over", most)
    if rank:
        return []
    before, after = (contents(folder / str(turn) / "step-00000001") for turn in range(2))
    names = sorted(before.keys() ^ after.keys())
    names += [name for name in before.keys() & after.keys() if not torch.equal(before[name], after[name])]
    names += [f"whole {name}" for name, value in values[0].items() if not torch.equal(value, values[1][name])]
    return [f"pair {seed}: {one.cluster.mesh} → {other.cluster.mesh}: {name}" for name in names]


def _meet(store: dist.Store, name: str, world: int) -> None:
    store.add(name, 1)
    while int(store.add(name, 0)) < world:
        time.sleep(0.005)  # on fewer processors than ranks, who waits takes from who works


def differences_of(payload: tuple[list[int], str], rank: int, world: int) -> list[str]:
    """What differs in these pairs, on rank 0; the ranks meet anew for each."""
    seeds, folder = payload
    store = dist.FileStore(f"{folder}/store", world)
    found: list[str] = []
    for seed in seeds:
        place = Path(folder, str(seed))
        found += differences(seed, world, rank, store, place)
        if rank == 0:
            shutil.rmtree(place)
    return found


def a_rank_that_fails(folder: str) -> list[str]:
    """What every rank says of a save in which rank 1 cannot write, and of a load in which it cannot read."""
    model, optimizer = _made(make_plan("gpt:nano", mesh="2", optimizer="adamw"), 0)
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(model, optimizer, 1)
    checkpoints.wait()
    said: list[str] = []

    def broken(*_: Any) -> None:
        raise OSError(5, "Input/output error", "disk")

    def attempt(module: str, name: str, work: Callable[[], Any]) -> None:
        with patch(f"hzplan.checkpoint.{module}.{name}", broken) if dist.get_rank() == 1 else nullcontext():
            try:
                work()
            except UserError as error:
                said.append(str(error))

    def save() -> None:
        checkpoints.save(model, optimizer, 2)
        checkpoints.wait()

    attempt("save", "write", save)
    attempt("restore", "fill", lambda: checkpoints.load(model, optimizer))
    optimizer.engine.close()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, said)
    return [line.replace(folder, "") for of_rank in everyone for line in of_rank]


def wrong_pairs(seeds: list[int], most: int, folder: Path) -> list[str]:
    """What differs in these pairs of plans of at most ``most`` ranks, a line each."""
    asked = (seeds, str(folder))
    found = on_ranks(most, "tests.distributed.pairs:differences_of", asked, folder, join=False)
    return [str(line) for line in found]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        wrong = wrong_pairs([*range(int(sys.argv[1]))], 8, Path(place))
    print(*wrong, f"{sys.argv[1]} pairs, {len(wrong)} differences", sep="\n")
    sys.exit(bool(wrong))
