"""Who is slow, who grows, whose values differ."""

from __future__ import annotations

import random

import torch
from torch import nn

from hzplan.core.hierarchy import Levels
from hzplan.models.workload import load
from hzplan.runtime.optimizer import ShardedOptimizer
from hzplan.runtime.replicas import checksum, diverged
from hzplan.training.watch import LEAST_GROWTH_BYTES, SETTLED, WINDOW, Watch
from tests.plans import make_plan
from tests.threads import in_threads

GIB = float(1 << 30)


def test_a_slow_rank_is_named_once_and_again_when_it_has_recovered() -> None:
    watch, rng = Watch(["a", "a", "b", "b"]), random.Random(0)

    def steps(number: int, factor: float) -> list[str]:
        found = []
        for _ in range(number):
            busy = [0.02 * rng.uniform(0.8, 1.2) for _ in range(4)]
            busy[2] *= factor
            found += watch.note(busy, [GIB] * 4)
        return found

    assert steps(100, 1.0) == []
    (line,) = steps(20, 10.0)
    assert line.startswith("rank 2 on b is slow: it computes ") and line.endswith("look at its machine")
    assert steps(20, 1.0) == []
    assert len(steps(WINDOW, 10.0)) == 1


def test_one_slow_step_is_nobody_slow() -> None:
    watch = Watch(["a"] * 2)
    assert [watch.note([0.02, 2.0 if step % 7 == 3 else 0.02], [GIB] * 2) for step in range(50)] == [[]] * 50


def test_a_rank_that_grows_is_named() -> None:
    watch = Watch(["a", "b"])
    found = [
        line
        for step in range(200)
        for line in watch.note([0.02, 0.02], [GIB, GIB + max(0, step - SETTLED) * 4.0 * 2**20])
    ]
    assert len(found) == 2
    assert all(line.startswith("rank 1 on b grows: ") for line in found)
    assert LEAST_GROWTH_BYTES < GIB


def test_any_bit_changes_a_checksum() -> None:
    rng = random.Random(1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        values = torch.randn(100, dtype=dtype)
        before = checksum(values)
        raw = values.view(torch.uint8)
        for _ in range(50):
            place = rng.randrange(len(raw))
            raw[place] ^= 1 << rng.randrange(8)
            assert checksum(values) != before
            before = checksum(values)


def test_replicas_that_differ_are_named() -> None:
    """On mesh 2|2 with parameters in two shards ranks 1 and 3 hold the same slices."""
    plan = make_plan("gpt:nano", mesh="2|2", levels=Levels(1, 1, 1))

    def rank(number: int, _: nn.Module, optimizer: ShardedOptimizer) -> list[list[str]]:
        before = diverged(optimizer.engine)
        if number == 3:
            bucket = optimizer.engine.units["layers.1"].buckets[0]
            bucket.param.view(torch.int32)[5] ^= 1
        return [before, diverged(optimizer.engine)]

    expected = ["unit layers.1: rank 3 have other values than their replicas"]
    assert in_threads(plan, load("gpt:nano").build(), rank) == [[[], expected]] * 4
