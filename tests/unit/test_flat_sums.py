"""Whole gradients summed over several tiers by one all-reduce: where it is faster, and what says so."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from hzplan.core.hierarchy import Levels, Mesh, Stage
from hzplan.core.order import LINK_STREAM
from hzplan.core.schedule import EXCHANGE_STREAM
from hzplan.cost.collectives import with_ranks
from hzplan.cost.model import CostModel
from hzplan.errors import UserError
from hzplan.formats.plan import Plan
from hzplan.formats.profile import CollectiveCurve, CollectivePoint, Profile
from hzplan.formats.source import profile_of
from hzplan.runtime.backends.groups import _members
from hzplan.solver import search
from hzplan.solver.baseline import Baseline
from hzplan.solver.difference import choices
from hzplan.solver.emit import emit
from hzplan.solver.evaluate import Evaluation, replay
from hzplan.solver.guard import request_of
from hzplan.solver.schemes import Settings, schemes_of, slack_bytes
from hzplan.solver.search import Bounded, cost_model
from hzplan.solver.solve import Request, Solved, searches_of, solve
from hzplan.solver.sweep import with_network
from tests.instances import random_profile
from tests.plans import make_plan

GOLDEN = Path(__file__).resolve().parents[2] / "plans" / "gpt-tiny-2x2.json"


def with_flat(profile: Profile, seconds: float) -> Profile:
    """The profile with a sum over all tiers that takes so long, whatever its size."""
    whole = profile.mesh.whole
    assert whole is not None
    points = tuple(CollectivePoint(bytes=size, seconds=seconds, spread=0.0) for size in (1024, 1 << 20))
    curves = [c for c in profile.collectives if (c.low, c.high) != whole]
    curve = CollectiveCurve(operation="all_reduce", low=whole.low, high=whole.high, points=points)
    return profile.replaced(collectives=(*curves, curve))


def profile_of_tiers() -> Profile:
    """A random one of several tiers, in one dtype for all."""
    found = (random_profile(random.Random(seed)) for seed in range(1000))
    return next(p for p in found if p.mesh.whole is not None and p.model.dtype == "float32")


def question(profile: Profile) -> Request:
    return Request(2**40, 2 * profile.mesh.world * min(profile.micro_batches))


@pytest.mark.parametrize(("seconds", "taken"), [(1e-9, True), (10.0, False)])
def test_it_is_chosen_where_replicas_are_faster_by_it(seconds: float, taken: bool, tmp_path: Path) -> None:
    profile = with_flat(profile_of_tiers(), seconds)
    request = question(profile)
    assert cost_model(profile, request).flat_sums is taken
    outcome = solve(profile, request)
    assert isinstance(outcome, Solved)
    plan = emit(profile, request, outcome, profile_path=Path("profile.json"), plan_path=tmp_path / "p.json")
    whole = [b for unit in plan.units for b in unit.buckets if b.shards.optim == 1]
    assert bool(plan.flat_sums) is (taken and bool(whole))
    if taken:  # sums cost nothing then, and nothing has to be gathered
        assert whole and all(plan.levels(bucket).flat for bucket in whole)
    plan.save(tmp_path / "p.json")
    assert Plan.load(tmp_path / "p.json") == plan
    assert replay(plan, profile, tmp_path / "p.json").predicted == outcome.best.predicted
    if plan.flat_sums:
        without = profile.replaced(collectives=profile.collectives[:-1])
        with pytest.raises(UserError, match="has no all-reduce over all tiers; profile again"):
            replay(plan, without, tmp_path / "p.json")
        by_tier = plan.model_copy(update={"flat_sums": None})
        assert "flat sums" in {one.unit for one in choices(by_tier, plan)}


@pytest.mark.parametrize(("gain", "taken"), [(-0.01, True), (0.019, True), (0.021, False)])
def test_sums_by_tier_have_to_be_worth_their_messages(
    gain: float, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = with_flat(profile_of_tiers(), 1.0)
    monkeypatch.setattr(search, "_replicas_ns", lambda model, _: 1e6 if model.flat_sums else 1e6 * (1 - gain))
    assert cost_model(profile, question(profile)).flat_sums is taken


def test_other_runtimes_and_other_dtypes_are_not_told() -> None:
    profile = with_flat(profile_of_tiers(), 1e-9)
    assert CostModel(profile).knows_flat_sums
    assert not CostModel(profile, "bfloat16").knows_flat_sums
    narrow = make_plan(mesh="2|2", levels=Levels(0, 0, 0), flat_sums=True)
    assert {bucket.shards.optim for unit in narrow.units for bucket in unit.buckets} == {1}
    with pytest.raises(ValueError, match="one tier, whose sums are flat"):
        make_plan(mesh="2,2", levels=Levels(0, 0, 0), flat_sums=True)
    with pytest.raises(ValueError, match="only where gradients travel as they are kept"):
        make_plan(mesh="2|2", dtype="bfloat16", reduce_dtype="bfloat16", flat_sums=True)


def test_a_ring_leaves_each_node_once() -> None:
    mesh, whole = Mesh.parse("2|2|2"), Stage(0, 3)
    assert mesh.whole == whole and Mesh.parse("4").whole is None and Mesh.parse("2|1").whole is None
    assert Mesh.parse("2|2|1").whole == Stage(0, 2)
    for rank in range(8):
        assert _members(mesh, "reduce", whole, rank) == _members(mesh, LINK_STREAM, whole, rank)
        assert _members(mesh, "reduce", whole, rank) == tuple(range(8)) != mesh.group(rank, whole)
        for kind in (EXCHANGE_STREAM, "relaxed"):  # whose groups are told apart by slices
            assert _members(mesh, kind, whole, rank) == mesh.group(rank, whole)
        assert _members(mesh, "reduce", Stage(1, 2), rank) == mesh.group(rank, Stage(1, 2))


def test_pins_leave_frozen_tensors_whole() -> None:
    profile = with_flat(profile_of_tiers(), 1e-9)
    units = [unit.model_dump() for unit in profile.units]
    frozen = next(unit for unit in units if unit["tensors"])
    for tensor in frozen["tensors"]:
        tensor["trainable"] = False
    profile = Profile.model_validate(profile.model_dump() | {"units": units})
    name = frozen["tensors"][0]["name"]
    request = Request(2**40, question(profile).global_batch, pins=(f"{name}=1,*,*",))
    assert isinstance(solve(profile, request), Solved)


def saved(profile: Profile, request: Request, path: Path) -> Evaluation:
    """A question's plan, written and read again."""
    outcome = solve(profile, request)
    assert isinstance(outcome, Solved)
    emit(profile, request, outcome, profile_path=Path("profile.json"), plan_path=path).save(path)
    return replay(Plan.load(path), profile, path)


def test_a_plan_named_beside_a_question_is_summed_as_the_question_s_are(tmp_path: Path) -> None:
    profile = profile_of_tiers()
    slow, fast = with_flat(profile, 10.0), with_flat(profile, 1e-9)
    request = question(profile)
    path = tmp_path / "p.json"
    for before, after in ((slow, fast), (fast, slow)):
        like = saved(before, request, path)
        second = solve(after, request, like=like)
        assert isinstance(second, Solved)
        emit(after, request, second, profile_path=Path("profile.json"), plan_path=path)


def test_of_as_lean_settings_that_with_fewer_messages_is_taken() -> None:
    """Where sums are flat, and the step is not longer than is allowed."""
    profile = with_flat(profile_of(GOLDEN, Plan.load(GOLDEN)), 1e-3)
    request = request_of(Plan.load(GOLDEN))
    request = replace(request, memory_bytes=2**40)
    settings = Settings(searches_of(profile, request), request)
    assert settings.model.flat_sums
    row = settings.row("DDP", settings.of(schemes_of(settings.model)["DDP"]))
    apart = settings.replay(next(one for one in row.settings if _message_bytes(one) == 0))
    row = replace(row, found=apart)
    fewer = settings.lean(row, float("inf")).found
    assert fewer.schedule.message_bytes > 0
    assert fewer.memory.peak <= apart.memory.peak + slack_bytes(apart.memory.peak)
    assert settings.lean(row, apart.predicted.period_ns / 2).found is apart


def _message_bytes(one: Bounded) -> int:
    return one.search.question.schedule.message_bytes


def test_plans_whose_gradients_travel_narrow_are_summed_tier_by_tier(tmp_path: Path) -> None:
    """Beside a question whose sums are flat, and the other way round."""
    profile = with_flat(profile_of_tiers(), 1e-9)
    exact = question(profile)
    narrow = replace(exact, reduce_dtype="bfloat16")
    path = tmp_path / "p.json"
    for asked, other in ((narrow, exact), (exact, narrow)):
        old = saved(profile, asked, path)
        for baseline in (Baseline("yours", plan=old), Baseline.parse("ddp", cost_model(profile, asked))):
            beside = solve(profile, other, baseline=baseline, like=old)
            assert isinstance(beside, Solved)
            emit(profile, other, beside, profile_path=Path("profile.json"), plan_path=path)


@pytest.mark.parametrize(("world", "share"), [(4, 3 / 4), (6, 5 / 6), (8, 7 / 8)])
def test_other_numbers_of_nodes_keep_sums_over_tiers(world: int, share: float) -> None:
    profile = with_flat(profile_of(GOLDEN, Plan.load(GOLDEN)), 3.0)
    found = with_ranks(profile, world)
    (curve,) = [c for c in found.collectives if (c.low, c.high) == found.mesh.whole]
    assert found.sums_over_tiers and [p.seconds for p in curve.points] == pytest.approx([4 * share] * 2)
    assert not with_ranks(profile, 2).sums_over_tiers  # one node is one tier


def test_slower_networks_slow_sums_over_tiers() -> None:
    profile = with_flat(profile_of_tiers(), 1.0)
    curve = with_network(profile, 0.5).collectives[-1]
    assert (curve.low, curve.high) == profile.mesh.whole and curve.points[0].seconds == 2.0
