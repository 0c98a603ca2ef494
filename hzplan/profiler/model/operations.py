"""Operations of a forward and backward as data: what a device's seconds depend on, without any rate.

One pass in shapes records them once; ``profiler.model.kernels`` gives them seconds, for as many devices or
settings as are asked for.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

LOOK_UPS = ("embedding", "index", "index_select", "gather", "nll_loss_forward")
"""Operations that read as much as they write, however large the tensor that they read from."""


class Product(NamedTuple):
    """``batch`` matrix products [m, k] × [k, n]; ``nbytes``: of operands and result together."""

    batch: int
    m: int
    n: int
    k: int
    nbytes: int

    @property
    def flops(self) -> int:
        """A multiply-add counts two."""
        return 2 * self.batch * self.m * self.n * self.k


class Attention(NamedTuple):
    """A fused attention kernel over ``sequences`` heads of ``queries`` × ``keys`` positions, ``width`` wide.

    ``passes``: matrix products of that shape that it counts as (2 forward, 4 backward; what a backward kernel
    computes again is not counted). ``nbytes``: of its tensors together.
    """

    sequences: int
    queries: int
    keys: int
    width: int
    causal: bool
    passes: int
    nbytes: int

    @property
    def flops(self) -> int:
        """Over every pair of positions."""
        return 2 * self.passes * self.sequences * self.queries * self.keys * self.width


class Stream(NamedTuple):
    """An operation that only moves ``nbytes`` through memory: elementwise, norms, sums, copies."""

    nbytes: int


Operation = Product | Attention | Stream
Operations = Mapping[Operation, int]
"""Operations of one use, each with the number of times that it runs."""


class Operated(NamedTuple):
    """The operations of one use: as they run one by one (``eager``), and as a compiler fuses what only moves
    bytes between products (``fused``)."""

    eager: Operations
    fused: Operations


NONE = Operated({}, {})


def bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's values; expanded ones are read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


class Recorder:
    """Collects the operations of one use after another."""

    def __init__(self) -> None:
        self._eager: Counter[Operation] = Counter()
        self._fused: Counter[Operation] = Counter()
        self._read: dict[int, int] = {}
        self._made: dict[int, tuple[weakref.ref[Any], int]] = {}

    def take(self) -> Operated:
        """The operations since the last call of this."""
        self._end_run()
        found = Operated(dict(self._eager), dict(self._fused))
        self._eager, self._fused = Counter(), Counter()
        return found

    def move(self, nbytes: int) -> None:
        """A pass over memory that no compiler fuses, such as a copy of a gradient."""
        self._both(Stream(nbytes))

    def add(
        self, func: Any, args: Sequence[Any], read: list[Tensor], written: list[Tensor], flops: int
    ) -> None:
        """An operation that torch dispatched; ``flops``: as torch's counter counts them."""
        name = str(func.overloadpacket).rpartition(".")[2]
        if name in LOOK_UPS:
            self._both(Stream(2 * sum(map(bytes_of, written))))
            return
        nbytes = sum(map(bytes_of, written)) + sum(map(bytes_of, read))
        if not flops:
            self._eager[Stream(nbytes)] += 1
            self._extend_run(read, written)
        elif "scaled_dot_product" in name:
            self._both(_attention(func, args, nbytes))
        else:
            self._both(_product(name, args, nbytes, flops))

    def _both(self, operation: Operation) -> None:
        self._end_run()
        self._eager[operation] += 1
        self._fused[operation] += 1

    def _extend_run(self, read: list[Tensor], written: list[Tensor]) -> None:
        for tensor in read:
            storage = tensor.untyped_storage()
            known = self._made.get(id(storage))
            if known is None or known[0]() is not storage:
                self._read[id(storage)] = max(self._read.get(id(storage), 0), bytes_of(tensor))
        for tensor in written:
            storage = tensor.untyped_storage()
            self._made[id(storage)] = weakref.ref(storage), bytes_of(tensor)

    def _end_run(self) -> None:
        """One fused kernel reads what the run took from outside, and writes what of its results is still
        there: kept for backward, or taken by the next product."""
        if self._read or self._made:
            kept = sum(nbytes for storage, nbytes in self._made.values() if storage() is not None)
            self._fused[Stream(sum(self._read.values()) + kept)] += 1
            self._read.clear()
            self._made.clear()


def _product(name: str, args: Sequence[Any], nbytes: int, flops: int) -> Product:
    """A product by its operands' shapes; of an unknown operation one as square as its FLOPs allow."""
    shapes = [tuple(arg.shape) for arg in args if isinstance(arg, Tensor)]
    if name in ("mm", "addmm") and len(shapes) >= 2:
        first, second = shapes[-2:]
        return Product(1, first[0], second[1], first[1], nbytes)
    if name in ("bmm", "baddbmm") and len(shapes) >= 2:
        first, second = shapes[-2:]
        return Product(first[0], first[1], second[2], first[2], nbytes)
    if name == "_grouped_mm" and len(shapes) >= 2:
        first, second = shapes[:2]
        groups = second[0] if len(second) == 3 else 1
        rows = max(1, first[-2] // groups)
        return Product(
            max(1, flops // (2 * rows * first[-1] * second[-1])), rows, second[-1], first[-1], nbytes
        )
    side = max(1, round((flops / 2) ** (1 / 3)))
    return Product(1, side, side, max(1, flops // (2 * side * side)), nbytes)


def _attention(func: Any, args: Sequence[Any], nbytes: int) -> Attention:
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False))
    query, key = given["query"].shape, given["key"].shape
    backward = "backward" in str(func)
    causal = bool(given.get("is_causal", False))
    return Attention(query[0] * query[1], query[2], key[2], query[3], causal, 4 if backward else 2, nbytes)
