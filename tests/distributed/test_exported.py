"""What FSDP2 makes of a plan is the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import on_ranks
from tests.distributed.zero import SCHEMES

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
CASES = [(scheme, dtype) for scheme in SCHEMES for dtype in TOLERANCE]


@pytest.mark.parametrize("plans", [3, pytest.param(12, marks=pytest.mark.long)])
def test_plans_train_the_same_as_exported(plans: int, tmp_path: Path) -> None:
    payload = {"model": "gpt:tiny", "micro_batch": 1, "plans": plans, "folder": str(tmp_path)}
    for plan in on_ranks(4, "tests.distributed.exported:trained", payload, tmp_path):
        ours, theirs = plan["losses"]
        assert plan["lost"] == []
        assert len(ours) == len(theirs) > 3
        apart = max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))
        assert apart <= TOLERANCE[plan["dtype"]], (plan["seed"], apart)
        peak, of_fsdp2 = plan["peaks"]
        assert of_fsdp2 <= 1.05 * peak  # what fits under hzplan fits there


@pytest.mark.parametrize("cases", [CASES[5:9:3], pytest.param(CASES, marks=pytest.mark.long)], ids=len)
@pytest.mark.long
def test_deepspeed_trains_the_same_from_the_exported_file(
    cases: list[tuple[str, str]], tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    found = []
    for who in ("ours", "theirs"):
        folder = tmp_path / who
        folder.mkdir()
        payload = {"cases": cases, "folder": str(folder)}
        found.append(on_ranks(4, f"tests.distributed.zero:{who}", payload, folder))
    for (scheme, dtype), mine, exported in zip(cases, *found, strict=True):
        summed_in_bfloat16 = scheme == "ZeRO-0" and dtype == "bfloat16"
        assert exported["lost"] == ["the gradients"] * summed_in_bfloat16
        apart = max(abs(a - b) / abs(b) for a, b in zip(mine, exported["losses"], strict=True))
        assert apart <= TOLERANCE[dtype], (scheme, dtype, apart)
