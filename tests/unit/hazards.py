"""A race detector for schedules, written from what the runtime's tasks do and not from how they are ordered.

Every task declares which resources it reads and writes, as if every stage were present: a parameter both as
a slice that is gathered and as what compute reads in place, a gradient both as a slice and as what backward
accumulates into. The DAG is unrolled over two steps. Two tasks that touch one resource, at least one of them
writing, must be joined by a path; else they can run at the same time.

A slot of a buffer is one resource for all units that may share it: those whose declared lives are disjoint,
whatever their sizes. Besides them each unit's slot has phantom tenants, in whatever uses the unit's life, and
what a phantom's own life needs around it, leave open: lives are thereby held to what the edges guarantee.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hzplan.core.schedule import COMPUTE_STREAM, Interval, Kind, Schedule, Task

STEPS = 2

Resource = tuple[str, str]
Edge = tuple[int, int, bool]  # from, to, whether from the step before


@dataclass
class Touched:
    """What one task reads and writes."""

    reads: set[Resource] = field(default_factory=set)
    writes: set[Resource] = field(default_factory=set)


class Hazard(NamedTuple):
    """Two tasks of the unrolled steps that may touch a resource at the same time."""

    first: str
    second: str
    resource: Resource


def reduced_units(schedule: Schedule, trainable: Sequence[str]) -> dict[int, list[str]]:
    """For every use: the units whose gradients are complete after it; without a backward that is the last.

    What computes again in backward comes before the gradients of the unit that it belongs to.
    """
    needed = [set(schedule.requires[use.unit]) for use in schedule.uses]
    first = next((i for i, use in enumerate(schedule.uses) if use.phase == "backward"), len(needed))
    found: dict[int, list[str]] = {}
    for unit in trainable:
        if any(unit in units for units in needed):
            ends = [index for index in range(first, len(needed)) if unit in needed[index]]
            found.setdefault(max(ends, default=len(needed) - 1), []).append(unit)
    return found


def reduced_together(schedule: Schedule, reduced: Mapping[int, Sequence[str]]) -> list[list[int]]:
    """The uses of ``reduced_units`` whose gradients travel together, where each unit's have a byte."""
    found: list[list[int]] = []
    for use in sorted(reduced):
        if found and sum(len(reduced[one]) for one in [*found[-1], use]) <= schedule.message_bytes:
            found[-1].append(use)
        else:
            found.append([use])
    return found


def touched(schedule: Schedule, trainable: Sequence[str]) -> list[Touched]:
    """The reads and writes of every task of a step."""
    reduced = reduced_units(schedule, trainable)
    staged = bool(schedule.offload_slots)
    everywhere = [unit for units in reduced.values() for unit in units]
    phantom_of_slot = other_tenants(schedule)
    phantom_of_staging = other_gradients(schedule, reduced)
    found = []
    for task in schedule.tasks:
        it = Touched()
        match task.kind:
            case Kind.COMPUTE:
                index = task.position % len(schedule.uses)
                for unit in schedule.reads(schedule.uses[index]):
                    it.reads |= {("slot", unit), ("param", unit)}
                for unit in reduced.get(index, ()):
                    it.writes |= {("staging", unit), ("grad", unit)}
                it.writes |= {("phantom staging", unit) for unit in reduced.get(index, ())}
                for unit, (first, last) in schedule.saved.items():
                    window, use = schedule.prefetch + 1, ("kept", unit)
                    if index in (first - window, first, last):  # made, let go, and given room again
                        it.writes.add(use)
                    elif index == last + window:
                        it.reads.add(use)
                it.reads |= {("phantom slot", unit) for unit in phantom_of_slot.get(task.position, ())}
                it.reads |= {("phantom staging", unit) for unit in phantom_of_staging.get(task.position, ())}
            case Kind.UNSHARD:
                for unit in task.units:
                    it.reads |= {("param", unit), ("slot", unit)}
                    it.writes |= {("slot", unit), ("phantom slot", unit)}
            case Kind.REDUCE | Kind.FINAL_REDUCE:
                for unit in task.units:
                    it.writes |= {("staging", unit), ("grad", unit), ("phantom staging", unit)}
                it.reads |= {("phantom staging", unit) for unit in phantom_of_staging.get(task.position, ())}
            case Kind.GRAD_GATHER:
                it.writes |= {("grad", unit) for unit in task.units}
            case Kind.STEP if schedule.clip:
                it.writes |= {("grad", unit) for unit in everywhere}
            case Kind.UPDATE:
                it.reads |= {("options", "")} | {("grad", unit) for unit in task.units}
                for unit in task.units:
                    it.writes |= {("param", unit), ("optimizer", unit)}
                it.writes |= {("host slot", str(schedule.offload_slots[u])) for u in task.units if staged}
            case Kind.FETCH:
                for unit in task.units:
                    it.reads |= {("host", unit)}
                    it.writes |= {("host slot", str(schedule.offload_slots[unit]))}
            case Kind.STORE:
                for unit in task.units:
                    it.reads |= {("host slot", str(schedule.offload_slots[unit]))}
                    it.writes |= {("host", unit)}
            case Kind.SAVE:
                it.reads |= {("kept", unit) for unit in task.units}
                it.writes |= {("on host", unit) for unit in task.units}
            case Kind.LOAD:
                it.reads |= {("on host", unit) for unit in task.units}
                it.writes |= {("kept", unit) for unit in task.units}
            case Kind.PARAM_GATHER:
                it.writes |= {("param", unit) for unit in task.units}
        if task.index == schedule.options_read:
            it.writes |= {("options", "")}
        found.append(it)
    return found


def other_tenants(schedule: Schedule) -> dict[int, list[str]]:
    """For every position the units whose slot another tenant may be using in that position's compute."""
    if schedule.accumulation > 3:
        return {}  # lives are written down for three micro-batches
    found: dict[int, list[str]] = {}
    for position in range(len(schedule.uses) * schedule.accumulation):
        for unit, lives in schedule.unshard_live_ranges.items():
            if all(position < start or position - schedule.prefetch > end for start, end in lives):
                found.setdefault(position, []).append(unit)
    return found


def other_gradients(schedule: Schedule, reduced: Mapping[int, Sequence[str]]) -> dict[int, list[str]]:
    """For every position whose gradients are reduced the units whose slot that reduce may be using."""
    if schedule.accumulation > 3:
        return {}
    together = [
        [micro_batch * len(schedule.uses) + index for index in some]
        for micro_batch in range(schedule.accumulation)
        for some in reduced_together(schedule, reduced)
    ]
    found: dict[int, list[str]] = {}
    for ordinal, positions in enumerate(together):
        for unit, lives in schedule.gradient_live_ranges.items():
            if all(ordinal + schedule.gradient_buffers - 1 < start or ordinal > end for start, end in lives):
                for position in positions:
                    found.setdefault(position, []).append(unit)
    return found


def disjoint(first: Sequence[Interval], second: Sequence[Interval]) -> bool:
    """Whether no position is in both of two sets of closed intervals."""
    return not any(
        position in range(a, b + 1) for c, d in second for position in range(c, d + 1) for a, b in first
    )


def _aliases(schedule: Schedule, resource: Resource) -> list[Resource]:
    """The resources that may be the same memory."""
    kind, unit = resource
    lives = {"slot": schedule.unshard_live_ranges, "staging": schedule.gradient_live_ranges}.get(kind)
    if lives is None:
        return [resource]
    return [(kind, other) for other in lives if other == unit or disjoint(lives[unit], lives[other])]


def in_lanes(schedule: Schedule) -> list[Task]:
    """The tasks in the order that the runtime keeps: of a tier's stream several may be under way at once."""
    return [
        replace(task, after=task.needs, after_previous=task.needs_previous) if task.tier >= 0 else task
        for task in schedule.tasks
    ]


class Detector:
    """Finds the hazards of a schedule, and of the same tasks with other edges."""

    def __init__(self, schedule: Schedule, trainable: Sequence[str]) -> None:
        self.schedule = schedule
        tasks = touched(schedule, trainable)
        total = len(tasks)
        readers: dict[Resource, int] = {}
        writers: dict[Resource, int] = {}
        for node in range(STEPS * total):
            for resource in tasks[node % total].reads:
                readers[resource] = readers.get(resource, 0) | 1 << node
            for resource in tasks[node % total].writes:
                writers[resource] = writers.get(resource, 0) | 1 << node
        aliases = {resource: _aliases(schedule, resource) for resource in {*readers, *writers}}
        # For every node: (resource, the earlier nodes that must not run at the same time).
        self.conflicts: list[list[tuple[Resource, int]]] = []
        for node in range(STEPS * total):
            it, before = tasks[node % total], (1 << node) - 1
            mine: list[tuple[Resource, int]] = []
            for resource in it.reads | it.writes:
                others = 0
                for alias in aliases[resource]:
                    others |= writers.get(alias, 0)
                    if resource in it.writes:
                        others |= readers.get(alias, 0)
                if others & before:
                    mine.append((resource, others & before))
            self.conflicts.append(mine)

    def hazards(self, tasks: Sequence[Task] | None = None) -> Iterator[Hazard]:
        """Conflicting pairs without a path between them; and tasks that are launched, at the end of the
        compute task before them, when they may still run for the step before."""
        tasks = in_lanes(self.schedule) if tasks is None else tasks
        ancestors = reach(tasks)
        launcher = 0
        for task in tasks:
            if task.stream == COMPUTE_STREAM:
                launcher = task.index
            elif not ancestors[len(tasks) + launcher] >> task.index & 1:
                yield Hazard(
                    _name(tasks, task.index), _name(tasks, len(tasks) + launcher), ("run", str(task))
                )
        for node, mine in enumerate(self.conflicts):
            for resource, others in mine:
                open_pairs = others & ~ancestors[node]
                while open_pairs:
                    other = open_pairs.bit_length() - 1
                    open_pairs ^= 1 << other
                    yield Hazard(_name(tasks, other), _name(tasks, node), resource)

    def racy(self, tasks: Sequence[Task] | None = None) -> bool:
        """Whether there is any hazard."""
        return next(self.hazards(tasks), None) is not None


def reach(tasks: Sequence[Task]) -> list[int]:
    """For every node of the unrolled steps, as bits, the nodes from which a path leads to it."""
    total = len(tasks)
    ancestors: list[int] = []
    for node in range(STEPS * total):
        step, index = divmod(node, total)
        found = 0
        for before in tasks[index].after:
            at = step * total + before
            found |= ancestors[at] | 1 << at
        if step:
            for before in tasks[index].after_previous:
                at = (step - 1) * total + before
                found |= ancestors[at] | 1 << at
        ancestors.append(found)
    return ancestors


def edges(tasks: Sequence[Task]) -> Iterator[Edge]:
    """All edges of a step, those from the step before included."""
    for task in tasks:
        yield from ((before, task.index, False) for before in task.after)
        yield from ((before, task.index, True) for before in task.after_previous)


def without(tasks: Sequence[Task], edge: Edge) -> list[Task]:
    """The same tasks with one edge less."""
    before, after, previous = edge
    task = tasks[after]
    if previous:
        task = replace(task, after_previous=tuple(u for u in task.after_previous if u != before))
    else:
        task = replace(task, after=tuple(u for u in task.after if u != before))
    return [*tasks[:after], task, *tasks[after + 1 :]]


def implied(tasks: Sequence[Task], edge: Edge) -> bool:
    """Whether the other edges hold the order that an edge holds."""
    before, after, previous = edge
    node = len(tasks) + after  # in the second of the two steps
    origin = before if previous else len(tasks) + before
    return bool(reach(without(tasks, edge))[node] >> origin & 1)


def _name(tasks: Sequence[Task], node: int) -> str:
    step, index = divmod(node, len(tasks))
    return f"step {step}: {tasks[index]}"
