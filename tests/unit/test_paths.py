"""Rows of walks and relaxations: what they say about plans is true."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pulp
import pytest

from hzplan.core.schedule import MessageOrder
from hzplan.cost.simulate import replay
from hzplan.formats.profile import Profile
from hzplan.solver.candidates import Candidates
from hzplan.solver.evaluate import Evaluation
from hzplan.solver.paths import MS, LazyConstraint
from hzplan.solver.problem import build_fastest
from hzplan.solver.relaxation import Relaxation
from hzplan.solver.rounding import rounded
from hzplan.solver.search import Request, Search
from hzplan.solver.solve import searches_of
from tests.instances import random_profile


def _search(seed: int, accumulation: int) -> Search:
    rng = random.Random(seed)
    profile: Profile = random_profile(rng, micro_batches=(1,))
    batch = profile.mesh.world * accumulation
    request = Request(
        rng.choice([40_000, 80_000, 2**30]), batch, gap=0.0, clip=rng.random() < 0.5, depths=(1, 2)
    )
    return rng.choice(searches_of(profile, request))


def _choice(search: Search, rng: random.Random) -> dict[str, int]:
    return {unit: rng.randrange(len(pool.levels)) for unit, pool in search.pools.items()}


@pytest.mark.parametrize("seed", range(40))
def test_the_longest_row_is_the_objective(seed: int) -> None:
    search, rng = _search(seed, 1 + seed % 3), random.Random(seed)
    network = search.question.network
    for _ in range(5):
        choice = _choice(search, rng)
        durations = search.question.durations_of(choice)
        longest = max(cut.at(durations) for cut in network.critical_cycles(durations))
        found = search.evaluate(choice)
        alone = replay(found.schedule, found.durations_ns).period_ns * MS
        if network.graph.plain:
            assert longest == pytest.approx(alone, rel=1e-9)
        assert longest >= alone * (1 - 1e-9)
        capacities = max(cut.at(durations) for cut in network.capacities)
        assert capacities == pytest.approx(found.floor_ns * MS, rel=1e-9)
        assert max(longest, capacities) <= found.objective_ns * MS * (1 + 1e-9)
        if not network.graph.is_late or _sends_alike(found):
            assert max(longest, capacities) == pytest.approx(found.objective_ns * MS, rel=1e-9)


def _sends_alike(found: Evaluation) -> bool:
    """Whether units of one task have a message there all, or none of them: a row counts the mean."""
    of_tasks = [
        {found.units[unit].duration_ns(task.kind, task.tier) > 0 for unit in task.units}
        for task in found.schedule.tasks
        if task.tier >= 0
    ]
    return all(len(of_task) < 2 for of_task in of_tasks)


def test_a_window_with_the_energy_of_others_is_no_row() -> None:
    """Of a rank a message is slowed by a quarter, of the mean in full; a proof cannot mix them."""
    for seed in range(200):
        graph = _search(seed, 1).question.network.graph
        if not graph.is_late or not len(graph.windows.end):
            continue
        window = int(np.flatnonzero((graph.windows.rank == 0) & (graph.windows.begin < 0))[0])
        end, energies = int(graph.windows.end[window]), len(graph.energies)
        name = graph.nodes + window * energies + graph.of_rank  # the first energy of the mean
        begin = int(graph.windows.begin[window]) + graph.nodes - graph.numbered
        with pytest.raises(ValueError, match=f"node {name} does not wait"):
            graph.checked([end, name, begin])
        return
    pytest.fail("no profile has late ranks and windows")


def _cuts(search: Search, choices: list[dict[str, int]]) -> list[LazyConstraint]:
    """The rows that some choices, and their mean, violate most."""
    network = search.question.network
    durations = [search.question.durations_of(choice) for choice in choices]
    mixed = sum(durations) / len(choices)
    return [*network.capacities, *(cut for at in [mixed, *durations] for cut in network.critical_cycles(at))]


@pytest.mark.parametrize("seed", range(40))
def test_no_walk_is_longer_than_any_plans_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Walks found for one choice hold for all others, also where micro-batches are left out."""
    monkeypatch.setattr("hzplan.solver.search.MAX_POSITIONS", 1)
    search, rng = _search(seed, 5), random.Random(seed)
    choices = [_choice(search, rng) for _ in range(6)]
    cuts = _cuts(search, choices)
    for choice in choices:
        objective = search.evaluate(choice).objective_ns * MS
        at = search.question.durations_of(choice)
        assert all(cut.at(at) <= objective * (1 + 1e-9) for cut in cuts)


@pytest.mark.parametrize("seed", range(40))
def test_no_walk_in_an_order_is_longer_than_any_plans_step_in_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where micro-batches are left out: what goes on a tier in their time is the same, moved."""
    monkeypatch.setattr("hzplan.solver.search.MAX_POSITIONS", 1)
    plain, rng = _search(seed, 5), random.Random(seed)
    profile, prefetch = plain.question.model.profile, plain.question.schedule.prefetch
    ahead = [
        (unit.name, tuple(sorted(rng.randint(0, prefetch + 1) for _ in profile.mesh.tiers)))
        for unit in profile.units
    ]
    search = plain.in_order(MessageOrder(tuple(ahead), rng.randint(0, 4)))
    choices = [_choice(search, rng) for _ in range(6)]
    cuts = _cuts(search, choices)
    for choice in choices:
        found, at = search.evaluate(choice), search.question.durations_of(choice)
        assert all(cut.at(at) <= found.in_order_ns * MS * (1 + 1e-9) for cut in cuts)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_rounded_fits_and_what_is_bounded_is_not_beaten(seed: int) -> None:
    search, rng = _search(seed, 1 + seed % 2), random.Random(seed)
    found = Candidates()
    while search.has_open_nodes and search.may_improve(found):
        search.branch(found, defaultdict(set))
        plan = rounded(search.lp)
        if plan is not None:
            assert search.evaluate(plan).memory.peak <= search.request.memory_bytes
    for _ in range(50):
        one = search.evaluate(_choice(search, rng))
        if one.memory.peak <= search.request.memory_bytes:
            assert one.objective_ns * MS >= search.bound_ms * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_the_least_memory_is_not_beaten(seed: int) -> None:
    search, rng = _search(seed, 1), random.Random(seed)
    lp = Relaxation(search.question, least_memory=True)
    for unit, pool in search.pools.items():
        lp.offer(unit, list(range(len(pool.levels))))
    assert lp.solve()
    least = search.smallest.memory.peak
    while lp.add_event_rows():
        assert lp.solve()
    assert lp.value <= least * 2.0**-20 + 1e-9
    assert all(search.evaluate(_choice(search, rng)).memory.peak >= least for _ in range(50))


@pytest.mark.parametrize("seed", range(20))
def test_the_relaxation_and_the_ilp_have_one_bound(seed: int) -> None:
    """Where choices are fractional and both have all patterns and the same cycles."""
    search, rng = _search(seed, 1 + seed % 2), random.Random(seed)
    every = {unit: list(range(len(pool.levels))) for unit, pool in search.pools.items()}
    lp = Relaxation(search.question)
    for unit, patterns in every.items():
        lp.offer(unit, patterns)
    network = search.question.network
    some = [network.critical_cycles(search.question.durations_of(_choice(search, rng))) for _ in range(5)]
    lp.add_cycles([*network.capacities, *(cut for cuts in some for cut in cuts)])
    assert lp.solve()
    while lp.add_event_rows() or (lp.memory_violation_mib > 1e-7 and lp.raise_penalty()):
        assert lp.solve()
    problem = build_fastest(search.question, every, [cut for _, cut in lp.cycles])
    for variable in problem.lp.variables():
        variable.cat = pulp.LpContinuous
    status = problem.lp.solve(pulp.HiGHS(msg=False))
    if lp.memory_violation_mib > 1e-7:
        assert status == pulp.LpStatusInfeasible
        return
    assert status == pulp.LpStatusOptimal
    assert pulp.value(problem.lp.objective) == pytest.approx(lp.value, rel=1e-6)
