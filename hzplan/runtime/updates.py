"""Updates of one rank's shards: torch's own optimizer, one per unit, or per units that are updated together.

Here is decided which gradients count in the norm (``counted_gradients``), and here they are multiplied by
clipping's factor, right before a unit's update.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hzplan.errors import UserError
from hzplan.models.local import split_over
from hzplan.runtime.bucket import Bucket
from hzplan.runtime.muon import Muon
from hzplan.runtime.offload import HostStates, Keys, Offloaded, state_keys
from hzplan.runtime.relaxed.sync import COUNT, NUMBERS, OUTER, GroupSync
from hzplan.runtime.unit import UnitState, is_absent

NEVER = 2**62
"""Sentinel step number: no step with non-finite gradients has been seen."""

ParamGroup = dict[str, Any]

PLANNED = {"sgd": 0, "adam": 2, "adamw": 2}
"""The optimizers that profiles measure, and how many tensors of a parameter's size each keeps as state."""

ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "ASGD",
    "Rprop",
)
"""torch's optimizers that compute each element by itself, and so can work on slices of a tensor."""


@dataclass(frozen=True, eq=False)
class Piece:
    """The part of a tensor that this rank updates: elements ``[low, high)`` of its bucket's whole buffer."""

    unit: str
    bucket: Bucket
    index: int
    low: int
    high: int
    param: nn.Parameter


class Updates:
    """This rank's pieces of all tensors, and the inner optimizers (one per unit) that hold their state.

    Offloaded optimizer state is on the device from ``fetch`` to ``store`` only. ``param_groups`` are the
    user's groups over this rank's pieces; the inner optimizers go by what ``take_over_options`` copied from
    them. ``clip_scale``: factor, a float64 number, that the updates launched next multiply gradients by;
    ``left_out``: 1 where they change nothing, else 0 (a float32 number, None for 0); ``takes_factor``:
    whether both go into the optimizer's own kernels, as into torch's fused ones, without a pass over the
    gradients; ``unused``: ids of the parameters that they leave alone: no rank had a gradient for them.
    Without clipping nobody knows them before, and a reduced gradient says so itself (``unit.ABSENT``).
    ``used_here``: ids of the parameters that had a gradient in this step, on this rank.
    ``trained``: all trainable parameters, in one order on every rank. ``group_names``: by group, the names of
    all its parameters, likewise. ``state_keys_of``: by a parameter's name the state tensors that the
    optimizer has for it after its first update.
    ``steps``: steps taken; ``_updating``: the number of the one whose updates are launched.
    """

    def __init__(
        self,
        units: Sequence[UnitState],
        optimizer_class: Callable[..., Optimizer],
        groups: Sequence[ParamGroup],
        arguments: ParamGroup,
        *,
        offload_slots: Mapping[str, int],
        device: torch.device,
        clip: bool,
        local_norm: bool = False,
        queued: bool = False,
        together: Sequence[str] = (),
    ) -> None:
        """``groups``: the user's parameter groups, ``params`` being parameters of the model. ``local_norm``:
        all of this rank's gradients count, not only its slices at the finest level. ``together``: units that
        are updated in one call, that of the first.
        ``offload_slots``: by unit, the device buffer that its offloaded state is fetched to. ``queued``:
        whether the device queues work, and so is not waited for."""
        self.class_name = getattr(optimizer_class, "__name__", str(optimizer_class))
        self.clip, self.local_norm, self._queued = clip, local_norm, queued
        group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._units = {unit.name: unit for unit in units}
        self._host = _host_states(units, optimizer_class, groups, arguments, offload_slots, device)
        self._inner: dict[str, Optimizer] = {}  # by unit, or the first of those that are updated together
        self._call_of = {unit.name: unit.name for unit in units}
        self._call_of |= dict.fromkeys(together, next(iter(together), ""))
        self.pieces: list[Piece] = []
        self._gradients: dict[str, list[Tensor]] = {}  # by unit: those that this rank updates with
        self.counted_gradients: dict[str, list[Tensor]] = {}  # by unit: what of them this rank looks at
        self.split_of: dict[int, tuple[Any, ...]] = {}  # by id of those: the groups that have other parts
        # Both the same on every rank:
        self.trained = [p for unit in units for bucket in unit.trainable_buckets for p in bucket.parameters]
        self.splits = [*dict.fromkeys(map(split_over, self.trained))]
        everything: list[list[nn.Parameter]] = [[] for _ in groups]
        shapes: dict[str, dict[nn.Parameter, Sequence[int]]] = {}  # by call: of matrices
        of_call: dict[str, list[list[nn.Parameter]]] = {}
        for unit in units:
            call = self._call_of[unit.name]
            of_unit = of_call.setdefault(call, [[] for _ in groups])
            for bucket in unit.trainable_buckets:
                master = self._host.master(bucket)
                start, end = bucket.bounds(bucket.layout.levels.optim)
                for index, low, high in bucket.layout.pieces(start, end):
                    owner = bucket.parameters[index]
                    if id(owner) not in group_of:
                        raise UserError(
                            f"parameter {bucket.layout.tensors[index].name} is in no parameter group; "
                            "add it to one, or set requires_grad=False"
                        )
                    param = nn.Parameter(bucket.master_shard(low, high, master))
                    param.grad = bucket.grad_shard(low, high)
                    of_unit[group_of[id(owner)]].append(param)
                    self._gradients.setdefault(call, []).append(param.grad)
                    everything[group_of[id(owner)]].append(param)
                    self.pieces.append(Piece(unit.name, bucket, index, low, high, param))
                    if bucket.layout.levels.matrix:
                        shapes.setdefault(call, {})[param] = bucket.layout.tensors[index].shape
                counted = self.counted_gradients.setdefault(unit.name, [])
                level = 0 if local_norm else bucket.mesh.levels
                for index, low, high in bucket.layout.pieces(*bucket.bounds(level)):
                    counted.append(bucket.grad_shard(low, high))
                    self.split_of[id(counted[-1])] = split_over(bucket.parameters[index])
        self.group_names: list[list[str]] = [[] for _ in groups]
        for bucket in (bucket for unit in units for bucket in unit.trainable_buckets):
            for tensor, owner in zip(bucket.layout.tensors, bucket.parameters, strict=True):
                if id(owner) in group_of:
                    self.group_names[group_of[id(owner)]].append(tensor.name)
        self._inner |= {
            call: optimizer_class(
                [dict(option, params=params) for option, params in zip(options, of_unit, strict=True)],
                **arguments,
            )
            for call, of_unit in of_call.items()
            if any(of_unit)
        }
        for call, of_matrices in shapes.items():
            inner = self._inner[call]
            assert isinstance(inner, Muon)
            inner.shapes |= of_matrices
        # By call likewise those that keep master weights, and by unit those of them whose matrices are
        # applied by themselves:
        self._buckets_of: dict[str, list[Bucket]] = {}
        self._applied_of: dict[str, list[Bucket]] = {}
        self._updated_of: dict[str, list[Bucket]] = {}  # by call, and all of them, with masters or without
        self._finished_of: dict[str, list[Bucket]] = {}  # by unit, likewise, of matrices
        for unit in units:
            whole = [bucket for bucket in unit.trainable_buckets if not bucket.assembles]
            self._updated_of.setdefault(self._call_of[unit.name], []).extend(whole)
            self._finished_of[unit.name] = [b for b in unit.trainable_buckets if b.assembles]
            with_masters = [bucket for bucket in unit.trainable_buckets if bucket.layout.keeps_master]
            at_once = [bucket for bucket in with_masters if not bucket.assembles]
            self._buckets_of.setdefault(self._call_of[unit.name], []).extend(at_once)
            self._applied_of[unit.name] = [bucket for bucket in with_masters if bucket.assembles]
        self._pieces_of: dict[str, list[Piece]] = {call: [] for call in self._inner}
        for piece in self.pieces:
            self._pieces_of[self._call_of[piece.unit]].append(piece)
        self._offloaded = [unit.name for unit in units if unit.offload and unit.name in self._inner]
        for name in self._offloaded:  # some optimizers make their state at once
            self._move_state(name, lambda copies: copies.host)
        empty = nn.Parameter(torch.zeros(0))  # a rank may have no piece at all
        example = optimizer_class([dict(options[0], params=[empty])], **arguments)
        self.defaults = example.defaults
        self.takes_factor = (
            bool(getattr(example, "_step_supports_amp_scaling", False))
            and all(option.get("fused", True) for option in options)
            and not _has_momentum(options, self.defaults)
            and all(
                bucket.master.dtype == torch.float32 for unit in units for bucket in unit.trainable_buckets
            )
        )
        kept = [_kept(optimizer_class, one, arguments) for one in options]
        self.state_keys_of = {
            name: keys for names, keys in zip(self.group_names, kept, strict=True) for name in names
        }
        if not self.pieces:
            everything[0].append(empty)
        self._group_of, self._options_before = group_of, _filled(optimizer_class, options, arguments)
        self.param_groups: list[ParamGroup] = [
            dict(of, params=params) for of, params in zip(self._options_before, everything, strict=True)
        ]
        self._options: list[ParamGroup] = []  # taken over for the updates of this step
        self._one = torch.ones((), dtype=torch.float64, device=device)
        self.clip_scale = self._update_scale = self._one
        self.left_out: Tensor | None = None
        self._fused_factors: dict[str, Tensor | None] = {}  # by the attribute where torch looks for them
        self.unused = self._update_unused = frozenset[int]()
        self.used_here: Set[int] = frozenset()
        self.steps = self._updating = 0
        self.relaxed: GroupSync | None = None  # where groups do not wait for each other
        self.first_nonfinite = {
            name: torch.full((), NEVER, dtype=torch.int64, device=device) for name in self.counted_gradients
        }
        """By unit: the first step whose gradients were not finite on this rank, noted without clipping."""

    # State of pieces, for checkpoints.

    def state_of(self, piece: Piece) -> Mapping[str, Any]:
        """A piece's state as torch's optimizer of the class keeps it; empty before its first update.

        Of tensors that are offloaded the host's copy.
        """
        found = self._inner[self._call_of[piece.unit]].state.get(piece.param, {})
        copies = {key: self._copies(piece, key) for key in found}
        state = {
            key: both.host if (both := copies[key]) is not None and value is both.device else value
            for key, value in found.items()
        }
        if self.relaxed is not None:
            state |= self.relaxed.state_of(piece.bucket, piece.low, piece.high, self.steps)
        return state

    def set_state_of(self, piece: Piece, state: Mapping[str, Any]) -> None:
        """Replace a piece's state, between steps only. Tensors may come from ``room_for``, filled later."""
        made = {key: value for key, value in state.items() if not key.startswith(OUTER)}
        if self.relaxed is not None and COUNT in state:
            self.relaxed.load(lambda: [state.get(name, torch.tensor(-1.0)) for name in NUMBERS])
        for key, value in made.copy().items():
            if (copies := self._copies(piece, key)) is not None and value is copies.host:
                made[key] = copies.device
        if made:
            self._inner[self._call_of[piece.unit]].state[piece.param] = made
        else:
            self._inner[self._call_of[piece.unit]].state.pop(piece.param, None)

    def room_for(self, piece: Piece, key: str, dtype: torch.dtype) -> Tensor:
        """A tensor [elements of the piece] to write its state ``key`` into."""
        copies = self._copies(piece, key)
        if copies is not None and copies.host.dtype == dtype:
            return copies.host
        if self.relaxed is not None and key.startswith(OUTER):
            own = self.relaxed.state_of(piece.bucket, piece.low, piece.high, self.steps).get(key)
            if own is not None and own.dtype == dtype:
                return own
        return torch.zeros_like(piece.param, dtype=dtype).detach()

    def device_of_numbers(self, piece: Piece) -> torch.device:
        """The device where torch's optimizers keep state that is one number for a whole tensor."""
        options = self.options_of(piece.bucket.parameters[piece.index])
        on_device = any(options.get(key) for key in ("capturable", "fused"))
        return piece.param.device if on_device else torch.device("cpu")

    @property
    def on_host(self) -> list[Tensor]:
        """The buffers in the host's memory; on a CPU too, apart from what the plan counts as the device's."""
        return [*self._host.host_buffers, *([] if self.relaxed is None else self.relaxed.on_host)]

    def _copies(self, piece: Piece, key: str) -> Offloaded | None:
        return self._host.copies(piece.bucket, piece.low, key)

    # Options: learning rates and the like.

    def take_over_options(self) -> None:
        """Copy options from ``param_groups`` to the inner optimizers, and the clipping factor to the updates.

        Tensors are cloned: schedulers change them in place, while updates may still be under way.
        """
        self._updating = self.steps
        self._update_scale, self.clip_scale = self.clip_scale, self._one
        if self.clip and self.takes_factor:  # whose kernels divide
            divisor = self._update_scale.reciprocal().float()
            self._fused_factors = {"grad_scale": divisor, "found_inf": self.left_out}
        self.left_out = None
        self._update_unused, self.unused = self.unused, frozenset()
        self._options = [
            {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self.param_groups
        ]
        for inner in self._inner.values():
            for group, options in zip(inner.param_groups, self._options, strict=True):
                group.update(options)

    def check_options(self) -> None:
        """Raise UserError when options have changed since they were taken over."""
        for index, (group, taken) in enumerate(zip(self.param_groups, self._options, strict=True)):
            for key, value in taken.items():
                now = group[key]
                same = torch.equal(now, value) if isinstance(value, Tensor) else now == value
                if not same:
                    raise UserError(
                        f"parameter group {index}: {key} changed between backward and step(), but under a "
                        "plan without clipping units are updated during backward; set it before, or solve "
                        "with --clip"
                    )

    def drop_clipping(self) -> None:
        """Forget the factor, and who had no gradient, of a step whose gradients are left unused."""
        self.clip_scale, self.left_out, self.unused = self._one, None, frozenset()

    # The tasks of a schedule, on the streams' threads.

    def fetch(self, unit: str) -> None:
        """Copy a unit's offloaded state to its device buffer; runs on the fetch stream."""
        self._host.fetch(unit)

    def store(self, unit: str) -> None:
        """Copy a unit's offloaded state back to the host's memory; runs on the store stream."""
        self._host.store(unit)

    def update(self, unit: str) -> None:
        """Scale gradients by the clipping factor, update pieces, and copy master weights to model weights: a
        unit's, and those of the units that are updated with it. Runs on the optim stream.

        Without clipping nobody looks at gradients before: whether they are finite is noted here, on the
        device and without waiting for it, which would stop the thread that launches.
        """
        if not self.clip and self.counted_gradients[unit]:
            sums = torch.stack([grad.sum() for grad in self.counted_gradients[unit]])
            first = self.first_nonfinite[unit]
            first.copy_(torch.where(sums.isfinite().all(), first, first.clamp(max=self._updating)))
        if unit in self._inner:
            # A device that queues work is not waited for: small gradients are multiplied by 1 there.
            if self.clip and not self.takes_factor and (self._queued or self._update_scale < 1.0):
                scaled = self._gradients[unit]
                torch._foreach_mul_(scaled, self._update_scale.to(scaled[0].dtype))
            without = [piece.param for piece in self._pieces_of[unit] if self._is_unused(piece)]
            gradients = [param.grad for param in without]
            for param in without:
                param.grad = None  # torch's optimizers then leave it, and its state, alone
            for name, factor in self._fused_factors.items():
                setattr(self._inner[unit], name, factor)
            self._inner[unit].step()
            for param, gradient in zip(without, gradients, strict=True):
                param.grad = gradient
            if self._units[unit].offload:
                self._move_state(unit, lambda copies: copies.device)
        self._tell_groups(self._updated_of.get(unit, ()))
        for bucket in self._buckets_of.get(unit, ()):
            bucket.copy_master_to_model(self._host.master(bucket))

    def tell_groups_of_skip(self) -> None:
        """A step was left out: what other groups are sent and have sent goes on; nothing may be under way."""
        self._updating = self.steps
        for buckets in (*self._updated_of.values(), *self._finished_of.values()):
            self._tell_groups(buckets)
        self.steps += 1

    @torch.no_grad()
    def _tell_groups(self, buckets: Iterable[Bucket]) -> None:
        if self.relaxed is not None:
            for bucket in buckets:
                master = self._host.master(bucket)
                self.relaxed.updated(bucket, bucket.master if master is None else master, self._updating + 1)

    def apply(self, unit: str) -> None:
        """Finish the update of a unit's matrices that come back from their hosts. Runs on the optim
        stream."""
        if isinstance(inner := self._inner.get(self._call_of[unit]), Muon):
            inner.finish()
        self._tell_groups(self._finished_of[unit])
        for bucket in self._applied_of[unit]:
            bucket.copy_master_to_model()

    def pieces_in(self, bucket: Bucket) -> list[Piece]:
        """This rank's pieces of a bucket's tensors."""
        return [piece for piece in self.pieces if piece.bucket is bucket]

    def exchange(self, piece: Piece, places: list[tuple[int, Tensor]]) -> None:
        """From where on elements of a matrix's piece go for the whole to be computed, and come back from."""
        inner = self._inner[self._call_of[piece.unit]]
        assert isinstance(inner, Muon)
        inner.places[piece.param] = places

    def options_of(self, parameter: nn.Parameter) -> ParamGroup:
        """The options of a parameter's group that the updates launched last go by."""
        return (self._options or self._options_before)[self._group_of[id(parameter)]]

    def is_with_another(self, unit: str) -> bool:
        """Whether a unit is updated in another one's call."""
        return self._call_of[unit] != unit

    def _is_unused(self, piece: Piece) -> bool:
        """Whether no rank had a gradient for a piece's parameter. A device that queues work is waited for
        only where this rank had none."""
        parameter = id(piece.bucket.parameters[piece.index])
        if self.clip:
            return parameter in self._update_unused
        if self._queued and parameter in self.used_here:
            return False
        assert piece.param.grad is not None
        return is_absent(piece.param.grad)

    def _move_state(self, unit: str, destination: Callable[[Offloaded], Tensor]) -> None:
        """Copy state that torch has just allocated by itself to one of its two copies, and refer to the
        device copy from now on."""
        for piece in self._pieces_of[unit]:
            state = self._inner[unit].state.get(piece.param, {})
            for key, value in state.items():
                copies = self._copies(piece, key)
                if copies is not None and value is not copies.device:
                    destination(copies).copy_(value)
                    state[key] = copies.device


def _host_states(
    units: Sequence[UnitState],
    optimizer_class: Callable[..., Optimizer],
    groups: Sequence[ParamGroup],
    arguments: ParamGroup,
    buffers: Mapping[str, int],
    device: torch.device,
) -> HostStates:
    """Host memory for the units that the plan offloads; parameter groups may keep different state."""
    offloaded = [unit for unit in units if unit.offload]
    group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    known: dict[tuple[int, torch.dtype], Keys] = {}
    dtypes = {id(p): b.master.dtype for u in offloaded for b in u.trainable_buckets for p in b.parameters}

    def keys(parameter: nn.Parameter) -> Keys:
        index, dtype = group_of.get(id(parameter), 0), dtypes[id(parameter)]
        if (index, dtype) not in known:
            known[index, dtype] = state_keys(
                lambda params: optimizer_class([dict(groups[index], params=params)], **arguments),
                *(dtype, device),
            )
        return known[index, dtype]

    return HostStates(offloaded, buffers, keys, device)


def _kept(
    optimizer_class: Callable[..., Optimizer], options: ParamGroup, arguments: ParamGroup
) -> frozenset[str]:
    """The keys of an optimizer's state under options, found by a step on a zero."""
    parameter = nn.Parameter(torch.zeros(1, 1))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = optimizer_class([dict(options, params=[parameter])], **arguments)
    optimizer.step()
    return frozenset(key for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor))


def _filled(
    optimizer_class: Callable[..., Optimizer], options: Sequence[ParamGroup], arguments: ParamGroup
) -> list[ParamGroup]:
    """Parameter groups' options with those that they leave to the class."""
    empty = [dict(option, params=[nn.Parameter(torch.zeros(0, 0))]) for option in options]
    return [{**group} for group in optimizer_class(empty, **arguments).param_groups]


def check_elementwise(optimizer_class: Any) -> None:
    """Refuse an optimizer that mixes elements of a tensor: on slices it would compute something else."""
    if isinstance(optimizer_class, Optimizer):
        raise UserError(
            f"an optimizer of the class {type(optimizer_class).__name__} was given; give the class, and its "
            "options beside it"
        )
    name = getattr(optimizer_class, "__name__", str(optimizer_class))
    if optimizer_class is torch.optim.Muon:
        raise UserError("torch.optim.Muon needs whole matrices; give hzplan.Muon, the same in shards")
    if name not in ELEMENTWISE and optimizer_class is not Muon:
        raise UserError(
            f"optimizer {name} is not known to work element by element and cannot be sharded; "
            f"use one of {', '.join(ELEMENTWISE)}"
        )


def _has_momentum(groups: Sequence[ParamGroup], defaults: ParamGroup) -> bool:
    """Whether SGD keeps momentum. torch's fused kernel makes its buffers of what memory holds in the step
    that it leaves out, and wants either all or none of a unit's parameters to have one."""
    return any(group.get("momentum", defaults.get("momentum")) for group in groups)


def fused_by_default(
    optimizer_class: Callable[..., Optimizer], groups: Sequence[ParamGroup], arguments: ParamGroup
) -> ParamGroup:
    """Arguments with ``fused=True`` where the optimizer has it and they say nothing of how it is computed:
    what profiles measure, without temporary tensors, and what takes clipping's factor."""
    if optimizer_class is Muon:  # whose other half is torch's
        given = dict(arguments.get("adamw") or {})
        return {**arguments, "adamw": fused_by_default(torch.optim.AdamW, groups, given)}
    said = {"fused", "foreach", "capturable", "differentiable"} & arguments.keys()
    able = not said and "fused" in inspect.signature(optimizer_class).parameters
    able &= not _has_momentum(groups, arguments)
    return arguments | {"fused": True} if able else arguments


def check_planned(
    optimizer_class: Callable[..., Optimizer], arguments: ParamGroup, planned: str, device: torch.device
) -> None:
    """Compare an optimizer's state with what the plan counts for ``planned``, its name for one.

    UserError where one that profiles measure keeps more tensors of a parameter's size than the plan counts; a
    warning where another does, or where it keeps fewer.
    """
    if planned not in PLANNED:
        return
    name = getattr(optimizer_class, "__name__", str(optimizer_class))
    kept = len(state_keys(lambda params: optimizer_class(params, **arguments), torch.float32, device))
    counted = PLANNED[planned]
    if kept == counted:
        return
    differs = f"{name} keeps {kept} tensors of state per parameter, the plan, for {planned}, counts {counted}"
    if kept > counted and name.lower() != planned and PLANNED.get(name.lower()) == kept:
        raise UserError(f"{differs}; profile with --optimizer {name.lower()} and solve again")
    fit = "its memory may not suffice" if kept > counted else "it plans for more memory than that needs"
    warnings.warn(f"{differs}: {fit}", stacklevel=4)


def as_groups(params: Iterable[Any]) -> list[ParamGroup]:
    """torch's two ways to name parameters - an iterable of them, or of groups - as groups."""
    listed = list(params)
    if listed and isinstance(listed[0], dict):
        return [dict(group, params=list(group["params"])) for group in listed]
    return [{"params": listed}]
