"""What of its slices a rank sends in which round, and how ranks with the same slices share the work: each
sends a piece, and all gather what the others have received.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hzplan.core.hierarchy import Stage
from hzplan.core.relaxed import Policy, part_bounds, parts_of_units
from hzplan.runtime.backends.base import Buffers, Group
from hzplan.runtime.bucket import Bucket
from hzplan.runtime.world import World


@dataclass(frozen=True)
class Place:
    """What of a bucket's slice a part is about. ``pieces``: elements [low, high) by the rank that sends them,
    of those with the same slice; this one is the ``own``-th, and its piece lies from ``start`` on in what the
    part sends."""

    bucket: Bucket
    pieces: tuple[tuple[int, int], ...]
    own: int
    start: int

    @property
    def level(self) -> int:
        """That of the slice."""
        return self.bucket.layout.levels.optim

    @property
    def end(self) -> int:
        """Where the piece of this rank ends in what the part sends."""
        low, high = self.pieces[self.own]
        return self.start + high - low

    def of(self, flat: Tensor) -> Tensor:
        """This rank's piece in a part's values."""
        return flat[self.start : self.end]


Means = dict[int, list[tuple[int, int, Tensor]]]
"""By bucket (its id) the pieces of its slice, [low, high), with values."""


def places_of(policy: Policy, units: Mapping[str, Sequence[Bucket]], rank: int) -> list[list[Place]]:
    """By part what it takes of every bucket's slice, of *periodic* whole units, else a share of each, and
    what of that each of the ranks with this slice sends. Places at one level stand together."""
    parts = policy.timetable.parts
    sizes = {unit: sum(b.layout.numel for b in buckets) for unit, buckets in units.items() if buckets}
    part_of = parts_of_units(sizes, parts) if policy.rule == "periodic" else {}

    listed = [(unit, bucket) for unit, buckets in units.items() for bucket in buckets]
    listed.sort(key=lambda one: one[1].layout.levels.optim)

    def pieces(part: int, bucket: Bucket, size: int) -> Iterator[tuple[int, int]]:
        length = bucket.master.numel()
        share = -(-length // size)
        for index in range(size):
            first, end = min(index * share, length), min((index + 1) * share, length)
            if policy.rule == "periodic":
                yield first, end
            else:
                low, high = part_bounds(end - first, part, parts)
                yield first + low, first + high

    found = []
    for part in range(parts):
        start, places = 0, []
        for unit, bucket in listed:
            if part_of.get(unit, part) == part:
                members = bucket.mesh.group(rank, Stage(bucket.layout.levels.optim, bucket.mesh.levels))
                of_each = tuple(pieces(part, bucket, len(members)))
                places.append(Place(bucket, of_each, members.index(rank), start))
                start = places[-1].end
        found.append(places)
    return found


def replicas_of(parts: Sequence[Sequence[Place]], control: World) -> dict[int, Group]:
    """By level of their slices the ranks that have the same ones, this one among them; none where it is
    alone."""
    found: dict[int, Group] = {}
    for level, place in sorted(
        {place.level: place for places in parts for place in places}.items(), key=lambda one: one[0]
    ):
        mesh, stage = place.bucket.mesh, Stage(level, place.bucket.mesh.levels)
        if len(place.pieces) > 1:
            found[level] = control.new_group(mesh, "relaxed", stage, torch.device("cpu"))
    return found


def everywhere(places: Sequence[Place], flat: Tensor, replicas: Mapping[int, Group]) -> Means:
    """What all ranks with the same slices have of a part's values, where each has its pieces: they all call
    it, in the same order. ``replicas``: as ``replicas_of`` has them."""
    found: Means = {}
    for level, listed in itertools.groupby(places, lambda place: place.level):
        together = [*listed]
        own = flat[together[0].start : together[-1].end]
        group = replicas.get(level)
        by_rank = zip(*(place.pieces for place in together), strict=True)
        lengths = [sum(high - low for low, high in pieces) for pieces in by_rank]
        most, whole = max(lengths), own.view(1, -1)
        if group is not None:
            whole = own.new_zeros(group.size, most)
            whole[group.place, : len(own)] = own
            if most:
                group.all_gather([Buffers(whole.view(-1), whole[group.place])]).run()
        starts = [0] * len(lengths)
        for place in together:
            of_bucket = found[id(place.bucket)] = []
            for index, (low, high) in enumerate(place.pieces):
                start, starts[index] = starts[index], starts[index] + high - low
                of_bucket.append((low, high, whole[index, start : starts[index]]))
    return found
