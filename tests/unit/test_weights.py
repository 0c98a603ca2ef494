"""Weights out of checkpoints and into sharded models, as safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hzplan import Checkpoints, full_parameters, parallelize
from hzplan.checkpoint.folder import whole_at
from hzplan.checkpoint.weights import INDEX, ONE, export, take
from hzplan.core.hierarchy import Levels
from hzplan.errors import UserError
from hzplan.models.workload import load
from hzplan.runtime.optimizer import ShardedOptimizer
from tests.configs import LIKE_LLAMA
from tests.plans import make_plan
from tests.threads import in_threads

CONFIG = {"model_type": "llama"} | LIKE_LLAMA


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of a Llama of transformers, and its weights."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    name = f"hf:{folder / 'config.json'}"
    workload = load(name, seq_len=16)
    model, optimizer = parallelize(workload.build(), make_plan(workload, mesh="1"), lr=1e-2)
    checkpoints = Checkpoints(folder / "checkpoints", model_name=name)
    checkpoints.save(model, optimizer, 7)
    checkpoints.wait()
    values = full_parameters(optimizer)
    optimizer.engine.close()
    return folder / "checkpoints" / "step-00000007", values


def test_transformers_loads_what_is_exported(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    path, values = saved
    found = whole_at(path)
    export(path, found.index, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in values.items())


@pytest.mark.parametrize("most_bytes", [10_000, 1 << 30])
def test_every_rank_takes_its_slices(
    most_bytes: int, saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    path, values = saved
    export(path, whole_at(path).index, tmp_path, most_bytes=most_bytes)
    assert (tmp_path / ONE).exists() == (most_bytes > 10_000) == (not (tmp_path / INDEX).exists())
    workload = load(f"hf:{path.parents[1] / 'config.json'}", seq_len=16)
    plan = make_plan(workload, mesh="2|2", levels=Levels(1, 0, 2))
    torch.manual_seed(3)

    def rank(_: int, model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, torch.Tensor]:
        assert take(tmp_path, model, optimizer) == []
        return full_parameters(optimizer)

    for theirs in in_threads(plan, workload.build(), rank):
        assert all(torch.equal(theirs[name], value) for name, value in values.items())


def test_a_tied_tensor_is_written_once_and_found_by_either_name(tmp_path: Path) -> None:
    nano = load("gpt:nano")
    plan = make_plan("gpt:nano", mesh="1")
    model, optimizer = parallelize(nano.build(), plan, lr=1e-2)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(model, optimizer, 1)
    checkpoints.wait()
    export(
        tmp_path / "checkpoints" / "step-00000001",
        whole_at(tmp_path / "checkpoints" / "step-00000001").index,
        tmp_path,
    )
    tensors = load_file(tmp_path / ONE)
    expected = full_parameters(optimizer)
    assert tensors.keys() == expected.keys() and "head.weight" not in tensors
    renamed = {"head.weight" if name == "embed.weight" else name: value for name, value in tensors.items()}
    save_file({**renamed, "extra": torch.zeros(1)}, tmp_path / "other.safetensors")
    other, again = parallelize(nano.build(), plan, lr=1e-2)
    assert take(tmp_path / "other.safetensors", other, again) == ["extra"]
    assert all(torch.equal(value, expected[name]) for name, value in full_parameters(again).items())
    for one in (optimizer, again):
        one.engine.close()


def test_weights_can_be_written_in_another_dtype(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    path, values = saved
    export(path, whole_at(path).index, tmp_path, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / ONE)
    assert all(torch.equal(tensors[name], value.bfloat16()) for name, value in values.items())


def test_weights_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    model, optimizer = parallelize(load("gpt:nano").build(), make_plan("gpt:nano", mesh="1"), lr=1e-2)
    values = {name: value for name, value in full_parameters(optimizer).items() if name != "norm.weight"}
    save_file(values, tmp_path / ONE)
    with pytest.raises(UserError, match=r"norm.weight is not in it; these are another model's weights"):
        take(tmp_path, model, optimizer)
    save_file({**values, "norm.weight": torch.zeros(7)}, tmp_path / ONE)
    with pytest.raises(UserError, match=r"norm.weight is \[7\], and \[\d+\] in this model"):
        take(tmp_path, model, optimizer)
    (tmp_path / ONE).write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"model.safetensors: not a safetensors file that can be read"):
        take(tmp_path, model, optimizer)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"norm.weight": "../../secret"}}))
    with pytest.raises(UserError, match=r"field weight_map: must give a file of the folder"):
        take(tmp_path, model, optimizer)
    with pytest.raises(UserError, match=r"no safetensors there; give a file, or a folder with"):
        take(tmp_path / "nowhere", model, optimizer)
    optimizer.engine.close()


def test_a_second_export_leaves_nothing_of_the_first(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    path, _ = saved
    index = whole_at(path).index
    export(path, index, tmp_path, most_bytes=10_000)
    others = {"model.fp16.safetensors", "model_ema.safetensors", "config.json"}
    for name in others:
        (tmp_path / name).touch()
    export(path, index, tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {ONE} | others
    assert (tmp_path / ONE).stat().st_mode & 0o044
    export(path, index, tmp_path, most_bytes=10_000)
    assert not (tmp_path / ONE).exists() and (tmp_path / INDEX).exists()


def test_integers_are_no_weights(tmp_path: Path) -> None:
    model, optimizer = parallelize(load("gpt:nano").build(), make_plan("gpt:nano", mesh="1"), lr=1e-2)
    values = {name: value.to(torch.int8) for name, value in full_parameters(optimizer).items()}
    save_file(values, tmp_path / ONE)
    with pytest.raises(UserError, match=r"embed.weight is torch.int8, and torch.float32 in this model"):
        take(tmp_path, model, optimizer)
    optimizer.engine.close()
