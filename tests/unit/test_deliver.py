"""Gradients on their way into a bucket: rounded once, their zeros positive."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hzplan.runtime.unit import deliver, zero_like

SHAPES = [(), (1,), (3, 5), (700, 130)]


def gradient_of(shape: tuple[int, ...]) -> Tensor:
    torch.manual_seed(len(shape))
    made = torch.randn(shape).bfloat16()
    return torch.where(made > 1, torch.full_like(made, -0.0), made)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_gradient_is_rounded_where_it_goes_to(shape: tuple[int, ...]) -> None:
    gradient, scale = gradient_of(shape), 1 / 3
    target = torch.full(shape, 7.0)
    deliver(gradient, target, scale, accumulate=False)
    assert torch.equal(target, gradient.float() * scale)
    assert not target[target == 0].signbit().any()
    deliver(gradient, target, scale, accumulate=True)
    assert torch.allclose(target, gradient.float() * (2 * scale), rtol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_in_one_kernel_it_is_the_same(shape: tuple[int, ...]) -> None:
    """What a GPU is told to do, here."""
    gradient, scale = gradient_of(shape), 1 / 3
    target, expected = torch.full(shape, 7.0), torch.full(shape, 7.0)
    deliver(gradient, expected, scale, accumulate=False)
    torch.add(zero_like(target), gradient, alpha=scale, out=target)
    assert target.shape == torch.Size(shape)
    assert torch.equal(target, expected)
    assert torch.equal(target.signbit(), expected.signbit())
