"""Whether ranks that should hold the same values do: a checksum of every bucket, compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from hzplan.runtime.engine import Engine

CHUNK_ELEMENTS = 1 << 22
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
    levels = [
        level for _, bucket in buckets for level in (bucket.layout.levels.param, bucket.layout.levels.optim)
    ]
    found: dict[str, set[int]] = {}
    for column, ranks in odd_ones(everyone.cpu(), [engine.mesh.shards[level] for level in levels]).items():
        found.setdefault(buckets[column // 2][0], set()).update(ranks)
    return [
        f"unit {unit}: rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))} have other values "
        "than their replicas"
        for unit, ranks in sorted(found.items(), key=lambda item: [*engine.units].index(item[0]))
    ]


def checksum(values: Tensor) -> int:
    """The sum of the values' bits as integers: any one change shows."""
    if not values.numel():
        return 0
    bits = values.detach().contiguous().view(_BITS[values.element_size()])
    # In chunks: to sum into another dtype a device copies what it sums.
    return int(sum(chunk.sum(dtype=torch.int64) for chunk in bits.split(CHUNK_ELEMENTS)))


def odd_ones(checksums: Tensor, shards: Sequence[int]) -> dict[int, set[int]]:
    """By column, the ranks whose checksum is not that of most that hold the same slice; of a tie, later ones.

    ``checksums``: [ranks, columns], int64; ``shards``: into how many slices each column's buffer is cut.
    Ranks hold the same slice when they are equal modulo that number (``core.hierarchy``). Columns without
    differences, in most cases all of them, are left out, and cost one comparison of tensors.
    """
    found: dict[int, set[int]] = {}
    for cut in set(shards):
        columns = torch.tensor([column for column, its in enumerate(shards) if its == cut])
        replicas = checksums[:, columns].view(-1, cut, len(columns))  # [replicas, slices, columns]
        for index, number in (replicas != replicas[0]).any(0).nonzero().tolist():
            sums = replicas[:, index, number].tolist()
            usual = Counter(sums).most_common(1)[0][0]  # of a tie the first that was counted
            ranks = {index + cut * replica for replica, found_sum in enumerate(sums) if found_sum != usual}
            found.setdefault(int(columns[number]), set()).update(ranks)
    return found
