"""What messages and compute ask of processors that ranks share: measured, and in the cost model."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch

from hzplan.core.hierarchy import Levels, Mesh, Stage
from hzplan.core.layout import bucketise
from hzplan.core.schedule import Kind
from hzplan.cost.curves import latency
from hzplan.cost.model import CostModel
from hzplan.cost.unit import MESSAGES
from hzplan.formats.profile import CollectiveCurve, CollectivePoint
from hzplan.profiler.session.processors import Processors, compute_busy
from hzplan.profiler.session.ranks import Ranks
from tests.instances import random_profile, with_processors


def test_ranks_share_processors_by_kernel_and_affinity() -> None:
    first, second = ("kernel", (0, 1)), ("kernel", (2, 3, 4, 5))
    other = ("other kernel", (0, 1))
    processors = Processors((first, first, second, other))
    assert processors.busy_s([0.1, 0.3, 0.4, 0.1]) == pytest.approx(
        0.2
    )  # 0.4 on two, 0.4 on four, 0.1 on two
    assert processors.busy_s([0.1, 0.1, 2.0, 0.1]) == pytest.approx(0.5)


def test_who_only_waits_keeps_no_processor_busy() -> None:
    ranks = Ranks(0, 1, "none", torch.device("cpu"))
    one = Processors((("kernel", (0,)),))
    assert compute_busy(ranks, one, lambda: time.sleep(0.05)) < 0.3

    def work() -> None:
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass

    assert compute_busy(ranks, one, work) > compute_busy(ranks, one, lambda: time.sleep(0.05))
    assert Processors.of(ranks).shared == (Processors.of(ranks).shared[0],)


def test_messages_of_a_unit_are_busy_beside_each_other() -> None:
    """Their latencies hide each other, and what they ask of processors does not."""
    profile = with_processors(random_profile(random.Random(3)), random.Random(3))
    mesh = Mesh.parse("2")
    points = (
        CollectivePoint(bytes=0, seconds=1e-3, spread=0.0, busy_seconds=2e-4),
        CollectivePoint(bytes=1 << 20, seconds=3e-3, spread=0.0, busy_seconds=4e-4),
    )
    cluster = profile.cluster.model_copy(
        update={"mesh": str(mesh), "tier_names": ("node",), "reduce_scatter_by_exchange": True}
    )
    curves = tuple(
        CollectiveCurve(operation=operation, low=0, high=1, points=points)
        for operation in ("all_gather", "reduce_scatter", "all_reduce")
    )
    known = profile.model_copy(
        update={"cluster": cluster, "collectives": curves, "interference": (), "parallel": None}
    )
    model = CostModel(known)
    assert model.busy_ns("all_reduce", Stage(0, 1), 1 << 19) == 300_000
    tensors = next(of for of in model.tensors.values() if of[0].trainable)
    tensor = replace(tensors[0], shape=(1 << 17,))
    for levels, kinds in (
        (Levels(0, 0, 0), {Kind.FINAL_REDUCE: 1}),
        (Levels(1, 1, 1), {Kind.UNSHARD: 1, Kind.REDUCE: 1, Kind.FINAL_REDUCE: 1}),
        (Levels(0, 0, 1), {Kind.FINAL_REDUCE: 1, Kind.PARAM_GATHER: 1}),
    ):
        one = model.unit(bucketise([(tensor, levels)], mesh))
        busy = {kind: one.messages_busy_ns(kind, 0) for kind in MESSAGES}
        assert {kind: ns for kind, ns in busy.items() if ns} == {
            kind: 300_000 * many for kind, many in kinds.items()
        }
        schedule_busy = one + one
        assert schedule_busy.messages_busy_ns(Kind.FINAL_REDUCE, 0) == 600_000
        assert schedule_busy.once_ns(Kind.FINAL_REDUCE, 0) == one.once_ns(Kind.FINAL_REDUCE, 0)
    assert (
        CostModel(known.model_copy(update={"cluster": cluster.model_copy(update={"compute_busy": None})}))
        .unit(bucketise([(tensor, Levels(0, 0, 0))], mesh))
        .busy_ns
        == ()
    )


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, 6e-3), (1, 6e-3), (1000, 3e-3), (2000, 0.0), (5000, 0.0)],
)
def test_what_is_paid_once_is_what_bytes_do_not_explain(size: int, expected: float) -> None:
    """A small message takes 6 ms, one of 2,000 bytes no longer, and the link carries 333 bytes in a
    millisecond: together they take as long as their bytes."""
    curve = [(1, 6e-3), (2000, 6e-3), (4000, 12e-3)]
    assert latency(curve, size) == pytest.approx(expected, abs=1e-5)


def test_of_a_line_what_is_paid_once_is_its_latency() -> None:
    curve = [(1000, 1e-3 + 1000 * 1e-6), (9000, 1e-3 + 9000 * 1e-6)]
    for size in (1000, 5000, 90_000):
        assert latency(curve, size) == pytest.approx(1e-3)
    assert latency([(1000, 1e-3)], 5000) == 0.0
