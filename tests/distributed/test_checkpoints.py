"""Checkpoints between plans and worlds; a rank that is killed, a job that is ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hzplan.checkpoint.folder import LOCK, listed
from hzplan.formats.plan import Plan
from tests.cli.command import environment, hzplan, started
from tests.distributed.pairs import contents, wrong_pairs
from tests.distributed.ranks import on_ranks
from tests.plans import make_plan


def test_any_plan_loads_what_any_other_saved(tmp_path: Path) -> None:
    assert wrong_pairs([*range(10)], 4, tmp_path) == []


def test_what_one_rank_cannot_write_or_read_is_an_error_on_all(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    said = on_ranks(2, "tests.distributed.pairs:a_rank_that_fails", str(folder), tmp_path)
    of_a_rank = [
        "/step-00000002: not saved: rank 1: disk: Input/output error",
        "rank 1: disk: Input/output error",
    ]
    assert said == 2 * of_a_rank
    assert [path.name for path in folder.iterdir() if path.name != LOCK] == ["step-00000001"]


RUN = ("--steps", 12, "--checkpoint-every", 3, "--lr", 1e-3, "--json", "--resume", "--seed", 5)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    make_plan("gpt:nano", mesh="2", clip=True).save(path)
    return path


@pytest.fixture(scope="module")
def undisturbed(plan: Path) -> dict[str, torch.Tensor]:
    """What twelve steps make of the model and its optimizer."""
    done = hzplan("run", plan, *RUN, "--checkpoint", "undisturbed", cwd=plan.parent)
    assert done.code == 0, done.stderr
    return contents(plan.parent / "undisturbed" / "step-00000012")


@pytest.mark.long
def test_a_killed_rank_goes_on_to_the_same_weights(
    plan: Path, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", "-m", "hzplan", "run", str(plan), *map(str, RUN)]
    with subprocess.Popen(
        [*command, "--checkpoint", str(folder)],
        cwd=tmp_path,
        env=environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        _wait_for(folder, 1)
        _kill_one_rank_of(job.pid)
        out, errors = job.communicate(timeout=150)
    assert job.returncode == 0, errors
    assert json.loads(out.splitlines()[-1])["resumed_from"] >= 3
    found = contents(folder / "step-00000012")
    assert found.keys() == undisturbed.keys()
    assert all(torch.equal(found[name], value) for name, value in undisturbed.items())


def _wait_for(folder: Path, number: int) -> None:
    end = time.monotonic() + 60
    while len(listed(folder)) < number:
        assert time.monotonic() < end
        time.sleep(0.01)


def _kill_one_rank_of(launcher: int) -> None:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    ranks = [int(child) for child in children if b"hzplan" in Path(f"/proc/{child}/cmdline").read_bytes()]
    os.kill(ranks[-1], signal.SIGKILL)


def test_sigterm_saves_and_answers_5(plan: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    options = ("--steps", 100_000, "--checkpoint-every", 5, "--checkpoint", folder)
    with started("run", plan, *options, cwd=tmp_path) as job:
        _wait_for(folder, 1)
        job.send_signal(signal.SIGTERM)
        _, errors = job.communicate(timeout=60)
    assert job.returncode == 5, errors
    last = errors.splitlines()[-1]
    assert last.startswith("hzplan: SIGTERM: the run has ended after ") and last.endswith(
        "go on with --resume"
    )
    steps = int(last.split(" after ")[1].split()[0])
    assert listed(folder)[0].name == f"step-{steps:08d}"
    refused = hzplan("run", plan, "--checkpoint", folder, cwd=tmp_path)
    assert refused.code == 2
    assert "has checkpoints of another run; go on from them with --resume" in refused.stderr


@pytest.mark.long
def test_a_run_goes_on_with_fewer_ranks_under_a_plan_for_them(tmp_path: Path) -> None:
    golden = Path(__file__).resolve().parents[2] / "plans"
    folder = tmp_path / "plans"
    shutil.copytree(golden / "profiles", folder / "profiles")
    shutil.copy(golden / "gpt-tiny-2x2.json", folder / "plan.json")
    settings = ("--lr", 1e-3, "--json", "--checkpoint", tmp_path / "checkpoints", "--resume")
    first = hzplan("run", folder / "plan.json", "--steps", 3, *settings, cwd=tmp_path)
    assert first.code == 0, first.stderr
    refused = hzplan("run", folder / "plan.json", "--nproc", 2, "--steps", 5, *settings, cwd=tmp_path)
    assert refused.code == 2 and "or let --replan do it" in refused.stderr
    options = ("--nproc", 2, "--replan", "--steps", 5)
    done = hzplan("run", folder / "plan.json", *options, *settings, cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["resumed_from"] == 3
    said = done.stderr
    assert "is not for 2 ranks: solving for them" in said and "of another world size" in said
    assert Plan.load(folder / "plan.2-ranks.json").mesh.world == 2
    again = hzplan("run", folder / "plan.json", *options[:-1], 6, *settings, cwd=tmp_path)
    assert again.code == 0 and "solving for them" not in again.stderr
