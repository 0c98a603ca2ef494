"""Values in the form that they travel in, made where the values lie and read back there.

A form with blocks has for every 128 values as many bytes, and behind them the block's scale in float32. A
value that is not finite becomes a code of its own, which reads as NaN, and the block's other values stay what
they are. (Of int8 a scale with a minus says that there are such: whoever reads need not look at each.)

On a GPU ``kernels`` do it, where Triton is there, as it is beside torch's builds with CUDA; else torch's
operations, which are the reference.
"""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from hzplan.core.wire import BLOCK, BLOCK_BYTES, CHUNK, CHUNK_ON_DEVICE, TINY, TOPS, Format
from hzplan.errors import one_line
from hzplan.runtime.backends.convert import Conversion

TILE = 1 << 14
"""Numbers between 0 and 1 that rounding at random takes in turn."""
NEGATIVE_ZERO = -1
"""The code of int8 for −0.0 in such a block: it says that there was no gradient (``runtime.unit.ABSENT``)."""
NOT_FINITE = {"int8": -128, "fp8": 127}


class Step(Protocol):
    """Something prepared that is done again and again."""

    def run(self) -> None:
        """Do it."""


class Form(ABC):
    """A form that values travel in. ``dtype``: of what is sent."""

    dtype: torch.dtype

    @abstractmethod
    def units(self, values: int) -> int:
        """Elements of ``dtype`` that so many values become."""

    @abstractmethod
    def pack(self, values: Tensor, packed: Tensor) -> Step:
        """Prepare the way there; both contiguous and flat, perhaps in one storage."""

    @abstractmethod
    def unpack(self, packed: Tensor, values: Tensor, *, adds: bool = False) -> Step:
        """Prepare the way back. ``adds``: to ``values``, which lie elsewhere then."""

    @property
    def grain(self) -> int:
        """Parts of a buffer that travel by themselves have a multiple of so many values."""
        return 1

    def front(self, buffer: Tensor) -> Tensor:
        """The first bytes of a buffer, for its packed values."""
        return buffer.view(self.dtype)[: self.units(buffer.numel())]

    def back(self, buffer: Tensor) -> Tensor:
        """The last bytes of a buffer, for its packed values."""
        whole = buffer.view(self.dtype)
        return whole[whole.numel() - self.units(buffer.numel()) :]


@dataclass(frozen=True)
class Cast(Form):
    """Another dtype. ``sums``: where the back end's library adds up, it does so in this dtype."""

    dtype: torch.dtype
    sums: bool = False

    def units(self, values: int) -> int:
        """See Form."""
        return values

    def pack(self, values: Tensor, packed: Tensor) -> Step:
        """See Form."""
        return Conversion(values, packed)

    def unpack(self, packed: Tensor, values: Tensor, *, adds: bool = False) -> Step:
        """See Form."""
        return _Added(packed, values) if adds else Conversion(packed, values)


@dataclass(frozen=True)
class _Added(Step):
    what: Tensor
    to: Tensor

    def run(self) -> None:
        self.to.add_(self.what)


@dataclass
class Errors:
    """What rounding has cost since it was last asked: the largest share of a sample's norm that its error
    had, by tier and stream of work, for those of one stream come in order. Streams' threads note it while it
    is ``active``."""

    active: bool = True
    largest: dict[tuple[int, object], Tensor] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def see(self, tier: int, share: Tensor) -> None:
        """Note a message's."""
        stream = torch.cuda.current_stream(share.device) if share.is_cuda else None
        with self.lock:
            known = self.largest.get((tier, stream))
            self.largest[tier, stream] = share if known is None else torch.maximum(known, share)

    def taken(self) -> dict[int, Tensor]:
        """What there was since this was called last; on a device nothing may be under way."""
        with self.lock:
            noted, self.largest = self.largest, {}
        found: dict[int, Tensor] = {}
        for (tier, _), share in noted.items():
            found[tier] = torch.maximum(found[tier], share) if tier in found else share
        return found


@dataclass(frozen=True)
class Blocks(Form):
    """8 bits a value and a scale for every block. ``dithered``: rounded up or down at random, in proportion;
    ``errors`` of ``tier`` are noted, where given."""

    kind: Format
    dithered: bool = False
    tier: int = -1
    errors: Errors | None = field(default=None, compare=False)

    dtype: ClassVar[torch.dtype] = torch.uint8  # type: ignore[misc]

    @property
    def grain(self) -> int:
        """See Form."""
        return BLOCK

    def units(self, values: int) -> int:
        """See Form."""
        return values // BLOCK * BLOCK_BYTES

    def pack(self, values: Tensor, packed: Tensor) -> Step:
        """See Form."""
        if (kernels := _kernels_for(values.device.type, values.dtype)) is None:
            return _Pack(self, values, packed)
        source, target = values.view(-1, BLOCK), packed.view(-1, BLOCK_BYTES)
        pieces = _pieces(source, target, BLOCK * values.element_size(), BLOCK_BYTES, STAGED)
        return _KernelPack(self, pieces, kernels)

    def unpack(self, packed: Tensor, values: Tensor, *, adds: bool = False) -> Step:
        """See Form."""
        if (kernels := _kernels_for(values.device.type, values.dtype)) is None:
            return _Unpack(self, packed, values, adds)
        source, target = packed.view(-1, BLOCK_BYTES), values.view(-1, BLOCK)
        pieces = _pieces(source, target, BLOCK_BYTES, BLOCK * values.element_size(), STAGED)
        return _KernelUnpack(self, pieces, adds, kernels)


class _Room(NamedTuple):
    """Memory for what is computed on the way, of one stream of work."""

    values: Tensor  # [CHUNK, BLOCK]
    magnitudes: Tensor  # [CHUNK, BLOCK]
    tile: Tensor  # [TILE + CHUNK × BLOCK], everyone's


_rooms = threading.local()


@cache
def _tile(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(TILE + chunk(device) * BLOCK, generator=generator, dtype=torch.float32)
    return numbers.to(device)


def forget() -> None:
    """Let go of the memory in which this thread rounded values."""
    _rooms.__dict__.clear()
    _tile.cache_clear()


def _room(device: torch.device, dtype: torch.dtype) -> _Room:
    """The room of this thread, and on a GPU of its current stream."""
    known: dict[object, _Room] = _rooms.__dict__.setdefault("known", {})
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    key = device, dtype, stream
    if key not in known:
        values = torch.empty(chunk(device), BLOCK, dtype=dtype, device=device)
        known[key] = _Room(values, torch.empty_like(values), _tile(device))
    return known[key]


def chunk(device: torch.device) -> int:
    """Blocks at once on a device."""
    return CHUNK if device.type == "cpu" else CHUNK_ON_DEVICE


def _pieces(
    source: Tensor, target: Tensor, read: int, written: int, at_once: int
) -> list[tuple[Tensor, Tensor]]:
    """Chunks of records of ``read`` and ``written`` bytes, in the direction in which nothing is overwritten
    before it was read; ValueError where there is none."""
    count = len(source)
    starts = range(0, count, at_once)
    pairs = [(source[first : first + at_once], target[first : first + at_once]) for first in starts]
    shift = target.data_ptr() - source.data_ptr()
    ends = [min(first + at_once, count) for first in starts[:-1]]
    apart = shift >= count * read or -shift >= count * written
    if apart or all(shift + end * written <= end * read for end in ends):
        return pairs
    if all(shift + end * written >= end * read for end in ends):
        return pairs[::-1]
    raise ValueError("in either direction something would be overwritten before it was read")


STAGED = 2 * 4 * BLOCK * CHUNK_ON_DEVICE // BLOCK_BYTES // 16 * 16
"""Blocks that kernels take at once: as many as fit, packed, where torch's operations compute on the way; a
number after which memory is aligned as before."""


@cache
def _kernels_for(kind: str, dtype: torch.dtype) -> ModuleType | None:
    """Triton's, for values on a kind of device; None where torch's operations do it."""
    if kind not in KERNELS_ON or dtype not in (torch.float32, torch.bfloat16) or not find_spec("triton"):
        return None
    from hzplan.runtime.backends import kernels

    try:
        values = torch.zeros(BLOCK, dtype=dtype, device=kind)
        packed = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device=kind)
        kernels.pack("int8", values, packed, _tile(values.device)[: TILE + BLOCK], 0)
        kernels.unpack("int8", packed, values, adds=False)
    except Exception as error:  # Triton builds them here, with a compiler of C
        warnings.warn(f"values are rounded by torch's operations, slowly: {one_line(error)}", stacklevel=2)
        return None
    return kernels


KERNELS_ON = {"cuda"}
"""Kinds of devices; tests add processors, for Triton's interpreter."""


def _stage(device: torch.device, blocks: int) -> Tensor:
    """Memory for packed blocks, of this thread's stream: kernels may not read where they write."""
    known: dict[object, Tensor] = _rooms.__dict__.setdefault("stages", {})
    key = device, torch.cuda.current_stream(device) if device.type == "cuda" else None
    if key not in known:
        known[key] = torch.empty(STAGED * BLOCK_BYTES, dtype=torch.uint8, device=device)
    return known[key][: blocks * BLOCK_BYTES]


def _apart(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors share no memory."""
    first, second = one.data_ptr(), other.data_ptr()
    return first + one.nbytes <= second or second + other.nbytes <= first


@dataclass(frozen=True)
class _KernelPack(Step):
    form: Blocks
    pieces: list[tuple[Tensor, Tensor]]  # in order; of the whole message
    kernels: ModuleType

    @torch.no_grad()
    def run(self) -> None:
        errors, form = self.form.errors, self.form
        measures = errors is not None and errors.active
        first = 0
        for number, (values, packed) in enumerate(self.pieces):
            direct = _apart(values, packed)
            target = packed if direct else _stage(values.device, len(values)).view_as(packed)
            tile = _tile(values.device)[: TILE + BLOCK]
            share = self.kernels.pack(
                *(form.kind, values, target.view(-1), tile, first),
                dithered=form.dithered,
                measured=measures and number == 0,
            )
            if not direct:
                packed.copy_(target)
            if share is not None and errors is not None:
                errors.see(form.tier, share)
            first += len(values)


@dataclass(frozen=True)
class _KernelUnpack(Step):
    form: Blocks
    pieces: list[tuple[Tensor, Tensor]]
    adds: bool
    kernels: ModuleType

    @torch.no_grad()
    def run(self) -> None:
        for packed, values in self.pieces:
            source = packed
            if not _apart(packed, values):
                source = _stage(values.device, len(values)).view_as(packed).copy_(packed)
            self.kernels.unpack(self.form.kind, source.view(-1), values, adds=self.adds)


class _Pack(Step):
    def __init__(self, form: Blocks, values: Tensor, packed: Tensor) -> None:
        self._form = form
        source, target = values.view(-1, BLOCK), packed.view(-1, BLOCK_BYTES)
        self._dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
        self._pieces = [
            (of, into[:, :BLOCK], into[:, BLOCK:].view(torch.float32))
            for of, into in _pieces(
                *(source, target, BLOCK * values.element_size(), BLOCK_BYTES), chunk(values.device)
            )
        ]

    @torch.no_grad()
    def run(self) -> None:
        errors = self._form.errors
        measures = errors is not None and errors.active
        for number, (values, codes, scales) in enumerate(self._pieces):
            measured = measures and number == 0
            error = pack(self._form, values, codes, scales, self._dtype, measured=measured)
            if error is not None and errors is not None:
                errors.see(self._form.tier, error)


class _Unpack(Step):
    def __init__(self, form: Blocks, packed: Tensor, values: Tensor, adds: bool) -> None:
        self._form, self._adds = form, adds
        source, target = packed.view(-1, BLOCK_BYTES), values.view(-1, BLOCK)
        self._dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
        pieces = _pieces(source, target, BLOCK_BYTES, BLOCK * values.element_size(), chunk(values.device))
        self._pieces = [(of[:, :BLOCK], of[:, BLOCK:].view(torch.float32), into) for of, into in pieces]

    @torch.no_grad()
    def run(self) -> None:
        for codes, scales, values in self._pieces:
            unpack(self._form, codes, scales, values, self._dtype, adds=self._adds)


def pack(
    form: Blocks, values: Tensor, codes: Tensor, scales: Tensor, dtype: torch.dtype, *, measured: bool
) -> Tensor | None:
    """Round ``values`` [blocks, 128] to ``codes`` (bytes, alike) and ``scales`` [blocks, 1], which may lie in
    the memory of the values. ``measured``: also return the share of the values' norm that the error has."""
    room = _room(values.device, dtype)
    count = len(values)
    wide, other = room.values[:count], room.magnitudes[:count]
    wide.copy_(values)
    most = torch.amax(torch.abs(wide, out=other), dim=1, keepdim=True)
    known = torch.isfinite(most)
    bad = None
    if values.is_cuda or not bool(known.all()):
        bad = ~torch.isfinite(wide)
        wide.masked_fill_(bad, 0.0)
        most = torch.amax(torch.abs(wide, out=other), dim=1, keepdim=True)
    top = TOPS[form.kind]
    empty = most < TINY
    has_empty = values.is_cuda or bool(empty.any())
    scale = (most / most.new_tensor(top)).to(torch.float32)  # by a number a GPU would multiply instead
    original = wide.clone() if measured else None
    absent = None
    if has_empty:
        scale.masked_fill_(empty, 0.0)
        absent = torch.signbit(wide) & empty & (form.kind == "int8")
        wide.masked_fill_(empty & (form.kind == "int8"), 0.0).div_(scale.masked_fill(empty, 1.0))
    else:
        wide.div_(scale)
    wide.clamp_(-top, top)
    if form.kind == "int8":
        if form.dithered:
            wide.add_(_dither(room, most, count).view(count, BLOCK)).floor_().clamp_(-top, top)
        else:
            wide.round_()
        rounded = wide
        coded = codes.view(torch.int8)
    else:
        rounded = wide.to(torch.float8_e4m3fn)
        coded = codes.view(torch.float8_e4m3fn)
    share = None
    if original is not None:
        error = rounded.to(dtype).mul(scale).sub_(original)
        share = error.norm() / original.norm().clamp_(min=TINY)
    if bad is None and absent is None:
        scales.copy_(scale)
        coded.copy_(rounded)
        return share
    if bad is None:
        bad = torch.zeros_like(wide, dtype=torch.bool)
    scales.copy_(torch.where(bad.any(dim=1, keepdim=True) & (form.kind == "int8"), -scale, scale))  # −0.0 too
    coded.copy_(rounded)
    codes.view(torch.int8).masked_fill_(bad, NOT_FINITE[form.kind])
    if absent is not None:
        codes.view(torch.int8).masked_fill_(absent, NEGATIVE_ZERO)
    return share


def unpack(
    form: Blocks, codes: Tensor, scales: Tensor, values: Tensor, dtype: torch.dtype, *, adds: bool
) -> None:
    """The inverse, written or added to ``values``, which may lie over ``codes`` and ``scales`` unless
    added."""
    room = _room(values.device, dtype)
    wide = room.values[: len(values)]
    if form.kind == "fp8":
        torch.mul(codes.view(torch.float8_e4m3fn).to(dtype), scales, out=wide)
    elif not codes.is_cuda and not bool(scales.signbit().any()):
        torch.mul(codes.view(torch.int8), scales, out=wide)
    else:
        whole = codes.view(torch.int8)
        torch.mul(whole, scales.abs(), out=wide)
        wide.masked_fill_(whole == NOT_FINITE["int8"], float("nan"))
    values.add_(wide) if adds else values.copy_(wide)


def _dither(room: _Room, most: Tensor, count: int) -> Tensor:
    """Numbers between 0 and 1, from a place in the tile that the values themselves decide: where a run is
    resumed they are rounded as they would have been."""
    bits = most.to(torch.float32).view(torch.int32).sum()
    length = count * BLOCK
    if most.is_cuda:
        first = (bits * 2654435761 >> 7) % TILE
        return room.tile[torch.arange(length, device=most.device) + first]
    start = (int(bits) * 2654435761 >> 7) % TILE
    return room.tile[start : start + length]


def form_of(name: Format, *, dithered: bool = False, tier: int = -1, errors: Errors | None = None) -> Form:
    """The form of a format that is narrower than exact."""
    if name == "bf16":
        return Cast(torch.bfloat16)
    return Blocks(name, dithered and name == "int8", tier, errors)
