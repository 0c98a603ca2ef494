"""The solver against trying everything, and properties of its answers."""

from __future__ import annotations

import itertools
import os
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from hzplan.core.hierarchy import Levels
from hzplan.cost.model import CostModel
from hzplan.cost.simulate import objective_ns
from hzplan.errors import UserError
from hzplan.formats.plan import Plan, Recompute
from hzplan.solver.candidates import Candidates
from hzplan.solver.conflict import conflict, decided
from hzplan.solver.emit import emit
from hzplan.solver.evaluate import evaluate, replay, uniform
from hzplan.solver.paths import MS
from hzplan.solver.pins import Pins
from hzplan.solver.prefer import TIE
from hzplan.solver.rounding import rounded
from hzplan.solver.search import paces
from hzplan.solver.solve import Failed, Infeasible, Request, SearchState, Solved, searches_of, solve
from tests.instances import random_profile, try_everything, with_matrices, with_wire
from tests.long import shorter

INSTANCES = int(os.environ.get("HZPLAN_INSTANCES", "90"))  # make exhaustive asks for more
BUDGETS = (0.9, 1.0, 1.05, 1.2, 1.5, 3.0)  # times the least memory of any choice


def _instance(seed: int, *, matrices: bool = False, wire: bool = False) -> tuple[object, Request]:
    """Every fifth computes in bfloat16, with master weights; every third reduces in it. Half of those whose
    profile knows a link to the host's memory may put optimizer state there, some of it or all."""
    rng = random.Random(seed)
    dtype = "float32" if seed % 5 else "bfloat16"
    profile = random_profile(rng, micro_batches=rng.choice([(1,), (2,), (1, 2)]), dtype=dtype)
    if matrices:
        profile = with_matrices(profile, random.Random(f"matrices {seed}"))
    formats = None
    if wire:
        profile, formats = with_wire(profile, random.Random(f"wire {seed}"))
    batch = profile.mesh.world * profile.micro_batches[-1]  # at most two micro-batches a step
    request = Request(1, batch, gap=0.0, clip=rng.random() < 0.5, depths=(1, 2), time_limit_s=600)
    recompute: Recompute = {0: "none", 1: "all"}.get(seed % 7, "choose")  # type: ignore[assignment]
    request = replace(request, reduce_dtype=None if seed % 3 else "bfloat16", recompute=recompute)
    request = replace(request, wire=formats, narrow_sums=wire and seed % 2 == 0)
    if profile.host is not None:
        host = random.Random(f"host {seed}").choice([0, 0, 10_000, 40_000, 2**30])
        request = replace(request, host_bytes=host)
    least = try_everything(profile, request).smallest_bytes
    return profile, replace(request, memory_bytes=int(least * rng.choice(BUDGETS)))


OFFERED = 553
"""Where the smallest plan once had a pattern that no ILP was offered, as other units were offered more."""


@pytest.mark.parametrize(
    "seed",
    shorter(
        {*range(INSTANCES), OFFERED}, without={4, 5, 12, 16, 17, 21, 53, *range(60, INSTANCES)} - {OFFERED}
    ),
)
def test_equals_trying_everything(seed: int) -> None:
    _equals_trying_everything(seed, tight=True)


@pytest.mark.parametrize("seed", shorter({*range(60)} - {5, 16}, without={4, 10, 12, *range(14, 60)}))
def test_matrices_equal_trying_everything(seed: int) -> None:
    """In every way to bring them together, and in several groups: of those who share the work bounds count
    the mean, a replay the last one."""
    _equals_trying_everything(seed, tight=False, matrices=True)


@pytest.mark.parametrize("seed", shorter(range(60), without={4, 5, 10, 12, *range(14, 60)}))
def test_narrow_messages_equal_trying_everything(seed: int) -> None:
    """In formats of each tier's own, gradients being summed by the library or by ranks."""
    _equals_trying_everything(seed, tight=True, wire=True)


def _equals_trying_everything(seed: int, *, tight: bool, matrices: bool = False, wire: bool = False) -> None:
    profile, request = _instance(seed, matrices=matrices, wire=wire)
    truth = try_everything(profile, request, steps=True)
    outcome = solve(profile, request)
    if matrices and isinstance(outcome, Failed):  # bounds count of hosts' buffers the mean
        assert "bytes, and none was proven impossible: " in outcome.reason
        assert request.memory_bytes < 1.02 * truth.smallest_bytes
        return
    if truth.objective_ns is None:
        assert isinstance(outcome, Infeasible)
        if matrices:  # of hosts' buffers bounds count the mean, as of their work
            assert truth.smallest_bytes <= outcome.smallest.memory.peak <= 1.02 * truth.smallest_bytes
            return
        assert outcome.smallest.memory.peak == truth.smallest_bytes
        # what it names as the smallest memory does fit
        assert isinstance(solve(profile, replace(request, memory_bytes=truth.smallest_bytes)), Solved)
        return
    assert isinstance(outcome, Solved)
    # What replicas save of the norm is shared out among units: a bound may count a part of it too much.
    step = [outcome.best.model.norm.step_ns(outcome.best.schedule, replicated=of) for of in (False, True)]
    assert outcome.bound_ns <= truth.objective_ns * (1 + 1e-6)
    if tight:
        assert outcome.bound_ns >= (truth.objective_ns - (step[0] - step[1])) * (1 - 1e-6)
    assert outcome.best.fits(request.memory_bytes, request.host_bytes)
    step_ns = outcome.best.predicted.period_ns
    assert outcome.status == "optimal" and step_ns >= outcome.in_order_bound_ns * (1 - 1e-9)
    assert truth.step_ns is not None and step_ns <= truth.step_ns * (1 + 1e-12)
    same = (
        truth
        if outcome.best.schedule.order is None
        else try_everything(profile, request, outcome.best, steps=True)
    )
    assert step_ns == pytest.approx(same.step_ns, rel=1e-12)


@pytest.mark.parametrize("seed", shorter(range(40), without=(4, 5, *range(12, 40))))
def test_messages_of_several_units_equal_trying_everything(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short all-reduces wait. Of what units pay once in a task bounds count the mean, a replay the
    largest: bounds are not tight."""
    monkeypatch.setattr("hzplan.solver.search.LEAST_WAITS", 0.0)
    monkeypatch.setattr("hzplan.solver.search.MESSAGES", (1, 2))
    _equals_trying_everything(seed, tight=False)


def test_without_every_replay_no_optimum_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, request = _instance(11)
    whole = solve(profile, request)
    monkeypatch.setattr("hzplan.solver.exhaust.MOST_CHOICES", 1)
    few = solve(profile, request)
    assert isinstance(whole, Solved) and isinstance(few, Solved)
    assert (whole.status, few.status) == ("optimal", "feasible")
    assert whole.replayed is not None and few.replayed is None
    assert few.bound_ns == whole.bound_ns


BRANCHED = (5029, 5032, 5037, 5055, 7002, 7774, 7776)
"""Where parts that were branched into once left a plan out."""


@pytest.mark.parametrize("seed", shorter([*range(5000, 5020), *BRANCHED], without=range(5010, 5020)))
@pytest.mark.parametrize("small", [False, True])
def test_no_search_claims_more_than_its_own_best(
    seed: int, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pace by itself, so that no other hides a bound that is too high."""
    if small:
        monkeypatch.setattr("hzplan.solver.relaxation.OFFERED_AT_ONCE", 1)
        for name, value in {"ROUNDS": 1, "MAX_NODES": 3, "FIRST_OFFER": 1}.items():
            monkeypatch.setattr(f"hzplan.solver.search.{name}", value)
    profile, request = _instance(seed)
    request = replace(request, gap=0.05 if seed % 2 else 0.0)
    truth = try_everything(profile, request)
    for search in searches_of(profile, request):
        found, useful = Candidates(), defaultdict(set)
        while search.has_open_nodes and search.may_improve(found):
            search.branch(found, useful)
        pace = search.question.micro_batch, search.question.schedule.pace
        own = truth.by_pace.get(pace, float("inf")) * MS
        assert search.bound_ms <= own * (1 + 1e-7)
        if own < float("inf"):
            assert not search.certainly_too_large
            search.run(found, 600)
            assert search.bound_ms <= own * (1 + 1e-7) <= found.least_ms * (1 + 2e-7)
            if found.all:
                assert found.least_ms <= own * (1 + request.gap) * (1 + 1e-6)
        else:
            assert not found.all


@pytest.mark.parametrize("seed", shorter(range(1000, 1012), without=(1003, 1005)))
def test_bound_holds_when_micro_batches_are_left_out(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hzplan.solver.search.MAX_POSITIONS", 1)
    rng = random.Random(seed)
    profile = random_profile(rng, micro_batches=(1,))
    request = Request(2**30, profile.mesh.world * 5, gap=0.0, depths=(1, 2), time_limit_s=600)
    truth = try_everything(profile, request).objective_ns
    outcome = solve(profile, request)
    assert truth is not None and isinstance(outcome, Solved)
    assert outcome.bound_ns <= truth * (1 + 1e-9)
    assert outcome.status == "optimal" and truth <= outcome.best.objective_ns * (1 + 1e-9)


@pytest.mark.parametrize("seed", shorter(range(3000, 3025), without={3005, 3008, *range(3015, 3025)}))
def test_what_is_pinned_stays_and_the_rest_is_best(seed: int) -> None:
    profile, request = _instance(seed)
    rng, mesh = random.Random(seed), profile.mesh
    pins = []
    for name in rng.sample([t.name for unit in profile.units for t in unit.tensors if t.trainable][:2], 1):
        shards = [*map(str, rng.choice(mesh.triples()).shards(mesh))]
        shards[rng.randrange(3)] = "*"
        pins.append(f"{name}={','.join(shards)}")
    request = replace(request, pins=tuple(pins), memory_bytes=2**30 if seed % 2 else request.memory_bytes)
    truth, outcome = try_everything(profile, request, steps=True), solve(profile, request)
    if truth.objective_ns is None:
        assert isinstance(outcome, Infeasible) and outcome.smallest.memory.peak == truth.smallest_bytes
        return
    assert isinstance(outcome, Solved)
    assert outcome.bound_ns == pytest.approx(truth.objective_ns, rel=1e-6)
    assert truth.step_ns is not None
    assert outcome.best.predicted.period_ns <= truth.step_ns * (1 + 1e-12)
    assert Pins(pins, profile).keep(profile, outcome.best.levels)
    faster = solve(profile, replace(request, pins=(), gap=0.05))
    assert isinstance(faster, Solved) and faster.best.memory.peak <= request.memory_bytes


@pytest.mark.parametrize("seed", shorter(range(4000, 4012), without=range(4006, 4012)))
def test_a_conflict_is_irreducible(seed: int) -> None:
    """Without any one of its groups something fits; with all of them nothing does."""
    profile, request = _instance(seed)
    rng, mesh = random.Random(seed), profile.mesh
    names = [t.name for unit in profile.units for t in unit.tensors if t.trainable][:3]
    pins = tuple(f"{name}={rng.choice((1, mesh.world))},*,{rng.choice((1, mesh.world))}" for name in names)
    pins = tuple(pin for pin in pins if not pin.endswith(f"={mesh.world},*,1"))
    free = try_everything(profile, request).smallest_bytes
    pinned = try_everything(profile, replace(request, pins=pins)).smallest_bytes
    if pinned == free:
        return
    request = replace(request, pins=pins, memory_bytes=(free + pinned) // 2)
    assert isinstance(solve(profile, request), Infeasible)
    found = conflict(profile, request)
    for name in decided(profile, request):
        request = request if name in found.groups else decided(profile, request)[name]
    kept = decided(profile, request)
    assert kept and found.groups == ("--memory", *kept)
    assert isinstance(solve(profile, request), Infeasible)
    for name, fewer in kept.items():
        assert isinstance(solve(profile, fewer), Solved)
        assert found.relief[name] == try_everything(profile, fewer).smallest_bytes


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ("nobody=1,1,1", "no tensor is called 'nobody'; one is called 'u0.t0'"),
        ("u0.t0=1,1", "write TENSOR=PARAM,GRAD,OPTIM in shards"),
        ("u0.t0", "write TENSOR=PARAM,GRAD,OPTIM in shards"),
        ("u0.t0=1,1,999", "has no level with 999 shards; it has 1"),
        ("*=*,*,1", None),
    ],
)
def test_a_pin_that_cannot_be_is_refused(pin: str, said: str | None) -> None:
    profile, request = _instance(0)
    request = replace(request, memory_bytes=2**30, gap=0.05)
    if said is None:
        outcome = solve(profile, replace(request, pins=(pin,)))
        assert isinstance(outcome, Solved)
        assert {triple.optim for of in outcome.best.levels.values() for triple in of} == {0}
        return
    with pytest.raises(UserError) as caught:
        solve(profile, replace(request, pins=(pin,)))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_an_interruption_ends_with_the_best_plan_so_far() -> None:
    profile, request = _instance(2)  # not solved by the first relaxation
    whole = solve(profile, replace(request, memory_bytes=2**30))
    stood: list[SearchState] = []

    def interrupt(state: SearchState) -> None:
        stood.append(state)
        if state.best_ms < float("inf") and len(stood) < 100:
            stood.extend([state] * 100)
            raise KeyboardInterrupt

    early = solve(profile, replace(request, memory_bytes=2**30), interrupt, interruptible=True)
    assert isinstance(whole, Solved) and isinstance(early, Solved)
    assert early.bound_ns <= whole.bound_ns * (1 + 1e-9)
    assert whole.best.predicted.period_ns <= early.best.predicted.period_ns
    assert (whole.status, early.status) == ("optimal", "feasible") and early.replayed is None

    def at_once(state: SearchState) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        solve(profile, request, at_once, interruptible=True)
    stood.clear()
    with pytest.raises(KeyboardInterrupt):  # a guard or a sweep is over then, whatever was found
        solve(profile, replace(request, memory_bytes=2**30), interrupt)


@pytest.mark.parametrize("seed", shorter([*range(5000, 5023), 5038], without=(5022,)))
def test_an_interruption_while_rounding_leaves_a_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    profile, request = _instance(seed)
    request = replace(request, memory_bytes=2**30)
    truth = try_everything(profile, request).objective_ns
    calls: list[int] = []

    def second(lp: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rounded(lp)

    monkeypatch.setattr("hzplan.solver.search.rounded", second)
    early = solve(profile, request, interruptible=True)
    assert isinstance(early, Solved) and truth is not None
    assert early.bound_ns <= truth * (1 + 1e-7)


@pytest.mark.parametrize("seed", shorter([*range(40), *range(2000, 2008)], without=range(40)))
def test_more_memory_is_never_slower(seed: int) -> None:
    profile, request = _instance(seed)
    least = try_everything(profile, request).smallest_bytes
    bounds, steps = [], []
    for factor in (1.0, 1.3, 2.0, 4.0):
        outcome = solve(profile, replace(request, memory_bytes=int(least * factor)))
        assert isinstance(outcome, Solved)
        bounds.append(outcome.bound_ns)
        steps.append(outcome.best.predicted.period_ns)
    for figures in (bounds, steps):
        for tighter, looser in itertools.pairwise(figures):
            assert looser <= tighter * (1 + 1e-6)


def test_beats_or_equals_every_known_scheme() -> None:
    profile = random_profile(random.Random(7))
    request = Request(2**30, profile.mesh.world * 4)
    outcome = solve(profile, request)
    assert isinstance(outcome, Solved)
    model = CostModel(profile)
    for levels in model.mesh.triples():
        for pace in paces(model, request.depths):
            for size in profile.micro_batches:
                schedule = model.schedule(**pace._asdict(), accumulation=4 // size, clip=True)
                known = evaluate(model, uniform(profile, levels), schedule, size)
                assert outcome.best.predicted.period_ns <= known.predicted.period_ns * (1 + TIE + 1e-9)


def test_plan_file_replays_to_what_it_records(tmp_path: Path) -> None:
    profile = random_profile(random.Random(3))
    request = Request(2**30, profile.mesh.world * 4)
    outcome = solve(profile, request)
    assert isinstance(outcome, Solved)
    plan = emit(profile, request, outcome, profile_path=tmp_path / "p.json", plan_path=tmp_path / "plan.json")
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    again = replay(loaded, profile, tmp_path / "plan.json")
    assert again.objective_ns / 1e9 == pytest.approx(plan.proof.objective_s, abs=1e-9)
    assert again.memory.peak == plan.predicted.peak_memory_bytes
    durations = CostModel(profile).durations(again.schedule, again.units, again.micro_batch)
    known = again.model.interference, None, again.processor_ns
    assert objective_ns(again.schedule, durations, *known) == again.objective_ns


def test_same_question_same_text() -> None:
    profile, request = _instance(5)
    texts = {
        repr(solve(profile, replace(request, memory_bytes=2**30, gap=0.01)).best.levels) for _ in range(2)
    }
    assert len(texts) == 1


def test_batch_that_the_world_does_not_divide_is_refused() -> None:
    profile = random_profile(random.Random(1))
    with pytest.raises(UserError, match="--global-batch"):
        solve(profile, Request(2**30, profile.mesh.world * 4 + 1))


def test_gradients_that_travel_narrower_take_less_time_and_no_more_memory() -> None:
    profile = random_profile(random.Random(5), micro_batches=(1,))
    wide, narrow = CostModel(profile), CostModel(profile, "bfloat16")
    schedule = wide.schedule(prefetch=1, accumulation=1, clip=True)
    levels = uniform(profile, Levels(0, 0, 0))
    before, after = (evaluate(model, levels, schedule, 1) for model in (wide, narrow))
    assert after.communication_ns < before.communication_ns
    assert after.memory == before.memory


def test_a_reduce_dtype_that_cannot_be_is_refused() -> None:
    profile = random_profile(random.Random(5), micro_batches=(1,))
    request = Request(2**30, profile.mesh.world, reduce_dtype="float64")
    with pytest.raises(UserError, match=r"--reduce-dtype float64: .* travel in float32 or bfloat16"):
        solve(profile, request)


@pytest.mark.parametrize("seed", shorter(range(6000, 6016), without=range(6007, 6016)))
def test_a_bound_is_one_whatever_gap_is_asked_for(seed: int) -> None:
    profile, request = _instance(seed)
    request = replace(request, gap=(0.002, 0.02, 0.1)[seed % 3])
    truth, outcome = try_everything(profile, request).objective_ns, solve(profile, request)
    if truth is not None:
        assert isinstance(outcome, Solved)
        assert outcome.bound_ns <= truth * (1 + 1e-9) <= outcome.best.objective_ns * (1 + 2e-9)
