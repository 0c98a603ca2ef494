"""Plans in the words of other runtimes: what is said, and what is said to be lost."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from hzplan.core.hierarchy import Levels
from hzplan.export import deepspeed, fsdp2, megatron_fsdp
from hzplan.export.shape import groups_of
from hzplan.formats.plan import Plan, Shards
from hzplan.models.workload import load
from tests.configs import LIKE_LLAMA
from tests.plans import make_plan

GOLDEN = sorted((Path(__file__).resolve().parents[2] / "plans").glob("*.json"))
PATH = Path("plan.json")


def one(name: str) -> int:
    return 1


def plan_of(*levels: int, **options: Any) -> Plan:
    return make_plan("gpt:nano", mesh="2|2", levels=Levels(*levels), **options)


def wraps(text: str) -> dict[str, dict[str, Any]]:
    """The arguments of every ``Wrap(…)``, by module."""
    calls = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Wrap"
    ]
    return {
        ast.literal_eval(call.args[0]): {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
        for call in calls
    }


@pytest.mark.parametrize(
    ("levels", "accumulation", "said"),
    [
        ((2, 2, 2), 1, {"shards": 4}),
        ((2, 2, 2), 2, {"shards": 4}),
        ((2, 0, 2), 2, {"shards": 4, "late": True}),
        ((0, 2, 2), 2, {"shards": 4, "reshard": False, "keep": True}),
        ((0, 0, 2), 2, {"shards": 4, "reshard": False, "keep": True, "late": True}),
        ((1, 1, 1), 1, {"shards": 2}),
        ((0, 0, 0), 1, {"shards": 1}),
    ],
)
def test_fsdp2_says_what_it_can(
    levels: tuple[int, int, int], accumulation: int, said: dict[str, Any]
) -> None:
    plan = plan_of(*levels, accumulation=accumulation)
    made = fsdp2.export(PATH, plan, one)
    assert made.lost == () and "REDUCTIONS = 1 " in made.text
    found = wraps(made.text)
    assert set(found) == {"", "positions", "layers.0", "layers.1", "norm"}  # embed and head share a tensor
    assert all(options == said for options in found.values())
    assert f"ACCUMULATION = {accumulation}\n" in made.text
    assert made.levels == dict.fromkeys((unit.name for unit in plan.units), Levels(*levels))


@pytest.mark.parametrize(("level", "shape"), [(0, (8, 1)), (1, (2, 4)), (2, (8,))])
def test_fsdp2_has_replicas_across_and_shards_within_the_nodes(level: int, shape: tuple[int, ...]) -> None:
    """Eight ranks on two nodes; ranks that follow each other lie in a mesh's last dimension."""
    plan = make_plan("gpt:nano", mesh="4|2", levels=Levels(level, level, level))
    made: dict[str, Any] = {"__name__": "exported"}
    exec(fsdp2.export(PATH, plan, one).text, made)
    made |= {"init_device_mesh": MagicMock(), "fully_shard": MagicMock()}
    made["shard"](load("gpt:nano").build(), "cpu")
    names = ("replicate", "shard")[-len(shape) :]
    made["init_device_mesh"].assert_called_once_with("cpu", shape, mesh_dim_names=names)


def test_fsdp2_names_what_it_cannot_say() -> None:
    between = fsdp2.export(PATH, plan_of(1, 2, 2, accumulation=2), one)
    assert wraps(between.text)["layers.0"] == {"shards": 4, "reshard": 2}
    assert {lost.where for lost in between.lost} == {"the root", "positions", "layers.0", "layers.1", "norm"}
    assert "gathers them for forward" in between.lost[0].what
    late = fsdp2.export(PATH, plan_of(0, 1, 2, accumulation=2), one)
    assert all("gradients add up in 2 shards in the plan; in FSDP2 in 4" in lost.what for lost in late.lost)
    assert late.levels["layers.0"] == Levels(0, 2, 2)
    recomputed = fsdp2.export(PATH, plan_of(2, 2, 2, recompute=("layers.1",)), one)
    assert wraps(recomputed.text)["layers.1"] == {"shards": 4, "recompute": "full"} and not recomputed.lost


def test_fsdp2_has_as_many_reductions_under_way_as_the_plan() -> None:
    many = plan_of(2, 2, 2).model_copy(update={"gradient_buffers": 4})
    assert "REDUCTIONS = 3 " in fsdp2.export(PATH, many, one).text
    single = fsdp2.export(PATH, plan_of(2, 2, 2).model_copy(update={"gradient_buffers": 1}), one)
    assert "REDUCTIONS = 1 " in single.text and single.gradient_buffers == 2
    assert [lost.where for lost in single.lost] == ["the gradients"]
    whole = plan_of(0, 0, 0).model_copy(update={"gradient_buffers": 1})
    assert fsdp2.export(PATH, whole, one).lost == ()  # nothing is there unreduced


def test_a_root_without_tensors_is_wrapped_over_all_ranks(tmp_path: Path) -> None:
    """With no shards FSDP2 would be given a mesh of replicas, for units that have none of them."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": False} | LIKE_LLAMA))
    plan = make_plan(load(f"hf:{config}", seq_len=16), mesh="2|2", levels=Levels(2, 2, 2))
    assert "" not in {unit.name for unit in plan.units}
    found = wraps(fsdp2.export(PATH, plan, one).text)
    assert found[""] == found["model.layers.0"] == {"shards": 4}


def test_tensors_with_other_levels_than_their_unit_are_named() -> None:
    plan = plan_of(0, 2, 2, accumulation=1, clip=True)
    unit = plan.units[0]
    light = unit.buckets[0].model_copy(update={"tensors": ("light",)})
    other = light.model_copy(update={"tensors": ("heavy",), "shards": Shards(param=1, grad=1, optim=4)})
    plan = plan.model_copy(update={"units": (unit.model_copy(update={"buckets": (light, other)}),)})
    groups, lost = groups_of(plan, lambda name: 99 if name == "heavy" else 1)
    (group,) = (group for group in groups if group.module == unit.name)
    assert plan.mesh.shards[group.levels.grad] == 1  # of the heavier bucket
    assert [entry.where for entry in lost] == [unit.name]
    assert f"{unit.name or 'the root'} is one group, with 1/1/4" in lost[0].what


@pytest.mark.parametrize(
    ("levels", "scheme"),
    [
        ((0, 0, 0), {"stage": 0}),
        ((0, 0, 2), {"stage": 1}),
        ((0, 2, 2), {"stage": 2}),
        ((2, 2, 2), {"stage": 3}),
        ((1, 2, 2), {"stage": 3, "zero_hpz_partition_size": 2}),
        ((1, 1, 1), {"stage": 3, "mics_shard_size": 2}),
    ],
)
def test_deepspeed_has_a_stage_for_it(levels: tuple[int, int, int], scheme: dict[str, int]) -> None:
    plan = plan_of(*levels, accumulation=2, clip=True)
    made = deepspeed.export(PATH, plan, one, mics="mics_shard_size" in scheme)
    config = json.loads(made.text)
    assert made.lost == ()
    assert scheme.items() <= config["zero_optimization"].items()
    assert config["train_batch_size"] == 4 * 2 * config["train_micro_batch_size_per_gpu"]
    assert config["gradient_accumulation_steps"] == 2 and config["gradient_clipping"] == 1.0


def test_deepspeed_without_mics_names_where_it_is() -> None:
    """Releases of today refuse a file that has it."""
    made = deepspeed.export(PATH, plan_of(1, 1, 1), one)
    assert "mics" not in made.text
    assert "--to deepspeed-mics" in made.lost[-1].what and len(made.lost) > 1


def test_deepspeed_adds_up_in_bfloat16_at_stage_0_only() -> None:
    for levels, lost in (((0, 0, 0), ["the gradients"]), ((0, 0, 2), [])):
        made = deepspeed.export(PATH, plan_of(*levels, accumulation=2, dtype="bfloat16"), one)
        assert [one.where for one in made.lost] == lost
        assert ("grad_accum_dtype" in made.text) != bool(lost)


def test_megatron_has_a_strategy_for_it() -> None:
    made = megatron_fsdp.export(PATH, plan_of(1, 1, 2), one)
    assert made.lost == ()
    assert 'outer_dp_sharding_strategy="optim"' in made.text and '"cuda", (2, 2, 1)' in made.text
    lost = megatron_fsdp.export(PATH, plan_of(1, 2, 2), one).lost
    assert lost and "one scheme for all" in lost[0].what


@pytest.mark.parametrize("target", [fsdp2, deepspeed, megatron_fsdp])
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_plans_are_exported_to_files_that_can_be_read(target: Any, path: Path) -> None:
    plan = Plan.load(path)
    made = target.export(path, plan, one)
    if target is deepspeed:
        assert json.loads(made.text)["train_batch_size"] == plan.batch.global_batch
    else:
        compile(made.text, "exported", "exec")
    assert set(made.levels) == {unit.name for unit in plan.units}


def test_names_are_data() -> None:
    plan = plan_of(2, 2, 2)
    evil = 'x"); import os; os.system("true") #\n"""'
    units = [unit.model_dump() for unit in plan.units]
    for unit in units:
        unit["name"] = evil if unit["name"] == "norm" else unit["name"]
        unit["requires"] = [evil if name == "norm" else name for name in unit["requires"]]
    data = plan.model_dump() | {"units": units}
    data["uses"] = [use.replace("norm", evil) for use in data["uses"]]
    data["model"]["name"] = evil
    hostile = Plan.model_validate_json(json.dumps(data))
    for target in (fsdp2, megatron_fsdp):
        text = target.export(Path(f"{evil[:20]}.json"), hostile, one).text
        assert not any(
            isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "system"
            for node in ast.walk(ast.parse(text))
        )
        imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import)]
        assert {alias.name for node in imports for alias in node.names} <= {
            "torch",
            "torch.distributed",
            "warnings",
        }
    assert evil in wraps(fsdp2.export(PATH, hostile, one).text)
