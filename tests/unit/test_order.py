"""Message orders in the cost model: what they cannot make shorter, and a plan that they do."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from hzplan.core.order import within
from hzplan.core.schedule import MessageOrder
from hzplan.cost.model import CostModel
from hzplan.errors import UserError
from hzplan.formats.plan import Plan
from hzplan.solver.evaluate import Evaluation, evaluate, replay
from hzplan.solver.in_order import InOrder
from hzplan.solver.message_order import in_best_order
from hzplan.solver.solve import Request, Solved, searches_of, solve
from tests.instances import random_profile, try_everything
from tests.unit.test_gap import golden


def alike(one: Evaluation, *ahead: int) -> MessageOrder:
    """The same numbers for all units."""
    return MessageOrder(tuple((unit, ahead) for unit in one.levels), 1)


def in_order(one: Evaluation, order: MessageOrder) -> Evaluation:
    schedule = one.schedule
    ordered = one.model.schedule(
        **schedule.pace._asdict(),
        accumulation=schedule.accumulation,
        clip=schedule.clip,
        offload=bool(schedule.offload_slots),
        order=order,
    )
    return evaluate(one.model, one.levels, ordered, one.micro_batch, one.slots, one.modes)


@pytest.mark.parametrize("seed", range(8))
def test_no_order_is_below_the_objective(seed: int) -> None:
    """Which is why the bound of ``solve`` holds for plans in any order; memory and loads are the same."""
    rng = random.Random(seed)
    profile = random_profile(rng)
    model = CostModel(profile)
    triples = model.mesh.triples()
    levels = {
        unit: tuple(rng.choice(triples).of(trainable=tensor.trainable) for tensor in tensors)
        for unit, tensors in ((unit.name, unit.tensors) for unit in profile.units)
        if tensors
    }
    for prefetch, clip in itertools.product((1, 2), (True, False)):
        schedule = model.schedule(prefetch=prefetch, accumulation=2, clip=clip)
        one = evaluate(model, levels, schedule, profile.micro_batches[0])
        for ahead in itertools.combinations_with_replacement(range(prefetch + 2), schedule.tiers):
            other = in_order(one, alike(one, *ahead))
            assert other.objective_ns == one.objective_ns and other.floor_ns == one.floor_ns
            assert other.in_order_ns >= one.objective_ns * (1 - 1e-9)
            assert other.memory == one.memory


@pytest.mark.long
def test_an_order_makes_a_step_shorter_that_waits_for_its_links() -> None:
    plan, one = golden("gpt3-175b-h100-64")
    shared = in_order(one, alike(one, 0, 0)).schedule.shared
    assert shared is not None
    apart = evaluate(one.model, one.levels, shared, one.micro_batch, one.slots, one.modes)
    ordered = in_best_order(apart, lambda: False)
    assert ordered.schedule.order is not None
    assert ordered.predicted.period_ns < 0.96 * apart.predicted.period_ns
    assert ordered.in_order_ns <= ordered.predicted.period_ns * (1 + 1e-9)
    assert plan.proof.bound_s * 1e9 <= ordered.objective_ns


def test_a_plan_keeps_its_order(tmp_path: Path) -> None:
    plan, one = golden("gpt3-175b-h100-64")
    path = tmp_path / "plan.json"

    def saved(*ahead: int, sync: int | None = 3) -> Plan:
        units = tuple(unit.model_copy(update={"ahead": ahead}) for unit in plan.units)
        plan.model_copy(update={"units": units, "sync_ahead": sync}).save(path)
        return Plan.load(path)

    assert saved(0, 1).message_order == MessageOrder(tuple((unit.name, (0, 1)) for unit in plan.units), 3)
    assert replay(Plan.load(path), one.model.profile, path).schedule.order == Plan.load(path).message_order
    for wrong in ((0,), (1, 0), (0, 1, 1)):
        with pytest.raises(UserError, match="ahead: 2 numbers from 0 on needed"):
            saved(*wrong)
    with pytest.raises(UserError, match="for a message order, sync_ahead is needed too"):
        saved(0, 1, sync=None)
    with pytest.raises(UserError, match="units: ahead: the message order waits for parameters"):
        replay(saved(0, 99), one.model.profile, path)


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_in_an_order_is_below_its_bound(seed: int) -> None:
    """By trying all choices under every pace, from before the first node on."""
    rng = random.Random(seed)
    profile = random_profile(rng, micro_batches=(1,))
    batch = 2 * profile.mesh.world
    request = Request(1, batch, gap=1e-6, clip=rng.random() < 0.5, depths=(1, 2), recompute="none")
    least = try_everything(profile, request).smallest_bytes
    request = replace(request, memory_bytes=int(least * rng.choice((1.05, 1.3, 3.0))))
    searches = searches_of(profile, request)
    numbers = tuple(sorted(rng.randint(0, 3) for _ in profile.mesh.tiers))
    units = [unit.name for unit in profile.units]
    order = MessageOrder(tuple((unit, numbers) for unit in units if rng.random() < 0.8), rng.randint(0, 3))
    solved = solve(profile, request)
    assert isinstance(solved, Solved)
    best = solved.best
    start = in_order(best, within(order, best.schedule.prefetch + 1))
    truth = try_everything(profile, request, start)
    assert truth.objective_ns is not None
    inside = InOrder(start, searches, request)
    for nodes in (1, 1, 60):
        inside.explore(nodes, inf)
        assert inside.bound_ns <= truth.objective_ns * (1 + 1e-6)
        assert inside.found.least_ns >= truth.objective_ns * (1 - 1e-6)


def test_a_search_covers_the_plans_whose_order_every_pace_was_searched_in() -> None:
    """A plan of a smaller prefetch keeps less of the order, which is not the one that deeper paces had."""
    profile = random_profile(random.Random(2), micro_batches=(1,))
    request = Request(2**40, 2 * profile.mesh.world, depths=(1, 3))
    searches = searches_of(profile, request)
    solved = solve(profile, request)
    assert isinstance(solved, Solved)
    by_depth = {search.question.schedule.prefetch: search for search in searches}
    units = [unit.name for unit in profile.units]

    def at(depth: int, number: int) -> Evaluation:
        best, schedule = solved.best, by_depth[depth].question.schedule
        one = evaluate(best.model, best.levels, schedule, best.micro_batch, modes=best.modes)
        ahead = (number,) * len(profile.mesh.tiers)
        return in_order(one, MessageOrder(tuple((unit, ahead) for unit in units), 1))

    deep = InOrder(at(3, 4), searches, request)
    assert deep.covers(at(3, 4))
    assert not deep.covers(at(1, 2)) and not deep.covers(at(3, 3)) and not deep.covers(solved.best)
    shallow = InOrder(at(1, 2), searches, request)
    assert shallow.covers(at(1, 2)) and shallow.covers(at(3, 2))
