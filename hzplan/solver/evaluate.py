"""Evaluating a complete choice: its memory, its objective and its simulated step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from hzplan.core.buffers import Slots, assign_slots
from hzplan.core.hierarchy import Levels
from hzplan.core.layout import bucketise
from hzplan.core.order import LINK_STREAM, CircularOrder
from hzplan.core.recompute import HOST, NOTHING, Recomputed
from hzplan.core.schedule import EXCHANGE_STREAM, Schedule
from hzplan.core.stages import communicators
from hzplan.cost.interference import Interference
from hzplan.cost.memory import Memory, memory
from hzplan.cost.model import CostModel, tensors_of
from hzplan.cost.simulate import Timeline, floor_ns, objective_ns, replay_shared, tier_loads_ns
from hzplan.cost.unit import UnitCost
from hzplan.errors import UserError
from hzplan.formats.base import Strict
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile
from hzplan.solver.patterns import unit_cost

MAX_ACCUMULATION = 1024
"""Forward passes of a rank in one step at most; the schedule has tasks for each."""


class Modes(NamedTuple):
    """Choices for whole units: those that are recomputed, and those whose optimizer state is offloaded to the
    host's memory."""

    recompute: Recomputed = NOTHING
    offload: frozenset[str] = frozenset()


PLAIN = Modes()


@dataclass(frozen=True)
class Evaluation:
    """One complete plan with its costs. ``levels``: by unit, the triple of every tensor.

    Durations and timelines are computed on first use.
    """

    model: CostModel
    levels: Mapping[str, tuple[Levels, ...]]
    micro_batch: int
    schedule: Schedule
    slots: Slots
    units: Mapping[str, UnitCost]
    memory: Memory
    modes: Modes = PLAIN

    @cached_property
    def durations_ns(self) -> list[int]:
        """Durations of the schedule's tasks, nanoseconds."""
        return self.model.durations(self.schedule, self.units, self.micro_batch)

    @cached_property
    def floor_ns(self) -> float:
        """A lower bound on the objective that needs no replay, nanoseconds."""
        return floor_ns(self.schedule, self.durations_ns, self.model.interference, self.processor_ns)

    @cached_property
    def processor_ns(self) -> list[float] | None:
        """Processor time by task, nanoseconds; None where unknown."""
        return self.model.processor_ns(self.schedule, self.units, self.durations_ns)

    @cached_property
    def objective_ns(self) -> float:
        """The ILP's objective, nanoseconds: a lower bound on the predicted step in any message order."""
        return self._objective_ns(self.schedule.shared or self.schedule)

    @cached_property
    def in_order_ns(self) -> float:
        """The objective in the plan's own message order, nanoseconds: a lower bound on the predicted step."""
        if self.schedule.shared is None:
            return self.objective_ns
        return max(self.objective_ns, self._objective_ns(self.schedule))

    def _objective_ns(self, schedule: Schedule) -> float:
        durations = self.model.durations(schedule, self.units, self.micro_batch)
        graph = self.model.event_graph(schedule, self.micro_batch)
        processors = (
            self.processor_ns
            if schedule is self.schedule
            else self.model.processor_ns(schedule, self.units, durations)
        )
        return objective_ns(schedule, durations, self.model.interference, graph, processors)

    @cached_property
    def communication_ns(self) -> int:
        """The summed busy time of all tiers' links, nanoseconds."""
        return sum(tier_loads_ns(self.schedule, self.durations_ns))

    @cached_property
    def predicted(self) -> Timeline:
        """The predicted timeline: links shared, interference and stragglers included."""
        late = self.model.late_ns(self.schedule, self.micro_batch)
        return replay_shared(
            self.schedule, self.durations_ns, self.model.interference, late, self.processor_ns
        )

    @cached_property
    def undisturbed(self) -> Timeline:
        """The timeline of a rank without compute loss, communication slowdown and stragglers."""
        measured = self.model.interference
        none = Interference.none(self.schedule.tiers, measured.wakeup_ns)
        cost = replace(none, contention=measured.contention, beside_updates=measured.beside_updates)
        return replay_shared(self.schedule, self.durations_ns, cost)

    @property
    def waits_s(self) -> dict[str, float]:
        """Predicted seconds that compute waits in a step, by tier name and "optim"."""
        return self.predicted.waits_s(self.model.profile.cluster.tier_names)

    @property
    def step_s(self) -> float:
        """The predicted step, seconds."""
        return self.predicted.period_ns / 1e9

    @property
    def communicators(self) -> int:
        """How many a rank has: the job's, and the plan's."""
        mesh, tensors = self.model.mesh, self.model.tensors
        buckets = (
            bucket
            for unit, levels in self.levels.items()
            for bucket in bucketise(zip(tensors[unit], levels, strict=True), mesh)
        )
        one = self.schedule.order is not None
        found = {
            (LINK_STREAM if one and kind != EXCHANGE_STREAM else kind, stage)
            for kind, stage in communicators(buckets, mesh)
        }
        return 1 + len(found)

    def fits(self, memory_bytes: int, host_bytes: int) -> bool:
        """Whether peak device memory and host memory are within these bytes."""
        return self.memory.peak <= memory_bytes and self.memory.host <= host_bytes


def evaluate(
    model: CostModel,
    levels: Mapping[str, tuple[Levels, ...]],
    schedule: Schedule,
    micro_batch: int,
    slots: Slots | None = None,
    modes: Modes = PLAIN,
) -> Evaluation:
    """Evaluate a choice of levels and modes. A unit that is not updated, has no state, or whose matrices are
    brought together is not offloaded; activations that are needed again too soon stay on the device."""
    stays = [unit for unit, way in modes.recompute.items() if way == HOST and unit not in schedule.saved]
    recompute = modes.recompute.with_(stays, None) if stays else modes.recompute
    modes = Modes(recompute, modes.offload & schedule.offload_slots.keys())
    slots = slots or assign_slots(schedule, model.tensors)
    units = unit_costs(model, levels, modes)
    modes = modes._replace(offload=frozenset(unit for unit, cost in units.items() if cost.host_bytes))
    return Evaluation(
        model,
        levels,
        micro_batch,
        schedule,
        slots,
        units,
        memory(
            *(units, slots, schedule),
            model.activations.peak_bytes(micro_batch, modes.recompute, schedule),
            model.activations.host_bytes(micro_batch, schedule, modes.recompute),
        ),
        modes,
    )


def unit_costs(
    model: CostModel, levels: Mapping[str, tuple[Levels, ...]], modes: Modes = PLAIN
) -> dict[str, UnitCost]:
    """The cost of every unit; like units with the same levels share one computation."""
    known, none = model.unit_costs, UnitCost.zero(len(model.mesh.tiers))
    units = {}
    for unit, specs in model.tensors.items():
        recompute, offload = modes.recompute.get(unit), unit in modes.offload
        key = model.like[unit], levels.get(unit), recompute, offload
        if key not in known:
            made = unit_cost(specs, levels[unit], model) if specs else none
            moves = offload and not made.matrix_bytes  # matrices that travel need their state meanwhile
            known[key] = replace(model.offloaded(made) if moves else made, recompute=recompute)
        units[unit] = known[key]
    return units


def within_objective(one: Evaluation, limit_ns: float) -> bool:
    """Whether the objective is within ``limit_ns``; the cheap lower bound is asked first."""
    return one.floor_ns <= limit_ns and one.objective_ns <= limit_ns


def within(one: Evaluation, limit_ns: float) -> bool:
    """Whether the predicted step is within ``limit_ns``; its lower bound, the objective, is asked first."""
    return within_objective(one, limit_ns) and one.predicted.period_ns <= limit_ns


def fastest_of(some: Sequence[Evaluation]) -> Evaluation:
    """The plan predicted fastest; plans that a lower bound excludes are not simulated."""
    ordered = sorted(some, key=lambda one: one.floor_ns)
    best = ordered[0]
    for one in ordered[1:]:
        limit = best.predicted.period_ns
        if within_objective(one, limit) and one.predicted.period_ns < limit:
            best = one
    return best


def sent_bytes(found: Evaluation) -> tuple[int, ...]:
    """Bytes that a rank sends in a step, by tier, fastest first."""
    totals = [0.0] * len(found.model.mesh.tiers)
    for task, nbytes in zip(found.schedule.tasks, task_bytes(found), strict=True):
        if task.tier >= 0:
            totals[task.tier] += nbytes
    return tuple(round(total) for total in totals)


def task_bytes(found: Evaluation) -> list[float]:
    """Bytes that a rank sends in every task of a step.

    A gather to, or a reduction from, a buffer of B bytes on n ranks sends (n − 1)/n of B from each: every
    rank's slice reaches all others (rings and exchanges alike). An all-reduce is both.
    """
    model, mesh = found.model, found.model.mesh
    buckets = {
        unit: bucketise(zip(specs, found.levels[unit], strict=True), mesh) if specs else ()
        for unit, specs in model.tensors.items()
    }
    return [
        sum(
            nbytes * (1 - 1 / mesh.group_size(one.stage)) * (1 + (one.operation == "all_reduce"))
            for unit in task.units
            for bucket in buckets[unit]
            for one, nbytes in model.collectives(bucket, task.kind, task.tier)
        )
        if task.tier >= 0
        else 0.0
        for task in found.schedule.tasks
    ]


def replay(plan: Plan, profile: Profile, path: Path) -> Evaluation:
    """A recorded plan evaluated with today's formulas; UserError where plan and profile disagree."""
    levels_of = {
        name: plan.levels(bucket) for unit in plan.units for bucket in unit.buckets for name in bucket.tensors
    }
    levels: dict[str, tuple[Levels, ...]] = {}
    for name in sorted(levels_of.keys() - {t.name for unit in profile.units for t in unit.tensors}):
        raise UserError(f"{path}: tensor {name} is not in the profile {plan.source.profile}; solve again")
    for unit, tensors in tensors_of(profile).items():
        for tensor in tensors:
            if tensor.name not in levels_of:
                raise UserError(
                    f"{path}: tensor {tensor.name} of the profile is not in the plan; solve again"
                )
            if bool(levels_of[tensor.name].matrix) != tensor.matrix:
                raise UserError(
                    f"{path}: field matrix of {tensor.name}'s bucket: to the profile's optimizer it is "
                    f"{'a' if tensor.matrix else 'no'} matrix; solve again"
                )
        if tensors:
            levels[unit] = tuple(
                levels_of[t.name]._replace(flat=levels_of[t.name].flat and t.trainable) for t in tensors
            )
    if plan.batch.micro_batch not in profile.micro_batches:
        raise UserError(
            f"{path}: field batch.micro_batch: {plan.batch.micro_batch} is not in {plan.source.profile}; "
            "solve again"
        )
    for field, (mine, theirs) in _in_both(plan, profile).items():
        if mine != theirs:
            raise UserError(f"{path}: field {field} is not that of {plan.source.profile}; solve again")
    if plan.batch.accumulation > MAX_ACCUMULATION:
        raise UserError(
            f"{path}: field batch.accumulation: at most {MAX_ACCUMULATION} are planned; solve again"
        )
    wire = plan.wire.formats if plan.wire is not None else None
    model = CostModel(profile, plan.reduce_dtype, bool(plan.narrow_sums), wire, bool(plan.flat_sums))
    if plan.flat_sums and not model.knows_flat_sums:
        raise UserError(
            f"{path}: field flat_sums: {plan.source.profile} has no all-reduce over all tiers; profile "
            "again, and solve"
        )
    try:
        schedule = model.schedule(
            prefetch=plan.prefetch,
            accumulation=plan.batch.accumulation,
            clip=plan.clip,
            gradient_buffers=plan.gradient_buffers,
            message_bytes=plan.message_bytes or 0,
            matrix_units=plan.matrix_units or 0,
            offload=plan.source.host_memory_bytes is not None,
            order=plan.message_order,
        )
    except CircularOrder as error:
        raise UserError(f"{path}: field units: ahead: {error}; solve again") from None
    if plan.offloaded and profile.host is None:
        raise UserError(
            f"{path}: field units: {min(plan.offloaded)} is offloaded, but {plan.source.profile} knows no "
            "link to the host's memory"
        )
    for unit in sorted(u for u, way in plan.recomputed.items() if way not in model.ways.get(u, ())):
        raise UserError(
            f"{path}: field units: {unit} is recomputed, which {plan.source.profile} knows no cost of"
        )
    modes = Modes(plan.recomputed, plan.offloaded)
    return evaluate(model, levels, schedule, plan.batch.micro_batch, modes=modes)


def _in_both(plan: Plan, profile: Profile) -> dict[str, tuple[object, object]]:
    """By field, its value in the plan and in the profile, of all that both record."""
    model = [(f"model.{name}", pair) for name, pair in _pairs(plan.model, profile.model)]
    cluster = [(f"cluster.{name}", pair) for name, pair in _pairs(plan.cluster, profile.cluster)]
    return dict(model + cluster) | {
        "optimizer": (plan.optimizer, profile.optimizer.name),
        "ctas": (plan.ctas, profile.ctas),
        "units": (
            {unit.name: set(unit.requires) for unit in plan.units},
            {unit.name: set(unit.requires) for unit in profile.units},
        ),
        "uses": (plan.uses, tuple(str(use.use) for use in profile.uses)),
    }


def _pairs(mine: Strict, theirs: Strict) -> Iterator[tuple[str, tuple[object, object]]]:
    for name in type(mine).model_fields:
        yield name, (getattr(mine, name), getattr(theirs, name))


def uniform(profile: Profile, levels: Levels) -> dict[str, tuple[Levels, ...]]:
    """The same triple for every trained tensor; frozen ones take its parameter level."""
    return {
        unit: tuple(levels.of(trainable=t.trainable, matrix=t.matrix) for t in tensors)
        for unit, tensors in tensors_of(profile).items()
        if tensors
    }
