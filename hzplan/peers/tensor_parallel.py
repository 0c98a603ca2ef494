"""Tensor parallelism inside a node, data parallelism across nodes: the other way to spread a GPT."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hzplan.models.gpt import GPT, MLP, Attention
from hzplan.peers.contender import NotHere, Setting
from hzplan.peers.ddp import DDP, replicas
from hzplan.peers.fsdp2 import inner_shards
from hzplan.training.batches import Batches


class TensorParallel(DDP):
    """Attention heads and MLP columns are split over the ranks of a node (Megatron-LM, arXiv 1909.08053 §3).

    A group computes the micro-batches of all its ranks at once, so that the global batch is the same.
    """

    def __init__(self, setting: Setting, *, name: str = "tp-dp", buckets: int = 0) -> None:
        super().__init__(setting, name=name, buckets=buckets)

    def prepare(self) -> None:
        setting = self.setting
        size = inner_shards(setting.plan.mesh)
        mesh = init_device_mesh(
            setting.device.type, (setting.world // size, size), mesh_dim_names=("data", "tensor")
        )
        self.group, across = mesh["tensor"].get_group(), mesh["data"].get_group()
        model = setting.build_model()
        if not isinstance(model, GPT):
            raise NotHere("tensor parallelism is there for gpt: models only")
        if model.config.heads % size:
            raise NotHere(f"{model.config.heads} attention heads do not divide over {size} ranks")
        self.split: list[nn.Parameter] = []
        for block in model.layers:
            assert isinstance(block.attention, Attention) and isinstance(block.mlp, MLP)
            block.attention = _Attention(block.attention, self.group)
            block.mlp = _MLP(block.mlp, self.group)
            self.split += [*block.attention.split, *block.mlp.split]
        self.micro = _Joined(setting.data, [dist.get_global_rank(self.group, r) for r in range(size)])
        self.model = self._replicas = replicas(model, setting, across, buckets=self.buckets)
        self.make_optimizer()

    def data(self) -> Batches:
        return self.micro

    @torch.no_grad()
    def clip(self) -> None:
        mine = {id(parameter) for parameter in self.split}
        squares = torch.zeros(2, dtype=torch.float64)
        gradients = []
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                gradients.append(parameter.grad)
                squares[int(id(parameter) in mine)] += torch.linalg.vector_norm(parameter.grad).double() ** 2
        split = squares[1].clone()
        dist.all_reduce(split, group=self.group)
        norm = float((squares[0] + split).sqrt())
        scale = self.setting.clip_norm / (norm + 1e-6)
        if scale < 1:
            torch._foreach_mul_(gradients, scale)


class _Joined:
    """The micro-batches of several ranks as one."""

    def __init__(self, data: Batches, ranks: list[int]) -> None:
        self.inner, self.ranks = data, ranks

    def train(self, step: int, index: int, rank: int) -> object:
        parts = [self.inner.train(step, index, member) for member in self.ranks]
        if not all(isinstance(part, Tensor) for part in parts):
            raise NotHere("batches that are not tensors cannot be joined")
        return torch.cat(parts)  # type: ignore[arg-type]

    def heldout(self, count: int, rank: int, world: int) -> Any:
        return self.inner.heldout(count, rank, world)


class _Split(torch.autograd.Function):
    """The input of split columns: itself; its gradient is the sum over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """The output of split rows: the sum over the group; its gradient is itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Attention(nn.Module):
    """This rank's heads of an ``Attention``."""

    def __init__(self, whole: Attention, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        size, place = group.size(), group.rank()
        width = whole.out.in_features
        self.heads, self.head = whole.heads // size, width // whole.heads
        mine = slice(place * self.heads, (place + 1) * self.heads)
        rows = whole.qkv.weight.detach().view(3, whole.heads, self.head, width)[:, mine]
        self.qkv = nn.Parameter(rows.reshape(-1, width).clone())
        self.qkv_bias = nn.Parameter(
            whole.qkv.bias.detach().view(3, whole.heads, self.head)[:, mine].reshape(-1).clone()
        )
        columns = slice(mine.start * self.head, mine.stop * self.head)
        self.out = nn.Parameter(whole.out.weight.detach()[:, columns].clone())
        self.out_bias = nn.Parameter(whole.out.bias.detach().clone())

    @property
    def split(self) -> list[nn.Parameter]:
        """The parameters that other ranks hold other parts of."""
        return [self.qkv, self.qkv_bias, self.out]

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        projected = F.linear(_apply(_Split, x, self.group), self.qkv, self.qkv_bias)
        q, k, v = projected.view(batch, length, 3, self.heads, self.head).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        part = F.linear(mixed.transpose(1, 2).reshape(batch, length, -1), self.out)
        return _apply(_Sum, part, self.group) + self.out_bias


class _MLP(nn.Module):
    """This rank's columns of an ``MLP``."""

    def __init__(self, whole: MLP, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        up, bias = whole.up.weight.detach(), whole.up.bias.detach()
        place = group.rank()
        self.up = nn.Parameter(up.chunk(group.size())[place].clone())
        self.up_bias = nn.Parameter(bias.chunk(group.size())[place].clone())
        self.down = nn.Parameter(whole.down.weight.detach().chunk(group.size(), dim=1)[place].clone())
        self.down_bias = nn.Parameter(whole.down.bias.detach().clone())

    @property
    def split(self) -> list[nn.Parameter]:
        """The parameters that other ranks hold other parts of."""
        return [self.up, self.up_bias, self.down]

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(_apply(_Split, x, self.group), self.up, self.up_bias))
        return _apply(_Sum, F.linear(hidden, self.down), self.group) + self.down_bias


def _apply(function: type[torch.autograd.Function], x: Tensor, group: dist.ProcessGroup) -> Tensor:
    result: Tensor = function.apply(x, group)
    return result
