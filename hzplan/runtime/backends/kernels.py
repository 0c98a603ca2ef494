"""Rounding to blocks on a GPU, in Triton: what ``packing`` does in some twenty operations, in one pass.

A program of a kernel takes ``ROWS`` blocks of 128 values. It reads all of them before it writes, but programs
run in any order: what is read may not lie where others write. fp8 is made of integers, for not every GPU
turns float32 into it. Adding 1.5 × 2²³ (12582912) to a small float32 and taking it away again leaves the
nearest whole number, of two the even one.

Checked against ``packing`` in Triton's interpreter (``tests/unit/test_kernels.py``). NOT RUN ON A GPU YET.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from hzplan.core.wire import BLOCK, BLOCK_BYTES, TINY, TOPS

ROWS = 16
"""Blocks of one program: 2048 values, 16 for each of 128 threads."""
WARPS = 4


@triton.jit
def _to_fp8(value):
    """The code of e4m3 [int32] nearest to a float32 of at most 448, of two the even one."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # exponents begin at 120 of float32's
    small = ((tl.abs(value) * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    code = tl.where(tl.abs(value) < 0.015625, small, normal)
    return tl.where(bits < 0, code | 128, code)


@triton.jit
def _of_fp8(code):
    """The float32 of a code of e4m3 [int32]."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    size = tl.where((code & 127) == 127, float("nan"), size)
    signed = size.to(tl.int32, bitcast=True) | ((code & 128) << 24)  # 0 − 0 would lose a zero's sign
    return signed.to(tl.float32, bitcast=True)


@triton.jit
def _pack(
    values,
    codes,
    scales,
    tile,
    squares,
    count,
    first,
    top: tl.constexpr,
    whole: tl.constexpr,
    dithered: tl.constexpr,
    measured: tl.constexpr,
    rows: tl.constexpr,
    tile_numbers: tl.constexpr,
    tiny: tl.constexpr,
):
    """``count`` blocks; ``first``: how many of the message were packed before."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, 128)
    here = (row < count)[:, None]
    place = row[:, None] * 128 + column[None, :]
    wide = tl.load(values + place, mask=here, other=0.0).to(tl.float32)
    bad = (tl.abs(wide) < float("inf")) == 0  # NaN is not less either
    wide = tl.where(bad, 0.0, wide)
    most = tl.max(tl.abs(wide), axis=1)
    empty = most < tiny
    scale = tl.where(empty, 0.0, tl.div_rn(most, tl.full([rows], top, tl.float32)))
    scaled = tl.div_rn(wide, tl.where(empty, 1.0, scale)[:, None] + tl.zeros([rows, 128], tl.float32))
    scaled = tl.minimum(tl.maximum(scaled, -top), top)
    if whole:
        scaled = tl.where(empty[:, None], 0.0, scaled)
        if dithered:
            mixed = (most.to(tl.int32, bitcast=True).to(tl.int64) + (first + row) * 7919) & 0x7FFFFFFF
            begin = ((mixed * 2654435761) >> 7) % tile_numbers
            scaled = tl.floor(scaled + tl.load(tile + begin[:, None] + column[None, :]))
            scaled = tl.minimum(tl.maximum(scaled, -top), top)
        else:
            scaled = (scaled + 12582912.0) - 12582912.0
        code = scaled.to(tl.int32)
        absent = (wide.to(tl.int32, bitcast=True) < 0) & empty[:, None]
        sent = tl.where(bad, -128, tl.where(absent, -1, code)) & 255
        has_bad = tl.max(bad.to(tl.int32), axis=1) > 0
        sign = tl.where(has_bad, -1.0, 1.0)
    else:
        code = _to_fp8(scaled)
        sent = tl.where(bad, 127, code)
        sign = tl.full([rows], 1.0, tl.float32)
    if measured:
        read = code.to(tl.float32) if whole else _of_fp8(code)
        error = read * scale[:, None] - wide
        tl.store(squares + tl.program_id(0) * 2, tl.sum(tl.sum(error * error, axis=1), axis=0))
        tl.store(squares + tl.program_id(0) * 2 + 1, tl.sum(tl.sum(wide * wide, axis=1), axis=0))
    tl.store(codes + row[:, None] * 132 + column[None, :], sent.to(tl.uint8), mask=here)
    tl.store(scales + row * 33 + 32, scale * sign, mask=row < count)


@triton.jit
def _unpack(
    values,
    codes,
    scales,
    count,
    whole: tl.constexpr,
    adds: tl.constexpr,
    rows: tl.constexpr,
):
    """``count`` blocks, written or added to values."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, 128)
    here = (row < count)[:, None]
    place = row[:, None] * 128 + column[None, :]
    code = tl.load(codes + row[:, None] * 132 + column[None, :], mask=here, other=0).to(tl.int32)
    scale = tl.load(scales + row * 33 + 32, mask=row < count, other=0.0)
    if whole:
        code = tl.where(code > 127, code - 256, code)
        wide = code.to(tl.float32) * tl.abs(scale)[:, None]
        wide = tl.where(code == -128, float("nan"), wide)
    else:
        wide = _of_fp8(code) * scale[:, None]
    if adds:
        wide += tl.load(values + place, mask=here, other=0.0).to(tl.float32)
    if values.dtype.element_ty == tl.bfloat16:  # by hand, for the interpreter would cut off
        bits = wide.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        near = tl.where(wide == wide, near, 0x7FC0)
        tl.store(values + place, near.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=here)
    else:
        tl.store(values + place, wide, mask=here)


def pack(
    kind: str,
    values: Tensor,
    packed: Tensor,
    tile: Tensor,
    first: int,
    *,
    dithered: bool = False,
    measured: bool = False,
) -> Tensor | None:
    """Round ``values`` [blocks × 128] to ``packed`` [blocks × 132 bytes], which lie elsewhere. ``tile``: as
    many numbers between 0 and 1 as rounding at random takes in turn, and 128 more; ``first``: how many blocks
    of the message were packed before. ``measured``: return the share that the error has of the values' norm.
    """
    count = packed.numel() // BLOCK_BYTES
    programs = triton.cdiv(count, ROWS)
    squares = values.new_empty(programs, 2, dtype=torch.float32) if measured else tile
    with _on(values):
        _pack[(programs,)](
            values,
            packed,
            packed.view(torch.float32),
            tile,
            squares,
            count,
            first,
            top=TOPS[kind],
            whole=kind == "int8",
            dithered=dithered,
            measured=measured,
            rows=ROWS,
            tile_numbers=tile.numel() - BLOCK,
            tiny=TINY,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    if not measured:
        return None
    error, original = squares.sum(dim=0).sqrt_()
    share: Tensor = error / original.clamp_(min=TINY)
    return share


def unpack(kind: str, packed: Tensor, values: Tensor, *, adds: bool) -> None:
    """The inverse, written or added to ``values``, which lie elsewhere."""
    count = packed.numel() // BLOCK_BYTES
    with _on(values):
        _unpack[(triton.cdiv(count, ROWS),)](
            values,
            packed,
            packed.view(torch.float32),
            count,
            whole=kind == "int8",
            adds=adds,
            rows=ROWS,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


def _on(values: Tensor) -> AbstractContextManager[object]:
    """Kernels go to the device that is current, not to that of what they are given."""
    return torch.cuda.device(values.device) if values.is_cuda else nullcontext()
