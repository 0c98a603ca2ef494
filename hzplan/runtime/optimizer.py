"""The optimizer over shards: torch's own optimizer, fed with this rank's pieces of the tensors."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hzplan.errors import UserError
from hzplan.models.local import split_over
from hzplan.runtime.clipping import clipping, square_sum
from hzplan.runtime.faults import named
from hzplan.runtime.offload import Home, HostStates, Keys, state_keys
from hzplan.runtime.world import MAX, MIN

if TYPE_CHECKING:
    from hzplan.runtime.bucket import Bucket
    from hzplan.runtime.engine import Engine
    from hzplan.runtime.unit import UnitState

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

NEVER = 2**62
"""The number of a step that does not come."""

Group = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor's part that this rank updates: elements ``[low, high)`` of its bucket's whole buffer."""

    unit: str
    bucket: Bucket
    index: int
    low: int
    high: int
    param: nn.Parameter


class ShardedOptimizer(Optimizer):
    """Drives one inner optimizer per unit, so that a unit can be updated as soon as its gradient is there.

    State that a plan keeps in the host's memory is on the device from ``fetch`` to ``store`` only.
    ``param_groups`` are the user's groups over this rank's pieces: a learning-rate scheduler changes them,
    and ``step`` takes the values over. State lives in the inner optimizers.
    """

    def __init__(
        self,
        engine: Engine,
        units: Sequence[UnitState],
        optimizer_class: Callable[..., Optimizer],
        groups: Sequence[Group],
        arguments: Group,
    ) -> None:
        """``groups``: the user's parameter groups, ``params`` being parameters of the model."""
        self.engine = engine
        self.class_name = getattr(optimizer_class, "__name__", str(optimizer_class))
        group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._units = {unit.name: unit for unit in units}
        self._host = _host_states(engine, units, optimizer_class, groups, arguments)
        self._inner: dict[str, Optimizer] = {}
        self.held: list[Held] = []
        self._owned_gradients: dict[str, list[Tensor]] = {}  # by unit: this rank's at the finest level
        self._held_gradients: dict[str, list[Tensor]] = {}  # by unit: those that it updates with
        self._split_of: dict[int, tuple[Any, ...]] = {}  # those gradients, by where they have other parts
        trained = (p for unit in units for b in unit.trainable_buckets for p in b.parameters)
        self._split_over = [*dict.fromkeys(map(split_over, trained))]  # the same on every rank
        everything: list[list[nn.Parameter]] = [[] for _ in groups]
        for unit in units:
            mine: list[list[nn.Parameter]] = [[] for _ in groups]
            for bucket in unit.trainable_buckets:
                start, end = bucket.bounds(bucket.layout.levels.optim)
                for index, low, high in bucket.layout.pieces(start, end):
                    owner = bucket.parameters[index]
                    if id(owner) not in group_of:
                        raise UserError(
                            f"parameter {bucket.layout.tensors[index].name} is in no parameter group; "
                            "add it to one, or set requires_grad=False"
                        )
                    master = self._host.master(bucket) if self._host is not None else None
                    piece = nn.Parameter(bucket.owned_master(low, high, master))
                    piece.grad = bucket.owned_gradient(low, high)
                    mine[group_of[id(owner)]].append(piece)
                    self._held_gradients.setdefault(unit.name, []).append(piece.grad)
                    self.held.append(Held(unit.name, bucket, index, low, high, piece))
                owned = self._owned_gradients.setdefault(unit.name, [])
                finest = bucket.bounds(bucket.mesh.levels)
                for index, low, high in bucket.layout.pieces(*finest):
                    owned.append(bucket.owned_gradient(low, high))
                    self._split_of[id(owned[-1])] = split_over(bucket.parameters[index])
            if any(mine):
                self._inner[unit.name] = optimizer_class(
                    [dict(option, params=params) for option, params in zip(options, mine, strict=True)],
                    **arguments,
                )
            for collected, params in zip(everything, mine, strict=True):
                collected += params
        self._held_of = {
            unit.name: [held for held in self.held if held.unit == unit.name]
            for unit in units
            if unit.offload
        }
        for name in self._held_of:  # some optimizers make their state at once
            if name in self._inner:
                self._settle(name, lambda home: home.kept)
        empty = nn.Parameter(torch.zeros(0))  # a rank may hold no piece at all
        template = optimizer_class([dict(options[0], params=[empty])], **arguments)
        self._options: list[Group] = []  # what the updates of this step go by
        self._clipped = False
        # What gradients are to be multiplied by as clipping asks, and by what this step's updates do.
        self._clip_scale = self._update_scale = torch.ones((), dtype=torch.float64, device=engine.device)
        self._steps = self._updating = 0  # taken; and the number of the one whose updates are launched
        self._first_nonfinite = {
            name: torch.full((), NEVER, dtype=torch.int64, device=engine.device)
            for name in self._owned_gradients
        }
        super().__init__(
            [dict(option, params=params) for option, params in zip(options, everything, strict=True)]
            if self.held
            else [dict(options[0], params=[empty])],
            template.defaults,
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Launch the update of every unit and the gathering of its parameters, and return.

        The next forward waits for what it needs. Called after the last backward of the plan's accumulation.
        Under a plan without clipping units are updated in that backward, as soon as their gradients are
        there: set learning rates before it. ``closure``, which calls backward, is called first; what it
        returns is returned.
        """
        found = None
        if closure is not None:
            with torch.enable_grad():
                found = closure()
        if self.engine.schedule.clip and not self._clipped:
            warnings.warn(
                "the plan foresees clipping, and step() came without optimizer.clip_grad_norm_ (torch's own "
                "finds no gradients to clip); without clipping solve with --no-clip, which is faster",
                stacklevel=3,  # torch wraps step()
            )
        self._clipped = False
        self.engine.step()
        self._steps += 1
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: the first backward of a step overwrites."""

    def state_of(self, held: Held) -> Mapping[str, Any]:
        """A piece's state, as torch's optimizer of the class keeps it; empty before its first update.

        What is kept in the host's memory is what lies there.
        """
        found = self._inner[held.unit].state.get(held.param, {})
        homes = {key: self._home(held, key) for key in found}
        return {
            key: home.kept if (home := homes[key]) is not None and value is home.here else value
            for key, value in found.items()
        }

    def set_state_of(self, held: Held, state: Mapping[str, Any]) -> None:
        """In place of what there is; between steps only. Tensors may be ``room_for`` it, filled later."""
        made = dict(state)
        for key, value in state.items():
            if (home := self._home(held, key)) is not None and value is home.kept:
                made[key] = home.here
        if made:
            self._inner[held.unit].state[held.param] = made
        else:
            self._inner[held.unit].state.pop(held.param, None)

    @property
    def on_host(self) -> list[Tensor]:
        """What lies in the host's memory; on a CPU too it is apart from what the plan calls the device's."""
        return [] if self._host is None else self._host.kept

    def room_for(self, held: Held, key: str, dtype: torch.dtype) -> Tensor:
        """Where a piece's state of the name may be written to: one number per element."""
        home = self._home(held, key)
        if home is not None and home.kept.dtype == dtype:
            return home.kept
        return torch.zeros_like(held.param, dtype=dtype).detach()

    def _home(self, held: Held, key: str) -> Home | None:
        return None if self._host is None else self._host.home(held.bucket, held.low, key)

    def fetch(self, unit: str) -> None:
        """A unit's state comes to its slot; runs on the fetch stream."""
        assert self._host is not None
        self._host.fetch(unit)

    def store(self, unit: str) -> None:
        """It goes back to the host's memory; runs on the store stream."""
        assert self._host is not None
        self._host.store(unit)

    def device_of_numbers(self, held: Held) -> torch.device:
        """Where torch's optimizers keep what is one number for a whole tensor."""
        on_device = any(self.defaults.get(key) for key in ("capturable", "fused"))
        return held.param.device if on_device else torch.device("cpu")

    def state_dict(self) -> Any:
        """Refused: it would be this rank's pieces, which nothing could read under another plan."""
        raise UserError("hzplan's optimizer is sharded: save with hzplan.Checkpoints, not state_dict()")

    def load_state_dict(self, state_dict: Any) -> None:
        """Refused, as ``state_dict`` is."""
        raise UserError("hzplan's optimizer is sharded: load with hzplan.Checkpoints, not load_state_dict()")

    def take_over_options(self) -> None:
        """Copy learning rates and the like from ``param_groups`` to the inner optimizers.

        Tensors too: schedulers change them in place, while updates may still be under way.
        """
        self._updating = self._steps
        self._update_scale = self._clip_scale
        self._clip_scale = torch.ones_like(self._clip_scale)
        self._options = [
            {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self.param_groups
        ]
        for inner in self._inner.values():
            for mine, options in zip(inner.param_groups, self._options, strict=True):
                mine.update(options)

    def check_options(self) -> None:
        """UserError when they have changed since they were taken over."""
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

    @torch.no_grad()
    def update(self, unit: str) -> None:
        """Scale one unit's gradients as clipping asked, update its pieces, and publish what they are; runs on
        the optim stream.

        Without clipping nobody looks at gradients before: whether they are finite is noted here. Nothing is
        waited for, which on a GPU would stop the thread that launches.
        """
        if not self.engine.schedule.clip and self._owned_gradients[unit]:
            sums = torch.stack([grad.sum() for grad in self._owned_gradients[unit]])
            first = self._first_nonfinite[unit]
            first.copy_(torch.where(sums.isfinite().all(), first, first.clamp(max=self._updating)))
        if unit in self._inner:
            # A device that queues work is not waited for: small gradients are multiplied by 1 there.
            if self.engine.schedule.clip and (self._update_scale.is_cuda or self._update_scale < 1.0):
                gradients = self._held_gradients[unit]
                torch._foreach_mul_(gradients, self._update_scale.to(gradients[0].dtype))
            self._inner[unit].step()
            if self._units[unit].offload:
                self._settle(unit, lambda home: home.here)
        for bucket in self._units[unit].trainable_buckets:
            bucket.publish(None if self._host is None else self._host.master(bucket))

    def _settle(self, unit: str, place: Callable[[Home], Tensor]) -> None:
        """What torch has just made of state lies where it likes: it moves to its home's ``place``, to be in
        the unit's slot when it is updated."""
        for held in self._held_of[unit]:
            state = self._inner[unit].state.get(held.param, {})
            for key, value in state.items():
                home = self._home(held, key)
                if home is not None and value is not home.here:
                    place(home).copy_(value)
                    state[key] = home.here

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Have the updates of this step scale all gradients so that their joint 2-norm is at most
        ``max_norm``; returns the norm before. Until they do, gradients are as they were reduced.

        Each rank takes the norm of the slice it owns at the finest level; their squares are added up over the
        world in float64, and over the ranks of tensor parallelism those of what these have in parts.
        UserError under a plan without clipping, where updates wait for no norm.
        """
        self.engine.wait_gradients()
        self._clipped = True
        owned = [*itertools.chain.from_iterable(self._owned_gradients.values())]
        squares = torch.stack(
            [
                square_sum([grad for grad in owned if self._split_of[id(grad)] == groups], self.engine.device)
                for groups in self._split_over
            ]
        )
        with named("clipping: all-reduce of the norm", self.engine.route_to):
            self.engine.world.all_reduce(squares)
            for place, groups in enumerate(self._split_over):
                for group in groups:
                    dist.all_reduce(squares[place], group=group)
        norm = squares.sum().sqrt() * self._clip_scale  # as a call before this one leaves them
        self._clip_scale = self._clip_scale * clipping(norm, max_norm)
        return norm

    def skip_step(self) -> None:
        """Instead of ``step``: leave parameters and optimizer state as they are; every rank calls it.

        UserError under a plan without clipping, which has updated them in backward.
        """
        self.engine.skip_step()
        self._clipped = False
        self._clip_scale = torch.ones_like(self._clip_scale)

    def first_nonfinite(self) -> tuple[int, list[str]] | None:
        """Under a plan without clipping: where gradients were not finite first, on any rank; None: nowhere.

        The step, counted from 0, and the units as ``nonfinite_units`` lists them. Every rank calls it,
        between steps.
        """
        self.engine.executor.drain()
        names = [*reversed(self._owned_gradients)]
        firsts = torch.stack([self._first_nonfinite[name] for name in names])
        with named("looking for gradients that are not finite: all-reduce", self.engine.route_to):
            self.engine.world.all_reduce(firsts, MIN)
        first = int(firsts.min())
        return (
            None if first == NEVER else (first, [n for n, f in zip(names, firsts, strict=True) if f == first])
        )

    @torch.no_grad()
    def nonfinite_units(self) -> list[str]:
        """The units with a gradient that is infinite or not a number on any rank, the model's last first.

        Backward gets there in that order, so the first one is the nearest to the cause. Every rank calls it,
        after ``clip_grad_norm_`` or between steps; for when a norm or a loss is not finite, as it reads all
        gradients.
        """
        self.engine.executor.drain()
        names = [*reversed(self._owned_gradients)]
        found = torch.tensor(
            [any(not grad.isfinite().all() for grad in self._owned_gradients[name]) for name in names],
            dtype=torch.uint8,
            device=self.engine.device,
        )
        with named("looking for gradients that are not finite: all-reduce", self.engine.route_to):
            self.engine.world.all_reduce(found, MAX)
        return [name for name, bad in zip(names, found.tolist(), strict=True) if bad]


def _host_states(
    engine: Engine,
    units: Sequence[UnitState],
    optimizer_class: Callable[..., Optimizer],
    groups: Sequence[Group],
    arguments: Group,
) -> HostStates | None:
    """Room for what the plan offloads, if it does; groups may keep different state."""
    offloaded = [unit for unit in units if unit.offload]
    if not offloaded:
        return None
    group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    known: dict[tuple[int, torch.dtype], Keys] = {}
    dtypes = {id(p): b.master.dtype for u in offloaded for b in u.trainable_buckets for p in b.parameters}

    def keys(parameter: nn.Parameter) -> Keys:
        index, dtype = group_of.get(id(parameter), 0), dtypes[id(parameter)]
        if (index, dtype) not in known:
            known[index, dtype] = state_keys(
                lambda params: optimizer_class([dict(groups[index], params=params)], **arguments),
                *(dtype, engine.device),
            )
        return known[index, dtype]

    return HostStates(offloaded, engine.schedule.host_slots, keys, engine.device)


def check_elementwise(optimizer_class: Any) -> None:
    """Refuse an optimizer that mixes elements of a tensor: on slices it would compute something else."""
    name = getattr(optimizer_class, "__name__", str(optimizer_class))
    if name not in ELEMENTWISE:
        raise UserError(
            f"optimizer {name} is not known to work element by element and cannot be sharded; "
            f"use one of {', '.join(ELEMENTWISE)}"
        )


def as_groups(params: Iterable[Any]) -> list[Group]:
    """torch's two ways to name parameters - an iterable of them, or of groups - as groups."""
    listed = list(params)
    if listed and isinstance(listed[0], dict):
        return [dict(group, params=list(group["params"])) for group in listed]
    return [{"params": listed}]
