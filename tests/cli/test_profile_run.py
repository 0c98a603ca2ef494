"""``hzplan profile`` and ``hzplan run`` on ranks that they start themselves, and in jobs of others."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hzplan.cli import COMMANDS
from hzplan.core.hierarchy import Levels
from hzplan.formats.profile import Profile
from tests.cli.command import environment, hzplan, python, started
from tests.plans import make_plan

RUN_KEYS = {
    "steps",
    "loss_first",
    "loss_last",
    "skipped_steps",
    "resumed_from",
    "heldout_loss",
    "unigram_entropy",
    "tokens_per_s",
    "step_s",
    "computing_s",
    "exposed_comm_s",
    "peak_memory_bytes",
}


@pytest.fixture
def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


@pytest.mark.distributed
def test_run_trains_on_text(tmp_path: Path) -> None:
    make_plan("gpt:nano", mesh="2", micro_batch=8, accumulation=2, clip=True).save(tmp_path / "plan.json")
    arguments = (
        "--steps",
        80,
        "--lr",
        1e-2,
        "--metrics",
        "out/metrics.jsonl",
        "--trace",
        "trace.json",
        "--json",
    )
    done = hzplan("run", "plan.json", *arguments, "--json", cwd=tmp_path, cold=True)
    assert done.code == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)

    assert set(result) == RUN_KEYS
    assert result["steps"] == 80
    assert abs(result["loss_first"] - math.log(256)) < 0.5
    assert result["loss_last"] < 3.7
    assert result["heldout_loss"] < 3.7
    assert 2.5 < result["unigram_entropy"] < 4.0
    for quantity in ("step_s", "peak_memory_bytes"):
        assert set(result[quantity]) == {"predicted", "measured"}
        assert result[quantity]["measured"] > 0
    assert result["exposed_comm_s"]["measured"].keys() == {"tier 0", "optim"}
    for reading, step_s in result["step_s"].items():
        parts_s = [result["computing_s"][reading], *result["exposed_comm_s"][reading].values()]
        assert parts_s[0] > 0 and sum(parts_s) == pytest.approx(step_s, rel=1e-6)
    tokens = 2 * 2 * 8 * 32
    assert result["tokens_per_s"] == pytest.approx(tokens / result["step_s"]["measured"])

    metrics = [json.loads(text) for text in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in metrics] == list(range(80))
    for entry in metrics:
        expected = {"step", "loss", "step_s", "exposed_comm_s", "tokens", "peak_memory_bytes", "skipped"}
        assert set(entry) == expected
        assert entry["tokens"] == tokens
        assert entry["peak_memory_bytes"] == result["peak_memory_bytes"]["measured"]
    assert metrics[0]["loss"] == result["loss_first"]
    assert metrics[-1]["loss"] == result["loss_last"]
    assert "torchrun --nproc-per-node 2 -m hzplan run plan.json" in done.stderr
    assert "trace.json shows no prediction: plan.json: field source.profile: profile.json" in done.stderr

    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    ran = [e for e in events if e["ph"] == "X"]
    assert min(e["ts"] for e in ran) == 0
    assert (
        sum(e["name"].startswith("compute@") and e["pid"] == 1 for e in ran) == 5 * 2 * 12
    )  # steps, batches
    assert all(e["args"]["bytes"] > 0 for e in ran if e["name"].startswith("final-reduce"))


@pytest.mark.distributed
@pytest.mark.launch
def test_plans_differ_in_memory_not_in_losses(tmp_path: Path) -> None:
    results = []
    for name, levels in (("ddp", Levels(0, 0, 0)), ("zero1", Levels(0, 0, 1))):
        plan = make_plan("gpt:nano", mesh="2", levels=levels)
        plan.save(tmp_path / f"{name}.json")
        done = hzplan("run", f"{name}.json", "--steps", 6, "--json", cwd=tmp_path)
        assert done.code == 0, done.stderr
        results.append(json.loads(done.stdout))
    ddp, zero1 = results
    assert zero1["loss_last"] == pytest.approx(ddp["loss_last"], rel=1e-5)
    assert zero1["heldout_loss"] == pytest.approx(ddp["heldout_loss"], rel=1e-5)
    saved = ddp["peak_memory_bytes"]["measured"] - zero1["peak_memory_bytes"]["measured"]
    assert saved == pytest.approx(plan.model.parameters * 4, rel=0.05)  # half of AdamW's two moments


@pytest.mark.distributed
def test_run_of_a_factory_without_a_vocabulary(tmp_path: Path) -> None:
    """It trains on its own batches; the table says what was predicted and measured."""
    source = """
import torch
from torch import nn

class Regression:
    seq_len = 3

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def batch(self, n, generator):
        return torch.randn(n, 4, generator=generator)

    def loss(self, model, batch):
        return (model(batch).squeeze(1) - batch.sum(1)).square().mean()
"""
    (tmp_path / "regression.py").write_text(source)
    script = "from tests.plans import make_plan; from pathlib import Path\n"
    script += "make_plan('regression:Regression', mesh='2', micro_batch=16).save(Path('plan.json'))"
    assert python("-c", script, cwd=tmp_path).code == 0

    refused = hzplan("run", "plan.json", "regression:Regression", "--data", "regression.py", cwd=tmp_path)
    assert refused.code == 2
    assert "does not read bytes" in refused.stderr
    done = hzplan("run", "plan.json", "regression:Regression", "--steps", 30, "--lr", 0.05, cwd=tmp_path)
    assert done.code == 0, done.stderr
    for words in (
        "step time",
        "peak memory",
        "tokens/s",
        "computing",
        "waiting for tier 0",
        "predicted",
        "Loss",
    ):
        assert words in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.distributed
def test_profile_measures_and_says_what_to_type_next(tmp_path: Path) -> None:
    arguments = ("--nproc", 2, "--micro-batch", "2,1", "-o", "p.json")
    done = hzplan("profile", "gpt:nano", *arguments, cwd=tmp_path, cold=True)
    assert done.code == 0, done.stderr
    profile = Profile.load(tmp_path / "p.json")
    assert profile.mesh.world == 2
    assert profile.micro_batches == (1, 2)
    assert "layers.0–1 (each)" in done.stdout
    assert "hzplan solve p.json -o plan.json --global-batch 4" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if "hzplan solve" not in line) <= 80
    assert "-m hzplan profile gpt:nano --micro-batch 2,1 -o p.json" in done.stderr


@pytest.mark.distributed
@pytest.mark.long
def test_units_that_were_asked_for_are_trained(tmp_path: Path) -> None:
    """From profile to run; and a profile of another torch is said to be one."""
    arguments = (
        "--nproc",
        2,
        "--micro-batch",
        1,
        "--unit",
        "Attention",
        "--unit",
        "layers.*.mlp",
        "-o",
        "p.json",
    )
    done = hzplan("profile", "gpt:nano", *arguments, cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert not (tmp_path / "p.json.partial").exists()
    profile = Profile.load(tmp_path / "p.json")
    assert {"layers.0.attention", "layers.1.mlp"} <= {unit.name for unit in profile.units}
    old = profile.provenance.model_copy(update={"torch": "1.0"})
    profile.model_copy(update={"provenance": old}).save(tmp_path / "p.json")
    solved = hzplan("solve", "p.json", "--global-batch", 2, cwd=tmp_path)
    assert solved.code == 0, solved.stderr
    assert "expected error: " in solved.stdout
    done = hzplan("run", "plan.json", "--steps", 5, "--json", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert math.isfinite(json.loads(done.stdout)["loss_last"])
    assert "plan.json: profiled with torch 1.0, and this is torch" in done.stderr
    refused = hzplan("profile", "gpt:nano", "--unit", "Nothing", cwd=tmp_path)
    assert refused.code == 2
    assert "--unit Nothing: no module with parameters has this class or name; classes are" in refused.stderr


@pytest.mark.distributed
@pytest.mark.launch
def test_profile_as_json_on_a_given_mesh(tmp_path: Path) -> None:
    arguments = ("--nproc", 2, "--mesh", "1|2", "--micro-batch", "1", "--dtype", "bf16", "--json")
    done = hzplan("profile", "gpt:nano", *arguments, cwd=tmp_path)
    assert done.code == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["mesh"] == "1|2"
    profile = Profile.load(tmp_path / summary["profile"])
    assert profile.cluster.tier_names == ("node", "network")
    assert profile.model.dtype == "bfloat16"


@pytest.mark.distributed
def test_run_joins_an_srun(tmp_path: Path, free_port: int) -> None:
    make_plan("gpt:nano", mesh="2", dtype="bfloat16").save(tmp_path / "plan.json")
    common = {"SLURM_NTASKS": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "hzplan", "run", "plan.json", "--steps", "3", "--json"],
            cwd=tmp_path,
            env=environment(SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **common),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert json.loads(outputs[0][0])["steps"] == 3
    assert outputs[1] == ("", "")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.long), (signal.SIGTERM, 143)]
)
def test_interruption_ends_the_ranks(tmp_path: Path, number: signal.Signals, code: int) -> None:
    make_plan("gpt:nano", mesh="2").save(tmp_path / "plan.json")
    command = ("run", "plan.json", "--steps", "1000000", "--metrics", "m.jsonl")
    with started(*command, cwd=tmp_path, cold=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("Training"):
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 2
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert not any(is_running(child) for child in children)
    assert not list(tmp_path.glob("hzplan-*"))


def is_running(process: str) -> bool:
    """Whether a process is there and not just waiting to be reaped."""
    try:
        os.kill(int(process), 0)
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_help_has_an_example_of_every_command(tmp_path: Path) -> None:
    overview = hzplan("--help", cwd=tmp_path)
    assert overview.code == 0
    for command in COMMANDS:
        assert command in overview.stdout
        text = hzplan(command, "--help", cwd=tmp_path).stdout
        assert f"Example: hzplan {command}" in text


def test_help_needs_no_torch(tmp_path: Path) -> None:
    script = "import sys, hzplan.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], env=environment(), check=False).returncode == 0


def test_no_command_shows_the_help(tmp_path: Path) -> None:
    done = hzplan(cwd=tmp_path)
    assert done.code == 0
    assert "profile" in done.stdout
