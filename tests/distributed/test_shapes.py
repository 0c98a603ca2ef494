"""Models that are no chain of blocks, and loops that do more than step after step, against one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.ranks import on_ranks
from tests.distributed.shapes import LEVELS, MODELS

pytestmark = pytest.mark.distributed

CASES = [(name, levels, prefetch) for name in MODELS for levels in LEVELS for prefetch in (1, 3)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    found = on_ranks(2, "tests.distributed.shapes:run_models", CASES, tmp_path_factory.mktemp("models"))
    return dict(zip(CASES, found, strict=True))


def listed() -> list[Any]:
    """The cases, named."""
    return [
        pytest.param(
            case,
            id=f"{case[0]}-{''.join(map(str, case[1]))}-pre{case[2]}",
        )
        for case in CASES
    ]


@pytest.mark.parametrize("case", listed())
def test_equals_one_process(case: Any, trained: dict[Any, Any]) -> None:
    """Collectives dawdle, so that what may overlap does; every step follows the schedule."""
    assert not isinstance(trained[case], str), trained[case]
    error, scheduled = trained[case]
    assert error <= 1e-9
    assert scheduled


@pytest.fixture(scope="module")
def looped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return on_ranks(2, "tests.distributed.shapes:run_loops", None, tmp_path_factory.mktemp("loops"))


@pytest.mark.parametrize(
    "loop", ["evaluates_before_step", "schedules_rate", "forgets_backward", "ends_backward_early"]
)
def test_loops_equal_one_process(loop: str, looped: dict[str, Any]) -> None:
    assert looped[loop] <= 1e-9


def test_a_unit_that_training_does_not_use(looped: dict[str, Any]) -> None:
    assert looped["aside"]["error"] <= 1e-9
    assert "'aside' has a gradient, but took no part" in looped["aside"]["raised"]


@pytest.mark.parametrize(
    ("deed", "refused"),
    [
        ("clips", "gradients are clipped, but the plan was solved without clipping"),
        ("changes_rate", "parameter group 0: lr changed between backward and step()"),
        ("evaluates", "is used between its last backward and step()"),
    ],
)
def test_what_cannot_follow_updates_in_backward(deed: str, refused: str, looped: dict[str, Any]) -> None:
    assert refused in looped["unclipped"][deed]
