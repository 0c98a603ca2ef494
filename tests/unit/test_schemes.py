"""Schemes that users set by hand: rows, candidates, and never better than the plan."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.questions import CLOSE, PROFILES, Question, draw, find
from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.recompute import NOTHING, Recomputed
from hzplan.cost.model import CostModel
from hzplan.errors import UserError
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile
from hzplan.formats.source import profile_of
from hzplan.solver.baseline import Baseline
from hzplan.solver.emit import emit
from hzplan.solver.evaluate import Evaluation, Modes, evaluate, replay, uniform
from hzplan.solver.gain import FREEDOMS, gain, over
from hzplan.solver.guard import request_of
from hzplan.solver.prefer import TIE, ceiling_ns, distance, plainness, preferred, tie_of
from hzplan.solver.schemes import RecomputeOptions, Row, Settings, schemes, slack_bytes
from hzplan.solver.search import Request
from hzplan.solver.solve import Solved, searches_of, solve
from tests.instances import random_profile
from tests.long import shorter

SMALL = [
    PROFILES / f"{name}.json"
    for name in ("gpt-tiny-2x2", "gpt-tiny-2x2x2", "gpt-small-4", "gpt-1.3b-a100-4", "llama3-8b-h100-8")
]


def _question(seed: int) -> Question:
    rng = random.Random(seed)
    profile = random_profile(rng)
    batch = profile.mesh.world * rng.choice([2, 4])
    gap = rng.choice([0.005, 0.05])
    settings = Settings(searches_of(profile, Request(2**40, batch)), Request(2**40, batch))
    least = min(row.found.memory.peak for row in settings.rows())
    return Question(f"seed {seed}", profile, Request(int(least * rng.uniform(0.9, 2.0)), batch, gap=gap))


@pytest.mark.parametrize("seed", range(40))
def test_no_scheme_beats_a_plan_of_a_random_profile(seed: int) -> None:
    question = _question(seed)
    solved = solve(question.profile, question.request)
    if not isinstance(solved, Solved):
        return
    step, peak = solved.best.predicted.period_ns, solved.best.memory.peak
    for row in solved.rows:
        assert row.fits == (row.found.memory.peak <= question.request.memory_bytes)
        if row.fits:
            theirs, bytes_ = row.found.predicted.period_ns, row.found.memory.peak
            assert step <= theirs * (1 + TIE)
            assert theirs >= step * (1 - 1e-6) or bytes_ > peak  # who is slower is leaner
            assert theirs > step * (1 + TIE) or peak <= bytes_ + slack_bytes(bytes_)


ON_THE_EDGE = (2,)
"""Questions whose two best schemes, DDP and ZeRO-1, lie about the tie apart."""


@pytest.mark.parametrize("seed", shorter([2, 3, 5], without=(2, 3)))
def test_a_sample_of_the_benchmark(seed: int) -> None:
    """`python -m benchmarks.questions` asks 500 of these, of all golden profiles."""
    rng = random.Random(seed)
    found = find(draw(rng, SMALL), rng)
    assert not found.beaten and (not found.changed or seed in ON_THE_EDGE)
    assert found.worse_than_narrow <= CLOSE


@pytest.mark.parametrize("seed", range(8))
def test_every_setting_is_at_least_as_slow_and_as_large_as_bounded(seed: int) -> None:
    """What is not replayed is left out by these bounds."""
    profile = random_profile(random.Random(seed))
    request = Request(2**40, profile.mesh.world * 2)
    settings = Settings(searches_of(profile, request), request)
    for triple in profile.mesh.triples():
        for one in settings.of(triple):
            found = settings.replay(one)
            assert found.memory.peak == one.peak_bytes
            assert one.floor_ns <= found.predicted.period_ns * (1 + 1e-9)
            assert found.modes.recompute == one.recompute


def test_a_row_is_the_fastest_of_its_settings_and_of_those_the_leanest() -> None:
    profile = Profile.load(SMALL[3])
    request = Request(2**40, profile.data_ranks * 2)
    settings = Settings(searches_of(profile, request), request)
    for fast in settings.rows():
        row = settings.lean(fast, fast.found.predicted.period_ns * (1 + TIE))
        every = [settings.replay(one) for one in row.settings if not one.recompute]
        fastest = min(one.predicted.period_ns for one in every)
        assert fast.found.predicted.period_ns <= fastest * (1 + 1e-4)
        assert row.found.predicted.period_ns <= fast.found.predicted.period_ns * (1 + TIE)
        alike = [one for one in every if one.predicted.period_ns <= row.found.predicted.period_ns]
        least = min(one.memory.peak for one in alike)
        assert row.found.memory.peak <= least + slack_bytes(row.found.memory.peak)


def test_what_is_recomputed_is_named_as_users_set_it() -> None:
    blocks = tuple(f"layers.{index}" for index in range(6))
    offered = RecomputeOptions(blocks, ("embed", *blocks), ("operations",))
    assert offered.every(2) == Recomputed.of(["layers.1", "layers.3", "layers.5"])
    assert offered.name(NOTHING) == "none" and offered.name(Recomputed.of(blocks)) == "all"
    assert offered.name(offered.every(2)) == "every 2nd" and offered.name(offered.every(3)) == "every 3rd"
    assert offered.name(offered.first(4)) == "4 of 6" and offered.name(Recomputed.of(["embed"])) == "1 of 7"
    assert offered.name(Recomputed.of(blocks, "operations")) == "operations"
    mixed = offered.first(2).with_(blocks[2:], "operations").with_(["embed"], "elementwise")
    assert offered.name(mixed) == "2 of 6, operations 4, elementwise 1"
    assert offered.first(2) == Recomputed.of(["layers.0", "layers.1"])
    assert offered.first(7) == Recomputed.of(["embed", *blocks])
    assert offered.by_hand("none") == [NOTHING]
    assert offered.by_hand("all") == [Recomputed.of(["embed", *blocks])]
    sizes = [len(chosen) for chosen in offered.by_hand("choose")]
    assert sizes == sorted(sizes) and sizes[0] == 0 and sizes[-1] == 7
    assert Recomputed.of(blocks, "operations") in offered.by_hand("choose")


def test_schemes_of_two_tiers_and_of_one() -> None:
    two = schemes(Mesh(((8,), (4,))))
    assert (
        two["hpZ"] == Levels(1, 2, 2) and two["HSDP"] == Levels(1, 1, 1) and two["ZeRO-2"] == Levels(0, 2, 2)
    )
    assert "HSDP" not in schemes(Mesh(((4,),)))


@pytest.fixture
def pair() -> tuple[Evaluation, Evaluation]:
    """Two plans of one question: everything is sharded, or nothing."""
    profile = random_profile(random.Random(4))
    model = CostModel(profile)
    schedule = model.schedule(prefetch=1, accumulation=2, clip=True)
    finest = profile.mesh.levels
    sharded = evaluate(model, uniform(profile, Levels(finest, finest, finest)), schedule, 1)
    return sharded, evaluate(model, uniform(profile, Levels(0, 0, 0)), schedule, 1)


def test_order_of_preference(pair: tuple[Evaluation, Evaluation]) -> None:
    lean, large = sorted(pair, key=lambda one: one.memory.peak)
    slowest = max(one.predicted.period_ns for one in pair)
    assert lean.memory.peak < large.memory.peak
    assert preferred(pair, slowest) is lean  # as fast as asked for: the leanest
    fast = min(pair, key=lambda one: one.predicted.period_ns)
    assert preferred(pair, 0.0) is fast  # none is: the fastest
    unit = next(iter(lean.levels))
    mixed = evaluate(lean.model, {**lean.levels, unit: large.levels[unit]}, lean.schedule, 1)
    if mixed.memory.peak <= lean.memory.peak + slack_bytes(lean.memory.peak):
        assert preferred([mixed, lean], 2 * slowest) is lean
    assert plainness(lean)[0] == 1 and plainness(mixed)[0] == 2
    again = evaluate(lean.model, lean.levels, lean.schedule, 1)
    assert preferred([lean, again], 2 * slowest, like=again) in (lean, again)
    assert distance(lean, again) == 0 < distance(lean, mixed) <= distance(lean, large)


def test_the_tie_follows_the_gap_up_to_half_a_percent() -> None:
    assert tie_of(0.05, None) == TIE and tie_of(0.001, None) == 0.001 and tie_of(0.0, None) == 0.0
    assert tie_of(0.05, 0.02) == 0.02


def test_a_plan_of_its_own_stays_ahead_of_every_scheme() -> None:
    profile = Profile.load(SMALL[4])
    request = Request(int(0.95 * profile.cluster.memory_bytes), profile.data_ranks * 2)
    solved = solve(profile, request)
    assert isinstance(solved, Solved)
    rows = [row for row in solved.rows if row.fits]
    ceiling = ceiling_ns(min((row.found for row in rows), key=lambda one: one.step_s), [], TIE)
    fastest = min(row.found.predicted.period_ns for row in rows)
    assert ceiling == pytest.approx(fastest * (1 + TIE))
    won = gain(solved.best, solved.rows, request)
    assert won is not None and won.same and won.share == 0 and not won.parts
    assert solved.best is won.over.found  # nothing is faster by more than the tie, so the scheme is the plan


def test_gain_is_split_by_switching_each_freedom_off() -> None:
    profile = Profile.load(PROFILES / "llama3-70b-4096-h100-16.json")
    request = Request(60 * 2**30, 2 * profile.data_ranks)
    solved = solve(profile, request)
    assert isinstance(solved, Solved)
    won = gain(solved.best, solved.rows, request)
    assert won is not None and not won.same and won.share > TIE
    assert [part.freedom for part in won.parts] == list(FREEDOMS)
    shares = {part.freedom: part.share for part in won.parts}
    best, other = solved.best, won.over.found
    by_hand = evaluate(
        best.model, best.levels, best.schedule, best.micro_batch, modes=Modes(other.modes.recompute)
    )
    assert shares["recompute"] == pytest.approx(by_hand.step_s / best.step_s - 1)
    assert sum(share or 0 for share in shares.values()) > 0.5 * won.share


def test_a_choice_that_is_the_same_costs_nothing() -> None:
    """Also in a plan with an order of messages."""
    path = PROFILES.parent / "llama3-70b-h100-16.json"
    plan = Plan.load(path)
    profile = profile_of(path, plan)
    best = replay(plan, profile, path)
    assert best.schedule.order is not None
    again = evaluate(best.model, best.levels, best.schedule, best.micro_batch, modes=best.modes)
    row = Row("itself", again, fits=True, settings=())
    won = over(best, row, request_of(plan))
    assert [part.share for part in won.parts] == [0.0] * len(FREEDOMS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("zero7", "zero7 is no plan file and no scheme"),
        ("3/3/3", "has no level with 3 shards"),
        ("4/1/1", "the optimizer state needs at least"),
        ("zero3,width=2", "width=2 is not known"),
        ("zero3,micro_batch=x", "micro_batch=x is not known"),
        ("zero3,micro_batch=" + "9" * 5000, "is not known"),
        ("9" * 5000, "is no plan file"),
        ("zero3,recompute=selective", "the profile knows no unit that can be recomputed"),
    ],
)
def test_a_setting_that_cannot_be_is_one_line(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        Baseline.parse(text, CostModel(Profile.load(SMALL[2])))
    assert len(str(raised.value).splitlines()) == 1


def test_the_users_own_setting_is_a_row_and_a_candidate() -> None:
    profile = Profile.load(PROFILES / "llama3-70b-4096-h100-16.json")
    model, request = CostModel(profile), Request(2**40, profile.data_ranks * 2)
    settings = Settings(searches_of(profile, request), request)
    own = Baseline.parse("FSDP2,recompute=selective,micro_batch=1,prefetch=2", model)
    row = own.row(settings)
    assert row.name == "yours" and row.found.micro_batch == 1 and row.found.schedule.prefetch == 2
    assert settings.recompute_options.name(row.found.modes.recompute) == "every 2nd"
    assert {triple for of in row.found.levels.values() for triple in of} == {
        Levels(*[profile.mesh.levels] * 3)
    }
    finest = profile.mesh.shards[-1]
    assert Baseline.parse(f"1/1/{finest}", model).triple == Levels(0, 0, profile.mesh.levels)
    with pytest.raises(UserError, match="micro_batch="):
        Baseline.parse("zero3,micro_batch=64", model).row(settings)
    solved = solve(profile, request, baseline=own)
    assert isinstance(solved, Solved) and [row.name for row in solved.rows][-1] == "yours"
    whole = Baseline("yours", plan=solved.best)
    again = solve(profile, request, baseline=whole)
    assert isinstance(again, Solved)
    assert again.best.predicted.period_ns <= solved.best.predicted.period_ns * (1 + TIE)


@pytest.mark.long
def test_a_plan_file_given_as_a_setting_is_a_candidate(tmp_path: Path) -> None:
    """What a search of no time at all would not find."""
    profile = Profile.load(PROFILES / "llama3-70b-4096-h100-16.json")
    request = Request(60 * 2**30, 2 * profile.data_ranks)
    solved = solve(profile, request)
    assert isinstance(solved, Solved)
    names = {"profile_path": tmp_path / "profile.json", "plan_path": tmp_path / "plan.json"}
    plan = emit(profile, request, solved, **names)
    own = Baseline("yours", plan=replay(plan, profile, tmp_path / "plan.json"))
    hurried = solve(profile, replace(request, time_limit_s=1e-6), baseline=own)
    assert isinstance(hurried, Solved)
    assert hurried.best.predicted.period_ns <= solved.best.predicted.period_ns * (1 + 1e-9)
    assert hurried.best.levels == solved.best.levels and hurried.best.modes == solved.best.modes


def test_of_equal_plans_the_one_like_another_is_taken() -> None:
    profile = Profile.load(SMALL[0])
    request = Request(2**40, profile.data_ranks * 8)
    plain = solve(profile, request)
    assert isinstance(plain, Solved)
    again = solve(profile, replace(request, tie=0.05), like=plain.best)
    assert isinstance(again, Solved)
    assert again.best.predicted.period_ns <= plain.best.predicted.period_ns * 1.05


def test_every_profile_of_the_repository_is_asked() -> None:
    assert len(list(Path(PROFILES).glob("*.json"))) == 15


def test_rows_that_the_question_bars_are_no_measure() -> None:
    profile = Profile.load(SMALL[4])
    request = Request(76 * 2**30, profile.data_ranks * 2, pins=("*=8,8,64",))
    solved = solve(profile, request)
    assert isinstance(solved, Solved)
    assert not any(row.allowed for row in solved.rows) and any(row.fits for row in solved.rows)
    assert gain(solved.best, solved.rows, request) is None


def test_a_setting_given_by_hand_changes_nothing_that_was_known() -> None:
    """What a user names is one of the settings that were tried anyway."""
    profile = Profile.load(PROFILES / "qwen3-32b-h100-16.json")
    request = Request(100 * 2**30, profile.data_ranks)
    own = Baseline.parse("zero3,prefetch=2", CostModel(profile))
    plain, named = solve(profile, request), solve(profile, request, baseline=own)
    assert isinstance(plain, Solved) and isinstance(named, Solved)
    assert plain.best.levels == named.best.levels
    peaks = plain.best.memory.peak, named.best.memory.peak
    assert abs(peaks[0] - peaks[1]) <= slack_bytes(min(peaks))


def test_host_memory_that_is_not_granted_does_not_fit() -> None:
    profile = Profile.load(PROFILES / "llama3-70b-h100-1.json")
    path = PROFILES.parent / "llama3-70b-h100-1-host.json"
    whole = Baseline("yours", plan=replay(Plan.load(path), profile, path))
    request = Request(500 * 2**30, 64)
    row = whole.row(Settings(searches_of(profile, request), request))
    assert not row.fits
