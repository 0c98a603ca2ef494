"""``hzplan solve --sweep``: the same question at several points."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile
from tests.cli.command import hzplan
from tests.instances import random_profile


@pytest.fixture
def question(tmp_path: Path) -> list[object]:
    """A command for a small profile."""
    made: Profile = random_profile(random.Random(4))
    made.save(tmp_path / "profile.json")
    return ["solve", "profile.json", "--global-batch", made.mesh.world * 2, "-o", "plan.json"]


def test_every_budget_has_its_plan(question: list[object], tmp_path: Path) -> None:
    done = hzplan(*question, "--sweep", "memory=1KiB,1MiB,1GiB", "--json", cwd=tmp_path)
    assert done.code == 0, done.stderr
    small, middle, large = json.loads(done.stdout)["sweep"]
    assert small == {"point": "memory=1KiB", "status": "infeasible"}
    assert middle["step_s"] >= large["step_s"] * (1 - 1e-2) and middle["on_front"]
    for row, budget in ((middle, 2**20), (large, 2**30)):
        plan = Plan.load(tmp_path / row["plan"])
        assert plan.source.memory_budget_bytes == budget
        assert plan.predicted.peak_memory_bytes == row["peak_memory_bytes"] <= budget
        assert hzplan("check", row["plan"], cwd=tmp_path).code == 0
    assert not (tmp_path / "plan.json").exists()


def test_a_faster_network_is_never_slower(question: list[object], tmp_path: Path) -> None:
    done = hzplan(*question, "--sweep", "network=0.25,1,16", "--json", cwd=tmp_path)
    assert done.code == 0, done.stderr
    rows = json.loads(done.stdout)["sweep"]
    steps = [row["step_s"] for row in rows]
    assert steps[0] >= steps[1] * (1 - 1e-2) and steps[1] >= steps[2] * (1 - 1e-2)
    assert all(row["plan"] is None and row["on_front"] is None for row in rows)
    shown = hzplan(*question, "--sweep", "network=0.25,1,16", cwd=tmp_path)
    assert "network=16" in shown.stdout and all(len(line) <= 80 for line in shown.stdout.splitlines())


@pytest.mark.parametrize(
    "text",
    [
        "memory",
        "memory=",
        "memory=3",
        "nodes=1",
        "nodes=x",
        "nodes=0",
        "network=fast",
        "network=0",
        "network=nan",
    ],
)
def test_a_sweep_of_nothing_is_refused(question: list[object], tmp_path: Path, text: str) -> None:
    done = hzplan(*question, "--sweep", text, cwd=tmp_path)
    assert done.code == 2
    (line,) = done.stderr.splitlines()
    assert "--sweep" in line or "was measured on its nodes" in line


@pytest.fixture(scope="module")
def modelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a profile without a cluster."""
    folder = tmp_path_factory.mktemp("modelled")
    options = (
        "--analytic",
        "--cluster",
        "h100-8x400g",
        "--nodes",
        "2",
        "--dtype",
        "bf16",
        "--micro-batch",
        "1",
    )
    done = hzplan("profile", "gpt:nano", *options, "-o", "profile.json", cwd=folder)
    assert done.code == 0, done.stderr
    return folder


@pytest.mark.long
def test_other_numbers_of_nodes_and_a_plot(modelled: Path) -> None:
    ask = ("solve", "profile.json", "--global-batch", "64", "-o", "plan.json")
    done = hzplan(*ask, "--sweep", "nodes=1,4", "--plot", "front.svg", "--json", cwd=modelled)
    assert done.code == 0, done.stderr
    rows = json.loads(done.stdout)["sweep"]
    for row, nodes in zip(rows, (1, 4), strict=True):
        plan = Plan.load(modelled / row["plan"])
        assert plan.mesh.world == 8 * nodes and plan.batch.global_batch == 64
        assert hzplan("check", row["plan"], cwd=modelled).code == 0
    svg = (modelled / "front.svg").read_text()
    assert svg.startswith("<?xml") and "<!-- nodes -->" in svg and "predicted step (s)" in svg
    done = hzplan(*ask, "--nodes", "4", cwd=modelled)
    assert done.code == 0, done.stderr
    assert Plan.load(modelled / "plan.json").mesh.world == 32
    done = hzplan(*ask, "--nodes", "4", "--sweep", "memory=8GiB", "--json", cwd=modelled)
    assert done.code == 0, done.stderr
    assert hzplan("check", "plan.memory-8GiB.json", cwd=modelled).code == 0
    assert hzplan("check", "plan.json", cwd=modelled).code == 0
    done = hzplan(*ask, "--memory", "1KiB", "--json", cwd=modelled)
    assert done.code == 3 and "; on 4 nodes it is " in done.stderr
    assert list(json.loads(done.stdout)["smallest_memory_on_nodes"]) == ["4"]
    for options in (("--plot", "x.svg"), ("--sweep", "nodes=1", "--plot", "profile.json"), ("--nodes", "0")):
        assert hzplan(*ask, *options, cwd=modelled).code == 2


@pytest.mark.long
def test_a_ranks_share_under_model_parallelism(modelled: Path) -> None:
    ask = ("solve", "profile.json", "--global-batch", "64", "-o", "share.json")
    done = hzplan(*ask, "--model-parallel", "tp=2,cp=2", "--nodes", "4", cwd=modelled)
    assert done.code == 0, done.stderr
    assert "one rank's share of tp=2,pp=1,cp=2, 32 ranks in all" in " ".join(done.stdout.split())
    plan = Plan.load(modelled / "share.json")
    assert plan.mesh.world == 16 and plan.data_ranks == 8 and plan.source.profile == "share.profile.json"
    assert hzplan("check", "share.json", "--verify", cwd=modelled).code == 0
    for command in (
        ("run", "share.json"),
        ("verify", "share.json"),
        ("export", "share.json", "--to", "fsdp2"),
    ):
        refused = hzplan(*command, cwd=modelled)
        assert refused.code == 2 and "field parallel: the plan is beside tp=2,pp=1,cp=2" in refused.stderr
    done = hzplan(*ask, "--model-parallel", "tp=2", "--sweep", "nodes=1,4", "--json", cwd=modelled)
    worlds = [Plan.load(modelled / row["plan"]).mesh.world for row in json.loads(done.stdout)["sweep"]]
    assert worlds == [4, 16]
    refused = hzplan(*ask, "--nodes", "2", "--sweep", "nodes=1,4", cwd=modelled)
    assert refused.code == 2 and "leave --nodes out" in refused.stderr
    before = (modelled / "profile.json").read_text()
    for options in (("--model-parallel", "tp=2"), ("--nodes", "2")):
        refused = hzplan(
            "solve", "profile.json", "--global-batch", "64", *options, "-o", "profile.json", cwd=modelled
        )
        assert refused.code == 2 and "is what is read" in refused.stderr
    assert (modelled / "profile.json").read_text() == before
    refused = hzplan("solve", "share.profile.json", "--global-batch", "64", "--nodes", "2", cwd=modelled)
    assert refused.code == 2 and "the profile is of a rank's share" in refused.stderr


def test_nothing_fits_at_any_point(question: list[object], tmp_path: Path) -> None:
    done = hzplan(*question, "--sweep", "memory=1KiB,2KiB", cwd=tmp_path)
    assert done.code == 3 and "no plan fits at any point" in done.stderr
