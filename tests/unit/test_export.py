"""Plans in the words of other runtimes: what is said, and what is said to be lost."""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.export import deepspeed, fsdp2, megatron_fsdp, megatron_fsdp_v2
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


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("target", [deepspeed, fsdp2, megatron_fsdp, megatron_fsdp_v2])
def test_of_one_node_two_levels_are_one(target: Any, level: int) -> None:
    """With one rank along the slow tier both have the same shards."""
    plan = make_plan("gpt:nano", mesh="4|1", levels=Levels(level, level, level))
    assert target.export(PATH, plan, one).lost == ()


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


LETTERS: dict[str, Any] = {"R": Replicate(), "S": Shard(0), "P": Partial("avg")}


@pytest.mark.parametrize(
    ("levels", "ranks", "parameter", "gradient", "optimizer"),
    [
        ((0, 0, 0), (4,), "R", "P", "R"),  # DDP
        ((0, 0, 2), (4,), "R", "P", "S"),  # ZeRO-1
        ((0, 2, 2), (4,), "R", "S", "S"),  # ZeRO-2
        ((2, 2, 2), (4,), "S", "S", "S"),  # ZeRO-3
        ((2, 0, 2), (4,), "S", "P", "S"),
        ((1, 1, 1), (2, 2), "RS", "PS", "RS"),  # HSDP
        ((1, 1, 2), (2, 2), "RS", "PS", "SS"),  # HFSDP
        ((0, 1, 1), (2, 2), "RR", "PS", "RS"),
    ],
)
def test_megatron_v2_has_placements_for_it(
    levels: tuple[int, int, int], ranks: tuple[int, ...], parameter: str, gradient: str, optimizer: str
) -> None:
    plan = plan_of(*levels, accumulation=2).model_copy(update={"gradient_buffers": 2})
    made = megatron_fsdp_v2.export(PATH, plan, one)
    assert made.lost == ()
    found = wraps(made.text)
    assert set(found) == {"", "positions", "layers.0", "layers.1", "norm"}  # embed and head share a tensor
    said = {"ranks": ranks, "parameter": parameter, "gradient": gradient, "optimizer": optimizer}
    assert all(options == said for options in found.values())
    assert made.levels == dict.fromkeys((unit.name for unit in plan.units), Levels(*levels))
    assert "ACCUMULATION = 2\n" in made.text


def test_megatron_v2_cuts_axes_where_levels_differ() -> None:
    """Slowest links first; on 2 × 4 GPUs and 16 nodes."""
    mesh = Mesh.parse("2,4|16")
    assert megatron_fsdp_v2.placed(mesh, Levels(2, 2, 3)) == ((16, 8), "RS", "PS", "SS")
    assert megatron_fsdp_v2.placed(mesh, Levels(1, 1, 3)) == ((64, 2), "RS", "PS", "SS")
    assert megatron_fsdp_v2.placed(mesh, Levels(3, 3, 3)) == ((128,), "S", "S", "S")


def test_megatron_v2_has_levels_of_its_own_for_every_unit() -> None:
    ways = {"layers.0": Levels(1, 1, 2), "layers.1": Levels(2, 2, 2), "norm": Levels(0, 0, 0)}
    plan = make_plan(
        "gpt:nano",
        mesh="2|2",
        levels=lambda unit: ways.get(unit, Levels(0, 2, 2)),
        accumulation=2,
        recompute=("layers.1",),
    ).model_copy(update={"gradient_buffers": 2})
    made = megatron_fsdp_v2.export(PATH, plan, one)
    assert made.lost == ()
    found = wraps(made.text)
    for unit, levels in made.levels.items():
        placed = megatron_fsdp_v2.placed(plan.mesh, levels)._asdict()
        again = {"recompute": "full"} if unit == "layers.1" else {}
        assert found[unit if unit in found else ""] == placed | again and levels == ways.get(
            unit, Levels(0, 2, 2)
        )


def test_megatron_v2_names_what_it_cannot_say() -> None:
    two = {"gradient_buffers": 2}
    between = megatron_fsdp_v2.export(PATH, plan_of(1, 2, 2, accumulation=2).model_copy(update=two), one)
    assert {lost.where for lost in between.lost} == {"the root", "positions", "layers.0", "layers.1", "norm"}
    assert between.levels["layers.0"] == Levels(2, 2, 2)  # as near as (1, 1, 2), and smaller
    assert "2/4/4 shards in the plan" in between.lost[0].what and "has 4/4/4" in between.lost[0].what
    outside = megatron_fsdp_v2.export(PATH, plan_of(0, 1, 2, accumulation=2).model_copy(update=two), one)
    assert outside.levels["layers.0"] == Levels(0, 2, 2) and len(outside.lost) == 5
    moved = plan_of(2, 2, 2, offload=("layers.0",)).model_copy(update=two)
    assert [lost.where for lost in megatron_fsdp_v2.export(PATH, moved, one).lost] == ["the optimizer"]


@pytest.mark.parametrize(
    ("levels", "planned", "lost"),
    [
        ((2, 2, 2), 2, []),
        ((2, 2, 2), 4, ["the gradients"]),  # slower
        ((2, 2, 2), 1, ["the gradients"]),  # larger
        ((0, 0, 0), 4, ["the gradients"]),
        ((0, 0, 0), 1, []),
    ],
)
def test_megatron_v2_reduces_one_unit_beside_the_next(
    levels: tuple[int, int, int], planned: int, lost: list[str]
) -> None:
    plan = plan_of(*levels).model_copy(update={"gradient_buffers": planned})
    made = megatron_fsdp_v2.export(PATH, plan, one)
    assert [one.where for one in made.lost] == lost and made.gradient_buffers == 2


@pytest.mark.parametrize(
    ("levels", "accumulation", "kept", "lost"),
    [((2, 2, 2), 2, "float32", 0), ((1, 1, 2), 2, "float32", 5), ((1, 1, 2), 1, "bfloat16", 0)],
)
def test_megatron_v2_reduces_in_bfloat16_but_for_sums(
    levels: tuple[int, int, int], accumulation: int, kept: str, lost: int
) -> None:
    plan = plan_of(*levels, accumulation=accumulation, dtype="bfloat16", reduce_dtype="bfloat16")
    made = megatron_fsdp_v2.export(PATH, plan.model_copy(update={"gradient_buffers": 2}), one)
    assert f"MAIN_GRADS_DTYPE = torch.{kept} " in made.text
    assert "\nREDUCE_DTYPE = torch.bfloat16 " in made.text
    assert len(made.lost) == lost and all("float32 after the last" in one.what for one in made.lost)


@dataclass
class Policy:
    """``SchedulePolicy``."""

    forward_prefetch_size: int | None = None
    backward_prefetch_size: int | None = None


@dataclass
class Precision:
    """``MixedPrecisionPolicy``."""

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None


@dataclass
class Placements:
    """``Placements``."""

    dp_axes: Any
    parameter: Any
    gradient: Any
    optimizer: Any


class Megatron:
    """The part of Megatron-FSDP v2 that an exported file calls, with its arguments; ``wrapped`` records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wrapped: list[tuple[nn.Module, Any, Placements, Precision, Policy]] = []
        inside = "megatron.core.distributed.fsdp.src.megatron_fsdp"
        names = ["megatron", "megatron.core", "megatron.core.distributed", "megatron.core.distributed.fsdp"]
        names += ["megatron.core.distributed.fsdp.src", inside]
        for name in (*names, f"{inside}.experimental", f"{inside}.mixed_precision"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[f"{inside}.mixed_precision"].__dict__["MixedPrecisionPolicy"] = Precision
        sys.modules[f"{inside}.experimental"].__dict__.update(
            Placements=Placements,
            SchedulePolicy=Policy,
            fully_shard=self.fully_shard,
            fully_shard_context=MagicMock(),
            fully_shard_optimizer=None,
            microbatch=None,
        )

    def fully_shard(
        self,
        module: nn.Module,
        mesh: Any,
        placements: Placements,
        mixed_precision_policy: Precision,
        grad_divisor: int = 1,
        schedule_policy: Policy | None = None,
    ) -> None:
        assert grad_divisor == 1 and schedule_policy is not None
        self.wrapped.append((module, mesh, placements, mixed_precision_policy, schedule_policy))


def exported(plan: Plan) -> dict[str, Any]:
    """The names of an exported file, run without a device."""
    text = megatron_fsdp_v2.export(PATH, plan, one).text.replace('"cuda"', '"cpu"')
    made: dict[str, Any] = {"__name__": "exported"}
    exec(text, made)
    made["init_device_mesh"] = MagicMock(side_effect=lambda device, ranks, **names: ranks)
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("prefetch", [1, 2])
def test_megatron_v2_is_called_as_the_plan_says(
    prefetch: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    megatron = Megatron(monkeypatch)
    ways = {"layers.0": Levels(1, 1, 2), "norm": Levels(0, 0, 0), "positions": Levels(0, 1, 1)}
    plan = make_plan(
        "gpt:nano", mesh="4|2", levels=lambda unit: ways.get(unit, Levels(2, 2, 2)), prefetch=prefetch,
        dtype=dtype, recompute=("layers.1",),
    )  # fmt: skip
    model = load("gpt:nano").build()
    names = {module: name for name, module in model.named_modules()}
    layer = model.get_submodule("layers.1")
    made = exported(plan)
    made["shard"](model)
    assert model.get_submodule("layers.1") is not layer  # wrapped, to be recomputed
    names[model.get_submodule("layers.1")] = "layers.1"
    order = [names[module] for module, *_ in megatron.wrapped]
    assert set(order) == {"", "positions", "layers.0", "layers.1", "norm"}
    assert order[-1] == ""  # parents after children
    for module, ranks, placements, precision, _ in megatron.wrapped:
        name = names[module]
        levels = ways.get(name, Levels(2, 2, 2))
        said = megatron_fsdp_v2.placed(plan.mesh, levels)
        assert ranks == said.ranks and list(placements.dp_axes) == [*range(len(ranks))]
        assert placements.parameter == [LETTERS[letter] for letter in said.parameter]
        assert placements.gradient == [LETTERS[letter] for letter in said.gradient]
        assert placements.optimizer == [LETTERS[letter] for letter in said.optimizer]
        assert precision == Precision(torch.float32, torch.float32)
    for parameter in model.parameters():
        assert parameter.dtype == getattr(torch, dtype) and parameter.grad_dtype == torch.float32


@pytest.mark.parametrize("prefetch", [1, 2, 9])
def test_megatron_v2_gathers_as_many_modules_ahead_as_the_plan(
    prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gathers the next modules until it has the budget's elements; as registered, from the root on."""
    megatron = Megatron(monkeypatch)
    model = load("gpt:nano").build()
    names = {module: name for name, module in model.named_modules()}
    exported(plan_of(2, 2, 2, prefetch=prefetch))["shard"](model)
    budgets = {names[module]: policy for module, *_, policy in megatron.wrapped}
    inside = {
        name: sum(one.numel() for one in model.get_submodule(name).parameters()) for name in budgets if name
    }
    elements = inside | {"": sum(one.numel() for one in model.parameters()) - sum(inside.values())}
    forward = [name for name, _ in model.named_modules() if name in budgets]
    for field, following in (
        ("forward_prefetch_size", forward),
        ("backward_prefetch_size", ["", *reversed(forward[1:])]),  # no unit is inside of another one here
    ):
        for place, name in enumerate(following):
            budget, gathered, ahead = getattr(budgets[name], field), 0, []
            for other in following[place + 1 :]:
                if gathered >= budget:
                    break
                ahead.append(other)
                gathered += elements[other]
            assert ahead == following[place + 1 : place + 1 + prefetch]


def test_megatron_v2_is_built_from_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    Megatron(monkeypatch)
    sent: list[torch.Tensor] = []
    models = []
    for rank in range(2):
        made = exported(plan_of(2, 2, 2))
        made["dist"] = MagicMock()
        made["dist"].get_rank.return_value = rank
        made["dist"].broadcast.side_effect = lambda here, source, rank=rank: (
            here.copy_(sent.pop(0)) if rank else sent.append(here.clone())
        )
        torch.manual_seed(rank)
        models.append(made["build"](load("gpt:nano").build)[0])
    first, second = models
    assert not sent
    assert list(dict(first.named_parameters())) == list(dict(second.named_parameters()))  # ties are kept
    for name, value in first.state_dict().items():
        torch.testing.assert_close(second.state_dict()[name], value, rtol=0, atol=0)


def test_megatron_v2_clips_by_the_norm_of_all_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that share an axis have the same part of the first gradient, and shards of the second."""

    class Distributed:
        def __init__(self, local: list[float], *placements: str) -> None:
            self.local, self.placements = torch.tensor(local), [LETTERS[one] for one in placements]
            self.device_mesh = MagicMock(shape=(2, 2)[: len(placements)])

        def to_local(self) -> torch.Tensor:
            return self.local

    Megatron(monkeypatch)
    made = exported(plan_of(2, 2, 2))
    made["DTensor"], made["dist"] = Distributed, MagicMock()
    made["dist"].all_reduce.side_effect = lambda squares: squares.mul_(2)  # another rank with the same ones
    gradients = [Distributed([3.0, 4.0], "R", "S"), Distributed([1.0], "S"), None]
    model = MagicMock()
    model.parameters.return_value = [MagicMock(grad=one) for one in gradients]
    norm = made["clip"](model, 1.0)
    assert norm.item() == pytest.approx((2 * (25 / 2 + 1)) ** 0.5)
    assert gradients[0] is not None
    assert gradients[0].local.tolist() == pytest.approx([3 / norm.item(), 4 / norm.item()], rel=1e-5)


@pytest.mark.parametrize("target", [fsdp2, deepspeed, megatron_fsdp, megatron_fsdp_v2])
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
    for target in (fsdp2, megatron_fsdp, megatron_fsdp_v2):
        text = target.export(Path(f"{evil[:20]}.json"), hostile, one).text
        assert not any(
            isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "system"
            for node in ast.walk(ast.parse(text))
        )
        imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import)]
        assert {alias.name for node in imports for alias in node.names} <= {
            "math",
            "torch",
            "torch.distributed",
            "warnings",
        }
    for target in (fsdp2, megatron_fsdp_v2):
        assert evil in wraps(target.export(PATH, hostile, one).text)
