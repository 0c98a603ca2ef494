"""A plan as a DeepSpeed configuration: one ZeRO stage for the whole model, chosen by ``shape.one_scheme``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hzplan.core.hierarchy import Levels
from hzplan.core.layout import ITEM_BYTES
from hzplan.export.shape import (
    GRADIENTS,
    OPTIMIZER,
    Exported,
    Lost,
    all_again,
    groups_of,
    kept_on_device,
    one_scheme,
    summed_narrow,
)
from hzplan.formats.plan import Plan

LAST_WITH_MICS = "0.19.6"
"""Its release; later ones refuse a file with ``mics_shard_size``."""


def schemes(plan: Plan, *, mics: bool = False) -> dict[Levels, dict[str, Any]]:
    """What DeepSpeed can do with a whole model: its field ``zero_optimization``, by the levels that it means.

    ZeRO stages 0 to 3; stage 3 with parameters that stay inside of a node (``zero_hpz_partition_size``); with
    ``mics`` also all states sharded inside of a group.
    """
    finest = plan.mesh.levels
    found: dict[Levels, dict[str, Any]] = {
        Levels(0, 0, 0): {"stage": 0},
        Levels(0, 0, finest): {"stage": 1},
        Levels(0, finest, finest): {"stage": 2},
    }
    for level in range(1, finest):
        count = plan.mesh.shards[level]
        if 1 < count < plan.mesh.world:
            found[Levels(level, finest, finest)] = {"stage": 3, "zero_hpz_partition_size": count}
            if mics:
                found[Levels(level, level, level)] = {"stage": 3, "mics_shard_size": count}
    found[Levels(finest, finest, finest)] = {"stage": 3}
    return found


def export(path: Path, plan: Plan, sizes: Callable[[str], int], *, mics: bool = False) -> Exported:
    """The file, and the units that want something else than most of the model's elements do.

    ``mics``: for a release that has MiCS, whose model is made under ``MiCS_Init``.
    """
    groups, lost = groups_of(plan, sizes, recomputes=False)
    known = schemes(plan, mics=mics)
    chosen, instead = one_scheme(plan, groups, known, sizes, "DeepSpeed")
    lost += instead
    if not mics and any(group.levels in schemes(plan, mics=True).keys() - known for group in groups):
        what = f"--to deepspeed-mics says shards inside of a group, for DeepSpeed up to {LAST_WITH_MICS}"
        lost.append(Lost("the model", what))
    of_units = [sum(sizes(t) for bucket in unit.buckets for t in bucket.tensors) for unit in plan.units]
    # Without the plan's profile nobody knows sizes, and DeepSpeed takes its own.
    largest = max(of_units) if sum(of_units) == plan.model.parameters else None
    message = (plan.message_bytes or 0) // ITEM_BYTES["float32"]  # DeepSpeed counts elements
    scheme = known[chosen]
    trained = {unit.name for unit in plan.units if unit.buckets}
    offloads = bool(plan.offloaded) and plan.offloaded == trained and scheme["stage"] > 0
    if offloads:
        scheme = scheme | {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
        what = "optimizer state visits the device in the plan; DeepSpeed updates it on the host's processors"
        lost.append(Lost(OPTIMIZER, what))
    else:
        lost += kept_on_device(plan, "DeepSpeed")
    config: dict[str, Any] = {
        "train_batch_size": plan.batch.global_batch,
        "train_micro_batch_size_per_gpu": plan.batch.micro_batch,
        "gradient_accumulation_steps": plan.batch.accumulation,
        "zero_optimization": scheme
        | {"overlap_comm": True, "contiguous_gradients": True}
        | ({} if largest is None else {"reduce_bucket_size": max(largest, message)})
        | (_third(plan, largest) if scheme["stage"] == 3 else {}),
    }
    if plan.clip:
        config["gradient_clipping"] = 1.0
    lost += summed_narrow(plan, "DeepSpeed")
    config["communication_data_type"] = "fp32" if plan.reduce_dtype == "float32" else "bf16"
    if plan.model.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
        if scheme["stage"] > 0:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        elif plan.batch.accumulation > 1:  # it refuses float32 there
            lost.append(
                Lost(GRADIENTS, "add up in float32 in the plan; at stage 0 DeepSpeed does in bfloat16")
            )
    units = dict.fromkeys((unit.name for unit in plan.units), chosen)
    text = json.dumps(config, indent=2) + "\n"
    return Exported(text, tuple(lost), units, offloads=offloads, beside=all_again(plan))


def _third(plan: Plan, largest: int | None) -> dict[str, int]:
    """Stage 3 gathers as far ahead as the plan does; every parameter is sharded."""
    kept = {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
    if largest is None:
        return kept
    return kept | {
        "stage3_prefetch_bucket_size": plan.prefetch * largest,
        "stage3_max_live_parameters": (plan.prefetch + 1) * largest,
    }
