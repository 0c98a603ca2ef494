"""What becomes of the activations that units keep for backward: which are computed again (activation
checkpointing), which lie in the host's memory meanwhile. Pure.

Each way keeps the results of some operations, and computes the others again from them: "elementwise" keeps
matrix products and attention; "operations" attention and every other product (torchtitan's selective
checkpointing by operation); "products" attention alone; "attention" products alone; "full" nothing but the
unit's inputs.
"chunks" is for a head alone: nothing is computed again, but the loss and its gradients are computed in chunks
of tokens, so that logits are never there as a whole.
"host" computes nothing again either: what the unit itself has made and keeps is copied to the host's memory
after its forward, and back before its backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Literal, get_args

HOST: Literal["host"] = "host"
PartialWay = Literal["host", "chunks", "elementwise", "operations", "attention", "products"]
Way = Literal["host", "chunks", "elementwise", "operations", "attention", "products", "full"]
PARTIAL_WAYS: tuple[PartialWay, ...] = get_args(PartialWay)
WAYS: tuple[Way, ...] = get_args(Way)
"""Of blocks, from the one that keeps most on."""


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "addmv", "mv", "convolution")
"""Names of torch's operations that count as matrix products."""

SAVES_NOTHING = ("add", "add_", "sub", "sub_", "neg", "clone", "_to_copy", "_unsafe_view")
"""Names of those, beside views, whose backward needs neither what they are given nor what they return."""


class Recomputed(Mapping[str, Way]):
    """By unit its way; who is not in it keeps everything. Does not change, and can be a key."""

    __slots__ = ("_key", "_ways")

    def __init__(self, ways: Mapping[str, Way] | Iterable[tuple[str, Way]] = ()) -> None:
        self._ways = dict(ways)
        self._key = frozenset(self._ways.items())

    @classmethod
    def of(cls, units: Iterable[str], way: Way = "full") -> Recomputed:
        """One way for all of them."""
        return cls(dict.fromkeys(units, way))

    def __getitem__(self, unit: str) -> Way:
        return self._ways[unit]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ways)

    def __len__(self) -> int:
        return len(self._ways)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recomputed) and self._key == other._key

    def __repr__(self) -> str:
        return f"Recomputed({dict(sorted(self._ways.items()))})"

    def with_(self, units: Iterable[str], way: Way | None) -> Recomputed:
        """The same with these units that way; None: they keep everything."""
        named = {*units}
        others = {unit: of for unit, of in self._ways.items() if unit not in named}
        return Recomputed(others if way is None else others | dict.fromkeys(named, way))

    def difference(self, other: Recomputed) -> Collection[str]:
        """The units that differ."""
        return {unit for unit, _ in self._key ^ other._key}


NOTHING = Recomputed()


def only(unit: str, way: Way | None) -> Recomputed:
    """One unit's way."""
    return NOTHING.with_([unit], way)
