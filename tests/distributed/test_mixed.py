"""bf16 compute with fp32 master weights: against one process by hand, against FSDP2, memory to the byte."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from hzplan.core.hierarchy import Mesh
from tests.distributed.mixed import by_hand, cases, in_shards, narrow_cases
from tests.distributed.oracle import Case
from tests.distributed.ranks import chosen, on_ranks
from tests.distributed.shapes import MODELS

pytestmark = pytest.mark.distributed
MODULE = "tests.distributed.mixed"


@pytest.fixture(scope="module")
def errors(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, float]]:
    """All cases of one world in one job."""
    found: dict[str, dict[str, float]] = {}
    for world in (3, 4):
        payload = [asdict(case) for case in chosen(request) if Mesh.parse(case.mesh).world == world]
        found |= on_ranks(world, f"{MODULE}:run_cases", payload, tmp_path_factory.mktemp(f"world{world}"))
    return found


def listed(cases: list[Case], short: int) -> list[Any]:
    """The cases, named; so many of them in ``make test``."""
    return [
        pytest.param(case, marks=[] if number < short else pytest.mark.long, id=case.name)
        for number, case in enumerate(cases)
    ]


@pytest.mark.parametrize("case", listed(cases(), 7))
def test_equals_one_process_by_hand(case: Case, errors: dict[str, dict[str, float]]) -> None:
    """A gradient that was rounded to bfloat16 on its way is off by 1e-3, a bfloat16 master by more."""
    assert errors[case.name]["update"] <= 1e-5
    assert errors[case.name]["losses"] <= 1e-3


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    payload = [asdict(case) for case in narrow_cases()]
    return dict(on_ranks(4, f"{MODULE}:run_narrow", payload, tmp_path_factory.mktemp("narrow")))


@pytest.mark.parametrize("case", narrow_cases(), ids=lambda case: case.name)
def test_gradients_may_travel_in_bfloat16(case: Case, narrow: dict[str, dict[str, float]]) -> None:
    """Rounded once per stage (2^-9 each, of terms that may cancel), summed in float32, the same everywhere.

    What was computed in bfloat16 and travels through one stage is not rounded again.
    """
    assert narrow[case.name]["update"] <= 1e-2
    assert narrow[case.name]["update"] > 1e-5 or case.dtype == "bfloat16"
    assert narrow[case.name]["apart"] == 0.0


def test_a_world_of_one_is_equal_bit_for_bit() -> None:
    case = Case("1", (0, 0, 0), accumulation=2, steps=12, clip=False, dtype="bfloat16")
    losses, weights = in_shards(case)
    expected, exact = by_hand(case)
    assert losses == expected
    assert all(torch.equal(weights[name], value) for name, value in exact.items())


SHAPES = [(name, levels) for name in MODELS for levels in ((1, 1, 1), (0, 0, 1))]


@pytest.fixture(scope="module")
def shape_errors(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, float]]:
    found = on_ranks(2, f"{MODULE}:run_shapes", SHAPES, tmp_path_factory.mktemp("shapes"))
    return dict(zip(SHAPES, found, strict=True))


@pytest.mark.parametrize("case", SHAPES, ids=lambda case: f"{case[0]}-{''.join(map(str, case[1]))}")
def test_other_shapes_of_models(case: Any, shape_errors: dict[Any, dict[str, float]]) -> None:
    """Nested, repeated, recomputed and parallel units, some of them left out; evaluated between steps."""
    assert shape_errors[case]["update"] <= 1e-5
    assert shape_errors[case]["losses"] <= 1e-2  # the last bits of a bfloat16 loss


def test_memory_is_as_predicted(tmp_path: Path) -> None:
    for found in on_ranks(2, "tests.distributed.whole_path:memory", None, tmp_path):
        predicted, allocated = found["predicted"], found["allocated"]
        # Of the optimizer's state the padding between tensors is counted, but not allocated.
        padding = predicted.pop("optimizer") - allocated.pop("optimizer")
        assert 0 <= padding <= 0.05 * found["predicted_peak"], found["case"]
        assert allocated == predicted, found["case"]
        assert found["measured_peak"] == pytest.approx(found["predicted_peak"], rel=0.02), found["case"]


def test_losses_are_those_of_fsdp2(tmp_path: Path) -> None:
    found = on_ranks(4, "tests.distributed.whole_path:beside_fsdp2", 50, tmp_path)
    expected = found.pop("fsdp2")
    assert expected[-1] < expected[0] - 0.5
    for name, losses in found.items():
        assert losses == pytest.approx(expected, rel=1e-3), name
