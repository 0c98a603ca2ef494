"""Whether ranks that should hold the same values do: a checksum of every bucket, compared."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from hzplan.runtime.bucket import Bucket
from hzplan.runtime.engine import Engine

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def diverged(engine: Engine) -> list[str]:
    """The units whose replicas differ, with the ranks that are not like the most, a line each.

    Looks at parameters and master weights, once through memory. Every rank calls it, between steps, and gets
    the same answer.
    """
    engine.synchronize()
    buckets = [(unit.name, bucket) for unit in engine.units.values() for bucket in unit.buckets]
    checksums = torch.zeros(engine.world.size, 2 * len(buckets), dtype=torch.int64)
    for index, (_, bucket) in enumerate(buckets):
        checksums[engine.world.rank, 2 * index] = checksum(bucket.param)
        checksums[engine.world.rank, 2 * index + 1] = checksum(bucket.master)
    everyone = checksums.to(engine.device)
    engine.all_reduce(everyone, "comparing replicas")
    found: dict[str, set[int]] = defaultdict(set)
    for index, (unit, bucket) in enumerate(buckets):
        sums = everyone[:, 2 * index : 2 * index + 2].tolist()
        found[unit] |= _odd_ones(bucket, [row[0] for row in sums], bucket.layout.levels.param)
        found[unit] |= _odd_ones(bucket, [row[1] for row in sums], bucket.layout.levels.optim)
    return [
        f"unit {unit}: rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))} have other values "
        "than their replicas"
        for unit, ranks in found.items()
        if ranks
    ]


def checksum(values: Tensor) -> int:
    """The sum of the values' bits as integers: any one change shows."""
    if not values.numel():
        return 0
    return int(values.detach().contiguous().view(_BITS[values.element_size()]).sum(dtype=torch.int64))


def _odd_ones(bucket: Bucket, sums: list[int], level: int) -> set[int]:
    """Ranks whose sum is not that of most that hold the same slice; of a tie, the later ones."""
    by_slice: dict[int, list[int]] = defaultdict(list)
    for rank in range(len(sums)):
        by_slice[bucket.mesh.slice_index(rank, level)].append(rank)
    odd: set[int] = set()
    for ranks in by_slice.values():
        of_ranks = [sums[rank] for rank in ranks]
        usual = max(of_ranks, key=of_ranks.count)
        odd |= {rank for rank in ranks if sums[rank] != usual}
    return odd
