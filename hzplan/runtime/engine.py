"""Ties a model's hooks to a schedule: follows the recorded uses, or falls back to unsharding on demand."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

import torch
from torch import Tensor, nn

from hzplan.core.buffers import LANES, scratch_bytes, slot_sizes
from hzplan.core.hierarchy import Mesh, Stage
from hzplan.core.schedule import Kind, Schedule, Task, Use
from hzplan.errors import UserError
from hzplan.runtime.bucket import Bucket
from hzplan.runtime.collectives import Gather, Reduction, exchanges, receives_apart
from hzplan.runtime.cuda import Device
from hzplan.runtime.executor import Executor, Streams
from hzplan.runtime.launcher import Launcher
from hzplan.runtime.unit import Life, UnitState
from hzplan.runtime.updates import Updates
from hzplan.runtime.world import World

BETWEEN_STEPS = "parameters can be read between steps only: after step(), before the next forward"
MOST_GATHERS = 1 << 8
"""Of a task, told apart by their tags while they are under way together."""


class Mode(Enum):
    """How the current step runs."""

    BETWEEN = auto()  # no micro-batch has begun
    SCHEDULED = auto()  # every event so far was the next recorded one
    DEMAND = auto()  # something else happened: unshard at use, reduce at the end of backward


@dataclass(frozen=True)
class _Prepared:
    """A communication task's collectives: reductions one after the other, gathers together.

    With a reduction: whether it is added to what earlier micro-batches left.
    """

    reductions: list[tuple[Reduction, bool]]
    gathers: list[Gather]


class Engine:
    """One rank's side of a plan. Implements ``hzplan.models.hooks.Listener``; used by the compute thread."""

    def __init__(
        self,
        units: Sequence[UnitState],
        updates: Updates,
        schedule: Schedule,
        unshard_slots: Mapping[str, int],
        staging_slots: Mapping[str, int],
        mesh: Mesh,
        device: torch.device,
        world: World,
        streams: Streams = Streams.TIERS,
        tier_names: tuple[str, ...] = (),
    ) -> None:
        self.units = {unit.name: unit for unit in units}
        self.updates, self.schedule = updates, schedule
        self._streams = streams
        self.mesh, self.device, self.world, self._tier_names = mesh, device, world, tier_names
        self.detach: Callable[[], None] = lambda: None
        self.groups = world.groups(mesh, _wanted(units, len(mesh.tiers)))
        self.buffer_bytes = self._allocate(unshard_slots, staging_slots, device)
        self.executor: Executor | Launcher
        if device.type == "cuda":
            self.executor = Launcher(schedule, self.run, self.idle, Device(device), streams, tier_names)
        else:
            self.executor = Executor(schedule, self.run, self.idle, streams, self._depth, tier_names)
        self._unit_of = {
            id(parameter): unit for unit in units for b in unit.buckets for parameter in b.parameters
        }
        self._needs = _needs_by_position(schedule)
        self._reduced_at: dict[int, tuple[str, ...]] = {}
        for task in schedule.tasks:
            if task.kind in (Kind.REDUCE, Kind.FINAL_REDUCE):
                self._reduced_at[task.position] = task.units
        self._trainable = tuple(dict.fromkeys(u for units in self._reduced_at.values() for u in units))
        self._prepared: dict[tuple[Kind, tuple[str, ...], int, int], _Prepared] = {}
        self.mode = Mode.BETWEEN
        self._position = -1  # the use whose turn it is, in scheduled mode
        self._running = False
        self._step_task = next(task for task in schedule.tasks if task.kind is Kind.STEP)
        self._update_tasks = [task for task in schedule.tasks if task.kind is Kind.UPDATE]
        self._step_started = False
        self._micro_batch = 0
        self._warned = False  # of a step with fewer micro-batches than planned
        self._reduced: set[str] = set()  # units whose gradients of this micro-batch were launched

    def way(self, ranks: Sequence[int]) -> str:
        """Over which tiers this rank reaches others, for messages."""
        if self.world.is_part:  # they are numbered otherwise in the job
            return ""
        tiers = sorted({self.mesh.tier_between(self.world.rank, rank) for rank in ranks})
        return f" (over {' and '.join(self._tier_names[tier] for tier in tiers)})" if self._tier_names else ""

    def _allocate(
        self, unshard_slots: Mapping[str, int], staging_slots: Mapping[str, int], device: torch.device
    ) -> dict[str, int]:
        """All communication buffers, once. Returns bytes by category."""

        def slots(assigned: Mapping[str, int], sizes: Mapping[str, int]) -> list[Tensor]:
            return [
                torch.zeros(size, dtype=torch.uint8, device=device)
                for size in slot_sizes(assigned, {unit: sizes[unit] for unit in assigned})
            ]

        unshard = slots(unshard_slots, {name: unit.unshard_bytes for name, unit in self.units.items()})
        staging = slots(
            staging_slots, {name: unit.gradient_buffer_bytes for name, unit in self.units.items()}
        )
        for name, unit in self.units.items():
            unit.place(
                unshard[unshard_slots[name]] if name in unshard_slots else None,
                staging[staging_slots[name]] if name in staging_slots else None,
            )
        apart = any(receives_apart(device, group) for group in self.groups.values())
        exchanging = any(exchanges(device, group) for group in self.groups.values())
        # What is only paced has no gap at its end that another one could fill.
        self._depth = LANES if exchanging and self._streams is Streams.TIERS else 1
        sizes = [
            _received_bytes(self.units.values(), tier) if apart else 0 for tier in range(len(self.mesh.tiers))
        ]
        self._scratch = [
            [
                torch.zeros(scratch_bytes(size) // LANES, dtype=torch.uint8, device=device)
                for _ in range(LANES)
            ]
            for size in sizes
        ]
        return {
            "unshard_buffers": sum(slot.numel() for slot in unshard),
            "gradient_buffers": sum(slot.numel() for slot in staging),
            "scratch": sum(scratch.numel() for lanes in self._scratch for scratch in lanes),
        }

    @property
    def turn(self) -> Use | None:
        """The recorded use whose turn it is; None outside of the schedule."""
        if self.mode is not Mode.SCHEDULED or not self._running:
            return None
        return self.schedule.use(self.schedule.compute[self._position])

    # What tasks do, on their streams' threads.

    def idle(self, task: Task) -> bool:
        """Whether a task has nothing to do under this plan; the same on every rank."""
        if task.kind is Kind.UPDATE:
            return False
        if task.kind in (Kind.FETCH, Kind.STORE):
            return not any(self.units[unit].offload for unit in task.units)
        return not self.stages(task)

    def stages(self, task: Task) -> list[tuple[Bucket, Stage]]:
        """The collectives of a communication task, in order."""
        found: list[tuple[Bucket, Stage]] = []
        for bucket in (bucket for unit in task.units for bucket in self.units[unit].buckets):
            if task.kind in (Kind.REDUCE, Kind.FINAL_REDUCE):
                final = task.kind is Kind.FINAL_REDUCE
                found += [(bucket, stage) for stage in bucket.reduce_stages(task.tier, final=final)]
            elif task.kind in (Kind.UNSHARD, Kind.GRAD_GATHER, Kind.PARAM_GATHER):
                stage = {
                    Kind.UNSHARD: bucket.unshard_stage,
                    Kind.GRAD_GATHER: bucket.grad_gather_stage,
                    Kind.PARAM_GATHER: bucket.param_gather_stage,
                }[task.kind](task.tier)
                found += [(bucket, stage)] if stage is not None else []
        return found

    def nbytes(self, task: Task) -> int:
        """The bytes of a communication task's whole buffers, as they travel: of the coarser slice."""
        gradients = task.kind in (Kind.REDUCE, Kind.FINAL_REDUCE, Kind.GRAD_GATHER)
        return sum(
            (bucket.gradient_wire_nbytes if gradients else bucket.layout.nbytes)
            // self.mesh.shards[stage.low]
            for bucket, stage in self.stages(task)
        )

    @torch.no_grad()
    def run(self, task: Task, lane: int = 0) -> None:
        """Do a task's work for all its units: gathers together, reductions one after the other."""
        if task.kind is Kind.UPDATE:
            for name in task.units:
                self.updates.update(name)
            return
        if task.kind in (Kind.FETCH, Kind.STORE):
            for name in task.units:
                self.updates.fetch(name) if task.kind is Kind.FETCH else self.updates.store(name)
            return
        prepared = self._prepared.get((task.kind, task.units, task.tier, lane))
        if prepared is None:
            prepared = self._prepare(task, lane)
            self._prepared[task.kind, task.units, task.tier, lane] = prepared
        tag = task.index + 1  # what is under way at once on a stream is told apart by it
        for reduction, arrives in prepared.reductions:
            reduction.run(accumulate=arrives and task.position >= len(self.schedule.uses), tag=tag)
        for index, gather in enumerate(prepared.gathers):
            gather.begin(tag * MOST_GATHERS + index)
        for gather in prepared.gathers:
            gather.end()

    def _prepare(self, task: Task, lane: int) -> _Prepared:
        buckets = [bucket for name in task.units for bucket in self.units[name].buckets]
        if task.kind in (Kind.REDUCE, Kind.FINAL_REDUCE):
            scratch, final = self._scratch[task.tier][lane], task.kind is Kind.FINAL_REDUCE
            listed = [bucket.reductions(task.tier, self.groups, scratch, final=final) for bucket in buckets]
            return _Prepared([reduction for found in listed for reduction in found], [])
        gathers = []
        for bucket in buckets:
            gather = {
                Kind.UNSHARD: bucket.unshard,
                Kind.GRAD_GATHER: bucket.grad_gather,
                Kind.PARAM_GATHER: bucket.param_gather,
            }
            gathers.append(gather[task.kind](task.tier, self.groups))
        return _Prepared([], [found for found in gathers if found is not None])

    # What the hooks report.

    def enter(self, unit: str, phase: Literal["forward", "backward"]) -> None:
        """A unit's turn begins: end the turn before, wait until the unit is whole."""
        training = torch.is_grad_enabled() or phase == "backward"
        if training and self._micro_batch >= self.schedule.accumulation:
            raise RuntimeError(f"call optimizer.step() after {self.schedule.accumulation} backward passes")
        if self.mode is Mode.BETWEEN and training and self._expected(0, unit, phase):
            self._make_whole(())
            self.executor.begin_step()
            self.mode = Mode.SCHEDULED
            self._position = -1
        if self.mode is Mode.SCHEDULED:
            following = self._position + 1
            if training and self._expected(following, unit, phase):
                self._end_turn()
                self._begin_turn(following)
                return
        self._enter_on_demand(unit, training=training)

    def gradient(self, parameter: nn.Parameter) -> None:
        """A gradient is complete: it goes to its bucket in the turn after which the unit is reduced.

        Before that turn the slot may be another unit's: an early gradient stays in ``parameter.grad``.
        """
        unit = self._unit_of[id(parameter)]
        self._require_expected(unit)
        if self.mode is Mode.SCHEDULED and unit.name in self._reduced_at.get(self._position, ()):
            unit.take_gradient(parameter, accumulate=self._micro_batch > 0)

    def backward_end(self) -> None:
        """A micro-batch is over."""
        uses = len(self.schedule.uses)
        if self.mode is Mode.SCHEDULED:
            if self._position == (self._micro_batch + 1) * uses - 1:
                self._end_turn()
            else:
                self._go_on_demand()
        if self.mode is not Mode.SCHEDULED:
            self._reduce_on_demand()
        for unit in self.units.values():
            if unit.left_over():
                self._require_expected(unit)
            unit.expect_gradients()
        self._reduced.clear()
        self._micro_batch += 1

    def _require_expected(self, unit: UnitState) -> None:
        """A gradient has come: the schedule must have a place for it, and not have sent it yet."""
        if unit.name not in self._trainable:
            raise RuntimeError(
                f"unit {unit.name!r} has a gradient, but took no part when the model was recorded; "
                "profile and solve with a step that uses it, or set requires_grad=False"
            )
        if unit.name in self._reduced:
            raise RuntimeError(
                f"a gradient of unit {unit.name!r} came after the turn that completed it when the model was "
                "recorded; profile and solve again"
            )

    def wait_gradients(self) -> None:
        """Return when every gradient of this step is reduced."""
        self._require_complete()
        self._require_clip("gradients are clipped")
        if self.mode is Mode.SCHEDULED:
            self._start_step()

    def step(self) -> None:
        """The user's optimizer.step(): launch updates and the gathering of parameters."""
        self._require_complete()
        if self.mode is Mode.SCHEDULED:
            self._start_step()
        if self._updated_in_backward():
            self.updates.check_options()
        else:
            self.updates.take_over_options()
        if self.mode is Mode.SCHEDULED:
            self.executor.end(self._step_task)
        else:
            self._update_on_demand()
        self.updates.steps += 1
        self._end_step()

    def skip_step(self) -> None:
        """Instead of ``step``: gradients are left unused."""
        self._require_complete()
        self._require_clip("a step is skipped")
        if self.mode is Mode.SCHEDULED:
            self._start_step()  # which waits for the gradients
        else:
            self._make_whole(())
        self.executor.skip_step()
        self.updates.drop_clipping()
        self._end_step()

    def _end_step(self) -> None:
        self._step_started = False
        self.mode = Mode.BETWEEN
        self._micro_batch = 0

    def _require_clip(self, what: str) -> None:
        if not self.schedule.clip:
            raise UserError(
                f"{what}, but the plan was solved without clipping and updates units during backward; solve "
                "with --clip"
            )

    def _start_step(self) -> None:
        if not self._step_started:
            self.executor.start(self._step_task)
            self._step_started = True

    def _updated_in_backward(self) -> set[str]:
        """The units whose updates this step has launched already, as plans without clipping do."""
        if self.schedule.clip:
            return set()
        return {name for task in self._update_tasks if self.executor.ran(task) for name in task.units}

    def _require_complete(self) -> None:
        """All gradients of this step are sent; fewer micro-batches than planned will do."""
        wanted = self.schedule.accumulation
        if not self._micro_batch:
            raise RuntimeError(f"step() without a backward pass; the plan accumulates {wanted}")
        if self._micro_batch < wanted and not self._warned:
            self._warned = True
            warnings.warn(
                f"step() after {self._micro_batch} backward passes, but the plan accumulates {wanted}: right "
                "for the rest of an epoch, and slower than planned; for all steps solve again",
                stacklevel=5,  # of the loop's call
            )
        if self._micro_batch < wanted:
            self._micro_batch = wanted - 1
            self.backward_end()  # as of one more that brings nothing

    # Scheduled mode.

    def _expected(self, position: int, unit: str, phase: str) -> bool:
        uses = self.schedule.uses
        if position // len(uses) != self._micro_batch or self._micro_batch >= self.schedule.accumulation:
            return False
        use = uses[position % len(uses)]
        return use.unit == unit and use.phase == phase

    def _begin_turn(self, position: int) -> None:
        task = self.schedule.compute[position]
        self.executor.start(task)
        if task.index == self.schedule.options_read:
            self.updates.take_over_options()
        for name in self._needs[position]:
            self.units[name].become_whole()
        self._position, self._running = position, True

    def _end_turn(self) -> None:
        """Release what the window does not keep, complete the gradients that are reduced now."""
        if not self._running:
            return
        position, self._running = self._position, False
        kept = self._needs[position + 1] if position + 1 < len(self._needs) else ()
        for name in self._needs[position]:
            if name not in kept:
                self.units[name].release()
        for name in self._reduced_at.get(position, ()):
            self.units[name].take_rest(accumulate=self._micro_batch > 0)
            self._reduced.add(name)
        self.executor.end(self.schedule.compute[position])

    # Demand mode: everything on the compute thread, in program order, which is the same on every rank.

    def _go_on_demand(self) -> None:
        """Leave the schedule for the rest of this step."""
        self.executor.drain()
        if self.mode is Mode.SCHEDULED:
            self.mode, self._running = Mode.DEMAND, False

    def _enter_on_demand(self, unit: str, *, training: bool) -> None:
        self._go_on_demand()
        if training and self.mode is Mode.BETWEEN:
            self.executor.step += 1
            self.mode = Mode.DEMAND
        wanted = self.schedule.requires.get(unit, (unit,))
        updated = self._updated_in_backward() if self.mode is Mode.DEMAND else set()
        for name in wanted:
            if name in updated:
                raise UserError(
                    f"unit {name!r} is used between its last backward and step(), but under a plan without "
                    "clipping it has been updated already; evaluate after step(), or solve with --clip"
                )
        self._make_whole(wanted)

    def _make_whole(self, names: Iterable[str]) -> None:
        wanted = list(names)
        for name, unit in self.units.items():
            if name not in wanted:
                unit.release()
        for name in wanted:
            unit = self.units[name]
            if unit.life is Life.SHARDED:
                for tier in reversed(range(len(self.mesh.tiers))):
                    self.run(Task(-1, Kind.UNSHARD, "", (name,), tier))
                unit.become_whole()

    def _reduce_on_demand(self) -> None:
        """Reduce this micro-batch's gradients that the schedule has not reduced.

        Units with gradients already in their slot go first: the slot is theirs until it is reduced.
        """
        self._make_whole(())
        final = self._micro_batch == self.schedule.accumulation - 1
        kind = Kind.FINAL_REDUCE if final else Kind.REDUCE
        position = self._micro_batch * len(self.schedule.uses)
        left = [name for name in self._trainable if name not in self._reduced]
        for name in sorted(left, key=lambda name: self.units[name].expects_all):
            self.units[name].take_rest(accumulate=self._micro_batch > 0)
            for tier in range(len(self.mesh.tiers)):
                self.run(Task(-1, kind, "", (name,), tier, position))
            if final:
                for tier in reversed(range(len(self.mesh.tiers))):
                    self.run(Task(-1, Kind.GRAD_GATHER, "", (name,), tier, position))

    def _update_on_demand(self) -> None:
        self._make_whole(())  # what an evaluation left whole has old values from here on
        updated = self._updated_in_backward()
        for name in self._trainable:
            if name not in updated:
                held = (Kind.FETCH, Kind.UPDATE, Kind.STORE) if self.units[name].offload else (Kind.UPDATE,)
                for kind in held:
                    self.run(Task(-1, kind, "", (name,)))
            self._sync(name)
        self.executor.skip_step()

    def _sync(self, name: str) -> None:
        for tier in reversed(range(len(self.mesh.tiers))):
            self.run(Task(-1, Kind.PARAM_GATHER, "", (name,), tier))

    def settle(self) -> None:
        """Between two steps: return when all that the last one launched is done."""
        if self.mode is not Mode.BETWEEN:
            raise RuntimeError(BETWEEN_STEPS)
        self.executor.drain()

    @torch.no_grad()
    def adopt(self) -> None:
        """Master weights were written to from outside: gather parameters from them, on every rank."""
        self.settle()
        self._make_whole(())
        for name in self._trainable:
            for bucket in self.units[name].trainable_buckets:
                bucket.publish()
            self._sync(name)

    def close(self) -> None:
        """End the threads. The model is not usable afterwards."""
        self.detach()
        self.executor.close()

    @contextmanager
    def whole(self, unit: str) -> Iterator[UnitState]:
        """A unit's parameters, readable inside the block; between steps only."""
        self.settle()
        self._make_whole([unit])
        yield self.units[unit]
        self._make_whole(())


def _wanted(units: Sequence[UnitState], tiers: int) -> set[tuple[str, Stage]]:
    """The communicators that a plan uses."""
    found: set[tuple[str, Stage | None]] = set()
    for bucket in (bucket for unit in units for bucket in unit.buckets):
        for tier in range(tiers):
            found.add(("unshard", bucket.unshard_stage(tier)))
            found.add(("sync", bucket.grad_gather_stage(tier)))
            found.add(("sync", bucket.param_gather_stage(tier)))
            for final in (False, True):
                found |= {("reduce", stage) for stage in bucket.reduce_stages(tier, final=final)}
    return {(kind, stage) for kind, stage in found if stage is not None}


def _received_bytes(units: Iterable[UnitState], tier: int) -> int:
    """The most that a reduce on a tier receives at once: a rank's slice."""
    return max(
        (
            bucket.layout.master_nbytes // bucket.mesh.shards[stage.high]
            for unit in units
            for bucket in unit.buckets
            for stage in bucket.reduce_stages(tier, final=True)
        ),
        default=0,
    )


def _needs_by_position(schedule: Schedule) -> list[tuple[str, ...]]:
    return [schedule.reads(schedule.use(task)) for task in schedule.compute]
