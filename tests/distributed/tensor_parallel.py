"""Tensor parallelism by DTensor beside a plan's data parallelism, against one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from hzplan import Checkpoints, full_parameters, parallelize
from hzplan.core.hierarchy import Levels
from hzplan.errors import UserError
from hzplan.formats.parallel import ModelParallel
from hzplan.models.local import is_distributed, local
from hzplan.models.workload import Workload
from tests.plans import make_plan

WIDTH, HEADS, VOCAB, LENGTH = 32, 4, 64, 12
STEPS, ACCUMULATION, CLIP, LR = 3, 2, 0.05, 0.5  # low enough to act, and high enough to tell
TENSOR = 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.q, self.k, self.v)
        ]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        found: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        found: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(x)
        return found


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1).double(), batch[:, 1:].flatten())


WORKLOAD = Workload(
    name="tests.distributed.tensor_parallel:Model",
    build=Model,
    batch=lambda n, generator: torch.randint(VOCAB, (n, LENGTH + 1), generator=generator),
    loss=_loss,
    seq_len=LENGTH,
    vocab=VOCAB,
)
CUT = {
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.o": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def _batch(step: int, index: int, rank: int) -> Any:
    return WORKLOAD.batch(2, torch.Generator().manual_seed(100 * step + 10 * index + rank))


def _alone(model: nn.Module, ranks: int) -> list[float]:
    """Losses of one process that trains on what all data-parallel ranks have."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        for index in range(ACCUMULATION):
            for rank in range(ranks):
                loss = _loss(model, _batch(step, index, rank)) / ACCUMULATION / ranks
                loss.backward()
                losses.append(float(loss.detach()) * ACCUMULATION * ranks)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def differences(cases: list[tuple[list[int], str]]) -> list[dict[str, float]]:
    """How far losses and weights are from one process's, by levels and dtype; the worst of all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // TENSOR, TENSOR), mesh_dim_names=("dp", "tp"))
    return [_differences(mesh, Levels(*levels), dtype) for levels, dtype in cases]


def _differences(mesh: DeviceMesh, levels: Levels, dtype: Any) -> dict[str, float]:
    data, place = mesh["dp"].size(), mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    model = Model().to(torch.float64 if dtype == "float64" else torch.float32)
    reference = copy.deepcopy(model)
    plan = make_plan(
        WORKLOAD,
        mesh=",".join("2" * (data.bit_length() - 1)),
        levels=levels,
        accumulation=ACCUMULATION,
        clip=True,
        dtype=dtype,
    ).model_copy(update={"parallel": ModelParallel(tensor=TENSOR)})
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], CUT)
    _, optimizer = parallelize(model, plan, torch.optim.SGD, lr=LR, mesh=mesh["dp"])
    losses = []
    for step in range(STEPS):
        for index in range(ACCUMULATION):
            loss = _loss(model, _batch(step, index, place))
            (loss / ACCUMULATION).backward()
            losses.append(float(loss.detach()))
        optimizer.clip_grad_norm_(CLIP)
        optimizer.step()
    values = full_parameters(optimizer)
    parameters = dict(model.named_parameters())
    optimizer.engine.close()

    expected = _alone(reference, data)[place::data]
    loss_error = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    weight_error, split = 0.0, 0
    for name, whole in reference.named_parameters():
        mine = whole.detach()
        if is_distributed(parameters[name]):
            (placement,) = parameters[name].placements
            if placement.is_shard():
                split += 1
                mine = mine.chunk(TENSOR, placement.dim)[mesh["tp"].get_local_rank()]
        assert values[name].shape == mine.shape == local(parameters[name]).shape
        weight_error = max(weight_error, float((values[name] - mine).abs().max()))
    found = torch.tensor([loss_error, weight_error], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return {"loss": found[0].item(), "weight": found[1].item(), "split": split}


def refusals(_: object) -> list[str]:
    """What is said to a model that is cut over replicas, to two dimensions, to pipelines, to checkpoints."""
    mesh = init_device_mesh("cpu", (2, TENSOR), mesh_dim_names=("dp", "tp"))
    plan = make_plan(WORKLOAD, mesh="2").model_copy(update={"parallel": ModelParallel(tensor=TENSOR)})
    said = []

    def refused(work: Any) -> None:
        try:
            work()
        except UserError as error:
            said.append(str(error))

    model = Model()
    parallelize_module(model.layers[0], mesh["dp"], CUT)
    refused(lambda: parallelize(model, plan, mesh=mesh["dp"]))
    refused(lambda: parallelize(Model(), plan, mesh=mesh))
    pipeline = plan.model_copy(update={"parallel": ModelParallel(pipeline=2)})
    refused(lambda: parallelize(Model(), pipeline, mesh=mesh["dp"]))
    good, optimizer = parallelize(Model(), plan, mesh=mesh["dp"], lr=LR)
    refused(lambda: Checkpoints("nowhere").save(good, optimizer, 1))
    optimizer.engine.close()
    return said
