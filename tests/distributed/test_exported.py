"""What FSDP2 makes of a plan is the plan."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.ranks import on_ranks

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def test_twelve_plans_train_the_same_as_exported(tmp_path: Path) -> None:
    payload = {"seeds": [*range(12)], "folder": str(tmp_path)}
    for plan in on_ranks(4, "tests.distributed.exported:trained", payload, tmp_path):
        ours, theirs = plan["losses"]
        assert plan["lost"] == []
        assert len(ours) == len(theirs) > 3
        apart = max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))
        assert apart <= TOLERANCE[plan["dtype"]], (plan["seed"], apart)
        peak, of_fsdp2 = plan["peaks"]
        assert of_fsdp2 <= 1.05 * peak  # what fits under hzplan fits there
