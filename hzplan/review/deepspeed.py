"""A DeepSpeed configuration as a setting.

What its fields mean: DeepSpeed's documentation, "DeepSpeed Configuration JSON" and "ZeRO".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hzplan.core.hierarchy import Mesh
from hzplan.errors import UserError
from hzplan.review.setting import Setting, shards_of

AUTO = "auto"
"""What a trainer fills in."""


def is_config(data: object) -> bool:
    """Whether an object is a DeepSpeed configuration."""
    known = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}
    return isinstance(data, dict) and bool(known & data.keys())


def read(where: str, text: str, mesh: Mesh) -> Setting:
    """UserError of one line for what is none, or what has no like here. ``where``: the file's name."""
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}") from None
    if not is_config(data):
        raise UserError(
            f"{where}: neither a plan nor a DeepSpeed configuration (it has no zero_optimization)"
        )
    zero = _table(where, data, "zero_optimization")
    stage = _number(where, zero, "zero_optimization.stage", 0)
    if stage is None or stage > 3:
        raise UserError(f"{where}: field zero_optimization.stage: 0, 1, 2 or 3, not {zero.get('stage')!r}")
    world = mesh.world
    param, grad, optim = (world if stage >= least else 1 for least in (3, 2, 1))
    said = [f"DeepSpeed, ZeRO stage {stage}"]
    inner = _number(where, zero, "zero_optimization.zero_hpz_partition_size", 1) or 1
    if stage == 3 and inner > 1:
        param = shards_of(f"{where}: field zero_hpz_partition_size", inner, mesh)
        said.append(f"parameters gathered from {inner} ranks (hpZ)")
    group = _number(where, zero, "zero_optimization.mics_shard_size", 0) or 0
    if stage == 3 and group > 0:
        param = grad = optim = shards_of(f"{where}: field mics_shard_size", group, mesh)
        said.append(f"everything over groups of {group} ranks (MiCS)")
    clip = data.get("gradient_clipping", 0)
    return Setting(
        (param, grad, optim),
        micro_batch=_number(where, data, "train_micro_batch_size_per_gpu"),
        global_batch=_global_batch(where, data, mesh.world),
        clip=None if clip == AUTO else bool(clip),
        dtype=_dtype(where, data),
        reduce_dtype=_reduce_dtype(where, data),
        said=tuple(said),
        open=tuple(_not_looked_at(where, data, zero)),
    )


def _global_batch(where: str, data: Mapping[str, Any], world: int) -> int | None:
    whole = _number(where, data, "train_batch_size")
    if whole is not None:
        return whole
    micro = _number(where, data, "train_micro_batch_size_per_gpu")
    times = _number(where, data, "gradient_accumulation_steps", 1)
    return None if micro is None or times is None else micro * times * world


def _dtype(where: str, data: Mapping[str, Any]) -> str | None:
    for name in ("bf16", "fp16"):
        enabled = _table(where, data, name).get("enabled", False)
        if enabled == AUTO:
            return None
        if enabled:
            return {"bf16": "bfloat16", "fp16": "float16"}[name]
    return "float32"


def _reduce_dtype(where: str, data: Mapping[str, Any]) -> str | None:
    """What gradients travel in: by default what is computed in (DeepSpeed's ``communication_data_type``)."""
    given = data.get("communication_data_type")
    named = {"fp32": "float32", "bf16": "bfloat16", "bfp16": "bfloat16", "fp16": "float16"}
    if isinstance(given, str) and given.lower() in named:
        return named[given.lower()]
    return _dtype(where, data)


def _not_looked_at(where: str, data: Mapping[str, Any], zero: Mapping[str, Any]) -> list[str]:
    """What the configuration has and no plan has like it."""
    found = []
    if _table(where, zero, "offload_param"):
        found.append("offload_param: parameters lie on the device in every plan")
    if _table(where, zero, "offload_optimizer"):
        found.append("offload_optimizer: taken as on the device; --host-memory lets the plan offload, too")
    if zero.get("zero_quantized_weights") or zero.get("zero_quantized_gradients"):
        found.append("quantized messages: plans send parameters and gradients as they are")
    if "tensor_parallel" in data or "pipeline" in data:
        found.append("model parallelism: give it as --model-parallel to hzplan solve")
    if not _table(where, data, "activation_checkpointing"):
        found.append(
            "activation checkpointing: which layers recompute is in the model's code; say it with --recompute"
        )
    return found


def _table(where: str, data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name) or {}
    if not isinstance(found, dict):
        raise UserError(f"{where}: field {name}: an object is needed, not {str(found)[:40]!r}")
    return found


def _number(where: str, data: Mapping[str, Any], path: str, default: int | None = None) -> int | None:
    """A whole number of at least 0; None for what a trainer fills in, or what is absent without a default."""
    value = data.get(path.rpartition(".")[2], default)
    if value is None or value == AUTO:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        raise UserError(f"{where}: field {path}: a whole number is needed, not {str(value)[:40]!r}")
    return int(value)
