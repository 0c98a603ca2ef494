"""Ranks that share one GPU, over gloo and over NCCL, against one process on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
SEVERAL = [case for case in CASES if Mesh.parse(case.mesh).world > 1]
TOLERANCES = {
    "float64": 1e-9,
    "float32": 1e-5,
    "bfloat16": 3e-2,
}  # the process computes in the master's dtype


def errors_of(cases: list[Case], tmp_path_factory: pytest.TempPathFactory, nccl: bool) -> dict[str, Any]:
    """All cases of one world in one job."""
    found: dict[str, Any] = {}
    for world in sorted({Mesh.parse(case.mesh).world for case in cases}):
        same = [case for case in cases if Mesh.parse(case.mesh).world == world]
        folder: Path = tmp_path_factory.mktemp(f"world{world}")
        found |= on_ranks(world, "tests.distributed.oracle:run_cases", as_payload(same), folder, nccl=nccl)
    return found


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return errors_of(CASES, tmp_path_factory, False)


@pytest.fixture(scope="module")
def errors_over_nccl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return errors_of(SEVERAL, tmp_path_factory, True)


def check(case: Case, found: dict[str, Any]) -> None:
    losses, weights = found[case.name]
    assert losses <= TOLERANCES[case.dtype]
    if case.dtype == "float64":
        assert weights <= TOLERANCES[case.dtype]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_one_process(case: Case, errors: dict[str, Any]) -> None:
    check(case, errors)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", SEVERAL, ids=lambda case: case.name)
def test_equals_one_process_over_nccl(case: Case, errors_over_nccl: dict[str, Any]) -> None:
    check(case, errors_over_nccl)


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_of_nccl_are_those_made_by_hand(world: int, tmp_path: Path) -> None:
    assert on_ranks(world, "tests.distributed.exchanges:check_library", "cuda", tmp_path, nccl=True) == []
