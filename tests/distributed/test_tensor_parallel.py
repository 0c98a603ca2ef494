"""TP 2 × DP 2: DTensors of a user's tensor parallelism under a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import on_ranks

EXACT = [([1, 1, 1], "float64"), ([0, 1, 1], "float64"), ([0, 0, 1], "float64"), ([0, 0, 0], "float64")]
ROUNDED = {"float32": 1e-5, "bfloat16": 2e-2}


@pytest.mark.distributed
def test_equals_one_process(tmp_path: Path) -> None:
    cases = [*EXACT, *(([1, 0, 1], dtype) for dtype in ROUNDED)]
    *exact, fp32, bf16 = on_ranks(4, "tests.distributed.tensor_parallel:differences", cases, tmp_path)
    assert len(exact) == len(EXACT)
    for found in exact:
        assert found["split"] == 3 * (3 * 2 + 1 + 2 + 1)  # biases of columns are cut too, those of rows not
        assert found["loss"] < 1e-9 and found["weight"] < 1e-9
    assert fp32["loss"] < ROUNDED["float32"] and bf16["loss"] < ROUNDED["bfloat16"]


@pytest.mark.distributed
def test_what_is_not_supported_is_refused_with_the_reason(tmp_path: Path) -> None:
    said = on_ranks(4, "tests.distributed.tensor_parallel:refusals", None, tmp_path)
    cut, dimensions, pipeline, saved = said
    assert cut.startswith("parameter layers.0.attention.q.weight is a DTensor that is cut over ranks which")
    assert dimensions.startswith("mesh has the dimensions ('dp', 'tp'); give the data-parallel one")
    assert pipeline.startswith("the plan is of the first of 2 pipeline stages")
    assert saved.startswith("hzplan.Checkpoints saves models of data-parallel ranks alone")
