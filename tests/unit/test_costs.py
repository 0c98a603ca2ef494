"""What repeated passes say of uses, and what a step costs beside them."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from hzplan.cli.sweep import _points
from hzplan.core.hierarchy import Levels, Stage
from hzplan.core.layout import TensorSpec, bucketise
from hzplan.core.schedule import Kind
from hzplan.cost.memory import budget_bytes, reserve
from hzplan.cost.model import CostModel
from hzplan.formats.profile import OptimizerPoint, Profile
from hzplan.profiler.model.memory import Segment
from hzplan.profiler.model.time import use_costs
from hzplan.solver.solve import Request

MEASURED = "plans/profiles/gpt-small-2x2-500mbit.json"
MEMORY = (Segment(1, 1),) * 3


def test_uses_of_a_kind_share_their_samples_and_add_up_to_whole_passes() -> None:
    repeats = [[[1.0, 5.0, 3.0], [3.0, 1.0, 5.0]], [[2.0, 2.0, 4.0], [2.0, 4.0, 4.0]]]
    costs = use_costs(1, ["a", "a", "b"], [1, 1, 1], MEMORY, repeats)
    assert costs[0].seconds == costs[1].seconds
    assert costs[0].seconds / costs[2].seconds == pytest.approx(14 / 6 / 4.0)  # without the 1.0 and the 5.0
    whole = statistics.median(sum(row) for by_rank in repeats for row in by_rank)
    assert sum(cost.seconds for cost in costs) == pytest.approx(whole)
    assert costs[0].straggler_seconds == pytest.approx((1.0 + 2.0 + 0.0 + 1.0) / 4)


def test_a_pause_now_and_then_is_no_property() -> None:
    repeats = [[[1.0, 1.0]] for _ in range(40)]
    repeats[7] = [[1000.0, 1.0]]
    first, second = use_costs(1, ["a", "b"], [1, 1], MEMORY[:2], repeats)
    assert first.seconds == second.seconds == pytest.approx(1.0)


@pytest.mark.parametrize("many", [6, 15, 40])
def test_neither_one_pause_makes_a_rank_late(many: int) -> None:
    repeats = [[[1.0, 1.0]] * 4 for _ in range(many)]
    repeats[3] = [[1.0, 1.0], [1.0, 500.0], [1.0, 1.0], [1.0, 1.0]]
    first, second = use_costs(1, ["a", "b"], [1, 1], MEMORY[:2], repeats)
    assert first.straggler_seconds == second.straggler_seconds == 0.0


def _with(profile: Profile, **changes: Any) -> Profile:
    return profile.model_copy(update={"cluster": profile.cluster.model_copy(update=changes)})


def test_the_norm_costs_only_who_clips() -> None:
    profile = _with(Profile.load(MEASURED), norm_seconds=0.002)
    points = [OptimizerPoint(elements=0, seconds=0.0, spread=0.0)]
    points.append(OptimizerPoint(elements=1000, seconds=0.001, spread=0.0))
    optimizer = profile.optimizer.model_copy(update={"norm": tuple(points)})
    profile = profile.model_copy(update={"optimizer": optimizer})
    model = CostModel(profile)
    owned = sum(math.prod(t.shape) for unit in profile.units for t in unit.tensors) / profile.mesh.world
    for clip, expected in ((True, round(2_000_000 + 1000 * owned)), (False, 0)):
        schedule = model.schedule(prefetch=1, accumulation=1, clip=clip)
        step = next(task for task in schedule.tasks if task.kind is Kind.STEP)
        assert model.task_ns(schedule, step, {}, profile.micro_batches[0]) == expected


def test_who_shares_processors_takes_their_time_at_least() -> None:
    """Two ranks on one processor, 3 each: one is done at 4, the other at 6, in the mean at 5."""
    repeats = [[[2.0, 2.0], [4.0, 2.0]]] * 3
    first, second = use_costs(1, ["a", "b"], [1, 1], MEMORY[:2], repeats, 6.0)
    assert first.seconds + second.seconds == pytest.approx(6.0)
    assert first.seconds / second.seconds == pytest.approx(3.0 / 2.0)
    assert first.straggler_seconds == pytest.approx(1.0 - 3.0 * (6 / 5 - 1))
    assert second.straggler_seconds == 0.0
    plain = use_costs(1, ["a", "b"], [1, 1], MEMORY[:2], repeats)
    assert use_costs(1, ["a", "b"], [1, 1], MEMORY[:2], repeats, 4.0) == plain
    assert [cost.seconds for cost in plain] == [3.0, 2.0]


@pytest.mark.parametrize("exchange", [True, False])
def test_gathers_at_once_wait_for_one_latency(exchange: bool) -> None:
    """Of a tier of two levels: over stages (0, 1) and (0, 2), under way together or one after the other."""
    known = Profile.load(MEASURED)
    stages = [Stage(0, 1), Stage(0, 2), Stage(1, 2)]
    points = [
        {"bytes": 4096, "seconds": 2e-3, "spread": 0.0},
        {"bytes": 8192, "seconds": 3e-3, "spread": 0.0},
    ]
    curves = [
        {"operation": operation, "low": stage.low, "high": stage.high, "points": points}
        for stage in stages
        for operation in ("all_gather", "reduce_scatter")
    ]
    data = known.model_dump(mode="json", exclude_none=True) | {"collectives": curves, "interference": []}
    data["cluster"] |= {"mesh": "2,2", "tier_names": ["node"], "reduce_scatter_by_exchange": exchange}
    model = CostModel(Profile.model_validate(data))
    tensors = [TensorSpec(name, (2048,), "float32", True) for name in "ab"]
    levels = [Levels(1, 1, 1), Levels(2, 2, 2)]
    buckets = bucketise(zip(tensors, levels, strict=True), model.mesh)
    alone = [model.bucket(bucket).unshard_ns[0] for bucket in buckets]
    assert alone == [3_000_000, 3_000_000]
    together = model.unit(buckets).unshard_ns[0]
    assert together == (4_000_000 if exchange else 6_000_000)


def test_a_unit_in_bfloat16_has_gradients_and_state_in_float32() -> None:
    """2,048 elements on 2 x 2 ranks: 2 bytes each of the parameters, 4 of everything else."""
    profile = Profile.load(MEASURED)
    model, tensor = CostModel(profile), TensorSpec("a", (2048,), "bfloat16", True)
    for levels, parameters, gradients, buffer in (
        (Levels(0, 0, 2), 4096, 8192, 0),
        (Levels(0, 1, 2), 4096, 4096, 8192),
        (Levels(1, 2, 2), 2048, 2048, 8192),
    ):
        (bucket,) = bucketise([(tensor, levels)], model.mesh)
        cost = model.unit([bucket])
        assert (cost.param_bytes, cost.grad_bytes, cost.gradient_buffer_bytes) == (
            parameters,
            gradients,
            buffer,
        )
        assert cost.master_bytes == 8192 // 4
        assert cost.optim_bytes == 2 * 8192 // 4


@pytest.mark.parametrize(
    ("device", "mesh", "communicators"),
    [
        ("cuda", "8|16", 7),
        ("cuda", "2,4|1", 4),
        ("cuda", "2|2|2", 10),
        ("cuda", "1", None),
        ("cpu", "8|16", None),
    ],
)
def test_what_nccl_takes_is_left_free(device: str, mesh: str, communicators: int | None) -> None:
    whole = 80 * 2**30
    cluster = Profile.load(MEASURED).cluster.model_copy(
        update={"device": device, "mesh": mesh, "memory_bytes": whole}
    )
    expected = 0 if communicators is None else (512 + 600 * communicators) * 2**20
    assert reserve(cluster).nbytes == max(whole // 20, expected) and not reserve(cluster).measured
    measured = cluster.model_copy(update={"context_bytes": 3 * 2**30, "communicator_bytes": 2**30})
    told = reserve(measured)
    assert told.measured == (communicators is not None)
    assert told.nbytes == max(whole // 20, 0 if communicators is None else (3 + communicators) * 2**30)
    if communicators is not None:  # in a message order the job's own, and one for each tier
        assert reserve(measured, ordered=True).communicators == 1 + (communicators - 1) // 3


def test_no_more_than_half_of_a_small_device_is_left_free() -> None:
    cluster = Profile.load(MEASURED).cluster.model_copy(
        update={"device": "cuda", "mesh": "2|2", "memory_bytes": 4 * 2**30}
    )
    assert budget_bytes(cluster) == 2 * 2**30


def test_a_sweep_over_nodes_has_each_ones_own_budget() -> None:
    modelled = next(
        one
        for path in sorted(Path(MEASURED).parent.glob("*.json"))
        if (one := Profile.load(path)).modelled and len(one.mesh.tiers) == 2
    )
    request = Request(1 << 30, 64)
    for reserved in (False, True):
        for _, profile, asked in _points("nodes=1,4", modelled, request, None, reserved=reserved):
            assert asked.memory_bytes == (budget_bytes(profile.cluster) if reserved else 1 << 30)
