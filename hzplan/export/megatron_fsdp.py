"""A plan as arguments of Megatron-FSDP's ``fully_shard_model``: one strategy for all of the model.

By its documentation as of version 0.6.1: ``zero_dp_strategy`` no_shard, optim, optim_grads or
optim_grads_params over the mesh's ``dp_shard_dim``; with a ``dp_outer_dim`` replicas across, whose optimizer
state may be sharded too (``outer_dp_sharding_strategy`` optim, with optim_grads_params only).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hzplan.core.hierarchy import Levels
from hzplan.export.shape import (
    Exported,
    about,
    all_again,
    groups_of,
    kept_on_device,
    one_scheme,
    summed_narrow,
)
from hzplan.formats.plan import Plan

TEMPLATE = '''"""Megatron-FSDP as a plan of hzplan says: {about}.

    model = shard(model)  # torch.distributed initialised, this rank's device set
    optimizer = megatron_fsdp.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=…))
    for number in range(ACCUMULATION):
        before_micro_batch(model, last=number == ACCUMULATION - 1)
        …  # forward, and backward of the loss / ACCUMULATION
{clip}    optimizer.step()
"""

import torch
from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

MICRO_BATCH = {micro_batch}
ACCUMULATION = {accumulation}
UNITS = {units}


def shard(model: nn.Module) -> nn.Module:
    """Wrap a model, given in float32."""
    model = model.to(torch.{dtype})
    mesh = init_device_mesh("cuda", {shape}, mesh_dim_names={names})
{groups}    blocks = [type(model.get_submodule(name)) for name in UNITS]
    return fully_shard_model(
        model,
        device_mesh=mesh,
        fsdp_unit_modules=list(dict.fromkeys(blocks)),
        mixed_precision_policy=MixedPrecisionPolicy(
            main_params_dtype=torch.float32,
            main_grads_dtype=torch.float32,
            grad_comm_dtype=torch.{reduce_dtype},
        ),
        sync_model_each_microbatch=ACCUMULATION == 1,
{options}
    )


def before_micro_batch(model: nn.Module, last: bool) -> None:
    """Gradients are reduced after the last one of a step."""
    if ACCUMULATION > 1:
        model.set_model_auto_sync(last)
'''


def schemes(plan: Plan) -> dict[Levels, tuple[int, dict[str, Any]]]:
    """Ranks of the inner group and arguments, by the levels that they mean."""
    finest = plan.mesh.levels
    found: dict[Levels, tuple[int, dict[str, Any]]] = {}
    for level in range(1, finest + 1):
        count, outer = plan.mesh.shards[level], {} if level == finest else {"dp_outer_dim": "dp_outer"}
        found |= {
            Levels(0, 0, 0): (count, {"zero_dp_strategy": "no_shard"} | outer),
            Levels(0, 0, level): (count, {"zero_dp_strategy": "optim"} | outer),
            Levels(0, level, level): (count, {"zero_dp_strategy": "optim_grads"} | outer),
            Levels(level, level, level): (count, {"zero_dp_strategy": "optim_grads_params"} | outer),
        }
        if outer:
            both = {"zero_dp_strategy": "optim_grads_params", "outer_dp_sharding_strategy": "optim"}
            found[Levels(level, level, finest)] = (count, both | outer)
    return found


def export(path: Path, plan: Plan, sizes: Callable[[str], int]) -> Exported:
    """The file, and the units that want something else than most of the model's elements do."""
    groups, lost = groups_of(plan, sizes, recomputes=False)
    known = schemes(plan)
    chosen, instead = one_scheme(plan, groups, known, sizes, "Megatron-FSDP")
    lost += [*instead, *kept_on_device(plan, "Megatron-FSDP"), *summed_narrow(plan, "Megatron-FSDP")]
    clip = "    # Clip here, by the norm that Megatron-FSDP takes over all ranks\n" if plan.clip else ""
    inner, options = known[chosen]
    outer = "dp_outer_dim" in options
    text = TEMPLATE.format(
        about=about(path, plan).replace("\\", "/").replace('"', "'"),
        clip=clip,
        dtype=plan.model.dtype,
        reduce_dtype=plan.reduce_dtype,
        micro_batch=plan.batch.micro_batch,
        accumulation=plan.batch.accumulation,
        units=json.dumps([group.module for group in groups if group.module]),
        # It looks for tensor parallelism's dimension whether there is any or not.
        shape=(plan.mesh.world // inner, inner, 1) if outer else (inner, 1),
        names=("dp_outer", "dp_shard", "tp") if outer else ("dp_shard", "tp"),
        groups='    hybrid = mesh["dp_outer", "dp_shard"]._flatten("hybrid").get_group()\n' if outer else "",
        options="\n".join(
            [
                *(
                    f"        {name}={json.dumps(value)},"
                    for name, value in {"dp_shard_dim": "dp_shard", "tp_dim": "tp", **options}.items()
                ),
                *(["        hybrid_fsdp_group=hybrid,"] if outer else []),
            ]
        ),
    )
    units = dict.fromkeys((unit.name for unit in plan.units), chosen)
    return Exported(text, tuple(lost), units, beside=all_again(plan))
