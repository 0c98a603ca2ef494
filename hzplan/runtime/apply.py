"""``parallelize``: a model and a plan in, the same model trained in shards out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hzplan.core.buffers import assign_slots
from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.layout import MASTER_DTYPE, BucketLayout, TensorSpec, bucketise, gradient_bytes, marked
from hzplan.core.order import CircularOrder, in_order
from hzplan.core.recompute import HOST, NOTHING, Recomputed
from hzplan.core.relaxed import Policy
from hzplan.core.schedule import Kind, MessageOrder, Schedule, Use, build
from hzplan.core.wire import Wire
from hzplan.errors import UserError
from hzplan.formats.plan import Plan, RelaxedTier
from hzplan.formats.profile import signature
from hzplan.models.deferred import Waiting, become, stand_in
from hzplan.models.hooks import attach
from hzplan.models.local import local, split_over
from hzplan.models.recompute import recompute, recomputed_modules
from hzplan.models.saved import Saved
from hzplan.models.units import Unit, blocks_of, dtype_name, find_units
from hzplan.runtime import cuda, launcher
from hzplan.runtime.backends.groups import STREAMS, job_timeout
from hzplan.runtime.bucket import Bucket, Forms
from hzplan.runtime.engine import Engine
from hzplan.runtime.executor import Streams
from hzplan.runtime.host_memory import host_buffer
from hzplan.runtime.joined import lay_side_by_side
from hzplan.runtime.muon import by_method
from hzplan.runtime.optimizer import ShardedOptimizer
from hzplan.runtime.relaxed.meeting import here
from hzplan.runtime.relaxed.sync import Groups, GroupSync
from hzplan.runtime.rounding import RoundingGuard
from hzplan.runtime.tasks import Tasks
from hzplan.runtime.unit import UnitState
from hzplan.runtime.updates import Updates, as_groups, check_elementwise, check_planned, fused_by_default
from hzplan.runtime.world import ProcessWorld, World

SLACK = 4.0
"""How many times as long as predicted a transfer may take, beside what groups are patient for."""
NOTE = "while allocating what lasts of unit "
"""How an error is marked with the unit that ``apply`` was busy with."""


@dataclass(frozen=True)
class Choice:
    """What the runtime needs of a plan: levels by tensor, and how the step is ordered.

    ``dtype``: the dtype that the model computes in, torch's name; None: its parameters'. ``reduce_dtype``:
    the dtype that gradients travel in; None: the master weights'; ``narrow_sums``: libraries add up in it.
    ``wire``: narrower formats (``core.wire``). ``message_order``: see ``core.order``.
    ``message_bytes``, ``matrix_units``, ``copy_uses``: see ``core.schedule.build``.
    ``requires``: by unit, the units whose parameters it needs, besides those that the model shows.
    ``recompute``: units that compute their forward again in backward. ``offload``: units whose optimizer
    state lies in the host's memory. ``tier_names``: the cluster's names of its links, for messages.
    ``local_norm``: every rank has all reduced gradients, and takes their norm by itself.
    ``relaxed``: how this world's ranks stay together with other groups of as many.
    """

    mesh: Mesh
    levels: Mapping[str, Levels]
    uses: tuple[Use, ...]
    prefetch: int
    accumulation: int
    clip: bool
    dtype: str | None = None
    reduce_dtype: str | None = None
    narrow_sums: bool = False
    wire: Wire | None = None
    gradient_buffers: int | None = None
    message_bytes: int = 0
    matrix_units: int = 0
    copy_uses: int = 1
    message_order: MessageOrder | None = None
    requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    recompute: Recomputed = NOTHING
    offload: frozenset[str] = frozenset()
    tier_names: tuple[str, ...] = ()
    optimizer: str | None = None
    local_norm: bool = False
    relaxed: Policy | None = None

    @classmethod
    def of(cls, plan: Plan) -> Choice:
        """Read a plan file's choices."""
        return cls(
            mesh=plan.mesh,
            levels={
                name: plan.levels(bucket)
                for unit in plan.units
                for bucket in unit.buckets
                for name in bucket.tensors
            },
            uses=tuple(Use.parse(text) for text in plan.uses),
            prefetch=plan.prefetch,
            accumulation=plan.batch.accumulation,
            clip=plan.clip,
            local_norm=plan.local_norm or False,
            dtype=plan.model.dtype,
            reduce_dtype=plan.reduce_dtype,
            narrow_sums=plan.narrow_sums or False,
            wire=plan.wire.formats if plan.wire else None,
            gradient_buffers=plan.gradient_buffers,
            message_bytes=plan.message_bytes or 0,
            matrix_units=plan.matrix_units or 0,
            copy_uses=plan.copy_uses or 1,
            message_order=plan.message_order,
            requires={unit.name: unit.requires for unit in plan.units},
            recompute=plan.recomputed,
            offload=plan.offloaded,
            tier_names=plan.cluster.tier_names,
            optimizer=plan.optimizer,
            relaxed=plan.relaxed,
        )


def parallelize(
    model: nn.Module,
    plan: Plan | str | Path,
    optimizer_class: Callable[..., Optimizer] = torch.optim.AdamW,
    *,
    params: Iterable[Any] | None = None,
    streams: Streams = Streams.TIERS,
    mesh: DeviceMesh | None = None,
    groups: Groups | None = None,
    **arguments: Any,
) -> tuple[nn.Module, ShardedOptimizer]:
    """Shard a model in place as a plan (or the file of one) says, and make its optimizer.

    ``params``: parameters or parameter groups as torch's optimizers take them (default: all trained
    parameters in one group); ``arguments`` go to ``optimizer_class``, which must work element by element.
    ``streams``: what communication runs on; leave it, except to measure what the others cost.
    ``mesh``: the data-parallel dimension of a torch DeviceMesh, where the job has others beside, as in
    ``mesh=device_mesh["dp"]``; what the model then holds as DTensors of tensor parallelism stays so, and the
    plan is one that ``hzplan solve --model-parallel tp=…`` made. By default all ranks.
    ``groups``: under a plan whose slowest tier is relaxed, which group this one is and where it meets the
    others; by default what HZPLAN_GROUP and HZPLAN_MEET say.
    Every rank calls it, with torch.distributed initialised and the plan's world. Initial values are rank 0's.

    The loop stays yours: forward, ``backward()`` as often as the plan accumulates, then
    ``optimizer.clip_grad_norm_`` if you clip, and ``optimizer.step()``. As with DDP, gradients are means over
    ranks and sums over micro-batches: divide the loss by the accumulation. ``parameter.grad`` is None after
    backward; the reduced gradients are in the optimizer's pieces.

    A bfloat16 plan takes the model in float32. Its parameters become bfloat16, for forward, backward and
    all-gathers; the float32 values live on as master weights, sharded like the optimizer state and updated by
    the optimizer. Gradients are accumulated in float32, travel in the plan's ``reduce_dtype`` or what its
    ``wire`` says, and are summed in float32 unless the plan says ``narrow_sums``.
    As in FSDP2 floating tensors that are passed to a unit are cast to bfloat16, and buffers keep their dtype:
    a float32 buffer that meets activations inside a module should be cast there.

    Units that are compiled are compiled in place, ``layer.compile()``, before this is called.

    A parameter for which no rank has a gradient in a step is left alone by the optimizer, as with DDP; under
    a plan without clipping, whose updates do not wait for other ranks, its gradient counts as zero.

    Raises UserError when world, model or optimizer do not fit the plan, naming what differs.
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    if plan.parallel is not None and plan.parallel.pipeline > 1:
        raise UserError(
            f"the plan is of the first of {plan.parallel.pipeline} pipeline stages; pipelines are planned "
            "and shown, not trained: their order of passes is another"
        )
    check_model(model, plan)
    travels = any(plan.levels(b).assembles(plan.mesh) for unit in plan.units for b in unit.buckets)
    of_tier = (STREAMS if plan.message_order is None else 1) + travels
    world = ProcessWorld(None if mesh is None else _only_group(mesh), plan.ctas, of_tier)
    if plan.relaxed is not None and groups is None:
        tier = plan.replica_sync
        assert isinstance(tier, RelaxedTier)
        # What a transfer may take, however busy the link is, and how far apart groups may be in their steps.
        slack_s = SLACK * tier.transfer_s + tier.delay * tier.step_s
        groups = here(tier.groups, plan.batch.global_batch, slack_s)
        if (timeout := job_timeout()) is not None and (waits_s := groups.most_s) > timeout.total_seconds():
            raise UserError(
                f"a result of another group is waited for up to {waits_s:.0f} s (twice the patience, and "
                f"{slack_s:.0f} s for transfers), and ranks of the job for each other "
                f"{timeout.total_seconds():.0f} s: give a longer --timeout, or less --patience"
            )
    return apply(
        *(model, Choice.of(plan), optimizer_class),
        params=params,
        streams=streams,
        world=world,
        among=groups,
        **arguments,
    )


def _only_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """A mesh's process group; UserError for one of several dimensions."""
    if not isinstance(mesh, DeviceMesh):
        raise UserError(f"mesh is a {type(mesh).__name__}; give a dimension of a torch DeviceMesh")
    if mesh.ndim != 1:
        raise UserError(
            f"mesh has the dimensions {mesh.mesh_dim_names or tuple(mesh.shape)}; give the data-parallel "
            'one, as in mesh["dp"], or several flattened'
        )
    return mesh.get_group()


def check_model(model: nn.Module, plan: Plan) -> None:
    """UserError when the plan was made for another model; names the first tensor that differs."""
    if isinstance(model, DistributedDataParallel):
        raise UserError("the model is in DDP already; give the module inside of it, the plan shards it")
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule":
            raise UserError(
                f"{name or 'the model'} is wrapped by torch.compile, which renames its parameters; compile "
                "it in place with module.compile() instead, or wrap it after parallelize"
            )
    units = find_units(model)  # names and order of tensors do not depend on them
    tensors = [tensor for unit in units for tensor in unit.computed_in(plan.model.dtype)]
    here = {tensor.name for tensor in tensors}
    planned = {name for unit in plan.units for bucket in unit.buckets for name in bucket.tensors}
    for name in sorted(here ^ planned):
        where = "the plan but not in the model" if name in planned else "the model but not in the plan"
        raise UserError(
            f"the plan is for another model ({plan.model.name}): {name} is in {where}; solve again"
        )
    if plan.parallel is not None:  # how tensors are cut is the user's; names and levels are the plan's
        return
    if signature(tensors) != plan.model.signature:
        raise UserError(
            f"the plan is for another model ({plan.model.name}): same tensor names, but a shape, dtype or "
            "requires_grad differs; profile and solve this model"
        )


def apply(
    model: nn.Module,
    choice: Choice,
    optimizer_class: Callable[..., Optimizer] = torch.optim.AdamW,
    *,
    params: Iterable[Any] | None = None,
    streams: Streams = Streams.TIERS,
    world: World | None = None,
    queues: launcher.Device | None = None,
    among: Groups | None = None,
    **arguments: Any,
) -> tuple[nn.Module, ShardedOptimizer]:
    """``parallelize`` from a bare choice of levels. ``world``: who trains, by default this job's ranks.
    ``queues``: the device where it queues work, by default CUDA's where the model is on a GPU. ``among``: the
    other groups of a relaxed tier; without it this group trains by itself."""
    check_elementwise(optimizer_class)
    world = world or ProcessWorld()
    if world.size != choice.mesh.world:
        raise UserError(
            f"the plan is for {choice.mesh.world} ranks (mesh {choice.mesh}), this job has {world.size}; "
            "start that many, or solve for this world"
        )
    waiting = stand_in(model)
    if choice.optimizer is not None:
        device = next(model.parameters()).device
        check_planned(optimizer_class, arguments, choice.optimizer, device)
    units = find_units(model, blocks_of(choice.requires) if choice.requires else None)
    modules = [unit.module for unit in units]
    if not _in_shards.isdisjoint(modules):
        raise UserError(
            "the model is in shards already; go on with the optimizer that it was given then, or make the "
            "model anew"
        )
    recomputed = recomputed_modules(units, choice.recompute)
    tensors = {unit.name: marked(unit.computed_in(choice.dtype), choice.wire) for unit in units}
    _check_parameters(units, tensors, world)
    for name in sorted(choice.offload - {unit.name for unit in units}):
        raise UserError(f"the plan offloads unit {name}, which the model does not have; solve again")
    schedule = schedule_of(units, choice)
    slots = assign_slots(schedule, tensors)
    layouts = {
        name: bucketise([(tensor, choice.levels[tensor.name]) for tensor in of_unit], choice.mesh)
        for name, of_unit in tensors.items()
    }
    if choice.local_norm:
        _check_local_norm(layouts, choice.mesh)
    offloaded = choice.offload & schedule.offload_slots.keys()
    reduce_dtype = None if choice.reduce_dtype is None else getattr(torch, choice.reduce_dtype)
    forms = Forms(choice.wire, reduce_dtype, choice.narrow_sums)
    of_all = choice.mesh, world, forms, waiting.parameters
    states = [_state(unit, layouts[unit.name], *of_all, offload=unit.name in offloaded) for unit in units]
    lay_side_by_side({state.name: state for state in states}, schedule)
    if waiting.parameters or waiting.buffers:
        _begin(model, waiting, states, world)
    if world.size > 1:
        _send_buffers(model, waiting.buffers, world)
    groups = as_groups(params if params is not None else (p for p in model.parameters() if p.requires_grad))
    for group in groups:
        group["params"] = [waiting.replaced.get(id(p), (p, p))[1] for p in group["params"]]
    named = [pair for unit in units for pair in unit.parameters]
    matrices = {id(p): name for name, p in named if p.requires_grad and choice.levels[name].matrix}
    groups = by_method(groups, matrices, {id(p): name for name, p in named}, optimizer_class)
    del waiting  # and what its constructor was given
    device = next(model.parameters()).device
    if queues is None and device.type == "cuda":
        queues = cuda.Device(device)
    if queues is not None:
        arguments = fused_by_default(optimizer_class, groups, arguments)
    updates = Updates(
        *(states, optimizer_class, groups, arguments),
        offload_slots=schedule.offload_slots,
        device=device,
        clip=schedule.clip,
        local_norm=choice.local_norm,
        queued=queues is not None,
        together=_updated_together(states, schedule) if queues is None else (),
    )
    on_host = [name for name, way in choice.recompute.items() if way == HOST and name in schedule.saved]
    saved = {name: Saved(host_buffer(device)) for name in sorted(on_host)}
    tasks = Tasks(
        *({state.name: state for state in states}, updates, schedule, slots.unshard, slots.gradient),
        *(choice.mesh, device, world, saved, forms),
    )
    rounding = RoundingGuard(forms, len(choice.mesh.tiers))
    engine = Engine(
        *(tasks, choice.mesh, device, world, rounding, streams),
        tier_names=choice.tier_names,
        queues=queues,
    )
    if choice.relaxed is not None and among is not None:
        updated = {unit for task in schedule.tasks if task.kind is Kind.UPDATE for unit in task.units}
        trained = [state for state in states if state.name in updated]
        updates.relaxed = _relaxed(choice.relaxed, among, model, trained, world)
    undo = [attach(units, engine, silent=engine.comes_by_itself, passed_over=engine.passes_over)]
    undo += [
        recompute(
            module,
            partial(choice.recompute.get, name),
            saved=saved.get(name),
            in_time=partial(engine.copies_in_time, name),
        )
        for name, module in recomputed.items()
    ]
    if any(bucket.sharded for state in states for bucket in state.buckets):
        undo += [refuse_state_dict(module) for module in model.modules()]

    _in_shards.update(modules)

    def detach() -> None:
        if not any(bucket.sharded for state in states for bucket in state.buckets):
            _in_shards.difference_update(modules)  # else parameters stay placeholders
        for one in undo:
            one()

    engine.detach = detach
    return model, ShardedOptimizer(engine)


_in_shards: WeakSet[nn.Module] = WeakSet()
"""Modules of units whose parameters are views of a plan's buffers."""


def _relaxed(
    policy: Policy, groups: Groups, model: nn.Module, states: Sequence[UnitState], world: World
) -> GroupSync:
    """This rank's part in a relaxed tier. UserError for what groups would not have in common."""
    for state in states:
        if state.offload:
            raise UserError(
                f"unit {state.name}: optimizer state in the host's memory, and groups that do not wait for "
                "each other, are not for one plan; solve without --host-memory"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            raise UserError(
                f"{name or 'the model'} has running statistics (BatchNorm), which groups that do not wait "
                "for each other do not have in common; take another norm, or a plan in which all wait"
            )
    trained = {state.name: state.trainable_buckets for state in states}
    return GroupSync(policy, groups, trained, world.apart())


def refuse_state_dict(module: nn.Module) -> Callable[[], None]:
    """From now on its state dict, which would be of NaN, is refused; returns what undoes that."""

    def refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        raise UserError(
            "the model is sharded, and its state_dict() would not have its weights: save with "
            "hzplan.Checkpoints, or call hzplan.full_parameters(optimizer) on every rank"
        )

    handle: RemovableHandle = module.register_state_dict_pre_hook(refuse)
    return handle.remove


def _updated_together(states: Iterable[UnitState], schedule: Schedule) -> list[str]:
    """The units that one call of the optimizer updates, in the order of updates: those that nobody gathers
    afterwards, where all are updated at the end of a step.

    Compute waits for the first of them before it reads any other: where updates are on a stream of their own,
    as with matrices that are brought together, a prefetch may not.
    """
    listed = list(states)
    assembles = any(bucket.assembles for state in listed for bucket in state.trainable_buckets)
    if not schedule.clip or schedule.offload_slots or assembles:
        return []
    alone = {
        state.name
        for state in listed
        if not any(
            bucket.collectives(Kind.PARAM_GATHER, tier)
            for bucket in state.trainable_buckets
            for tier in range(schedule.tiers)
        )
    }
    return [
        unit for task in schedule.tasks if task.kind is Kind.UPDATE for unit in task.units if unit in alone
    ]


def _check_local_norm(layouts: Mapping[str, Sequence[BucketLayout]], mesh: Mesh) -> None:
    """UserError where a rank does not have all reduced gradients, whose norm it is to take by itself."""
    for layout in (one for of_unit in layouts.values() for one in of_unit if one.trainable):
        _, grad, optim = layout.levels.shards(mesh)
        if max(grad, optim) > 1:
            raise UserError(
                f"the plan's field local_norm: {layout.tensors[0].name} is trained, and its gradient or "
                "optimizer state is in shards; solve again"
            )


def _check_parameters(
    units: Iterable[Unit], tensors: Mapping[str, Sequence[TensorSpec]], world: World
) -> None:
    """UserError for a parameter that the ranks that train together have in parts already, and for a trained
    one that has been rounded already: master weights start from its values."""
    for unit in units:
        for (name, parameter), tensor in zip(unit.parameters, tensors[unit.name], strict=True):
            for group in split_over(parameter):
                if world.meets(dist.get_process_group_ranks(group)):
                    raise UserError(
                        f"parameter {name} is a DTensor that is cut over ranks which train as replicas "
                        "(FSDP?); pass the model as it was before, and with tensor parallelism the other "
                        "dimension as mesh"
                    )
            given, master = dtype_name(parameter.dtype), MASTER_DTYPE[tensor.dtype]
            if tensor.trainable and given != master:
                raise UserError(
                    f"parameter {name} is {given}, but master weights are {master}; pass the model in "
                    f"{master} and let the plan cast it"
                )


def schedule_of(units: Iterable[Unit], choice: Choice) -> Schedule:
    """The schedule that a choice leads to; UserError when its uses do not fit the units."""
    listed = list(units)
    requires = {
        unit.name: tuple(dict.fromkeys([*unit.requires, *choice.requires.get(unit.name, ())]))
        for unit in listed
    }
    for name in sorted({*choice.requires, *(u for wanted in requires.values() for u in wanted)}):
        if name not in requires:
            raise UserError(
                f"the plan names unit {name}, which the model does not have; profile and solve again"
            )
    for use in choice.uses:
        if use.unit not in requires:
            raise UserError(
                f"the plan uses unit {use.unit}, which the model does not have; profile and solve again"
            )
    schedule = build(
        choice.uses,
        requires,
        [unit.name for unit in listed if any(t.trainable for t in unit.tensors)],
        tiers=len(choice.mesh.tiers),
        prefetch=choice.prefetch,
        accumulation=choice.accumulation,
        clip=choice.clip,
        gradient_buffers=choice.gradient_buffers,
        offload=bool(choice.offload),
        message_bytes=choice.message_bytes,
        gradient_bytes={unit.name: gradient_bytes(unit.tensors) for unit in listed},
        saved=[unit for unit, way in choice.recompute.items() if way == HOST],
        copy_uses=choice.copy_uses,
        matrices=[unit.name for unit in listed if _has_matrices(unit, choice)],
        matrix_units=choice.matrix_units,
    )
    try:
        return in_order(schedule, choice.message_order)
    except CircularOrder as error:
        raise UserError(f"the plan's units: ahead: {error}; solve again") from None


def _has_matrices(unit: Unit, choice: Choice) -> bool:
    return any(choice.levels[tensor.name].matrix for tensor in unit.tensors if tensor.trainable)


def _begin(model: nn.Module, waiting: Waiting, states: Iterable[UnitState], world: World) -> None:
    """Give what waits its values, rank 0's, one tensor after the other; UserError where ranks differ in what
    waits, or in the order of it."""
    order = hashlib.sha256("\n".join(waiting.order).encode()).digest()
    own = torch.tensor(
        int.from_bytes(order[:7], "big"),
        device=next(bucket.param.device for state in states for bucket in state.buckets),
    )
    least, most = own.clone(), own.clone()
    world.all_reduce(least, dist.ReduceOp.MIN)
    world.all_reduce(most, dist.ReduceOp.MAX)
    if not least == most == own:
        raise UserError(
            "the model was made in other ways on other ranks, so its tensors cannot be sent from rank 0; "
            "make it alike on all ranks, from the same seed"
        )
    where = {
        tensor.name: (bucket, index)
        for state in states
        for bucket in state.buckets
        for index, tensor in enumerate(bucket.layout.tensors)
    }
    buffers = dict(model.named_buffers())
    for name, values in waiting.values():
        if name in where:
            bucket, index = where[name]
            bucket.begin_with(index, values)
        else:
            world.broadcast(kept := values.detach().contiguous())
            become(model, buffers[name], kept)


@torch.no_grad()
def _send_buffers(model: nn.Module, but: Collection[str], world: World) -> None:
    """Give every rank the buffers of rank 0, as DDP does, ``but`` those that have been sent: some are drawn
    at random."""
    for name, buffer in model.named_buffers():
        values = local(buffer)
        if name in but or not values.numel() or values.is_meta or values.layout != torch.strided:
            continue
        sent = values.contiguous()
        world.broadcast(sent.view(-1).view(torch.uint8))  # gloo does not know every dtype
        if sent.data_ptr() != values.data_ptr():
            sides = zip(values.stride(), values.shape, strict=True)
            is_expanded = any(not stride and size > 1 for stride, size in sides)
            become(model, buffer, sent) if is_expanded else values.copy_(sent)


def _state(
    unit: Unit,
    layouts: Iterable[BucketLayout],
    mesh: Mesh,
    world: World,
    forms: Forms,
    waits: frozenset[str],
    *,
    offload: bool,
) -> UnitState:
    """Allocate what lasts of a unit; an error names it."""
    by_name = dict(unit.parameters)
    try:
        buckets = [
            Bucket(
                *(layout, [by_name[t.name] for t in layout.tensors], mesh, world, forms),
                offload=offload,
                waits=waits & {tensor.name for tensor in layout.tensors},
            )
            for layout in layouts
        ]
        return UnitState(unit.name, buckets, mesh.world, offload=offload)
    except Exception as error:
        error.add_note(f"{NOTE}{unit.name}")
        raise


def full_parameters(
    optimizer: ShardedOptimizer, *, cpu_offload: bool = True, rank0_only: bool = False
) -> dict[str, Tensor]:
    """A copy of every parameter, whole, by its name in the model; every rank calls it, between steps.

    ``cpu_offload``: copies lie in the host's memory, so that the device holds one unit's at a time.
    ``rank0_only``: other ranks than the first take part and get none; a node's ranks share its memory.

    Of a DTensor of tensor parallelism it is this rank's part.

    Where the plan keeps master weights (bfloat16), it is those, in float32; frozen parameters are bfloat16.
    """
    found: dict[str, Tensor] = {}
    for name in optimizer.engine.units:
        with optimizer.engine.unsharded(name) as unit:
            for bucket in unit.buckets:
                values = bucket.gathered(optimizer.engine.tasks.groups)
                if rank0_only and bucket.rank != 0:
                    continue
                for tensor, value in zip(bucket.layout.tensors, values, strict=True):
                    # A copy also where it is there already: values may be views of a whole bucket.
                    found[tensor.name] = value.to("cpu", copy=True) if cpu_offload else value
    return found
