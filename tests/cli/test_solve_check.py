"""``hzplan solve`` and ``hzplan check`` as commands."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from hzplan.formats.base import fingerprint
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile
from tests.cli.command import hzplan
from tests.instances import random_profile
from tests.unit.test_wire import profile_with


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    """A small profile in ``tmp_path/profile.json``."""
    made = random_profile(random.Random(4))
    made.save(tmp_path / "profile.json")
    return made


def _solve(folder: Path, profile: Profile, *options: object) -> object:
    batch = profile.mesh.world * 2
    return hzplan("solve", "profile.json", "--global-batch", batch, "-o", "plan.json", *options, cwd=folder)


def test_solve_writes_a_plan_and_says_how_good_it_is(tmp_path: Path, profile: Profile) -> None:
    done = _solve(tmp_path, profile, "--json")
    assert done.code == 0, done.stderr
    answer = json.loads(done.stdout)
    assert set(answer) == {
        "status",
        "gap",
        "objective_s",
        "bound_s",
        "replayed",
        "solve_s",
        "modelled",
        "predicted",
        "expected_step_s",
        "baselines",
        "gain",
        "plan",
    }
    assert {"step_s", "exposed_comm_s", "peak_memory_bytes", "tokens_per_s_per_gpu", "mfu"} == set(
        answer["predicted"]
    )
    assert {"ZeRO-3", "ZeRO-1", "DDP"} <= {baseline["name"] for baseline in answer["baselines"]}
    assert answer["gap"] == pytest.approx(answer["predicted"]["step_s"] / answer["bound_s"] - 1, abs=1e-5)
    assert answer["bound_s"] <= answer["objective_s"] <= answer["predicted"]["step_s"] * (1 + 1e-9)
    for baseline in answer["baselines"]:
        known = {"name", "step_s", "peak_memory_bytes", "fits", "allowed", "micro_batch", "recompute"}
        assert set(baseline) == known
        if baseline["fits"]:
            assert answer["predicted"]["step_s"] <= baseline["step_s"] * (1 + 1e-6)
    assert set(answer["gain"]) == {"over", "share", "is_the_plan", "without"}
    assert not answer["modelled"] and answer["expected_step_s"] is None
    plan = Plan.load(tmp_path / answer["plan"])
    assert plan.source.profile_sha256 == fingerprint(profile)


def test_optimizer_state_in_the_hosts_memory(tmp_path: Path) -> None:
    made = random_profile(random.Random(22))
    point = {"bytes": 1024, "seconds": 1e-6, "spread": 0.0}
    profile = Profile.model_validate(made.model_dump() | {"host": {"points": [point]}})
    profile.save(tmp_path / "profile.json")
    refused = _solve(tmp_path, profile, "--memory", "1B")
    assert refused.code == 3 and "with optimizer state in the host's memory (--host-memory)" in refused.stderr
    told = json.loads(_solve(tmp_path, profile, "--memory", "1B", "--json").stdout)
    least = told["smallest_memory_with_host"]
    assert least < told["smallest_memory_bytes"]
    done = _solve(tmp_path, profile, "--memory", f"{least}B", "--host-memory", "1MiB", "--gap", 0)
    said = " ".join(done.stdout.split())
    assert done.code == 0 and ", offloaded" in said and "of the host's" in said
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.offloaded and 0 < plan.predicted.memory_bytes["host"] <= 2**20
    assert plan.source.host_memory_bytes == 2**20
    assert hzplan("check", "plan.json", cwd=tmp_path).code == 0
    for target in ("fsdp2", "deepspeed", "megatron-fsdp", "megatron-fsdp-v2"):
        over = hzplan("export", "plan.json", "--to", target, "-o", "out", cwd=tmp_path)
        assert over.code == 1 and "more than the budget" in over.stderr, target
        assert not (tmp_path / "out").exists()
        moved = hzplan("export", "plan.json", "--to", target, "-o", "out", "--force", cwd=tmp_path)
        assert moved.code == 0 and "optimizer state of" in moved.stderr + moved.stdout, target
        (tmp_path / "out").unlink()
    made.model_copy(update={"host": None}).save(tmp_path / "profile.json")
    without = _solve(tmp_path, profile, "--host-memory", "1MiB")
    assert without.code == 2 and "knows no link to the host's memory" in without.stderr


def test_solve_prints_the_comparison_in_80_columns(tmp_path: Path, profile: Profile) -> None:
    done = _solve(tmp_path, profile)
    assert done.code == 0
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert "this plan" in done.stdout and "next: hzplan run plan.json" in done.stdout


def test_nothing_fits_exits_3_and_names_the_smallest_memory(tmp_path: Path, profile: Profile) -> None:
    done = _solve(tmp_path, profile, "--memory", "1KiB")
    assert done.code == 3
    (line,) = done.stderr.splitlines()
    smallest = int(line.partition("the smallest memory that would is ")[2].partition(" B")[0])
    assert not (tmp_path / "plan.json").exists()
    assert _solve(tmp_path, profile, "--memory", f"{smallest - 1}B").code == 3
    assert _solve(tmp_path, profile, "--memory", f"{smallest}B").code == 0
    assert Plan.load(tmp_path / "plan.json").predicted.peak_memory_bytes == smallest


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--memory", "64XB"), "--memory 64XB"),
        (("--memory", "0GiB"), "--memory 0GiB"),
        (("--gap", "-1"), "--gap"),
        (("--time-limit", "0"), "--time-limit"),
        (("-o", "missing/../"), "folder"),
        (("--wire", "int8"), "--wire 'int8': write exact, safe"),
        (("--wire", "grad=fp8"), "--wire grad=fp8: grad travels in bf16, int8"),
        (("--wire", "safe"), "how long rounding to bf16 takes; profile again"),
        (("--wire-exact", "*"), "--wire-exact says"),
        (("--wire", "safe", "--for", "fsdp2"), "--wire: no other runtime"),
        (("--reduce-dtype", "fp32-sum"), "--reduce-dtype fp32-sum"),
    ],
)
def test_bad_options_are_one_line(
    tmp_path: Path, profile: Profile, options: tuple[str, ...], named: str
) -> None:
    done = _solve(tmp_path, profile, *options)
    assert done.code == 2
    (line,) = done.stderr.splitlines()
    assert named in line
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def test_a_batch_that_the_world_does_not_divide(tmp_path: Path, profile: Profile) -> None:
    batch = profile.mesh.world * 2 + 1
    done = hzplan("solve", "profile.json", "--global-batch", batch, cwd=tmp_path)
    assert done.code == 2
    assert f"--global-batch {batch}" in done.stderr and len(done.stderr.splitlines()) == 1


def test_check_holds_a_plan(tmp_path: Path, profile: Profile) -> None:
    assert _solve(tmp_path, profile).code == 0
    plan = tmp_path / "plan.json"
    text = plan.read_text()
    assert hzplan("check", "plan.json", cwd=tmp_path).code == 0
    assert hzplan("check", "plan.json", "--replay-only", cwd=tmp_path).code == 0

    # As if the formulas had given a faster step when the plan was recorded.
    data = json.loads(text)
    data["proof"]["objective_s"] *= 0.98
    plan.write_text(json.dumps(data))
    done = hzplan("check", "plan.json", "--json", cwd=tmp_path)
    assert done.code == 1
    answer = json.loads(done.stdout)
    assert not answer["ok"]
    (verdict,) = answer["plans"]
    assert set(verdict) >= {"plan", "ok", "reason", "objective_s", "peak_memory_bytes"}
    assert "objective" in verdict["reason"]
    assert verdict["objective_s"]["now"] > verdict["objective_s"]["golden"] * 1.005
    assert json.loads(plan.read_text()) == data  # nothing is written unasked

    assert hzplan("check", "plan.json", "--update", cwd=tmp_path).code == 0
    assert plan.read_text() == text


def test_check_notices_another_profile(tmp_path: Path, profile: Profile) -> None:
    assert _solve(tmp_path, profile).code == 0
    data = json.loads((tmp_path / "profile.json").read_text())
    for use in data["uses"]:
        for cost in use["costs"]:
            cost["seconds"] *= 1.02
    (tmp_path / "profile.json").write_text(json.dumps(data))
    done = hzplan("check", "plan.json", cwd=tmp_path)
    assert done.code == 1
    assert "cost data" in done.stdout and "plan.json" in done.stderr


def test_check_of_nothing_is_bad_input(tmp_path: Path) -> None:
    for name in (".", "missing"):
        done = hzplan("check", name, cwd=tmp_path)
        assert done.code == 2
        assert len(done.stderr.splitlines()) == 1


def test_a_link_that_is_too_slow_is_said_and_one_group_is_planned(tmp_path: Path) -> None:
    profile_with((1e12, 1e5), 0.0).save(tmp_path / "slow.json")
    done = hzplan("solve", "slow.json", "--global-batch", 16, "-o", "plan.json", "--json", cwd=tmp_path)
    assert done.code == 0
    said = json.loads(done.stdout)["alone"]
    plan = Plan.load(tmp_path / said["plan"])
    assert said["groups"] == 2 and said["times"] > 1 and plan.mesh.world == 2
    assert plan.batch.global_batch == 8 and (tmp_path / "plan.alone.proof").exists()
    done = hzplan("check", "plan.alone.json", cwd=tmp_path)
    assert done.code == 0
