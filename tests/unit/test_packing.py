"""What travels narrow: against the formats' definitions, in the memory of the values."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hzplan.core.buffers import MAX_IN_FLIGHT, scratch_bytes
from hzplan.core.wire import BLOCK, Format, packed_bytes
from hzplan.runtime.backends.base import Buffers
from hzplan.runtime.backends.packing import Blocks, Cast, Errors, Form, form_of
from hzplan.runtime.backends.threads import Post, ThreadGroup

FORMATS: list[Format] = ["bf16", "int8", "fp8"]


def there_and_back(form: Form, values: Tensor) -> Tensor:
    """In memory of their own."""
    packed = torch.zeros(form.units(values.numel()), dtype=form.dtype)
    form.pack(values, packed).run()
    found = torch.full_like(values, -1)
    form.unpack(packed, found).run()
    return found


def rounded(kind: Format, values: Tensor) -> Tensor:
    """To the nearest value of the format, by its definition, value by value in float64."""
    if kind == "bf16":
        return values.to(torch.bfloat16).to(values.dtype)
    blocks = values.double().view(-1, BLOCK)
    top = {"int8": 127.0, "fp8": 448.0}[kind]
    scale = (blocks.abs().amax(1, keepdim=True) / top).float().double()
    scaled = blocks / scale
    codes = scaled.round() if kind == "int8" else scaled.float().to(torch.float8_e4m3fn).double()
    return torch.where(scale > 0, codes * scale, 0.0).view(-1).to(values.dtype)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_value_is_the_nearest_of_its_block(kind: Format, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(700 * BLOCK, generator=generator, dtype=dtype)
    values.view(-1, BLOCK).mul_(torch.logspace(-20, 20, 700, dtype=dtype)[:, None])
    values[: 3 * BLOCK] = 0.0
    torch.testing.assert_close(
        there_and_back(form_of(kind), values), rounded(kind, values), rtol=1e-6, atol=0.0
    )


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    blocks=st.integers(1, 700),
    size=st.integers(2, 5),
    place=st.integers(0, 4),
)
def test_in_the_memory_of_the_values(
    kind: Format, dtype: torch.dtype, blocks: int, size: int, place: int
) -> None:
    """As a gather has them, packed behind, and a reduction, packed in front."""
    form, place, length = form_of(kind), place % size, blocks * BLOCK
    whole = torch.randn(size * length, dtype=dtype)
    apart = torch.zeros(form.units(whole.numel()), dtype=form.dtype)
    form.pack(whole, apart).run()
    form.pack(whole, form.front(whole)).run()
    assert torch.equal(form.front(whole), apart)
    behind = torch.randn(size * length, dtype=dtype)
    values, expected = behind.clone(), there_and_back(form, behind)
    packed, units = form.back(behind), form.units(length)
    own = packed[place * units : (place + 1) * units]
    form.pack(behind[place * length : (place + 1) * length], own).run()
    for other in range(size):
        if other != place:
            form.pack(values[other * length : (other + 1) * length], packed[other * units :][:units]).run()
    form.unpack(packed, behind).run()
    assert torch.equal(behind, expected)


def test_bytes_are_those_that_plans_count() -> None:
    for kind in FORMATS:
        form = form_of(kind)
        assert form.units(5 * BLOCK) * form.dtype.itemsize == packed_bytes(kind, 5 * BLOCK, 4)


def test_rounding_at_random_is_right_in_the_mean() -> None:
    """Of 400 draws within 5 standard errors, and never by more than one step."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(BLOCK * 4, generator=generator)
    drawn = []
    for number in range(400):
        some = values * (1 + 1e-5 * number)  # the same up to a last digit: another place in the tile
        drawn.append(there_and_back(Blocks("int8", dithered=True), some) / (1 + 1e-5 * number))
    step = values.view(-1, BLOCK).abs().amax(1, keepdim=True).expand(-1, BLOCK).reshape(-1) / 127
    errors = (torch.stack(drawn) - values) / step
    assert errors.abs().max() < 1.01
    assert errors.mean(0).abs().max() < 5 * 0.5 / 20 + 0.02  # at most half a step's deviation, 400 draws
    assert errors.mean().abs() < 0.01


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_alone_and_is_seen(kind: Format, bad: float) -> None:
    values = torch.randn(600 * BLOCK)
    clean = there_and_back(form_of(kind), values)
    values[[5, 40_000]] = bad
    found = there_and_back(form_of(kind), values)
    assert found[[5, 40_000]].isnan().all() and int(found.isnan().sum()) == 2
    others = torch.ones(len(values), dtype=torch.bool)
    others[:BLOCK] = others[40_000 // BLOCK * BLOCK :][:BLOCK] = False
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_what_is_not_finite_is_seen_among_zeros(kind: Format) -> None:
    values = torch.zeros(600 * BLOCK)
    values[5] = float("nan")
    found = there_and_back(form_of(kind), values)
    assert found[5].isnan() and int(found.isnan().sum()) == 1
    assert (
        not found[torch.arange(len(found)) != 5].signbit().any()
    )  # −0.0 would say that there is no gradient


def test_the_error_of_a_sample_is_noted() -> None:
    errors = Errors()
    values = torch.randn(256 * BLOCK)
    found = there_and_back(Blocks("int8", tier=1, errors=errors), values)
    share = float((found - values).norm() / values.norm())
    noted = errors.taken()
    assert noted.keys() == {1} and float(noted[1]) == pytest.approx(share, rel=1e-4)
    assert not errors.taken()


def in_groups(size: int, rank: Callable[[ThreadGroup], Any]) -> list[Any]:
    """What a function returns for every rank of a group of threads."""
    post, found = Post(size), {}

    def one(place: int) -> None:
        found[place] = rank(ThreadGroup(post, "group", range(size), place))

    threads = [threading.Thread(target=one, args=(place,)) for place in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return [found[place] for place in range(size)]


def test_sums_of_a_block_or_two_need_no_more_scratch_than_there_is() -> None:
    """Joined all-reduces are longer than the slices that scratch was made for."""
    least = scratch_bytes(BLOCK * 4) // MAX_IN_FLIGHT
    wholes = [torch.randn(4 * BLOCK) for _ in range(2)]

    def sums(group: ThreadGroup) -> Tensor:
        whole = wholes[group.place].clone()
        own = whole.view(2, -1)[group.place]
        group.all_reduce([Buffers(whole, own, form_of("int8"))], torch.zeros(least, dtype=torch.uint8)).run()
        return whole

    first, second = in_groups(2, sums)
    assert torch.equal(first, second) and float((first - sum(wholes)).abs().max()) < 0.1


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", [2, 3])
def test_replicas_have_the_same_after_a_gather_and_a_sum(kind: Format, size: int) -> None:
    length, form = 300 * BLOCK, form_of(kind)
    parts = [torch.randn(length, generator=torch.Generator().manual_seed(n)) for n in range(size)]
    wholes = [torch.randn(size * length, generator=torch.Generator().manual_seed(9 + n)) for n in range(size)]
    expected = torch.cat([there_and_back(form, part) for part in parts])

    def gathers(group: ThreadGroup) -> Tensor:
        whole = torch.zeros(size * length)
        own = whole.view(size, -1)[group.place]
        own.copy_(parts[group.place])
        group.all_gather([Buffers(whole, own, form)]).run()
        return whole

    for found in in_groups(size, gathers):
        assert torch.equal(found, expected)

    def sums(group: ThreadGroup) -> Tensor:
        whole = wholes[group.place].clone()
        own = whole.view(size, -1)[group.place]
        group.all_reduce([Buffers(whole, own, form)], torch.zeros(2 * BLOCK * 3)).run()
        return whole

    first, *others = in_groups(size, sums)
    assert all(torch.equal(first, other) for other in others)
    exact = torch.stack(wholes).sum(0)
    error = {"bf16": 0.004, "int8": 0.02, "fp8": 0.06}[kind] * size
    assert float((first - exact).norm() / exact.norm()) < error


def test_a_cast_to_what_values_are_is_none() -> None:
    values = torch.zeros(4)
    assert Buffers(values, values, Cast(torch.float32)).narrow is None
    assert Buffers(values, values, Cast(torch.bfloat16)).narrow is not None
