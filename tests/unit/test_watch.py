"""Who is slow, who grows, whose values differ."""

from __future__ import annotations

import random
import time
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.models.workload import load
from hzplan.runtime.executor import StepRecord
from hzplan.runtime.optimizer import ShardedOptimizer
from hzplan.runtime.replicas import checksum, diverged, odd_ones
from hzplan.training.loop import _Trainer
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


@pytest.mark.parametrize("text", ["1", "4", "2|2|2", "2,3|2", "1,4|3", "6|1,2"])
def test_the_odd_ones_are_those_unlike_most_that_hold_the_same_slice(text: str) -> None:
    mesh, rng = Mesh.parse(text), random.Random(text)
    levels = [rng.randrange(mesh.levels + 1) for _ in range(12)]
    sums = torch.tensor([[mesh.slice_index(rank, level) for level in levels] for rank in range(mesh.world)])
    shards = [mesh.shards[level] for level in levels]
    assert odd_ones(sums, shards) == {}
    for _ in range(5):
        sums[rng.randrange(mesh.world), rng.randrange(12)] += 1 << 40
    expected = {}
    for column, level in enumerate(levels):
        by_slice: dict[int, list[int]] = {}
        for rank in range(mesh.world):
            by_slice.setdefault(mesh.slice_index(rank, level), []).append(rank)
        odd = set()
        for ranks in by_slice.values():
            theirs = [int(sums[rank, column]) for rank in ranks]
            usual = max(theirs, key=theirs.count)
            odd |= {rank for rank, its in zip(ranks, theirs, strict=True) if its != usual}
        if odd:
            expected[column] = odd
    assert odd_ones(sums, shards) == expected


def test_sixteen_thousand_ranks_are_compared_in_seconds() -> None:
    ranks, columns = 16_384, 2 * 127
    sums = (torch.arange(ranks)[:, None] % 8).repeat(1, columns)
    sums[12_345] += 1
    began = time.perf_counter()
    assert odd_ones(sums, [8] * columns) == {column: {12_345} for column in range(columns)}
    assert time.perf_counter() - began < 5


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


def test_steps_that_were_not_timed_tell_of_no_slow_rank() -> None:
    watch = Watch(["a", "b", "c"])
    for _ in range(WINDOW - 1):
        assert watch.note([1.0, 1.0, 9.0], [0.0] * 3) == []
    for _ in range(WINDOW):
        assert watch.note([-1.0, -1.0, -1.0], [0.0] * 3) == []
    (line,) = watch.note([1.0, 1.0, 9.0], [0.0] * 3)
    assert line.startswith("rank 2 on c is slow: it computes 9.0 times as long")


@pytest.mark.parametrize("behind", [0, 2])
def test_waits_are_of_the_step_that_was_recorded(behind: int) -> None:
    """On a device that queues work that is the last but one; what else was done in a step is not counted."""
    executor = SimpleNamespace(step=-1, record=StepRecord(timed=False))
    trainer = SimpleNamespace(
        optimizer=SimpleNamespace(engine=SimpleNamespace(executor=executor)),
        plan=SimpleNamespace(cluster=SimpleNamespace(tier_names=("node",))),
        recording=SimpleNamespace(note=lambda: None),
        record=executor.record,
        unplanned=0,
        untimed={6},
        durations=deque(maxlen=4),
    )
    found = {}
    for step in range(4, 14):  # the job begins with a checkpoint of step 4
        executor.step = step - 4
        of, timed = executor.step - behind, (executor.step - behind) % 2 == 0
        waits = {"tier 0": 0.01 * (of + 4)} if timed else {}
        executor.record = StepRecord(of, timed=timed and of >= 0, exposed_s=waits)
        found[step] = _Trainer.waits(trainer, step, 1.0 + step)  # type: ignore[arg-type]
    for step, (waits, busy) in found.items():
        of = step - behind
        if of < 4 or of % 2 or of == 6:
            assert (waits, busy) == ({}, -1.0)
        else:
            assert waits == {"node": pytest.approx(0.01 * of), "optim": 0.0}
            assert busy == pytest.approx(1.0 + of - 0.01 * of)
    _Trainer.waits(trainer, 14, 1.0)  # type: ignore[arg-type]
    assert trainer.unplanned == 1  # no new record
