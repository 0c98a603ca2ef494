"""Bringing the matrices of a group of units together, to whoever computes their updates, and those back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hzplan.core.layout import ALIGNMENT_BYTES
from hzplan.core.matrices import EXCHANGED, Placed, hosts, newton_schulz_flops, route
from hzplan.core.schedule import Kind
from hzplan.core.stages import GROUP_OF
from hzplan.errors import UserError
from hzplan.runtime.backends.base import Buffers, Collectives, Groups, Split
from hzplan.runtime.bucket import Bucket
from hzplan.runtime.muon import orthogonalized
from hzplan.runtime.updates import Updates


class _Way(Protocol):
    """How matrices come together."""

    nbytes: int

    def bind(self, buffer: Tensor, updates: Updates) -> None:
        """Work in ``buffer`` [nbytes, uint8]."""

    def collectives(self, kind: Kind, tier: int) -> Collectives | None:
        """What to do in a task."""

    def orthogonalize(self, updates: Updates) -> None:
        """Compute what this rank computes."""


class MatrixExchange:
    """One rank's part in the tasks of a group of units whose matrices are brought together at once."""

    def __init__(self, buckets: Sequence[Bucket], updates: Updates, groups: Groups) -> None:
        """``buckets``: those of the units; ``groups``: this rank's."""
        self._updates = updates
        self.buckets = [bucket for bucket in buckets if bucket.assembles]
        exchanged: dict[tuple[int, torch.dtype], list[Bucket]] = {}
        self._ways: list[_Way] = []
        for bucket in self.buckets:
            dtypes = {_dtype(updates.options_of(parameter)) for parameter in bucket.parameters}
            if len(dtypes) > 1:
                raise UserError("ns_dtype differs between groups of matrices that travel together; give one")
            [dtype] = dtypes
            if bucket.layout.levels.matrix == EXCHANGED:
                exchanged.setdefault((bucket.layout.levels.optim, dtype), []).append(bucket)
            else:
                self._ways.append(_Repeated(bucket, dtype, groups))
        self._ways += [_Exchanged(some, level, dtype, groups) for (level, dtype), some in exchanged.items()]
        self._known: dict[tuple[Kind, int], list[Collectives]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer to work in."""
        return sum(_aligned(way.nbytes) for way in self._ways)

    def bind(self, buffer: Tensor) -> None:
        """Work in ``buffer`` [nbytes, uint8], which others have between this group's first and last task."""
        start = 0
        for way in self._ways:
            way.bind(buffer[start : start + way.nbytes], self._updates)
            start += _aligned(way.nbytes)

    def sent_bytes(self, kind: Kind, tier: int) -> int:
        """Bytes of a task's buffers: of an exchange all that this rank sends, of a gather the coarser
        slice."""
        return sum(
            bucket.layout.numel
            * _dtype(self._updates.options_of(bucket.parameters[0])).itemsize
            // bucket.mesh.shards[one.stage.high if one.operation == "all_to_all" else one.stage.low]
            for bucket in self.buckets
            for one in bucket.collectives(kind, tier)
        )

    def run(self, kind: Kind, tier: int, tag: int) -> None:
        """Do a task's work."""
        if kind is Kind.ORTHOGONALIZE:
            for way in self._ways:
                way.orthogonalize(self._updates)
            return
        if (prepared := self._known.get((kind, tier))) is None:
            found = [way.collectives(kind, tier) for way in self._ways]
            prepared = self._known[kind, tier] = [one for one in found if one is not None]
        for one in prepared:  # in one order on every rank; of one tag, so one after the other
            one.begin(tag)
            one.end()


class _Repeated:
    """A bucket whose matrices every rank gathers, in the dtype that they are computed in."""

    def __init__(self, bucket: Bucket, dtype: torch.dtype, groups: Groups) -> None:
        self._bucket, self._dtype, self._groups = bucket, dtype, groups
        self.nbytes = bucket.layout.numel * dtype.itemsize

    def bind(self, buffer: Tensor, updates: Updates) -> None:
        self._whole = buffer.view(self._dtype)
        for piece in updates.pieces_in(self._bucket):
            updates.exchange(piece, [(0, self._whole[piece.low : piece.high])])

    def collectives(self, kind: Kind, tier: int) -> Collectives | None:
        for _, stage in self._bucket.collectives(kind, tier):
            coarse, fine = (self._bucket.within(self._whole, 0, level) for level in stage)
            return self._groups[GROUP_OF[kind], stage].all_gather([Buffers(coarse, fine)])
        return None

    def orthogonalize(self, updates: Updates) -> None:
        for matrix in self._bucket.layout.matrices(0):
            one = self._whole[matrix.offset : matrix.offset + matrix.numel].view(matrix.rows, matrix.columns)
            one.copy_(orthogonalized(one, updates.options_of(self._bucket.parameters[matrix.tensor])))


class _Exchanged:
    """Buckets of one level whose matrices go to a rank of the level's group each."""

    def __init__(self, buckets: Sequence[Bucket], level: int, dtype: torch.dtype, groups: Groups) -> None:
        mesh, rank = buckets[0].mesh, buckets[0].rank
        self._buckets, self._dtype, self._groups = buckets, dtype, groups
        self._matrices = [one for index, of in enumerate(buckets) for one in of.layout.matrices(index)]
        slices = mesh.shards[level]
        host = hosts([newton_schulz_flops(one.rows, one.columns) for one in self._matrices], slices)
        self._route = route(self._matrices, host, mesh.slice_index(rank, level), slices)
        self._arriving = _aligned(sum(self._route.sent) * dtype.itemsize)
        self.nbytes = self._arriving + sum(self._route.received) * dtype.itemsize

    def bind(self, buffer: Tensor, updates: Updates) -> None:
        many = sum(self._route.sent) * self._dtype.itemsize
        self._leaves = buffer[:many].view(self._dtype)
        self._arrives = buffer[self._arriving :].view(self._dtype)
        for index, bucket in enumerate(self._buckets):
            for piece in updates.pieces_in(bucket):
                places = [
                    (part.low - piece.low, self._leaves[part.start : part.end])
                    for part in self._route.own
                    if (of := self._matrices[part.matrix]).bucket == index and of.tensor == piece.index
                ]
                updates.exchange(piece, places)

    def collectives(self, kind: Kind, tier: int) -> Collectives | None:
        stages = [one.stage for one in self._buckets[0].collectives(kind, tier)]
        if not stages:
            return None
        here, there = Split(self._leaves, self._route.sent), Split(self._arrives, self._route.received)
        group = self._groups[GROUP_OF[kind], stages[0]]
        return group.all_to_all(here, there) if kind is Kind.ASSEMBLE else group.all_to_all(there, here)

    def orthogonalize(self, updates: Updates) -> None:
        parts: dict[int, list[Tensor]] = {}
        for part in self._route.hosted:
            parts.setdefault(part.matrix, []).append(self._arrives[part.start : part.end])
        for number, of in parts.items():
            matrix = self._matrices[number]
            found = orthogonalized(_whole(of, matrix), self._options(matrix, updates)).reshape(-1)
            for arrived, values in zip(of, found.split([one.numel() for one in of]), strict=True):
                arrived.copy_(values)

    def _options(self, matrix: Placed, updates: Updates) -> Mapping[str, Any]:
        return updates.options_of(self._buckets[matrix.bucket].parameters[matrix.tensor])


def _whole(parts: Sequence[Tensor], matrix: Placed) -> Tensor:
    flat = parts[0] if len(parts) == 1 else torch.cat([*parts])
    return flat.view(matrix.rows, matrix.columns)


def _dtype(options: Mapping[str, Any]) -> torch.dtype:
    found: torch.dtype = getattr(torch, options["ns_dtype"])
    return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
