"""``hzplan run --against``: the plan beside its peers, on real ranks."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hzplan.core.hierarchy import Levels
from hzplan.peers import PEERS, POORER
from tests.cli.command import hzplan
from tests.plans import make_plan

KEYS = {
    "name",
    "step_s",
    "tokens_per_s",
    "ratio",
    "peak_memory_bytes",
    "fits",
    "sent_bytes",
    "exposed_comm_s",
    "waits_s",
    "processor_s",
    "loss_error",
    "losses_agree",
    "round_s",
}


def compared(folder: Path, plan: Path, *arguments: object) -> dict[str, Any]:
    done = hzplan(
        *("run", plan, *arguments, "--steps", 6, "--round-steps", 1, "--lr", "1e-4", "--json"),
        cwd=folder,
        timeout_s=300,
        OMP_NUM_THREADS="1",
    )
    assert done.code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


DEEPSPEED = {"deepspeed1", "deepspeed3"}
MATRIX_PEERS = {"owners", "owners-size", "owners-work", "pytorch-optimizer"}


@pytest.mark.distributed
def test_muon_s_peers_train_the_same(tmp_path: Path) -> None:
    plan, peers = tmp_path / "plan.json", {"zero1", "fsdp2", *MATRIX_PEERS}
    make_plan(mesh="2", levels=Levels(0, 0, 1), clip=True, optimizer="muon", matrix="exchanged").save(plan)
    found = compared(tmp_path, plan, "--against", ",".join(sorted(peers)))
    contenders = {entry["name"]: entry for entry in found["contenders"]}
    assert not found["absent"] and peers <= contenders.keys()
    assert all(entry["losses_agree"] for entry in contenders.values())


@pytest.mark.distributed
@pytest.mark.parametrize(
    "left_out", [DEEPSPEED, pytest.param(set(), marks=pytest.mark.long)], ids=["without DeepSpeed", "all"]
)
def test_every_peer_trains_the_same_and_is_measured(left_out: set[str], tmp_path: Path) -> None:
    """DeepSpeed's processes import for longer than all others train."""
    plan, other = tmp_path / "plan.json", tmp_path / "other.json"
    make_plan(mesh="2|2", levels=Levels(1, 1, 2), accumulation=2, clip=True).save(plan)
    make_plan(mesh="2|2", levels=Levels(0, 0, 2), accumulation=2, clip=True).save(other)
    asked = {*PEERS, *POORER} - left_out
    found = compared(tmp_path, plan, "--against", ",".join([*sorted(asked), str(other)]))
    contenders = {entry["name"]: entry for entry in found["contenders"]}
    absent = {"megatron-fsdp", *MATRIX_PEERS} | (DEEPSPEED if find_spec("deepspeed") is None else set())
    assert set(found["absent"]) == absent & asked
    assert set(contenders) == ({"hzplan", "ddp again", "alone", "other"} | asked) - absent
    for name, entry in contenders.items():
        assert set(entry) == KEYS
        assert len(entry["round_s"]) == found["rounds"] == 6 and min(entry["round_s"]) > 0
        assert entry["ratio"]["low"] <= entry["ratio"]["value"] <= entry["ratio"]["high"]
        if name == "alone":
            assert entry["loss_error"] is None
        else:
            assert entry["loss_error"] < 1e-4, f"{name} trains something else"
        assert entry["peak_memory_bytes"] > 100_000
    # Whole replicas hold parameters, gradients and two moments: 16 bytes a parameter.
    assert contenders["ddp"]["peak_memory_bytes"] > 16 * 27_000
    assert contenders["ddp"]["peak_memory_bytes"] > contenders["fsdp2"]["peak_memory_bytes"]
    # FSDP2 with its shards of these on the host has, on the device, what a step needs besides.
    saved = contenders["fsdp2"]["peak_memory_bytes"] - contenders["fsdp2-offload"]["peak_memory_bytes"]
    assert saved > 0.7 * 16 * 27_000 / 4  # its peak is a little lower or higher, as messages come
    # Ranks alone send next to nothing; the others send gradients at least.
    assert contenders["alone"]["sent_bytes"]["in_node"] < contenders["hzplan"]["sent_bytes"]["in_node"] / 3
    assert contenders["hzplan"]["ratio"] == {"value": 1.0, "low": 1.0, "high": 1.0}


@pytest.mark.distributed
def test_in_bf16_the_sharded_schemes_agree(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    make_plan(mesh="2", levels=Levels(0, 1, 1), dtype="bfloat16").save(plan)
    found = compared(tmp_path, plan, "--against", "fsdp2,fsdp2@0,ddp@3,hsdp,tp-dp")
    contenders = {entry["name"]: entry for entry in found["contenders"]}
    assert contenders["fsdp2"]["loss_error"] < 1e-3
    assert contenders["ddp"]["losses_agree"] and contenders["ddp@3"]["losses_agree"]
    assert contenders["fsdp2@0"]["loss_error"] == contenders["fsdp2"]["loss_error"]
    assert "no level between" in found["absent"]["hsdp"]


@pytest.mark.parametrize(
    ("against", "says"),
    [
        ("ddp,nobody", "--against nobody: not known; use ddp,"),
        ("ddp@0", "--against ddp@0: not known"),
        ("fsdp2@x", "--against fsdp2@x: not known"),
        ("alone@1", "--against alone@1: not known"),
        (",", "--against needs names"),
        ("missing.json", "missing.json: no such file"),
        ("other.json", "other.json: field batch differs from the plan's"),
    ],
)
def test_whom_it_cannot_compare_it_names_before_ranks_start(tmp_path: Path, against: str, says: str) -> None:
    make_plan(mesh="2").save(tmp_path / "plan.json")
    make_plan(mesh="2", accumulation=2).save(tmp_path / "other.json")
    done = hzplan("run", "plan.json", "--against", against, cwd=tmp_path)
    assert (done.code, len(done.lines)) == (2, 1)
    assert says in done.lines[0]


def test_metrics_belong_to_a_run_of_the_plan_alone(tmp_path: Path) -> None:
    make_plan(mesh="2").save(tmp_path / "plan.json")
    done = hzplan("run", "plan.json", "--against", "ddp", "--metrics", "m.jsonl", cwd=tmp_path)
    assert done.code == 2 and "--metrics" in done.lines[0]
    assert not (tmp_path / "m.jsonl").exists()
