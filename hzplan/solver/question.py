"""The choice problem under one micro-batch size, pace and budget: what patterns take, in time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hzplan.core.buffers import MATRIX_SLOTS, Slots
from hzplan.core.recompute import HOST, only
from hzplan.core.schedule import Kind, Schedule
from hzplan.cost.model import CostModel
from hzplan.solver.paths import MS, Network
from hzplan.solver.patterns import ColumnPool

MIB = 2.0**-20  # bytes to MiB

Coefficients = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Events:
    """Memory of a shared buffer at every event of a step, MiB: ``base`` [events], plus for each unit the part
    that its pattern adds, ``added[unit]`` [patterns, events]."""

    base: Coefficients
    added: Mapping[str, Coefficients]

    def at(self, choice: Mapping[str, int]) -> Coefficients:
        """MiB at every event [events] for one pattern index per unit."""
        return sum((of[choice[unit]] for unit, of in self.added.items()), self.base)


NO_EVENTS = Events(np.zeros(0), {})


@dataclass(frozen=True)
class Buffer:
    """A buffer that units share. Its size is the largest size that a unit, or an event, asks for.

    ``sizes``: by unit, the MiB that each of its patterns asks for [patterns].
    """

    name: str
    sizes: Mapping[str, Coefficients]
    events: Events = NO_EVENTS


@dataclass(frozen=True)
class MemoryUse:
    """Memory of all patterns, MiB: ``resident`` for the whole step and ``host`` in the host's memory, both by
    unit [patterns]; ``shared``: the buffers that units share."""

    resident: Mapping[str, Coefficients]
    shared: Sequence[Buffer]
    host: Mapping[str, Coefficients]


@dataclass(frozen=True)
class Question:
    """The choice problem under one micro-batch size, pace and budget, with all patterns of every unit.

    ``pools`` holds one column pool per unit and one per recompute binary; ``binaries`` maps a unit to the
    name of its recompute binary.
    """

    model: CostModel
    schedule: Schedule  # of the whole step
    short: Schedule  # only the micro-batches that have nodes of their own in the event graph
    slots: Slots
    pools: Mapping[str, ColumnPool]
    binaries: Mapping[str, str]
    micro_batch: int
    budget_bytes: int
    host_bytes: int

    @cached_property
    def network(self) -> Network:
        """The event graph of the schedule, for which ``durations_ms`` are the weights."""
        units = list(self.pools)
        return Network(self.model, self.short, self.schedule, units, self.micro_batch, self.binaries)

    @cached_property
    def durations_ms(self) -> dict[str, Coefficients]:
        """By unit, the milliseconds of every pattern [patterns, duration keys]; like units share an array."""
        known = {id(pool): pool.durations_ns * MS for pool in self.pools.values()}
        return {unit: known[id(pool)] for unit, pool in self.pools.items()}

    def durations_of(self, choice: Mapping[str, int]) -> Coefficients:
        """Milliseconds [units, keys] of a choice."""
        return np.array([self.durations_ms[unit][choice[unit]] for unit in self.pools])

    @cached_property
    def activations(self) -> Events:
        """Activation memory at every use of a forward and backward, without uses that never have the peak.

        Event e is left out where an event f needs at least as much under every choice: base_e − base_f +
        Σ_units max over patterns of (added_e − added_f) ≤ 0. Searches of one micro-batch size share them.
        """
        ways = {unit: self.pools[binary].ways for unit, binary in self.binaries.items()}
        away = self.schedule.saved if any(HOST in of for of in ways.values()) else {}
        key = self.micro_batch, *ways.items(), *sorted(away.items())
        known: dict[object, Events] = self.model.activation_events
        if key not in known:
            known[key] = self._events()
        return known[key]

    def _events(self) -> Events:
        base = np.array(self.model.activations.bytes_by_use(self.micro_batch), dtype=float)
        added = {}
        for unit, binary in self.binaries.items():
            ways = self.pools[binary].ways
            each = [
                self.model.activations.bytes_by_use(self.micro_batch, only(unit, way), self.schedule.saved)
                for way in ways
            ]
            added[binary] = np.array(each, dtype=float) - base
        kept: list[int] = []
        for event in np.argsort(-base, kind="stable"):
            more = base[event] - base[kept]
            for of in added.values():
                more = more + np.max(of[:, [event]] - of[:, kept], axis=0, initial=-np.inf)
            if not (more <= 0).any():
                kept.append(int(event))
        return Events(base[kept] * MIB, {unit: of[:, kept] * MIB for unit, of in added.items()})

    @cached_property
    def alike(self) -> list[list[str]]:
        """Groups of at least two recompute binaries whose units are alike: the count of ones in a group
        decides the cost more than which of them are one."""
        found: dict[int, list[str]] = {}
        for binary in self.binaries.values():
            if len(self.pools[binary].levels) > 1:
                found.setdefault(id(self.pools[binary]), []).append(binary)
        return [binaries for binaries in found.values() if len(binaries) > 1]

    @property
    def budget_mib(self) -> float:
        """The memory budget of a rank, MiB."""
        return self.budget_bytes * MIB

    @property
    def host_budget_mib(self) -> float:
        """The part of the host's memory that a rank may take, MiB."""
        return self.host_bytes * MIB

    @property
    def _matrix_slots(self) -> list[Buffer]:
        """The buffers in which matrices come together: a group of units is an event that asks for its own."""
        groups = [task.units for task in self.schedule.tasks if task.kind is Kind.ORTHOGONALIZE]
        found = []
        for slot in range(min(MATRIX_SLOTS, len(groups))):
            own = groups[slot::MATRIX_SLOTS]
            added = {
                unit: np.outer(self.pools[unit].matrix * MIB, [unit in group for group in own])
                for unit in {unit for group in own for unit in group}
                if self.pools[unit].matrix.any()
            }
            if added:
                found.append(Buffer(f"matrix_slot_{slot}", {}, Events(np.zeros(len(own)), added)))
        return found

    @cached_property
    def memory_use(self) -> MemoryUse:
        """The memory of all patterns, resident and in shared buffers.

        Shared buffers: every unshard, gradient, offload and matrix slot, scratch of each tier, activations,
        and the optimizer's temporaries; with clipping the last two share one buffer, because they are not
        alive at the same time. A slot with one user counts as resident memory of that unit.
        """
        pools, slots = self.pools, self.slots
        resident = {unit: pool.resident * MIB for unit, pool in pools.items()}
        shared: list[Buffer] = []

        def share(name: str, users: Mapping[str, NDArray[np.int64]]) -> None:
            if not any(sizes.any() for sizes in users.values()):
                return
            if len(users) == 1:
                ((unit, sizes),) = users.items()
                resident[unit] = resident[unit] + sizes * MIB
            else:
                shared.append(Buffer(name, {u: sizes * MIB for u, sizes in users.items()}))

        for slot in sorted(set(slots.unshard.values())):
            users = {u: f.unshard for u, f in pools.items() if slots.unshard.get(u) == slot}
            share(f"unshard_slot_{slot}", users)
        for slot in sorted(set(slots.gradient.values())):
            users = {u: f.gradient_buffer for u, f in pools.items() if slots.gradient.get(u) == slot}
            share(f"gradient_slot_{slot}", users)
        for slot in sorted(set(self.short.offload_slots.values())):
            users = {u: f.host for u, f in pools.items() if self.short.offload_slots.get(u) == slot}
            share(f"host_slot_{slot}", users)
        for tier in range(self.short.tiers):
            share(f"exchange_{tier}", {u: pool.scratch[:, tier] for u, pool in pools.items()})
        shared += self._matrix_slots
        updates = {unit: pool.temporary for unit, pool in pools.items() if pool.temporary.any()}
        if not self.short.clip:
            share("update", updates)
            updates = {}
        events = self.activations
        least = sum((of.min(axis=0) for of in events.added.values()), events.base).max(initial=0.0)
        larger = {unit: sizes * MIB for unit, sizes in updates.items() if (sizes * MIB > least).any()}
        shared.append(Buffer("activations", larger, events))
        host = {unit: pool.host * MIB for unit, pool in pools.items() if pool.host.any()}
        for unit in self.schedule.saved.keys() & self.binaries.keys():
            nbytes = self.model.activations.saved_bytes(unit, self.micro_batch) * MIB
            ways = self.pools[self.binaries[unit]].ways
            host[self.binaries[unit]] = np.array([nbytes * (way == HOST) for way in ways])
        return MemoryUse(resident, shared, host)
