"""What a model's hooks tell a listener of its forward and backward."""

from __future__ import annotations

import gc
import weakref
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hzplan.models.hooks import attach
from hzplan.models.units import Unit


class Told:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def enter(self, unit: str, phase: Literal["forward", "backward"]) -> None:
        self.calls.append(f"{unit} {phase}")

    def gradient(self, parameter: nn.Parameter) -> None:
        self.calls.append("gradient")

    def backward_end(self) -> None:
        self.calls.append("end")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(130, 130), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, use_reentrant=True)
        return x + found


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        raise ValueError("a bad gradient")


def told(blocks: int = 2) -> tuple[nn.Sequential, Told]:
    model, listener = nn.Sequential(*(Block() for _ in range(blocks))), Told()
    units = [
        Unit(str(index), block, tuple(block.named_parameters()), (str(index),))
        for index, block in enumerate(model)
    ]
    attach(units, listener)
    return model, listener


def test_what_a_forward_returns_is_not_kept() -> None:
    """As of frozen embeddings, whose outputs get ``requires_grad_()`` under gradient checkpointing."""
    embedding, listener = nn.Embedding(4, 3), Told()
    embedding.requires_grad_(False)
    embedding.register_forward_hook(lambda module, arguments, output: output.requires_grad_(True))
    detach = attach([Unit("", embedding, tuple(embedding.named_parameters()), ("",))], listener)
    out = embedding(torch.tensor([1, 2]))
    out.sum().backward()
    gone = weakref.ref(out)
    del out
    gc.collect()
    assert gone() is None
    detach()


def test_a_reentrant_checkpoint_is_part_of_its_backward() -> None:
    """Its backward inside of the backward is not one more micro-batch."""
    model, listener = told()
    for _ in range(2):
        listener.calls.clear()
        model(torch.randn(3, 130, requires_grad=True)).sum().backward()
        assert listener.calls == [
            *("0 forward", "1 forward", "1 backward", "gradient", "0 backward", "gradient", "end")
        ]


def test_a_backward_after_one_that_raised_is_told_whole() -> None:
    model, listener = told()
    x = torch.randn(3, 130, requires_grad=True)
    with pytest.raises(ValueError):
        model[1](Fails.apply(model[0](x))).sum().backward()
    listener.calls.clear()
    model(x).sum().backward()
    assert listener.calls[-1] == "end" and listener.calls.count("end") == 1
