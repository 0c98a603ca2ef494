"""The cost of matrices under a matrix optimizer: seconds of their updates, and bytes meanwhile. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from hzplan.core.hierarchy import Mesh
from hzplan.core.layout import ITEM_BYTES, BucketLayout
from hzplan.core.matrices import EXCHANGED, OWNED, Placed, hosts, newton_schulz_flops
from hzplan.cost.curves import interpolate
from hzplan.cost.unit import Hosted, UnitCost
from hzplan.formats.profile import MatrixEntry

ORTHOGONALIZED_BYTES = ITEM_BYTES["bfloat16"]
"""Bytes of an element of a matrix that travels to be orthogonalised, and while it is."""


class MatrixCosts:
    """A profile's costs of matrices, cached."""

    def __init__(self, entry: MatrixEntry) -> None:
        self.state_per_element = entry.state_per_element
        self._begin = [(point.elements, point.seconds) for point in entry.begin]
        self._finish = [(point.elements, point.seconds) for point in entry.finish]
        self._known = {(point.rows, point.columns): point.seconds for point in entry.products}

    def begin_ns(self, elements: int) -> int:
        """Nanoseconds of momentum."""
        return round(interpolate(self._begin, elements) * 1e9)

    def finish_ns(self, elements: int) -> int:
        """Nanoseconds of the step after orthogonalising."""
        return round(interpolate(self._finish, elements) * 1e9)

    def orthogonalize_ns(self, rows: int, columns: int) -> int:
        """Nanoseconds of Newton–Schulz on one matrix; of a shape that was not measured by the work of the one
        nearest to it."""
        if (rows, columns) not in self._known:
            work = newton_schulz_flops(rows, columns)
            near = min(self._known, key=lambda shape: abs(newton_schulz_flops(*shape) - work))
            self._known[rows, columns] = self._known[near] * work / newton_schulz_flops(*near)
        return round(self._known[rows, columns] * 1e9)

    def with_updates(self, cost: UnitCost, bucket: BucketLayout, mesh: Mesh) -> UnitCost:
        """A bucket's cost with that of its matrices' updates, without messages."""
        ranks = mesh.shards[bucket.levels.optim]
        elements = bucket.numel // ranks
        matrices = bucket.matrices(0)
        begin, finish = self.begin_ns(elements), self.finish_ns(elements)
        temporary = max(_temporary_bytes(one, bucket, elements) for one in matrices)
        if ranks == 1 or bucket.levels.matrix == OWNED:
            loads = [0] * ranks
            for one in matrices:
                loads[one.offset // elements] += self.orthogonalize_ns(one.rows, one.columns)
            return replace(cost, update_ns=begin + max(loads) + finish, update_temporary_bytes=temporary)
        found = replace(cost, update_ns=begin, apply_ns=finish, update_temporary_bytes=temporary)
        each = [(one.rows, one.columns, self.orthogonalize_ns(one.rows, one.columns)) for one in matrices]
        if bucket.levels.matrix == EXCHANGED:
            hosted = tuple(Hosted(ranks, *one) for one in each)
            return replace(found, hosted=hosted, matrix_bytes=elements * ORTHOGONALIZED_BYTES)
        whole = bucket.numel * ORTHOGONALIZED_BYTES
        return replace(found, repeated_ns=sum(ns for _, _, ns in each), matrix_bytes=whole)


def _temporary_bytes(matrix: Placed, bucket: BucketLayout, elements: int) -> int:
    """Bytes beside lasting ones while a matrix is updated: the update of its slice in the dtype of master
    weights, or three matrices, of which one is put together from parts, and two products of its short sides;
    of a stack that is updated at once the result, too.
    """
    item = ITEM_BYTES[bucket.master_dtype]
    tensor = bucket.tensors[matrix.tensor]
    own = min(tensor.numel, elements)
    computed = (3 * matrix.numel + 2 * min(matrix.rows, matrix.columns) ** 2) * ORTHOGONALIZED_BYTES
    if bucket.levels.matrix == OWNED or elements == bucket.numel:
        stack = tensor.numel * ORTHOGONALIZED_BYTES if tensor.numel > matrix.numel else 0
        return own * item + computed + stack
    return max(own * item, computed)


def orthogonalize_ns(units: Iterable[UnitCost]) -> int:
    """Nanoseconds until the last rank has computed the updates of a group of units' matrices."""
    listed = list(units)
    hosted = tuple(one for unit in listed for one in unit.hosted)
    return sum(unit.repeated_ns for unit in listed) + sum(max(loads) for loads, _ in _loads(hosted))


def buffer_bytes(units: Iterable[UnitCost]) -> int:
    """Bytes of the buffer in which a group of units' matrices come together, of the rank with most."""
    listed = list(units)
    hosted = tuple(one for unit in listed for one in unit.hosted)
    received = sum(max(elements) for _, elements in _loads(hosted)) * ORTHOGONALIZED_BYTES
    return received + sum(unit.matrix_bytes for unit in listed)


def least_buffer_bytes(unit: UnitCost) -> int:
    """Bytes of such a buffer that are sure to be a unit's: of what hosts receive each one's share."""
    received = sum(one.rows * one.columns / one.ranks for one in unit.hosted)
    return unit.matrix_bytes + int(received) * ORTHOGONALIZED_BYTES


@lru_cache(maxsize=4096)
def _loads(hosted: tuple[Hosted, ...]) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Nanoseconds and elements by host, for each number of ranks that share; ``core.matrices.hosts`` says who
    has which, as in the runtime."""
    found: list[tuple[Sequence[int], Sequence[int]]] = []
    for ranks in dict.fromkeys(one.ranks for one in hosted):
        some = [one for one in hosted if one.ranks == ranks]
        times, elements = [0] * ranks, [0] * ranks
        of = hosts([newton_schulz_flops(one.rows, one.columns) for one in some], ranks)
        for one, host in zip(some, of, strict=True):
            times[host] += one.ns
            elements[host] += one.rows * one.columns
        found.append((times, elements))
    return found
