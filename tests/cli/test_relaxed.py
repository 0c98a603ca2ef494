"""Groups that do not wait for each other, by command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile
from tests.cli.command import environment, hzplan
from tests.unit.test_wire import profile_with

BATCH = 8
ASK = ("--memory", "1GiB", "--global-batch", BATCH, "--time-limit", 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of two groups of two ranks over a slow link, and its plan."""
    path = tmp_path_factory.mktemp("relaxed")
    profile_with((1e12, 2e7), 0.0).save(path / "profile.json")
    done = hzplan("solve", "profile.json", *ASK, "--allow-stale", "periodic", "--json", cwd=path)
    assert done.code == 0, done.stderr
    (path / "said.json").write_text(done.stdout)
    return path


def test_solve_says_what_not_waiting_is_worth(folder: Path) -> None:
    said = json.loads((folder / "said.json").read_text())
    plan = Plan.load(folder / "plan.json")
    assert not isinstance(plan.replica_sync, str)
    assert said["relaxed"]["interval"] == plan.replica_sync.policy.interval
    assert said["relaxed"]["hidden"] == 1.0
    rates = said["tokens_per_s"]
    assert rates["all, relaxed"] == pytest.approx(2 * rates["one group"])
    assert rates["all, waiting"] < rates["one group"]
    assert plan.mesh.world == 2 and plan.batch.global_batch == BATCH // 2
    done = hzplan("solve", "profile.json", *ASK, "--allow-stale", "ema", "-o", "ema.json", cwd=folder)
    assert done.code == 0, done.stderr
    assert "all, relaxed" in done.stdout and "not proven" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_plan_is_shown_checked_compared_and_not_exported_silently(folder: Path) -> None:
    assert "do not wait for each other" in hzplan("show", "plan.json", cwd=folder).stdout
    done = hzplan("check", "plan.json", cwd=folder)
    assert done.code == 0 and "changed" not in done.stdout, done.stdout + done.stderr
    text = (folder / "plan.json").read_text()
    other = folder / "other.json"
    other.write_text(text.replace('"momentum": 0.9', '"momentum": 0.8'))
    assert "momentum 0.8" in hzplan("diff", "plan.json", "other.json", cwd=folder).stdout
    done = hzplan("export", "plan.json", "--to", "fsdp2", "--strict", "-o", "x.py", cwd=folder)
    assert done.code and "other groups" in done.stderr
    assert hzplan("verify", "plan.json", cwd=folder).code == 0


def test_a_transfer_that_no_longer_hides_fails_the_check(folder: Path) -> None:
    plan = Plan.load(folder / "plan.json")
    assert not isinstance(plan.replica_sync, str)
    longer = plan.replica_sync.model_copy(update={"transfer_s": plan.replica_sync.transfer_s * 10})
    (folder / "late.json").write_text((folder / "plan.json").read_text())
    plan.model_copy(update={"replica_sync": longer}).save(folder / "late.json")
    done = hzplan("check", "late.json", "--replay-only", cwd=folder)
    assert done.code == 1 and "a transfer to other groups takes" in done.stdout + done.stderr


@pytest.mark.distributed
@pytest.mark.launch
def test_all_groups_start_here(folder: Path) -> None:
    done = hzplan(
        *("run", "plan.json", "--steps", 30, "--metrics", "m.jsonl", "--checkpoint", "saved", "--json"),
        cwd=folder,
    )
    assert done.code == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["groups"]["group"] == 0
    assert said["groups"]["applied"] > 0 and said["groups"]["missed"] == 0
    assert said["loss_last"] < said["loss_first"]
    of_groups = [folder / "m.jsonl", folder / "m.group1.jsonl"]
    losses = [[json.loads(line)["loss"] for line in path.open()] for path in of_groups]
    assert len(losses[0]) == len(losses[1]) == 30
    assert losses[0] != losses[1]  # texts of their own
    done = hzplan(
        "run", "plan.json", "--steps", 34, "--checkpoint", "saved", "--resume", "--json", cwd=folder
    )
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["resumed_from"] == 30


@pytest.mark.distributed
@pytest.mark.long
def test_groups_that_start_by_themselves_meet(folder: Path) -> None:
    meet = subprocess.Popen(
        [sys.executable, "-m", "hzplan", "meet", "--port", "0", "--host", "localhost"],
        cwd=folder,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert meet.stderr is not None
        where = meet.stderr.readline().rpartition("--meet ")[2].strip()
        command = [sys.executable, "-m", "hzplan", "run", "plan.json", "--steps", "20", "--json"]
        groups = [
            subprocess.Popen(
                [*command, "--group", str(group), "--meet", where],
                cwd=folder,
                env=environment(OMP_NUM_THREADS="1"),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for group in range(2)
        ]
        for group, process in enumerate(groups):
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            assert json.loads(out)["groups"]["group"] == group
    finally:
        meet.terminate()
        meet.wait()


def test_bad_input(folder: Path) -> None:
    plain = ("solve", "profile.json", *ASK)
    said = {
        (*plain, "--allow-stale", "never"): "begin with periodic",
        (*plain, "--allow-stale", "periodic", "--wire", "safe"): "--wire: not with --allow-stale",
        ("run", "plan.json", "--group", 0): "--group and --meet",
        ("run", "plan.json", "--group", 7, "--meet", "localhost:1"): "--group 7: the plan has groups 0 to 1",
        ("run", "plan.json", "--group", 0, "--meet", "nowhere"): "HOST:PORT",
        ("run", "plan.json", "--nproc", 3): "start all of them",
        ("run", "plan.json", "--against", "ddp"): "--against: peers wait",
    }
    for command, expected in said.items():
        done = hzplan(*command, cwd=folder)
        assert done.code == 2, (command, done.stdout, done.stderr)
        assert expected in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    alone = Profile.load(folder / "plan.profile.json")
    assert alone.mesh.world == 2
