"""Profiles of other worlds than were measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from hzplan.cost.collectives import with_ranks
from hzplan.errors import UserError
from hzplan.formats.plan import Plan
from hzplan.formats.source import profile_of
from hzplan.solver.guard import request_of
from hzplan.solver.solve import Solved, solve

GOLDEN = Path(__file__).resolve().parents[2] / "plans" / "gpt-tiny-2x2.json"


@pytest.mark.parametrize(("world", "mesh"), [(4, "2|2"), (2, "2"), (6, "2|3"), (8, "2|2,2")])
def test_a_measured_profile_goes_to_other_numbers_of_nodes(world: int, mesh: str) -> None:
    profile = profile_of(GOLDEN, Plan.load(GOLDEN))
    found = with_ranks(profile, world)
    assert found.cluster.mesh == mesh and found.mesh.world == world
    assert [c for c in found.collectives if c.high == 1] == [c for c in profile.collectives if c.high == 1]
    if world == 4:
        assert found == profile.model_copy(update={"stragglers": ()})
    if world == 6:  # two thirds of the bytes cross, where half of them did
        before, after = (
            next(c for c in p.collectives if (c.operation, c.low, c.high) == ("all_gather", 1, 2))
            for p in (profile, found)
        )
        assert [point.seconds for point in after.points] == pytest.approx(
            [point.seconds * 4 / 3 for point in before.points], abs=2e-9
        )
    else:
        assert isinstance(solve(found, request_of(Plan.load(GOLDEN))), Solved)


def test_nodes_stay_whole() -> None:
    profile = profile_of(GOLDEN, Plan.load(GOLDEN))
    with pytest.raises(UserError, match="3 ranks: the profile has nodes of 2, which they do not fill"):
        with_ranks(profile, 3)
