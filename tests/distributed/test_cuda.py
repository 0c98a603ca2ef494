"""Ranks that share one GPU, over gloo, against one process on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hzplan.core.hierarchy import Mesh
from tests.distributed.oracle import Case, as_payload, on_device
from tests.distributed.ranks import on_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

CASES = list(on_device("cuda"))
TOLERANCES = {
    "float64": 1e-9,
    "float32": 1e-5,
    "bfloat16": 3e-2,
}  # the process computes in the master's dtype


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """All cases of one world in one job."""
    found: dict[str, list[float]] = {}
    for world in (1, 2, 4):
        cases = [case for case in CASES if Mesh.parse(case.mesh).world == world]
        folder: Path = tmp_path_factory.mktemp(f"world{world}")
        found |= on_ranks(world, "tests.distributed.oracle:run_cases", as_payload(cases), folder)
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_one_process(case: Case, errors: dict[str, list[float]]) -> None:
    losses, weights = errors[case.name]
    assert losses <= TOLERANCES[case.dtype]
    if case.dtype == "float64":
        assert weights <= TOLERANCES[case.dtype]
