"""A plan as Megatron-FSDP v2: Python that gives every unit a mesh and ``Placements`` of its own.

By the source of ``megatron_fsdp/experimental`` in NVIDIA/Megatron-LM at d98e8a64 (2026-08-22): a mesh's axes
go from the slowest links to the fastest, and those that are sharded are the last ones. ``SchedulePolicy`` is
newer (pull request 6905, merged 2026-09; read in ``schedule.py`` at 6e9992a4): how many elements of the next
modules are gathered ahead, in forward and in backward. ``solver.target`` knows which levels can be said.

Two things are not as in our schedule, and cost what a plan does not say: parameters that are sharded are
gathered again for backward even if it is near, and the next modules are those that were registered next.
In bfloat16, master weights begin as the rounded values: there is no public way to give it others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from hzplan.core.hierarchy import Levels, Mesh
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
    shards,
)
from hzplan.formats.plan import Plan
from hzplan.solver.target import GRADIENT_BUFFERS, megatron_fsdp_v2, reduced_at_once

NAME = "Megatron-FSDP v2"

TEMPLATE = '''"""Megatron-FSDP v2 as a plan of hzplan says: {about}.

    model, context = build(lambda: Model(config))  # or shard(model), with the same values on all ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=…)
    fully_shard_optimizer(optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        for index in range(ACCUMULATION):
            with microbatch(context, is_last=index == ACCUMULATION - 1):
                (loss_of(model, batch) / ACCUMULATION).backward()
        clip(model, 1.0)
        optimizer.step()

torch.distributed must be initialised before, with NCCL, and this rank's GPU be the current one. It is for a
Megatron-LM that has SchedulePolicy (pull request 6905, of September 2026).
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import (
    Placements,
    SchedulePolicy,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.src.megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

__all__ = ["ACCUMULATION", "MICRO_BATCH", "build", "clip", "fully_shard_optimizer", "microbatch", "shard"]

PRODUCTS = {products}
SAVES_NOTHING = {saves_nothing}
SECOND_RUN = getattr(torch.utils.checkpoint, "_RECOMPUTE", None)  # torch's mark of what is computed again
MICRO_BATCH = {micro_batch}
ACCUMULATION = {accumulation}
PREFETCH = {prefetch}  # modules that are gathered ahead
DTYPE = torch.{dtype}  # of parameters in forward and backward
REDUCE_DTYPE = torch.{reduce_dtype}  # of gradients when a micro-batch's are reduced
MAIN_GRADS_DTYPE = torch.{main_grads_dtype}  # of their sum, and of what is reduced after the last one
PLACEMENTS = {{"R": Replicate(), "S": Shard(0), "P": Partial("avg")}}


class Wrap(NamedTuple):
    """A module to shard as one, over a mesh whose axes go from the slowest links to the fastest.

    ranks: along each axis. parameter, gradient, optimizer: a letter for each axis. R, its ranks have the
    same; S, shards; P, each the gradients of its own micro-batches, which are reduced after the last one.
    recompute: forward is computed again in backward, all of it ("full"), or what remains where the results of
    matrix products and attention are kept ("elementwise"), of attention and every other product
    ("operations"), of attention ("products"), or of products ("attention").
    """

    module: str
    ranks: tuple[int, ...]
    parameter: str
    gradient: str
    optimizer: str
    recompute: str = ""


WRAPS = (
{wraps}
)
ROOT = {root}


def build(make: Callable[[], nn.Module]) -> tuple[nn.Module, Any]:
    """Make a model and shard it: rank 0 makes it in the host's memory, and all ranks get their shards from
    there. No device ever has more than one whole unit beside its shards. Returns the model and the context
    of its micro-batches."""
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = make()
    return _shard(model, sends=True)


def shard(model: nn.Module) -> tuple[nn.Module, Any]:
    """Shard a model in place, in the host's memory or on the device, whose values all ranks have; a module
    that is recomputed is wrapped. Returns the model and the context of its micro-batches."""
    return _shard(model, sends=False)


@torch.no_grad()
def clip(model: nn.Module, most: float) -> torch.Tensor:
    """Clip gradients by their global norm, which is returned, after the last micro-batch's backward."""
    gradients = [one.grad for one in model.parameters() if isinstance(one.grad, DTensor)]
    squares = torch.zeros((), device="cuda")
    for gradient in gradients:
        axes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
        copies = math.prod(ranks for ranks, placement in axes if placement.is_replicate())
        squares += torch.linalg.vector_norm(gradient.to_local(), dtype=torch.float32) ** 2 / copies
    dist.all_reduce(squares)
    norm = squares.sqrt()
    for gradient in gradients:
        gradient.to_local().mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _shard(model: nn.Module, *, sends: bool) -> tuple[nn.Module, Any]:
    """sends: whether the others have rank 0's values from it."""
    for wrap in WRAPS:
        if wrap.recompute:
            parent, _, name = wrap.module.rpartition(".")
            kept: dict[str, Any] = {{}}
            if wrap.recompute != "full":
                kept["context_fn"] = partial(_contexts, wrap.recompute)
            again = checkpoint_wrapper(model.get_submodule(wrap.module), **kept)
            setattr(model.get_submodule(parent), name, again)
    for parameter in model.parameters():
        parameter.data = parameter.detach().to(DTYPE)
    wraps = {{model.get_submodule(wrap.module): wrap for wrap in (*WRAPS, ROOT)}}
    policies = _policies(model, wraps)
    meshes: dict[tuple[int, ...], DeviceMesh] = {{}}
    with fully_shard_context() as context:
        for module in reversed(list(policies)):  # children before parents
            wrap = wraps[module]
            if wrap.ranks not in meshes:
                names = tuple(f"dp_{{axis}}" for axis in range(len(wrap.ranks)))
                meshes[wrap.ranks] = init_device_mesh("cuda", wrap.ranks, mesh_dim_names=names)
            own = [one for one in module.parameters() if not isinstance(one, DTensor)]
            for parameter in own:
                if sends:
                    _materialise(parameter)
                if parameter.requires_grad and REDUCE_DTYPE != DTYPE:
                    parameter.grad_dtype = REDUCE_DTYPE
            if DTYPE != torch.float32:
                module.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
            fully_shard(
                module,
                meshes[wrap.ranks],
                Placements(
                    dp_axes=range(len(wrap.ranks)),
                    parameter=[PLACEMENTS[letter] for letter in wrap.parameter],
                    gradient=[PLACEMENTS[letter] for letter in wrap.gradient],
                    optimizer=[PLACEMENTS[letter] for letter in wrap.optimizer],
                ),
                mixed_precision_policy=_precision(own),
                schedule_policy=policies[module],
            )
    for holder in model.modules():
        for name, buffer in list(holder.named_buffers(recurse=False)):
            setattr(holder, name, _here(buffer, sends=sends))
    return model, context


def _policies(model: nn.Module, wraps: dict[nn.Module, Wrap]) -> dict[nn.Module, SchedulePolicy]:
    """How far to gather ahead at each module, parents before children: the elements of the PREFETCH modules
    that follow it. They follow as they were registered, in forward and backward from the root on."""
    forward = [module for module in model.modules() if module in wraps]
    backward = list(_backward(model, wraps))
    elements: dict[nn.Module, int] = {{}}
    taken: set[nn.Parameter] = set()
    for module in reversed(forward):
        own = set(module.parameters()) - taken
        elements[module] = sum(parameter.numel() for parameter in own)
        taken |= own
    return {{
        module: SchedulePolicy(
            forward_prefetch_size=sum(map(elements.__getitem__, _next(forward, module))),
            backward_prefetch_size=sum(map(elements.__getitem__, _next(backward, module))),
        )
        for module in forward
    }}


def _backward(module: nn.Module, wraps: dict[nn.Module, Wrap]) -> Iterator[nn.Module]:
    if module in wraps:
        yield module
    for child in reversed(list(module.children())):
        yield from _backward(child, wraps)


def _next(order: Sequence[nn.Module], module: nn.Module) -> Sequence[nn.Module]:
    place = order.index(module) + 1
    return order[place : place + PREFETCH]


def _precision(parameters: Sequence[nn.Parameter]) -> MixedPrecisionPolicy:
    """Master weights in float32, of a module that is trained."""
    trained = any(parameter.requires_grad for parameter in parameters)
    return MixedPrecisionPolicy(
        main_params_dtype=torch.float32 if trained else DTYPE, main_grads_dtype=MAIN_GRADS_DTYPE
    )


def _materialise(parameter: nn.Parameter) -> None:
    """Rank 0's values on this device, in a parameter that stays itself wherever it is used."""
    whole = nn.Parameter(_here(parameter, sends=True), requires_grad=parameter.requires_grad)
    whole.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, whole)


def _here(tensor: torch.Tensor, *, sends: bool) -> torch.Tensor:
    """A tensor on this device, with rank 0's values if it sends them."""
    if not sends:
        return tensor.detach().to("cuda")
    here = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
    if dist.get_rank() == 0:
        here.copy_(tensor.detach())
    dist.broadcast(here, 0)
    return here


def _cast_inputs(module: nn.Module, arguments: Any, keywords: Any) -> Any:
    """Floating tensors that a module is given, in its dtype."""

    def cast(value: Any) -> Any:
        return value.to(DTYPE) if torch.is_tensor(value) and value.is_floating_point() else value

    return tuple(map(cast, arguments)), {{name: cast(value) for name, value in keywords.items()}}


{contexts}
'''


class Placed(NamedTuple):
    """A triple as ``Placements``: per axis of a mesh, slowest links first, its ranks, and a letter for each
    of the three states (R, replicated; S, sharded; P, partial sums)."""

    ranks: tuple[int, ...]
    parameter: str
    gradient: str
    optimizer: str


def placed(mesh: Mesh, levels: Levels) -> Placed:
    """A triple over a mesh with as few axes as tell its levels apart."""
    axes = list(pairwise(sorted({0, levels.param, levels.grad, levels.optim, mesh.levels})))[::-1]

    def letters(level: int, other: str) -> str:
        return "".join("S" if high <= level else other for _, high in axes)

    ranks = tuple(mesh.shards[high] // mesh.shards[low] for low, high in axes)
    return Placed(ranks, letters(levels.param, "R"), letters(levels.grad, "P"), letters(levels.optim, "R"))


def expressed(mesh: Mesh, levels: Levels) -> Levels:
    """The nearest triple that Megatron-FSDP v2 has, by the shares of a unit that a rank holds; of equally
    near ones that with the smallest shares."""
    share = [1 / count for count in mesh.shards]

    def apart(other: Levels) -> tuple[float, float]:
        pairs = zip(levels.three, other.three, strict=True)
        distance = sum(abs(share[one] - share[its]) for one, its in pairs)
        return distance, sum(share[level] for level in other.three)

    return min(megatron_fsdp_v2(mesh), key=apart)


def export(path: Path, plan: Plan, sizes: Callable[[str], int]) -> Exported:
    """The file, and what Megatron-FSDP v2 cannot say. ``sizes``: elements of a tensor by name."""
    groups, lost = groups_of(plan, sizes)
    buffers = min(GRADIENT_BUFFERS, sum(1 for unit in plan.units if unit.buckets))
    lost += [*kept_on_device(plan, NAME), *_buffers_differ(plan, buffers)]
    levels: dict[str, Levels] = {}
    for group in groups:
        said = expressed(plan.mesh, group.levels)
        lost += _differs(plan, group, said)
        levels |= dict.fromkeys(group.units, said)
    lines = [_wrap(plan, group) for group in groups]
    sums_in = "bfloat16" if _sums_travel(plan) else "float32"
    text = TEMPLATE.format(
        products=json.dumps(PRODUCTS),
        saves_nothing=json.dumps(SAVES_NOTHING),
        contexts=CONTEXTS,
        about=about(path, plan).replace("\\", "/").replace('"', "'"),
        micro_batch=plan.batch.micro_batch,
        accumulation=plan.batch.accumulation,
        prefetch=plan.prefetch,
        dtype=plan.model.dtype,
        reduce_dtype=plan.reduce_dtype,
        main_grads_dtype=sums_in,
        wraps="\n".join(f"    {line}," for line in lines[:-1]),
        root=lines[-1],
    )
    return Exported(text, tuple(lost), levels, buffers)


def _buffers_differ(plan: Plan, buffers: int) -> list[Lost]:
    """Fewer buffers than in the plan cost time, more cost memory where gradients are sharded."""
    planned = plan.gradient_buffers
    sharded = any(bucket.shards.grad > 1 for unit in plan.units for bucket in unit.buckets)
    if planned == buffers or (planned < buffers and not sharded):
        return []
    what = f"unreduced ones of up to {planned} units at a time in the plan, in {NAME} of up to {buffers}"
    return [Lost(GRADIENTS, what)]


def _differs(plan: Plan, group: WrappedModule, said: Levels) -> list[Lost]:
    """What of a module's levels, and of the dtype of its reductions, is not as in the plan."""
    where = group.module or "the root"
    if said != group.levels:
        what = (
            f"{shards(plan, group.levels)} shards in the plan; {NAME} cannot go there one axis of a mesh at "
            f"a time, and has {shards(plan, said)}"
        )
        return [Lost(where, what)]
    in_bfloat16 = plan.reduce_dtype == "bfloat16" and not _sums_travel(plan)
    if in_bfloat16 and not reduced_at_once(plan.mesh, said):
        what = f"gradients travel in bfloat16 in the plan; in {NAME} in float32 after the last micro-batch"
        return [Lost(where, what)]
    return []


def _sums_travel(plan: Plan) -> bool:
    """Whether gradients may be kept in bfloat16: they travel in it, and nothing is added up."""
    return plan.reduce_dtype == "bfloat16" and plan.batch.accumulation == 1


def _wrap(plan: Plan, group: WrappedModule) -> str:
    options: dict[str, object] = placed(plan.mesh, expressed(plan.mesh, group.levels))._asdict()
    if group.recompute:
        options["recompute"] = group.recompute
    said = ", ".join(
        f"{name}={json.dumps(value) if isinstance(value, str) else value}" for name, value in options.items()
    )
    return f"Wrap({json.dumps(group.module)}, {said})"
