"""The runtime against one process: every legal triple, random plans, different data on every rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hzplan.core.hierarchy import Mesh
from tests.distributed.oracle import Case, as_payload, every_legal_case, order_of, random_cases
from tests.distributed.ranks import chosen, on_ranks
from tests.distributed.soak import as_exact

pytestmark = pytest.mark.distributed

WHOLE = "HZPLAN_INSTANCES" in os.environ  # make exhaustive
LEGAL = list(every_legal_case(whole=WHOLE))
RANDOM = list(random_cases(100 if WHOLE else 50))
ROUNDED = [case for case in LEGAL if case.dtype == "float32"]
SHORT = {case.name for case in [*LEGAL, *RANDOM[:14]] if case.dtype == "float64"}
SHORT |= {case.name for case in ROUNDED[::11]}
"""Every legal triple, some random ones, and a few in float32."""
LISTED = [
    pytest.param(case, marks=[] if case.name in SHORT else pytest.mark.long, id=case.name)
    for case in LEGAL + RANDOM
]
TOLERANCES = {"float64": (1e-9, 1e-9), "float32": (1e-5, None)}  # fp32 weights differ by up to lr


@pytest.fixture(scope="module")
def errors(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[float]]:
    """All cases of one world in one job."""
    found: dict[str, list[float]] = {}
    for world in (3, 4):
        cases = [case for case in chosen(request) if Mesh.parse(case.mesh).world == world]
        folder: Path = tmp_path_factory.mktemp(f"world{world}")
        found |= on_ranks(world, "tests.distributed.oracle:run_cases", as_payload(cases), folder)
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", LISTED)
def test_equals_one_process(case: Case, errors: dict[str, list[float]]) -> None:
    loss_error, weight_error = errors[case.name]
    loss_bar, weight_bar = TOLERANCES[case.dtype]
    assert loss_error <= loss_bar
    if weight_bar is not None:
        assert weight_error <= weight_bar


def test_one_plan_after_the_other_equals_one_process(tmp_path: Path) -> None:
    """The beginning of ``make soak``."""
    payload = {"steps": 30, "every": 6, "shown": False}
    assert as_exact(on_ranks(4, "tests.distributed.soak:soak", payload, tmp_path))


def test_cases_are_what_they_claim() -> None:
    assert len({case.name for case in LEGAL + RANDOM}) == len(LEGAL) + len(RANDOM)
    exact = [case for case in LEGAL if case.dtype == "float64"]
    assert len(exact) == (5 + 14 + 14) * (4 if WHOLE else 1)
    assert len({(case.accumulation, case.prefetch) for case in exact}) == 4
    orders = [order_of(case) for case in RANDOM if case.name in SHORT]
    assert 3 < sum(order is not None for order in orders) < len(orders) - 3
