"""Peak memory of a step, against cases that can be counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hzplan.training.measure import peak_memory_bytes

CPU = torch.device("cpu")
KIB = 1 << 10


def block(kib: int) -> Tensor:
    return torch.zeros(kib * KIB // 4)


def peak(step: Callable[[], object], *ignore: Tensor) -> int:
    def run() -> None:
        step()

    return peak_memory_bytes(run, CPU, ignore=ignore)


def test_alive_storages_count_once() -> None:
    before = peak(lambda: None)
    kept = block(64)
    views = [kept[:10], kept.view(2, -1), kept.detach(), nn.Parameter(kept)]
    assert peak(lambda: None) - before == 64 * KIB
    assert len(views) == 4


def test_ignored_tensors_do_not_count() -> None:
    before = peak(lambda: None)
    data = block(64)
    assert peak(lambda: None, data) == before


def test_fake_tensors_have_no_memory() -> None:
    before = peak(lambda: None)
    with FakeTensorMode():
        fake = block(64)
    assert peak(lambda: None) == before
    assert fake.numel() == 64 * KIB // 4


def test_highest_level_inside_the_step() -> None:
    kept: list[Tensor] = []

    def step() -> None:
        first, second = block(300), block(100)  # 400
        del first, second
        kept.append(block(250))  # 250
        temporary = block(100)  # 350
        del temporary

    before = peak(lambda: None)
    assert peak(step) - before == 400 * KIB
    assert peak(lambda: None) - before == 250 * KIB


def test_a_training_step() -> None:
    """y = (x w)², summed: forward holds the product and its square; backward adds two gradients."""
    x, w = torch.randn(64, 32), nn.Parameter(torch.randn(32, 16))
    w.grad = torch.zeros_like(w)
    product, weight = 64 * 16 * 4, 32 * 16 * 4

    def step() -> None:
        product_squared = (x @ w).square()
        loss = product_squared.sum()
        del product_squared
        loss.backward()  # the gradient of the square is 2·product·gradient: two more like the product

    step()
    before = peak(lambda: None)
    taken = peak(step) - before
    assert 3 * product <= taken <= 4 * product + weight + 64
