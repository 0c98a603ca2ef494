"""A plan as FSDP2: Python that calls ``fully_shard`` module by module, to be put beside a training loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from hzplan.core.hierarchy import Levels
from hzplan.core.recompute import PRODUCTS, SAVES_NOTHING
from hzplan.export.shape import (
    CONTEXTS,
    GRADIENTS,
    Exported,
    Lost,
    WrappedModule,
    about,
    groups_of,
    kept_on_device,
    summed_narrow,
)
from hzplan.formats.plan import Plan

LEAST_BUFFERS = 2
"""Of gradients: the ones that are reduced, and the next module's beside them."""

TEMPLATE = '''"""FSDP2 as a plan of hzplan says: {about}.

    model = build(lambda: Model(config))  # or shard(model), of one that is there, in float32
    optimizer = torch.optim.AdamW(model.parameters(), lr=…)
    for step in range(steps):
        for index in range(ACCUMULATION):
            before_micro_batch(model, last=index == ACCUMULATION - 1)
            (loss_of(model, batch) / ACCUMULATION).backward()
        clip(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

torch.distributed must be initialised before, and this rank's device be the current one.
"""

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

PRODUCTS = {products}
SAVES_NOTHING = {saves_nothing}
SECOND_RUN = getattr(torch.utils.checkpoint, "_RECOMPUTE", None)  # torch's mark of what is computed again
WORLD = {world}
MICRO_BATCH = {micro_batch}
ACCUMULATION = {accumulation}
PREFETCH = {prefetch}
REDUCTIONS = {reductions}  # that may be under way while the next module's gradients are computed
POLICY = MixedPrecisionPolicy({policy})


class Wrap(NamedTuple):
    """A module to shard as one: over how many neighbouring ranks, with replicas across the others.

    reshard: what is left after forward: True, the shard; False, all of it; a number, one of so many shards.
    keep: parameters stay whole from the first micro-batch of a step to the last.
    late: gradients are reduced after the last micro-batch only, and add up unsharded before.
    recompute: forward is computed again in backward, all of it ("full"), or what remains where the results of
    matrix products and attention are kept ("elementwise"), of attention and every other product
    ("operations"), of attention ("products"), or of products ("attention").
    """

    module: str
    shards: int
    reshard: bool | int = True
    keep: bool = False
    late: bool = False
    recompute: str = ""


WRAPS = (
{wraps}
)
ROOT = {root}


{contexts}


def build(make: Callable[[], nn.Module], device_type: str = "{device}") -> nn.Module:
    """Make a model and shard it: rank 0 makes it in the host's memory, and all ranks get their shards from
    there. No device ever has more than one whole tensor beside its shards."""
    first = dist.get_rank() == 0
    whole = None
    if first:
        with torch.device("cpu"):
            whole = make().float()
    with torch.device("meta"):
        model = make().float()
    shard(model, device_type)
    device = torch.device(device_type, *([torch.cuda.current_device()] if device_type == "cuda" else []))
    model.to_empty(device=device)
    values = dict(whole.state_dict()) if whole is not None else {{}}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, values, options=options)
    buffers = dict(whole.named_buffers()) if whole is not None else {{}}
    for name, buffer in model.named_buffers():  # those that no state dict has, too
        if first:
            buffer.copy_(buffers[name.replace("_checkpoint_wrapped_module.", "")])
        dist.broadcast(buffer, 0)
    return model


def clip(model: nn.Module, most: float) -> torch.Tensor:
    """Clip gradients by their global norm, which is returned; torch's own clip_grad_norm_ cannot add up those
    of several meshes."""
    meshes: dict[object, list[nn.Parameter]] = {{}}
    for parameter in model.parameters():
        if parameter.grad is not None:
            meshes.setdefault(parameter.grad.device_mesh, []).append(parameter)
    norms = [nn.utils.get_total_norm([one.grad for one in some]).full_tensor() for some in meshes.values()]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for some in meshes.values():
        nn.utils.clip_grads_with_norm_(some, most, total)
    return total


def shard(model: nn.Module, device_type: str = "{device}") -> nn.Module:
    """Shard a model in place; a module that is recomputed is wrapped."""
    meshes: dict[int, DeviceMesh] = {{}}
    wrapped = {{}}
    for wrap in WRAPS:
        if wrap.recompute:
            parent, _, name = wrap.module.rpartition(".")
            kept = {{}} if wrap.recompute == "full" else {{"context_fn": partial(_contexts, wrap.recompute)}}
            again = checkpoint_wrapper(model.get_submodule(wrap.module), **kept)
            setattr(model.get_submodule(parent), name, again)
    for wrap in sorted(WRAPS, key=lambda wrap: -wrap.module.count(".")):
        wrapped[wrap.module] = _shard(model.get_submodule(wrap.module), wrap, meshes, device_type)
    _shard(model, ROOT, meshes, device_type)
    blocks = [wrapped[wrap.module] for wrap in WRAPS]
    for place, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 1 + PREFETCH])
        block.set_modules_to_backward_prefetch(blocks[max(0, place - PREFETCH) : place][::-1])
    if REDUCTIONS > 1:
        if hasattr(model, "set_reduce_scatter_max_input_buffers"):
            model.set_reduce_scatter_max_input_buffers(REDUCTIONS)
        else:
            warnings.warn(f"one reduction at a time, not {{REDUCTIONS}}: more are new in torch 2.13")
    return model


def before_micro_batch(model: nn.Module, *, last: bool) -> None:
    """Call it before the forward of every micro-batch; last: whether it is the step's last."""
    for wrap in (*WRAPS, ROOT):
        module = model.get_submodule(wrap.module)
        if wrap.keep:
            module.set_reshard_after_backward(last, recurse=False)
        if wrap.late:
            module.set_requires_gradient_sync(last, recurse=False)
        if wrap.shards < WORLD:
            module.set_requires_all_reduce(last, recurse=False)
    model.set_is_last_backward(last)


def _shard(module: nn.Module, wrap: Wrap, meshes: dict[int, DeviceMesh], device_type: str) -> nn.Module:
    if wrap.shards not in meshes:
        shape = (WORLD,) if wrap.shards == WORLD else (WORLD // wrap.shards, wrap.shards)
        names = ("replicate", "shard")[-len(shape) :]
        meshes[wrap.shards] = init_device_mesh(device_type, shape, mesh_dim_names=names)
    return fully_shard(
        module, mesh=meshes[wrap.shards], reshard_after_forward=wrap.reshard, mp_policy=POLICY
    )
'''


def export(path: Path, plan: Plan, sizes: Callable[[str], int]) -> Exported:
    """The file, and what FSDP2 cannot say. ``sizes``: elements of a tensor by name."""
    groups, lost = groups_of(plan, sizes)
    lost += [*kept_on_device(plan, "FSDP2"), *summed_narrow(plan, "FSDP2")]
    buffers = max(LEAST_BUFFERS, plan.gradient_buffers)
    if buffers > plan.gradient_buffers and any(plan.mesh.shards[group.levels.grad] > 1 for group in groups):
        what = "one unit's are unreduced at a time in the plan; FSDP2 computes the next unit's beside them"
        lost.append(Lost(GRADIENTS, what))
    lines: list[str] = []
    levels: dict[str, Levels] = {}
    for group in groups:
        said, instead = _wrap(plan, group)
        lines.append(said)
        lost += instead
        levels |= dict.fromkeys(group.units, expressed(plan, group.levels))
    text = TEMPLATE.format(
        products=json.dumps(PRODUCTS),
        saves_nothing=json.dumps(SAVES_NOTHING),
        contexts=CONTEXTS,
        about=about(path, plan).replace("\\", "/").replace('"', "'"),
        world=plan.mesh.world,
        micro_batch=plan.batch.micro_batch,
        accumulation=plan.batch.accumulation,
        prefetch=plan.prefetch,
        reductions=buffers - 1,
        policy=_policy(plan),
        wraps="\n".join(f"    {line}," for line in lines[:-1]),
        root=lines[-1],
        device="cpu" if plan.cluster.backend == "gloo" else "cuda",
    )
    return Exported(text, tuple(lost), levels, buffers)


def expressed(plan: Plan, levels: Levels) -> Levels:
    """What FSDP2 makes of a triple: gradients have the optimizer state's shards, or are whole."""
    if plan.batch.accumulation == 1 or levels.grad == 0:
        return levels
    return Levels(levels.param, levels.optim, levels.optim)


def _wrap(plan: Plan, group: WrappedModule) -> tuple[str, list[Lost]]:
    param, grad, optim = group.levels.shards(plan.mesh)
    options = {"shards": str(optim)}
    lost = []
    where = group.module or "the root"
    if param == 1 and optim > 1:
        options |= {"reshard": "False", "keep": "True"}
    elif param < optim:
        options["reshard"] = str(param)
        lost.append(
            Lost(
                where,
                f"parameters are {param} shards all along in the plan; FSDP2 keeps {optim}, gathers them for "
                f"forward, and has {param} from there to backward only",
            )
        )
    if plan.batch.accumulation > 1:
        if grad == 1 and optim > 1:
            options["late"] = "True"
        elif grad != optim:
            lost.append(Lost(where, f"gradients add up in {grad} shards in the plan; in FSDP2 in {optim}"))
    if group.recompute:
        options["recompute"] = json.dumps(group.recompute)
    said = ", ".join(f"{name}={value}" for name, value in options.items())
    return f"Wrap({json.dumps(group.module)}, {said})", lost


def _policy(plan: Plan) -> str:
    found = []
    if plan.model.dtype == "bfloat16":
        found.append("param_dtype=torch.bfloat16")
    if plan.model.dtype == "bfloat16" or plan.reduce_dtype != plan.model.dtype:
        found.append(f"reduce_dtype=torch.{plan.reduce_dtype}")
    return ", ".join(found)
