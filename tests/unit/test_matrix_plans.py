"""Plans of a matrix optimizer: what may be on the host, paces of scheme rows, and the least memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hzplan.core.matrices import EXCHANGED
from hzplan.core.recompute import NOTHING
from hzplan.cost.model import CostModel
from hzplan.errors import UserError
from hzplan.formats.profile import Profile
from hzplan.solver.conflict import least_bytes
from hzplan.solver.evaluate import Modes, evaluate, uniform
from hzplan.solver.schemes import Settings, _deepest, schemes_of
from hzplan.solver.search import Request
from hzplan.solver.solve import Solved, searches_of, solve
from tests.instances import random_profile, with_matrices


def profiles(count: int, *, host: bool = False) -> Iterator[Profile]:
    """Random ones with matrices, of several ranks."""
    found = 0
    for seed in range(10_000):
        rng = random.Random(seed)
        profile = random_profile(rng)
        if profile.optimizer.matrix is None:
            profile = with_matrices(profile, rng)
        if profile.mesh.world > 1 and (profile.host is not None or not host):
            found += 1
            yield profile
        if found == count:
            return


def question(profile: Profile, **asked: object) -> Request:
    return Request(2**40, 2 * profile.data_ranks * min(profile.micro_batches), **asked)  # type: ignore[arg-type]


def test_what_is_brought_together_stays_on_the_device() -> None:
    for profile in profiles(10, host=True):
        model = CostModel(profile)
        triple = next(one for one in model.triples if one.matrix == EXCHANGED)
        schedule = model.schedule(prefetch=1, accumulation=1, clip=True, offload=True)
        units = frozenset(unit.name for unit in profile.units)
        found = evaluate(
            model, uniform(profile, triple), schedule, profile.micro_batches[0], modes=Modes(NOTHING, units)
        )
        brought = {unit for unit, cost in found.units.items() if cost.matrix_bytes}
        assert brought and not brought & found.modes.offload


@pytest.mark.parametrize("seed", range(3))
def test_with_host_memory_and_matrices_there_is_a_plan(seed: int) -> None:
    """Of which every way to make it leaner is one, too: it can be written."""
    [*_, profile] = profiles(1 + seed, host=True)
    outcome = solve(profile, question(profile, host_bytes=2**40, gap=0.05))
    assert isinstance(outcome, Solved)
    brought = {unit for unit, cost in outcome.best.units.items() if cost.matrix_bytes}
    assert not brought & outcome.best.modes.offload


def test_schemes_keep_the_paces_that_bring_few_matrices_together() -> None:
    tried = 0
    for profile in profiles(30):
        request = question(profile)
        settings = Settings(searches_of(profile, request), request)
        for triple in schemes_of(settings.model).values():
            listed = settings.of(triple)
            kept = {one.search.question.schedule.matrix_units for one in _deepest(listed)}
            assert kept == {one.search.question.schedule.matrix_units for one in listed}
            tried += len(kept) > 1
    assert tried


def test_the_least_memory_is_no_more_than_any_plan_s() -> None:
    for profile in profiles(6):
        request = question(profile, gap=0.05)
        try:
            least = least_bytes(profile, request)
        except UserError:
            continue
        outcome = solve(profile, replace(request, memory_bytes=least))
        assert isinstance(outcome, Solved)
        # The ILP counts of what hosts receive each one's share, so the least of all may be 2 % below.
        assert least <= outcome.best.memory.peak * 1.02
        for search in searches_of(profile, request):
            assert search._smallest[1] <= search.smallest.memory.peak
