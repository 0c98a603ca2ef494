"""``hzplan run`` on ranks that share one GPU, over NCCL, beside the same plan on processors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hzplan.core.hierarchy import Levels
from hzplan.core.matrices import MATRIX_WAYS
from hzplan.core.recompute import HOST, Recomputed
from hzplan.core.wire import Wire
from hzplan.formats.plan import Plan
from tests.cli.command import Done, hzplan, python
from tests.plans import make_plan

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.timeout(300),
]

RUN = """import os, runpy
from tests.distributed.ranks import shared_card
os.environ.update(shared_card(int(os.environ["RANK"])))
runpy.run_module("hzplan", run_name="__main__", alter_sys=True)
"""
"""What torchrun starts: the command on a card that all ranks share."""
GLOO: Any = {"HZPLAN_BACKEND": "gloo", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
LAYERS = ("layers.0", "layers.1")
PLANS: dict[str, dict[str, Any]] = {
    "full shard": {"mesh": "2", "clip": True},
    "two levels": {"mesh": "2,2", "levels": Levels(1, 1, 2), "accumulation": 2},
    "two tiers": {"mesh": "2|2", "levels": Levels(0, 1, 2), "accumulation": 2, "prefetch": 2, "clip": True},
    "bfloat16": {"mesh": "2", "dtype": "bfloat16"},
    "recomputed in parts": {"mesh": "2", "recompute": Recomputed.of(LAYERS, "attention")},
    "activations on the host": {"mesh": "2", "recompute": Recomputed.of(LAYERS, HOST), "offload": LAYERS},
    "int8": {"mesh": "2|2", "wire": Wire(("int8", "int8"), ("int8", "int8"))},
}
MUON: dict[str, Any] = {"mesh": "4", "levels": Levels(0, 0, 1), "optimizer": "muon"}
PLANS |= {f"matrices {way}": MUON | {"matrix": way} for way in MATRIX_WAYS}


def succeeded(done: Done) -> Any:
    """What a command said in JSON."""
    assert not done.code, done.stderr[-3000:]
    return json.loads(done.stdout)


def started_on_card(plan: Plan, folder: Path, *words: object, **variables: Any) -> Done:
    """``hzplan run`` of it."""
    (folder / "shared.py").write_text(RUN)
    plan.save(folder / "plan.json")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", plan.mesh.world]
    command = ["shared.py", "run", "plan.json", "gpt:nano", "--json", *words]
    return python(*launcher, *command, cwd=folder, cold=True, OMP_NUM_THREADS="1", **variables)


def on_card(plan: Plan, folder: Path, *words: object) -> Any:
    """What it says."""
    return succeeded(started_on_card(plan, folder, *words))


@pytest.mark.parametrize("name", PLANS)
def test_trains_as_on_processors(name: str, tmp_path: Path) -> None:
    plan = make_plan("gpt:nano", **PLANS[name])
    card = on_card(plan, tmp_path, "--steps", 4)
    words = ["run", "plan.json", "gpt:nano", "--steps", 4, "--json", "--nproc", plan.mesh.world]
    processors = succeeded(hzplan(*words, cwd=tmp_path, **GLOO))
    loose = plan.model.dtype == "bfloat16" or plan.optimizer == "muon"  # Newton-Schulz is in bfloat16
    assert card["loss_first"] == pytest.approx(processors["loss_first"], rel=2e-2 if loose else 1e-4)
    assert card["loss_last"] == pytest.approx(processors["loss_last"], rel=2e-2 if loose else 2e-3)


def test_buffers_are_registered_where_the_card_can(tmp_path: Path) -> None:
    plan = make_plan("gpt:nano", mesh="2")
    usual = on_card(plan, tmp_path, "--steps", 3)
    done = started_on_card(plan, tmp_path, "--steps", 3, HZPLAN_NCCL_REGISTER="1")
    if done.code:  # a machine with a single card gives NCCL no memory that others could multicast to
        assert "HZPLAN_NCCL_REGISTER=1: this GPU" in done.stderr and "Traceback" not in done.stdout
    else:
        assert succeeded(done)["loss_last"] == usual["loss_last"]


def test_a_checkpoint_goes_on_here_and_on_processors(tmp_path: Path) -> None:
    plan = make_plan("gpt:nano", mesh="2|2", levels=Levels(0, 1, 2))
    on_card(plan, tmp_path, "--steps", 3, "--checkpoint", "saved")
    shutil.copytree(tmp_path / "saved", tmp_path / "copied")
    card = on_card(plan, tmp_path, "--steps", 6, "--checkpoint", "saved", "--resume")
    words = ["run", "plan.json", "gpt:nano", "--steps", 6, "--json", "--nproc", 4]
    processors = succeeded(hzplan(*words, "--checkpoint", "copied", "--resume", cwd=tmp_path, **GLOO))
    assert card["resumed_from"] == processors["resumed_from"] == 3
    assert card["loss_last"] == pytest.approx(processors["loss_last"], rel=2e-3)
