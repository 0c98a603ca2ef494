"""The ILP: choose a pattern for every unit. One function per family of rows; each docstring states the rows.

Sets: units u, patterns p ∈ P_u, tiers t. Variables:

    x[u,p] ∈ {0,1}     unit u uses pattern p
    b ≥ 0              MiB of a buffer that units share
    T                  the period of the step, in milliseconds: the objective

The schedule enters as lazy constraints: one row for each violated cycle of the event graph (``paths``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import highspy
import numpy as np
import pulp
from numpy.typing import NDArray

from hzplan.core.buffers import Slots
from hzplan.core.schedule import Schedule
from hzplan.cost.model import CostModel
from hzplan.solver.paths import MS, LazyConstraint, Network
from hzplan.solver.patterns import ColumnPool

MIB = 2.0**-20  # bytes to MiB
SEED = 1

Terms = list[tuple[pulp.LpVariable, float]]
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
        Σ_units max over patterns of (added_e − added_f) ≤ 0.
        """
        base = np.array(self.model.activation_bytes(self.micro_batch), dtype=float)
        added = {}
        for unit, binary in self.binaries.items():
            on = np.array(self.model.activation_bytes(self.micro_batch, {unit}), dtype=float) - base
            added[binary] = np.outer(self.pools[binary].recompute, on)
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

    @cached_property
    def memory_use(self) -> MemoryUse:
        """The memory of all patterns, resident and in shared buffers.

        Shared buffers: every unshard, gradient and offload slot, scratch of each tier, activations, and the
        optimizer's temporaries; with clipping the last two share one buffer, because they are not alive at
        the same time. A slot with one user counts as resident memory of that unit.
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
        updates = {unit: pool.temporary for unit, pool in pools.items() if pool.temporary.any()}
        if not self.short.clip:
            share("update", updates)
            updates = {}
        events = self.activations
        least = sum((of.min(axis=0) for of in events.added.values()), events.base).max(initial=0.0)
        larger = {unit: sizes * MIB for unit, sizes in updates.items() if (sizes * MIB > least).any()}
        shared.append(Buffer("activations", larger, events))
        host = {unit: pool.host * MIB for unit, pool in pools.items() if pool.host.any()}
        return MemoryUse(resident, shared, host)


@dataclass
class Problem:
    """The PuLP model over the patterns ``offered`` (indices by unit)."""

    question: Question
    offered: Mapping[str, Sequence[int]]
    lp: pulp.LpProblem
    period: Any = None  # of PuLP, once there is one
    chosen: dict[str, list[pulp.LpVariable]] = field(default_factory=dict)
    cycles: int = 0

    def add(self, name: str, terms: Terms, sense: int, rhs: float) -> None:
        """One row: Σ coefficient·variable (≤, =, ≥) rhs."""
        self.lp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, name, rhs))

    def patterns(self, unit: str, coefficients: Coefficients) -> Terms:
        """A unit's part of a row: Σ_p coefficient_p · x[u,p] over the patterns offered."""
        pairs = zip(self.chosen[unit], self.offered[unit], strict=True)
        return [(x, float(coefficients[p])) for x, p in pairs if coefficients[p]]

    def choice(self) -> dict[str, int]:
        """The pattern of every unit in the solution found."""
        return {
            unit: self.offered[unit][max(range(len(xs)), key=lambda p: xs[p].value() or 0.0)]
            for unit, xs in self.chosen.items()
        }

    def add_cycles(self, cuts: Sequence[LazyConstraint]) -> None:
        """Add a row per cycle: T − Σ_u Σ_p weights[u]·durations[p] · x[u,p] ≥ constant."""
        network, durations = self.question.network, self.question.durations_ms
        for cut in cuts:
            terms: Terms = [(self.period, 1.0)]
            for unit, row in network.rows.items():
                if cut.weights[row].any():
                    terms += self.patterns(unit, -(durations[unit] @ cut.weights[row]))
            self.add(f"cycle {self.cycles}", terms, pulp.LpConstraintGE, cut.constant)
            self.cycles += 1

    def minimise_period(self, cuts: Sequence[LazyConstraint]) -> None:
        """Set the objective T, with rows for ``cuts`` and for the memory budget."""
        self.period = self.lp.add_variable("period", 0)
        self.lp.setObjective(pulp.LpAffineExpression([(self.period, 1.0)]))
        self.add_cycles(cuts)
        self.add("memory at the peak", _memory(self), pulp.LpConstraintLE, self.question.budget_mib)


def build_fastest(
    question: Question, offered: Mapping[str, Sequence[int]], cuts: Sequence[LazyConstraint]
) -> Problem:
    """The model that minimises the period within the memory budget."""
    problem = _with_choices(question, offered)
    problem.minimise_period(cuts)
    return problem


def build_smallest(question: Question, offered: Mapping[str, Sequence[int]]) -> Problem:
    """The model that minimises the peak memory, whatever the period."""
    problem = _with_choices(question, offered)
    problem.lp.setObjective(pulp.LpAffineExpression(_memory(problem)))
    return problem


def _with_choices(question: Question, offered: Mapping[str, Sequence[int]]) -> Problem:
    """The model with its variables, Σ_p x[u,p] = 1 for every unit u, and the row for the host's memory.

    For each group of like units also the integer n = Σ x[s,on] over their recompute binaries. It is implied
    by x, and the best variable to branch on, because like units can trade places.
    """
    problem = Problem(question, offered, pulp.LpProblem("hzplan", pulp.LpMinimize))
    for number, (unit, pool) in enumerate(question.pools.items()):
        problem.chosen[unit] = [
            problem.lp.add_variable(f"x_{number}_{p}", 0, 1, pulp.LpBinary) for p in offered[unit]
        ]
        terms = problem.patterns(unit, np.ones(len(pool.levels)))
        problem.add(f"one pattern for {unit}", terms, pulp.LpConstraintEQ, 1)
    _host_memory(problem)
    for number, binaries in enumerate(question.alike):
        count = problem.lp.add_variable(f"count_recomputed_{number}", 0, len(binaries), pulp.LpInteger)
        on = [t for s in binaries for t in problem.patterns(s, question.pools[s].recompute.astype(float))]
        problem.add(f"recomputed of {binaries[0]} and its like", [(count, -1.0), *on], pulp.LpConstraintEQ, 0)
    return problem


def _host_memory(problem: Problem) -> None:
    """Σ x·host bytes ≤ the host's memory."""
    question = problem.question
    terms = [
        term for unit, sizes in question.memory_use.host.items() for term in problem.patterns(unit, sizes)
    ]
    if terms:
        problem.add("the host's memory", terms, pulp.LpConstraintLE, question.host_budget_mib)


def _memory(problem: Problem) -> Terms:
    """Σ x·resident bytes + Σ b, and for every shared buffer b: b ≥ Σ_p x[u,p]·bytes_p for every unit u,
    b ≥ base_e + Σ_u Σ_p x[u,p]·added_{p,e} for every event e."""
    use = problem.question.memory_use
    terms = [term for unit, sizes in use.resident.items() for term in problem.patterns(unit, sizes)]
    for buffer in use.shared:
        variable = problem.lp.add_variable(buffer.name, 0)
        terms.append((variable, 1.0))
        for unit, sizes in buffer.sizes.items():
            held = problem.patterns(unit, -sizes)
            row = f"{buffer.name} holds {unit}"
            problem.add(row, [(variable, 1.0), *held], pulp.LpConstraintGE, 0.0)
        for event, base in enumerate(buffer.events.base):
            held = [t for u, of in buffer.events.added.items() for t in problem.patterns(u, -of[:, event])]
            row = f"{buffer.name} at event {event}"
            problem.add(row, [(variable, 1.0), *held], pulp.LpConstraintGE, float(base))
    return terms


def optimise(
    problem: Problem, gap: float, seconds: float, enough: float = -1e30, proof: float = 1e30
) -> Literal["optimal", "solution", "infeasible", "nothing"]:
    """Run HiGHS on one thread with a fixed seed.

    Returns "optimal" (within the relative ``gap``), "solution" (a limit was reached first), "infeasible", or
    "nothing" (no solution in ``seconds``). Stops early at an objective of ``enough`` or a bound of ``proof``.
    """

    def look(kind: Any, message: str, out: Any, into: Any, data: Any) -> None:
        # The bound is infinite where no solution is below the upper limit; HiGHS then says infeasible.
        into.user_interrupt = bool(proof <= out.mip_dual_bound < highspy.kHighsInf)

    solver = pulp.HiGHS(
        msg=False,
        threads=1,
        gapRel=gap,
        gapAbs=0.0,
        timeLimit=seconds,
        random_seed=SEED,
        mip_feasibility_tolerance=1e-9,
        primal_feasibility_tolerance=1e-9,
        objective_target=enough,
        callbackTuple=(look, None),
        callbacksToActivate=[highspy.cb.HighsCallbackType.kCallbackMipInterrupt],
    )
    problem.lp.solve(solver)
    if problem.lp.status == pulp.LpStatusInfeasible:
        return "infeasible"
    # PuLP calls a time-out optimal, also one without a solution; HiGHS says what it is.
    highs = problem.lp.solverModel
    if highs.getInfo().primal_solution_status != 2:
        return "nothing"
    return "optimal" if highs.getModelStatus() == highspy.HighsModelStatus.kOptimal else "solution"
