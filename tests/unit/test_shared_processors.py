"""What messages and compute ask of processors that ranks share: measured, and in the cost model."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hzplan.core.hierarchy import Levels, Mesh, Stage
from hzplan.core.layout import bucketise
from hzplan.core.schedule import Kind
from hzplan.cost.collectives import with_ranks
from hzplan.cost.curves import TOGETHER, interpolate, latency
from hzplan.cost.model import CostModel
from hzplan.cost.unit import MESSAGES
from hzplan.formats.profile import CollectiveCurve, CollectivePoint, Profile
from hzplan.profiler.session.processors import Processors, Shared, compute_share, of_sessions
from hzplan.profiler.session.ranks import Ranks
from hzplan.solver.evaluate import evaluate, uniform, unit_costs
from hzplan.solver.paths import Network
from hzplan.solver.prefer import BUSY, NEAR, TIE, messages
from hzplan.solver.search import Request
from hzplan.solver.solve import Solved, solve
from tests.instances import random_profile, with_processors


def test_ranks_share_processors_by_kernel_and_affinity() -> None:
    first, second = Shared("kernel", (0, 1), 2.0), Shared("kernel", (2, 3, 4, 5), 4.0)
    other = Shared("other kernel", (0, 1), 2.0)
    processors = Processors((first, first, second, other))
    assert processors.time_s([0.1, 0.3, 0.4, 0.1]) == pytest.approx(
        0.2
    )  # 0.4 on two, 0.4 on four, 0.1 on two
    assert processors.time_s([0.1, 0.1, 2.0, 0.1]) == pytest.approx(0.5)


def test_who_only_waits_keeps_no_processor_busy() -> None:
    ranks = Ranks(0, 1, "none", torch.device("cpu"))
    one = Processors((Shared("kernel", (0,), 1.0),))
    assert compute_share(ranks, one, lambda: time.sleep(0.05)) < 0.3

    def work() -> None:
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass

    assert compute_share(ranks, one, work) > compute_share(ranks, one, lambda: time.sleep(0.05))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_a_plan_of_its_own_is_worth_it_where_processors_are_busy(seed: int, share: float) -> None:
    """Else a scheme is the plan, of those that are as near the one with the fewest messages; elsewhere it has
    to be ahead by the tie."""
    rng = random.Random(seed)
    profile = with_processors(random_profile(rng, micro_batches=(1,)), rng)
    cluster = profile.cluster.model_copy(update={"compute_processor_share": share})
    profile = profile.replaced(cluster=cluster)
    outcome = solve(profile, Request(2**40, 2 * profile.mesh.world))
    assert isinstance(outcome, Solved)
    schemes = [row.found for row in outcome.rows if row.fits]
    fastest = min(one.predicted.period_ns for one in schemes)
    step, wanted = outcome.best.predicted.period_ns, NEAR if share > BUSY else TIE
    if step * (1 + wanted) * (1 + 1e-9) < fastest:
        return
    assert any(one is outcome.best for one in schemes)
    assert step <= fastest * (1 + wanted) * (1 + TIE)
    if share > BUSY:
        near = [one for one in schemes if one.predicted.period_ns * (1 + NEAR) < fastest * (1 + 2 * NEAR)]
        assert messages(outcome.best) <= min(map(messages, near))


@pytest.mark.parametrize("seed", range(8))
def test_messages_that_are_joined_ask_for_processors_once(seed: int) -> None:
    """Of all-reduces in one task the part that no byte causes; and the row of bounds says no more."""
    rng = random.Random(seed)
    profile = with_processors(random_profile(rng, micro_batches=(1,)), rng)
    model = CostModel(profile)
    whole = uniform(profile, Levels(0, 0, 0))
    asked = []
    for message_bytes in (0, 1 << 40):
        schedule = model.schedule(prefetch=1, accumulation=2, clip=True, message_bytes=message_bytes)
        found = evaluate(model, whole, schedule, 1)
        assert found.processor_ns is not None
        asked.append(sum(found.processor_ns))
        network = Network(model, schedule, schedule, [*found.units], 1, {})
        [row] = network.processors
        assert row.at(network.durations(found.units)) <= asked[-1] * 1e-6 * (1 + 1e-9)
    once = {
        (unit, tier): cost.once_processor_ns(Kind.FINAL_REDUCE, tier)
        for unit, cost in found.units.items()
        for tier in range(len(model.mesh.tiers))
    }
    assert asked[0] > asked[1] or sum(map(bool, once.values())) < 2


@pytest.mark.parametrize("seed", range(20))
def test_gradients_meet_on_the_slowest_tier_whatever_the_levels(seed: int) -> None:
    """Bounds count on it."""
    rng = random.Random(seed)
    model = CostModel(random_profile(rng), flat_sums=False)
    for flat in {False, model.knows_flat_sums}:
        model = replace(model, flat_sums=flat)
        schedule = model.schedule(prefetch=1, accumulation=1, clip=False)
        met = [task for task in schedule.tasks if model.meets(task)]
        assert {unit for task in met for unit in task.units} >= {
            unit for unit, of in model.tensors.items() if all(t.trainable for t in of) and of
        } or model.mesh.world == 1
        for triple in model.triples:
            units = unit_costs(model, uniform(model.profile, triple))
            assert all(model.task_ns(schedule, task, units, 1) > 0 for task in met)


def test_messages_of_a_unit_are_busy_beside_each_other() -> None:
    """Their latencies hide each other, and what they ask of processors does not."""
    profile = with_processors(random_profile(random.Random(3)), random.Random(3))
    mesh = Mesh.parse("2")
    points = (
        CollectivePoint(bytes=0, seconds=1e-3, spread=0.0, processor_seconds=2e-4),
        CollectivePoint(bytes=1 << 20, seconds=3e-3, spread=0.0, processor_seconds=4e-4),
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
    assert model.collective_processor_ns("all_reduce", Stage(0, 1), 1 << 19) == 300_000
    tensors = next(of for of in model.tensors.values() if of[0].trainable)
    tensor = replace(tensors[0], shape=(1 << 17,))
    for levels, kinds in (
        (Levels(0, 0, 0), {Kind.FINAL_REDUCE: 1}),
        (Levels(1, 1, 1), {Kind.UNSHARD: 1, Kind.REDUCE: 1, Kind.FINAL_REDUCE: 1}),
        (Levels(0, 0, 1), {Kind.FINAL_REDUCE: 1, Kind.PARAM_GATHER: 1}),
    ):
        one = model.unit(bucketise([(tensor, levels)], mesh))
        taken = {kind: one.messages_processor_ns(kind, 0) for kind in MESSAGES}
        assert {kind: ns for kind, ns in taken.items() if ns} == {
            kind: 300_000 * many for kind, many in kinds.items()
        }
        both = one + one
        assert both.messages_processor_ns(Kind.FINAL_REDUCE, 0) == 600_000
        assert both.once_ns(Kind.FINAL_REDUCE, 0) == one.once_ns(Kind.FINAL_REDUCE, 0)
    assert (
        CostModel(
            known.model_copy(update={"cluster": cluster.model_copy(update={"compute_processor_share": None})})
        )
        .unit(bucketise([(tensor, Levels(0, 0, 0))], mesh))
        .processor_ns
        == ()
    )


def test_a_container_may_use_less_than_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr("hzplan.profiler.session.processors._CGROUP_LIMIT", limit)
    everything = Shared.here().limit
    assert everything == len(Shared.here().processors)
    for text, expected in (
        ("50000 100000", 0.5),
        ("max 100000", everything),
        ("100000000 100000", everything),
    ):
        limit.write_text(text)
        assert Shared.here().limit == expected


def test_fewer_ranks_take_the_same_share_of_processors() -> None:
    seeds = (random.Random(seed) for seed in range(100))
    drawn = next(one for rng in seeds if str((one := random_profile(rng)).mesh) == "4")
    profile = with_processors(drawn, random.Random(0))

    def shares(of: Profile) -> set[float]:
        return {
            round((point.processor_seconds or 0.0) / point.seconds, 3)
            for curve in of.collectives
            for point in curve.points
        }

    assert shares(with_ranks(profile, 2)) == shares(profile)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, 6e-3), (1, 6e-3), (500, 6e-3), (1000, 4e-3), (2000, 0.0), (5000, 0.0)],
)
def test_what_is_paid_once_is_what_four_such_messages_do_not_take(size: int, expected: float) -> None:
    """A small message takes 6 ms, one of 2,000 bytes no longer, and the link carries 333 bytes in a
    millisecond."""
    curve = [(1, 6e-3), (2000, 6e-3), (4000, 12e-3)]
    assert latency(curve, size) == pytest.approx(expected, abs=1e-5)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1)), min_size=1, unique_by=lambda at: at[0]))
def test_what_is_paid_once_is_no_more_than_a_message_takes(points: list[tuple[int, float]]) -> None:
    seconds = sorted(s for _, s in points)
    curve = [*zip(sorted(b for b, _ in points), seconds, strict=True)]
    for size, _ in curve:
        once, alone = latency(curve, size), interpolate(curve, size)
        assert 0.0 <= once <= alone * (1 + 1e-12)
        joined, (first, least) = interpolate(curve, TOGETHER * size), curve[0]
        if 0.0 < once < least and size > first:
            # Four take as long as one of all their bytes, but for a first point.
            little = (joined - alone) / size * first
            assert once + TOGETHER * (alone - once) >= (joined - little) * (1 - 1e-9) - 1e-9


@pytest.mark.parametrize("first", [1, 1000])
def test_of_a_line_what_is_paid_once_is_its_first_point(first: int) -> None:
    curve = [(first, 1e-3 + first * 1e-6), (9000, 1e-3 + 9000 * 1e-6)]
    for size in (first, 5000, 90_000):
        assert latency(curve, size) == pytest.approx(curve[0][1])
    assert latency([(1000, 1e-3)], 5000) == pytest.approx(1e-3)


@dataclass(frozen=True)
class _Sessions:
    """Ranks of given sessions, as seen by the first."""

    sessions: tuple[str, ...]

    def gather(self, own: str) -> list[str]:
        return [own and one for one in self.sessions]


@pytest.mark.parametrize(
    ("sessions", "processors", "enabled", "own", "group", "advised"),
    [
        (("a", "b", "c"), 2, "1", "/autogroup-7 nice 0\n", "/", True),
        (("a", "a", "a"), 2, "1", "/autogroup-7 nice 0\n", "/", False),  # groups of one session
        (("a", "b"), 2, "1", "/autogroup-7 nice 0\n", "/", False),  # a processor for each
        (("a", "b", "c"), 2, "0", "/autogroup-7 nice 0\n", "/", False),
        (("a", "b", "c"), 2, "1", "", "/", False),  # of no session
        (("a", "b", "c"), 2, "1", "/autogroup-7 nice 0\n", "/job", False),  # a container's processors
    ],
)
def test_sessions_that_share_processors_are_told_of(
    sessions: tuple[str, ...],
    processors: int,
    enabled: str,
    own: str,
    group: str,
    advised: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = tmp_path / "groups" / "job"
    limits.mkdir(parents=True)
    (limits / "cpu.max").write_text("max 100000")
    files = {"_SESSIONS_FIRST": f"{enabled}\n", "_SESSION": own, "_CGROUPS": f"1:memory:/x\n0::{group}\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(f"hzplan.profiler.session.processors.{name}", tmp_path / name)
    monkeypatch.setattr("hzplan.profiler.session.processors._CGROUP", tmp_path / "groups")
    shared = Shared("kernel", tuple(range(processors)), float(processors))
    told = of_sessions(_Sessions(sessions), Processors((shared,) * len(sessions)))  # type: ignore[arg-type]
    assert (told is not None) == advised
