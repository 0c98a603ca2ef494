"""``hzplan.auto``: a script that has no plan trains as under one, and starts at once the second time."""

from __future__ import annotations

import json
from pathlib import Path

from hzplan.formats.plan import Plan
from tests.distributed.ranks import on_ranks


def test_a_job_plans_for_matrices_as_its_groups_say(tmp_path: Path) -> None:
    found = on_ranks(2, "tests.distributed.in_job:with_matrices", str(tmp_path), tmp_path)
    assert found["losses"][-1] < found["losses"][0]
    assert found["rates"] == [0.02, 0.005]
    assert any(name.endswith("qkv.weight") for name in found["matrices"])
    assert not any(name.endswith("out.weight") for name in found["matrices"])


def test_a_job_plans_for_itself_and_remembers(tmp_path: Path) -> None:
    first, second, wrong = on_ranks(2, "tests.distributed.in_job:trained", str(tmp_path), tmp_path)
    assert first["losses"] == second["losses"] and first["losses"][-1] < first["losses"][0]
    assert first["plan"] == second["plan"]
    assert any("measuring" in line for line in first["said"])
    assert len(second["said"]) == 1 and second["seconds"] < 5
    kept = sorted(path.name.partition(".")[2] for path in tmp_path.glob("*.json"))
    assert kept.count("plan.json") >= 1 and kept.count("profile.json") == 1
    (path,) = (
        p for p in tmp_path.glob("*.plan.json") if Plan.load(p) == Plan.model_validate_json(first["plan"])
    )
    assert json.loads(path.read_text())["batch"]["accumulation"] == 2
    (profile,) = tmp_path.glob("*.profile.json")
    assert json.loads(profile.read_text())["optimizer"]["state_per_element"] == 1  # of the momentum asked for
    expected = ("no multiple", "tensors [sequences", "Adagrad is not measured", "no plan fits", "no labels")
    expected += ("messages of its own", "float7")
    for said, words in zip(wrong["refused"], expected, strict=True):
        assert words in said and "\n" not in said
