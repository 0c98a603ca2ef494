"""``hzplan export`` as a user calls it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.cli.command import ROOT, hzplan


def test_export_writes_a_file_and_says_what_is_lost(tmp_path: Path) -> None:
    plan = ROOT / "plans" / "gpt-small-2x2-500mbit.json"
    done = hzplan("export", plan, "--to", "fsdp2", "-o", "sharding.py", "--json", cwd=tmp_path)
    assert done.code == 0, done.stderr
    said = json.loads(done.stdout)
    assert {"embed", "layers.7"} <= {lost["where"] for lost in said["lost"]}
    priced = [lost for lost in said["lost"] if lost["where"] != "the root"]  # several units, not one
    assert all(isinstance(lost["peak_bytes"], int) for lost in priced) and "step_s" in said
    messages = [lost for lost in priced if lost["where"] == "messages"]
    assert len(messages) == 1 and messages[0]["peak_bytes"] == 0
    assert "def shard(model" in (tmp_path / "sharding.py").read_text()
    free = ROOT / "plans" / "gpt-1.3b-a100-4.json"
    shown = hzplan("export", free, "--to", "fsdp2", "-o", "sharding.py", cwd=tmp_path).stderr
    assert "lost at no cost: " in shown
    strict = hzplan("export", plan, "--to", "deepspeed", "-o", "zero.json", "--strict", cwd=tmp_path)
    assert strict.code == 1 and "deepspeed cannot say" in strict.stderr and len(strict.lines) == 1
    assert not (tmp_path / "zero.json").exists()


def test_a_plan_that_travels_alone_has_losses_without_a_price(tmp_path: Path) -> None:
    shutil.copy(ROOT / "plans" / "gpt-small-2x2-500mbit.json", tmp_path / "plan.json")
    done = hzplan("export", "plan.json", "--to", "megatron-fsdp", cwd=tmp_path)
    assert done.code == 0 and "fully_shard_model" in done.stdout
    placed = hzplan("export", "plan.json", "--to", "megatron-fsdp-v2", "-o", "sharding.py", cwd=tmp_path)
    assert placed.code == 0 and "Placements(" in (tmp_path / "sharding.py").read_text()
    assert "what gets lost has no predicted cost" in done.stderr and "lost: layers.7" in done.stderr
    wrong = hzplan("export", "plan.json", "--to", "horovod", cwd=tmp_path)
    known = "fsdp2, deepspeed, deepspeed-mics, megatron-fsdp, megatron-fsdp-v2"
    assert wrong.code == 2 and f"--to horovod: one of {known}" in wrong.stderr


def test_optimizer_state_that_stays_on_the_host_is_no_loss(tmp_path: Path) -> None:
    """DeepSpeed has it there as the plan; FSDP2's file would have it on the device, and does not fit."""
    plan = ROOT / "plans" / "llama3-70b-h100-1-host.json"
    done = hzplan("export", plan, "--to", "deepspeed", "-o", "zero.json", "--json", cwd=tmp_path)
    assert done.code == 0, done.stderr
    config = json.loads((tmp_path / "zero.json").read_text())
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    done = hzplan("export", plan, "--to", "fsdp2", "-o", "sharding.py", cwd=tmp_path)
    assert done.code == 1 and "more than the budget" in done.stderr
