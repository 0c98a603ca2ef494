"""What parameters and gradients travel in: the formats of each tier, and which tensors keep their own. Pure.

A format with a scale per block holds ``BLOCK`` values in as many bytes and the scale, as float32, behind
them. Blocks begin where a rank's slice does, so no shard cuts one.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, get_args

Format = Literal["exact", "bf16", "int8", "fp8"]
"""``exact``: values as they are, gradients in the plan's ``reduce_dtype``. ``bf16``: rounded to 8 bits of
mantissa. ``int8``: whole multiples of a block's scale, of gradients rounded up or down at random, so that the
mean of many is right. ``fp8``: e4m3, 3 bits of mantissa, under a block's scale."""

FORMATS: tuple[Format, ...] = get_args(Format)

BLOCK = 128
"""Values that share a scale. The next slice of a large bucket begins at a multiple of it
(``layout.LARGE_SLICE_ELEMENTS``)."""

BLOCK_BYTES = BLOCK + 4
"""Bytes of a block on the wire."""

ROUNDOFF: Mapping[Format, float] = {"exact": 0.0, "bf16": 2.0**-9, "int8": 1 / 127, "fp8": 2.0**-4}
"""How much of a value rounding changes at most; of int8, whose values share a scale, how much of the largest
of a block."""

EXACT = "everything exact"
"""What is said where nothing is rounded."""

What = Literal["param", "grad"]

ADMITTED: Mapping[str, tuple[Format, ...]] = {"param": ("bf16", "int8", "fp8"), "grad": ("bf16", "int8")}
"""What may travel narrow, in which formats: fp8 has no rounding at random, which sums need."""

SAFE: Mapping[str, tuple[Format, ...]] = {"param": ("int8",), "grad": ("bf16", "int8")}
"""The formats that docs/convergence.md has evidence for."""

KEPT = ("*embed*", "*wte*", "*wpe*", "*router*", "*gate.weight")
"""Names of tensors that travel exactly unless asked otherwise: embeddings and routers. So does every tensor
with fewer than two dimensions: norms and biases, few bytes that much depends on."""


class Wire(NamedTuple):
    """Formats by tier, fastest first, and patterns of the names of tensors that keep their own."""

    param: tuple[Format, ...]
    grad: tuple[Format, ...]
    kept: tuple[str, ...] = KEPT

    @property
    def is_exact(self) -> bool:
        """Whether everything travels as it is."""
        return {*self.param, *self.grad} <= {"exact"}

    @property
    def text(self) -> str:
        """For people, in a few words: formats tier by tier, fastest first."""
        parts = [(what, of) for what, of in (("parameters", self.param), ("gradients", self.grad))]
        said = [f"{what} in {'|'.join(of)}" for what, of in parts if {*of} != {"exact"}]
        kept = "" if self.kept == KEPT else f" (exactly: {', '.join(self.kept) or 'none by name'})"
        return f"{', '.join(said)}{kept}" if said else EXACT

    @property
    def admitting(self) -> str:
        """What ``Admitted.parse`` reads to admit the same formats, on whichever tiers."""
        parts = (("param", self.param), ("grad", self.grad))
        return ",".join(
            f"{what}={form}" for what, of in parts for form in dict.fromkeys(of) if form != "exact"
        )

    def on_tiers(self, tiers: int) -> Wire | None:
        """The same on the first ``tiers`` tiers; None where nothing is rounded there."""
        found = Wire(self.param[:tiers], self.grad[:tiers], self.kept)
        return None if found.is_exact else found

    def narrows(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor travels in these formats."""
        return len(shape) > 1 and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.kept)

    def of(self, what: What, tier: int) -> Format:
        """The format on a tier."""
        return (self.param if what == "param" else self.grad)[tier]


def packed_bytes(form: Format, elements: int, item_bytes: int) -> int:
    """Bytes of so many values on the wire, of ``item_bytes`` each where they are exact."""
    if form == "exact":
        return elements * item_bytes
    return elements * 2 if form == "bf16" else elements // BLOCK * BLOCK_BYTES


def fits(form: Format, slice_elements: int, item_bytes: int) -> bool:
    """Whether slices of so many values, of ``item_bytes`` each, can travel in a format: it is narrower, and
    they are whole blocks."""
    if form in ("exact", "bf16"):
        return form == "bf16" and item_bytes > 2
    return slice_elements % BLOCK == 0 and item_bytes > 1


TOPS: dict[str, float] = {"int8": 127.0, "fp8": 448.0}
"""What the largest value of a block becomes, by format."""
TINY = 2.0**-100
"""A block of smaller values than this travels as zeros, for its scale would hardly be a normal number."""

CHUNK, CHUNK_ON_DEVICE = 256, 1 << 12
"""Blocks that are rounded at once: on a processor what is computed on the way fits its cache."""


class Admitted(NamedTuple):
    """The formats that a user lets a plan choose among, beside exact ones."""

    param: tuple[Format, ...] = ()
    grad: tuple[Format, ...] = ()
    kept: tuple[str, ...] = KEPT

    @classmethod
    def parse(cls, text: str, kept: Iterable[str] = KEPT) -> Admitted:
        """Read ``exact``, ``safe``, or formats by name, as in ``param=int8,grad=bf16,grad=int8``; ValueError
        of one line."""
        if text == "exact":
            return cls(kept=tuple(kept))
        if text == "safe":
            return cls(SAFE["param"], SAFE["grad"], tuple(kept))
        found: dict[str, list[Format]] = {"param": [], "grad": []}
        for part in text.split(","):
            what, _, form = part.strip().partition("=")
            named = next((one for one in FORMATS if one == form), None)
            if what not in ("param", "grad") or named is None:
                raise ValueError(
                    f"{part.strip() or text!r}: write exact, safe, or as in param=int8,grad=bf16"
                )
            if named != "exact" and named not in ADMITTED[what]:
                raise ValueError(f"{part}: {what} travels in {', '.join(ADMITTED[what])} or exactly")
            if named != "exact":
                found[what].append(named)
        return cls(tuple(found["param"]), tuple(found["grad"]), tuple(kept))
