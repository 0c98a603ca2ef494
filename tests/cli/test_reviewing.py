"""``hzplan review``: what a user's own setting costs, and what would be better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import ROOT, hzplan

PROFILE = ROOT / "plans" / "profiles" / "llama3-70b-4096-h100-16.json"
CODE = "fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))\nfully_shard(model)\n"


def reviewed(folder: Path, *arguments: object) -> dict[str, object]:
    done = hzplan("review", PROFILE, *arguments, "--json", cwd=folder)
    assert done.code == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_code_is_a_scheme_of_the_table(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CODE)
    mine = reviewed(tmp_path, "train.py", "--global-batch", 256, "--memory", "70GiB")
    solved = hzplan(
        "solve", PROFILE, "--global-batch", 256, "--memory", "70GiB", "--json",
        "--baseline", "zero3,recompute=none", "--reduce-dtype", "bf16-sum", cwd=tmp_path,
    )  # fmt: skip
    rows = {row["name"]: row for row in json.loads(solved.stdout)["baselines"]}
    assert mine["yours"]["step_s"] == rows["yours"]["step_s"]  # type: ignore[index]
    assert mine["plan"]["step_s"] == json.loads(solved.stdout)["predicted"]["step_s"]  # type: ignore[index]
    assert mine["read"] == ["FSDP2 over all ranks"]
    assert not (tmp_path / "plan.proof").exists() or solved.code == 0


def test_a_plan_is_reviewed_by_its_own_question(tmp_path: Path) -> None:
    """Its batch, and what its gradients travel in."""
    plan = ROOT / "plans" / "llama3-70b-4096-h100-16.json"
    found = reviewed(tmp_path, plan, "--memory", 60 * 2**30)
    recorded = json.loads(plan.read_text())["predicted"]["step_s"]
    assert found["yours"]["step_s"] == pytest.approx(recorded, rel=1e-6)  # type: ignore[index]


def test_a_configuration_says_the_batch_and_nothing_is_written(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    done = hzplan("review", PROFILE, "ds.json", "--recompute", "all", "--memory", "75GiB", cwd=tmp_path)
    assert done.code == 0 and [path.name for path in tmp_path.iterdir()] == ["ds.json"]
    assert "DeepSpeed, ZeRO stage 2" in done.stdout and "next: hzplan solve" in done.stdout
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 80


@pytest.mark.parametrize(
    ("setting", "more", "said"),
    [
        ("train.py", (), "add --global-batch"),
        ("hsdp9", ("--global-batch", 256), "is no plan file and no scheme"),
        ("zero3", ("--global-batch", 256, "--recompute", "some"), "recompute=some is not known"),
        ("none.py", ("--global-batch", 256), "cannot be read"),
        ("fp32.json", ("--global-batch", 256), "profile with --dtype fp32"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, setting: str, more: tuple[object, ...], said: str) -> None:
    (tmp_path / "train.py").write_text(CODE)
    (tmp_path / "fp32.json").write_text('{"zero_optimization": {"stage": 1}}')
    done = hzplan("review", PROFILE, setting, *more, cwd=tmp_path)
    assert done.code == 2 and len(done.lines) == 1 and said in done.stderr
