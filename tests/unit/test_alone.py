"""One group by itself, where the link between groups is too slow for anything else."""

from __future__ import annotations

import pytest

from hzplan.formats.profile import Profile
from hzplan.solver.alone import Alone, one_group
from hzplan.solver.search import Request
from hzplan.solver.solve import Solved, solve
from tests.unit.test_wire import profile_with

BATCH = 16


def alone_of(profile: Profile, **options: object) -> tuple[Solved, Alone | None]:
    request = Request(1 << 40, BATCH, time_limit_s=20, **options)  # type: ignore[arg-type]
    together = solve(profile, request)
    assert isinstance(together, Solved)
    return together, one_group(profile, request, together, solve)


def test_a_slow_link_is_worth_less_than_none() -> None:
    profile = profile_with((1e12, 1e5), 0.0)
    together, alone = alone_of(profile)
    assert alone is not None and alone.groups == 2 and alone.tier == profile.cluster.tier_names[-1]
    assert alone.profile.mesh.world == 2 and alone.request.global_batch == BATCH // 2
    assert alone.times == pytest.approx(together.best.step_s / (2 * alone.solved.best.step_s))
    assert alone.times > 1


def test_a_fast_one_is_used() -> None:
    assert alone_of(profile_with((1e12, 1e12), 0.0))[1] is None


def test_pins_are_about_all_ranks() -> None:
    assert alone_of(profile_with((1e12, 1e5), 0.0), pins=("*=1,1,1",))[1] is None
