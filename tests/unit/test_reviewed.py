"""Settings read from users' files: what calls and fields say, and that no file is run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hzplan.core.hierarchy import Mesh
from hzplan.errors import UserError
from hzplan.review.read import read
from hzplan.review.setting import Setting

MESH = Mesh.parse("2,4|4")

FSDP2 = """
import torch
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
{mesh}
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
options = dict({options})
for layer in model.layers:
    fully_shard(layer, mp_policy=policy, **options)
fully_shard(model, mp_policy=policy)
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
"""


NAMED = 'mesh = init_device_mesh("cuda", {}, mesh_dim_names={})'


def of(tmp_path: Path, text: str, name: str = "train.py") -> Setting:
    (tmp_path / name).write_text(text)
    found = read(tmp_path / name, MESH)
    assert found is not None
    return found


def fsdp2(tmp_path: Path, options: str = "", mesh: str = "") -> Setting:
    return of(tmp_path, FSDP2.format(options=options, mesh=mesh))


@pytest.mark.parametrize(
    ("options", "mesh", "shards"),
    [
        ("", "", (32, 32, 32)),
        ("reshard_after_forward=True", "", (32, 32, 32)),
        ("reshard_after_forward=False", "", (1, 32, 32)),
        ("reshard_after_forward=8", "", (8, 32, 32)),
        ("mesh=mesh", 'mesh = init_device_mesh("cuda", (4, 8))', (8, 8, 8)),
        ("mesh=mesh", 'SIZES = (4, 8)\nmesh = init_device_mesh("cuda", mesh_shape=SIZES)', (8, 8, 8)),
        ("mesh=mesh, reshard_after_forward=False", 'mesh = init_device_mesh("cuda", (4, 8))', (1, 8, 8)),
        ("mesh=mesh", 'mesh = init_device_mesh("cuda", (32,))', (32, 32, 32)),
        ("reshard_after_forward=1", "", (1, 32, 32)),
        ("", 'mesh = init_device_mesh("cuda", (4, 8))', (32, 32, 32)),  # made for something else
        (
            'mesh=mesh["dp"]',
            'mesh = init_device_mesh("cuda", (32, 1), mesh_dim_names=("dp", "tp"))',
            (32,) * 3,
        ),
        ('mesh=mesh["out", "in"]', NAMED.format((4, 8, 1), ("out", "in", "tp")), (8, 8, 8)),
        ("mesh=dp", NAMED.format((4, 8), ("a", "b")) + '\ndp = mesh["a", "b"]', (8, 8, 8)),
    ],
)
def test_calls_of_fully_shard(tmp_path: Path, options: str, mesh: str, shards: tuple[int, ...]) -> None:
    found = fsdp2(tmp_path, options, mesh)
    assert found.shards == shards and not found.open
    assert (found.dtype, found.recompute, found.clip) == ("bfloat16", "none", True)


@pytest.mark.parametrize(
    ("options", "mesh"),
    [("mesh=mesh", 'mesh = init_device_mesh("cuda", (world // 8, 8))'), ("reshard_after_forward=flag", "")],
)
def test_what_is_computed_is_said_to_be_open(tmp_path: Path, options: str, mesh: str) -> None:
    found = fsdp2(tmp_path, options, mesh)
    assert found.shards == (32, 32, 32) and "computed" in found.open[0]


@pytest.mark.parametrize(
    ("code", "shards"),
    [
        ("FSDP(model)", (32, 32, 32)),
        ("FullyShardedDataParallel(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)", (1, 32, 32)),
        ("FSDP(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD)", (8, 8, 8)),
        ("FSDP(model, sharding_strategy=ShardingStrategy.NO_SHARD)", (1, 1, 1)),
        ("DDP(model)", (1, 1, 1)),
        ("torch.nn.parallel.DistributedDataParallel(model)\nZeroRedundancyOptimizer(ps, AdamW)", (1, 1, 32)),
    ],
)
def test_older_wrappers(tmp_path: Path, code: str, shards: tuple[int, ...]) -> None:
    assert of(tmp_path, code).shards == shards


@pytest.mark.parametrize(
    ("last", "param", "is_open"),
    [
        ("fully_shard(model.head, reshard_after_forward=False)\nfully_shard(model)", 32, True),
        ("fully_shard(net, reshard_after_forward=False)", 32, False),
        ("fully_shard(model, reshard_after_forward=False)", 32, False),
    ],
)
def test_a_call_that_says_nothing_reshards(tmp_path: Path, last: str, param: int, is_open: bool) -> None:
    """The root, under whichever name, is not resharded by torch either; another one may be kept whole."""
    found = of(tmp_path, f"for layer in net.layers:\n    fully_shard(layer)\n{last}\n")
    assert found.shards == (param, 32, 32) and bool(found.open) is is_open


@pytest.mark.parametrize(
    ("policy", "travels"),
    [
        ("param_dtype=torch.bfloat16", "bfloat16"),
        ("param_dtype=torch.bfloat16, reduce_dtype=torch.float32", "float32"),
        ("", None),
    ],
)
def test_gradients_travel_in_what_is_computed_in(tmp_path: Path, policy: str, travels: str | None) -> None:
    assert (
        of(tmp_path, f"fully_shard(model, mp_policy=MixedPrecisionPolicy({policy}))").reduce_dtype == travels
    )


@pytest.mark.parametrize(
    ("given", "travels"), [({}, "bfloat16"), ({"communication_data_type": "fp32"}, "float32")]
)
def test_so_they_do_in_deepspeed(tmp_path: Path, given: dict[str, str], travels: str) -> None:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}} | given
    assert of(tmp_path, json.dumps(config), "ds.json").reduce_dtype == travels


def test_checkpointing_is_seen(tmp_path: Path) -> None:
    assert of(tmp_path, "fully_shard(model)\nmodel.gradient_checkpointing_enable()").recompute == "all"


def test_code_is_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    of(tmp_path, f"open({str(ran)!r}, 'w')\nfully_shard(model)")
    assert not ran.exists()


CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
}


@pytest.mark.parametrize(
    ("zero", "shards"),
    [
        ({}, (1, 1, 1)),
        ({"stage": 1}, (1, 1, 32)),
        ({"stage": 2}, (1, 32, 32)),
        ({"stage": 3}, (32, 32, 32)),
        ({"stage": 3, "zero_hpz_partition_size": 8}, (8, 32, 32)),
        ({"stage": 3, "mics_shard_size": 8}, (8, 8, 8)),
    ],
)
def test_stages_of_deepspeed(tmp_path: Path, zero: dict[str, int], shards: tuple[int, ...]) -> None:
    found = of(tmp_path, json.dumps(CONFIG | {"zero_optimization": zero}), "ds.json")
    assert found.shards == shards
    assert (found.micro_batch, found.global_batch, found.dtype, found.clip) == (2, 256, "bfloat16", True)
    assert found.as_baseline == "/".join(map(str, shards)) + ",micro_batch=2"


def test_what_a_trainer_fills_in_is_open(tmp_path: Path) -> None:
    auto = {name: "auto" for name in CONFIG if name != "bf16"} | {"bf16": {"enabled": "auto"}}
    found = of(tmp_path, json.dumps(auto | {"zero_optimization": {"stage": 2}}), "ds.json")
    assert (found.micro_batch, found.global_batch, found.dtype, found.clip) == (None, None, None, None)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.py", "print(1)", "no call of fully_shard"),
        ("a.py", "def (", "not Python"),
        ("a.py", "(" * 5000, "not Python"),
        ("a.py", "fully_shard(model, reshard_after_forward=3)", "3 shards, but the profile's mesh"),
        ("a.json", "{", "not JSON"),
        ("a.json", "[1]", "neither a plan nor a DeepSpeed configuration"),
        ("a.json", '{"zero_optimization": {"stage": 4}}', "field zero_optimization.stage"),
        ("a.json", '{"zero_optimization": 3}', "an object is needed"),
        ("a.json", '{"train_batch_size": "many"}', "a whole number is needed"),
        ("a.json", '{"zero_optimization": {"stage": 3, "mics_shard_size": 3}}', "3 shards"),
    ],
)
def test_a_file_that_says_nothing_is_one_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=said) as raised:
        read(tmp_path / name, MESH)
    assert "\n" not in str(raised.value) and str(tmp_path / name) in str(raised.value)


def test_a_plan_is_left_to_who_reads_plans(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"format": "hzplan.plan"}')
    assert read(tmp_path / "plan.json", MESH) is None
