"""Triton's kernels, in its interpreter, against torch's operations: to the bit, but where numbers at random
come from. ``make kernels`` runs them in an environment that has Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from hzplan.core.wire import BLOCK, BLOCK_BYTES, Format
from hzplan.runtime.backends import packing
from hzplan.runtime.backends.packing import TILE, Blocks, Errors
from tests.cli.command import ROOT

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: make kernels")
KINDS: list[Format] = ["int8", "fp8"]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(packing, "STAGED", 40)  # several pieces
    packing._kernels_for.cache_clear()
    yield
    packing._kernels_for.cache_clear()
    packing.forget()


def blocks(dtype: torch.dtype, count: int = 101) -> Tensor:
    """Of all sizes, some empty, with zeros of both signs, some with what is not finite."""
    generator = torch.Generator().manual_seed(3)
    made = torch.randn(count, BLOCK, generator=generator) * torch.logspace(-20, 20, count)[:, None]
    made[:, 5], made[:, 6], made[:, 7:9] = 0.0, -0.0, made[:, 7:9] * 1e-4
    made[10], made[11] = 0.0, -0.0
    made[12], made[13] = 1e-33, -1e-38
    made[20, 3], made[21, 4], made[22, 5], made[10, 9] = (
        float("nan"),
        float("inf"),
        -float("inf"),
        float("nan"),
    )
    return made.to(dtype).view(-1)


def packed(form: Blocks, values: Tensor, into: Tensor | None = None) -> Tensor:
    target = torch.zeros(form.units(values.numel()), dtype=torch.uint8) if into is None else into
    form.pack(values, target).run()
    return target


def same(one: Tensor, other: Tensor) -> bool:
    """To the bit, but that NaN is NaN."""
    bits = {4: torch.int32, 2: torch.int16}[one.element_size()]
    return bool(((one.view(bits) == other.view(bits)) | (one.isnan() & other.isnan())).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_torch_s_operations(
    kind: Format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, form = blocks(dtype), Blocks(kind)
    codes = packed(form, values)
    found = {adds: torch.ones_like(values) for adds in (False, True)}
    for adds, into in found.items():
        form.unpack(codes, into, adds=adds).run()
    monkeypatch.setattr(packing, "KERNELS_ON", {"cpu"})
    packing._kernels_for.cache_clear()
    assert packing._kernels_for("cpu", dtype) is not None
    assert torch.equal(packed(form, values), codes)
    for adds, expected in found.items():
        into = torch.ones_like(values)
        form.unpack(codes, into, adds=adds).run()
        assert same(into, expected)
    assert found[False].isnan().sum() == 4


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_memory_of_the_values(kind: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    form, values = Blocks(kind), blocks(torch.float32)
    codes, expected = packed(form, values), torch.empty_like(values)
    form.unpack(codes, expected).run()
    monkeypatch.setattr(packing, "KERNELS_ON", {"cpu"})
    packing._kernels_for.cache_clear()
    for ends in (form.front, form.back):
        buffer = values.clone()
        assert torch.equal(packed(form, buffer, ends(buffer)), codes)
        form.unpack(ends(buffer), buffer).run()
        assert same(buffer, expected)


def test_every_code_of_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "KERNELS_ON", {"cpu"})
    packing._kernels_for.cache_clear()
    codes = torch.zeros(2, BLOCK_BYTES, dtype=torch.uint8)
    codes[:, :BLOCK] = torch.arange(256).view(2, BLOCK).to(torch.uint8)
    codes[:, BLOCK:].view(torch.float32).fill_(1.0)
    values, form = torch.empty(2 * BLOCK), Blocks("fp8")
    form.unpack(codes.view(-1), values).run()
    expected = codes[:, :BLOCK].reshape(-1).view(torch.float8_e4m3fn).float()
    assert same(values, expected)
    # And every value between two of them, and those in the middle, goes to the nearest, of two the even one.
    known = expected[expected.isfinite()].sort().values
    between = (known[:-1] + known[1:]) / 2
    near = torch.cat([known, between, between * (1 + 1e-6), between * (1 - 1e-6)])
    near = torch.cat([near, near.new_zeros(-len(near) % (BLOCK - 1))]).view(-1, BLOCK - 1)
    whole = torch.cat([near, near.new_full((len(near), 1), 448.0)], dim=1)  # so that the scale is 1
    made = packed(form, whole.reshape(-1)).view(-1, BLOCK_BYTES)
    assert torch.equal(made[:, BLOCK:].view(torch.float32), torch.ones(len(whole), 1))
    assert torch.equal(made[:, :BLOCK], whole.to(torch.float8_e4m3fn).view(torch.uint8))


def test_rounding_at_random_follows_the_tile_and_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "KERNELS_ON", {"cpu"})
    packing._kernels_for.cache_clear()
    torch.manual_seed(0)
    values, form = torch.randn(90 * BLOCK), Blocks("int8", dithered=True)
    codes = packed(form, values).view(-1, BLOCK_BYTES)
    assert torch.equal(packed(form, values).view(-1, BLOCK_BYTES), codes)
    of_block = values.view(-1, BLOCK)
    most = of_block.abs().amax(1, keepdim=True)
    tile = packing._tile(values.device)
    bits = (most.view(torch.int32).long() + torch.arange(90)[:, None] * 7919) & 0x7FFFFFFF
    first = (bits * 2654435761 >> 7) % TILE
    drawn = tile[first + torch.arange(BLOCK)]
    expected = (of_block / (most / 127) + drawn).floor().clamp(-127, 127).to(torch.int8)
    assert torch.equal(codes[:, :BLOCK].view(torch.int8), expected)
    assert len(first.unique()) > 80


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_measured(kind: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    values = torch.randn(40 * BLOCK)
    shares = []
    for on in ({"cuda"}, {"cpu"}):
        monkeypatch.setattr(packing, "KERNELS_ON", on)
        packing._kernels_for.cache_clear()
        errors = Errors()
        packed(Blocks(kind, tier=1, errors=errors), values)
        shares.append(float(errors.taken()[1]))
    assert shares[1] == pytest.approx(shares[0], rel=1e-4)


def test_torch_s_operations_where_there_is_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "KERNELS_ON", {"cpu"})
    monkeypatch.setattr(packing, "find_spec", lambda name: None)
    packing._kernels_for.cache_clear()
    assert packing._kernels_for("cpu", torch.float32) is None


def test_torch_s_operations_where_kernels_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from hzplan.runtime.backends import kernels

    def fails(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(packing, "KERNELS_ON", {"cpu"})
    monkeypatch.setattr(kernels, "pack", fails)
    packing._kernels_for.cache_clear()
    with pytest.warns(UserWarning, match="slowly: RuntimeError: Failed to find C compiler"):
        assert packing._kernels_for("cpu", torch.float32) is None


def test_they_compile_for_gpus() -> None:
    """Which needs none; the interpreter takes more than the compiler does."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.compile_kernels"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 3 * 2 * 2 * 4
