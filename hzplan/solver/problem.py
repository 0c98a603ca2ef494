"""The ILP: choose a pattern for every unit. One function per family of rows; each docstring states the rows.

Sets: units u, patterns p ∈ P_u, tiers t. Variables:

    x[u,p] ∈ {0,1}     unit u uses pattern p
    b ≥ 0              MiB of a buffer that units share
    T                  the period of the step, in milliseconds: the objective

The schedule enters as rows for walks through it (``paths``), which are added when they are violated.
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
from hzplan.solver.paths import MS, Cut, Network
from hzplan.solver.patterns import Family

MIB = 2.0**-20  # bytes to MiB
SEED = 1

Terms = list[tuple[pulp.LpVariable, float]]
Coefficients = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Events:
    """MiB at every event of a step: ``base`` [events], and by unit what each of its patterns adds [patterns,
    events]."""

    base: Coefficients
    added: Mapping[str, Coefficients]

    def at(self, choice: Mapping[str, int]) -> Coefficients:
        """With a pattern of every unit."""
        return sum((of[choice[unit]] for unit, of in self.added.items()), self.base)


NO_EVENTS = Events(np.zeros(0), {})


@dataclass(frozen=True)
class Buffer:
    """What units share: as large as the largest of them needs, and as is needed at every event.

    ``sizes``: MiB of every pattern, by unit.
    """

    name: str
    sizes: Mapping[str, Coefficients]
    events: Events = NO_EVENTS


@dataclass(frozen=True)
class Room:
    """What patterns take, in MiB: for good, by unit; in buffers that units share; and of the host's memory,
    by unit, where there is any."""

    resident: Mapping[str, Coefficients]
    shared: Sequence[Buffer]
    host: Mapping[str, Coefficients]


@dataclass(frozen=True)
class Question:
    """One micro-batch size, prefetch depth and budget, and all patterns of every unit."""

    model: CostModel
    schedule: Schedule  # of the whole step
    short: Schedule  # of as many micro-batches as have nodes of their own
    slots: Slots
    families: Mapping[str, Family]
    switches: Mapping[str, str]  # those of the families that are, by their units
    micro_batch: int
    budget_bytes: int
    host_bytes: int

    @cached_property
    def network(self) -> Network:
        """The schedule, ready for durations."""
        units = list(self.families)
        return Network(self.model, self.short, self.schedule, units, self.micro_batch, self.switches)

    @cached_property
    def durations_ms(self) -> dict[str, Coefficients]:
        """Milliseconds of every pattern [patterns, keys], by unit; those of like units are one array."""
        known = {id(family): family.durations_ns * MS for family in self.families.values()}
        return {unit: known[id(family)] for unit, family in self.families.items()}

    def durations_of(self, choice: Mapping[str, int]) -> Coefficients:
        """Milliseconds [units, keys] of a choice."""
        return np.array([self.durations_ms[unit][choice[unit]] for unit in self.families])

    @cached_property
    def activations(self) -> Events:
        """What activations take at every use, without uses at which it is never the most.

        An event e is left out where another, f, takes as much under every choice: base_e − base_f +
        Σ_units max over patterns of (added_e − added_f) ≤ 0.
        """
        base = np.array(self.model.activation_bytes(self.micro_batch), dtype=float)
        added = {}
        for unit, switch in self.switches.items():
            on = np.array(self.model.activation_bytes(self.micro_batch, {unit}), dtype=float) - base
            added[switch] = np.outer(self.families[switch].recompute, on)
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
        """The switches of like units, in groups of at least two: it matters more how many of them are on than
        which."""
        found: dict[int, list[str]] = {}
        for switch in self.switches.values():
            if len(self.families[switch].levels) > 1:
                found.setdefault(id(self.families[switch]), []).append(switch)
        return [switches for switches in found.values() if len(switches) > 1]

    @property
    def room_mib(self) -> float:
        """The budget."""
        return self.budget_bytes * MIB

    @property
    def host_mib(self) -> float:
        """Of the host's memory."""
        return self.host_bytes * MIB

    @cached_property
    def room(self) -> Room:
        """What patterns take.

        Buffers: every unshard and gradient slot, those for what is fetched from the host's memory, exchange
        buffers per tier, activations, and the optimizer's temporaries, which with clipping are there when
        activations are not. A slot that one unit uses is the unit's own.
        """
        families, slots = self.families, self.slots
        resident = {unit: family.resident * MIB for unit, family in families.items()}
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
            users = {u: f.unshard for u, f in families.items() if slots.unshard.get(u) == slot}
            share(f"unshard_slot_{slot}", users)
        for slot in sorted(set(slots.gradient.values())):
            users = {u: f.staging for u, f in families.items() if slots.gradient.get(u) == slot}
            share(f"gradient_slot_{slot}", users)
        for slot in sorted(set(self.short.host_slots.values())):
            users = {u: f.host for u, f in families.items() if self.short.host_slots.get(u) == slot}
            share(f"host_slot_{slot}", users)
        for tier in range(self.short.tiers):
            share(f"exchange_{tier}", {u: family.scratch[:, tier] for u, family in families.items()})
        updates = {unit: family.temporary for unit, family in families.items() if family.temporary.any()}
        if not self.short.clip:
            share("update", updates)
            updates = {}
        events = self.activations
        least = sum((of.min(axis=0) for of in events.added.values()), events.base).max(initial=0.0)
        larger = {unit: sizes * MIB for unit, sizes in updates.items() if (sizes * MIB > least).any()}
        shared.append(Buffer("activations", larger, events))
        host = {unit: family.host * MIB for unit, family in families.items() if family.host.any()}
        return Room(resident, shared, host)


@dataclass
class Problem:
    """The PuLP problem over some of the patterns."""

    question: Question
    offered: Mapping[str, Sequence[int]]
    lp: pulp.LpProblem
    period: Any = None  # of PuLP, once there is one
    chosen: dict[str, list[pulp.LpVariable]] = field(default_factory=dict)
    walks: int = 0

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

    def walk_rows(self, cuts: Sequence[Cut]) -> None:
        """T − Σ_u Σ_p weights[u]·durations[p] · x[u,p] ≥ constant, for every walk."""
        network, durations = self.question.network, self.question.durations_ms
        for cut in cuts:
            terms: Terms = [(self.period, 1.0)]
            for unit, row in network.rows.items():
                if cut.weights[row].any():
                    terms += self.patterns(unit, -(durations[unit] @ cut.weights[row]))
            self.add(f"walk {self.walks}", terms, pulp.LpConstraintGE, cut.constant)
            self.walks += 1

    def minimise_period(self, cuts: Sequence[Cut]) -> None:
        """T, within the budget."""
        self.period = self.lp.add_variable("period", 0)
        self.lp.setObjective(pulp.LpAffineExpression([(self.period, 1.0)]))
        self.walk_rows(cuts)
        self.add("memory at the peak", _memory(self), pulp.LpConstraintLE, self.question.room_mib)


def build_fastest(question: Question, offered: Mapping[str, Sequence[int]], cuts: Sequence[Cut]) -> Problem:
    """Minimise the period within the budget."""
    problem = _with_choices(question, offered)
    problem.minimise_period(cuts)
    return problem


def build_smallest(question: Question, offered: Mapping[str, Sequence[int]]) -> Problem:
    """Minimise the peak memory, whatever the time."""
    problem = _with_choices(question, offered)
    problem.lp.setObjective(pulp.LpAffineExpression(_memory(problem)))
    return problem


def _with_choices(question: Question, offered: Mapping[str, Sequence[int]]) -> Problem:
    """Σ_p x[u,p] = 1 for every unit u, within the host's memory. n = Σ x[s,on] over the switches of like
    units is whole: implied, but what is branched on best, as like units trade places."""
    problem = Problem(question, offered, pulp.LpProblem("hzplan", pulp.LpMinimize))
    for number, (unit, family) in enumerate(question.families.items()):
        problem.chosen[unit] = [
            problem.lp.add_variable(f"x_{number}_{p}", 0, 1, pulp.LpBinary) for p in offered[unit]
        ]
        terms = problem.patterns(unit, np.ones(len(family.levels)))
        problem.add(f"one pattern for {unit}", terms, pulp.LpConstraintEQ, 1)
    _host_memory(problem)
    for number, switches in enumerate(question.alike):
        count = problem.lp.add_variable(f"again_{number}", 0, len(switches), pulp.LpInteger)
        on = [t for s in switches for t in problem.patterns(s, question.families[s].recompute.astype(float))]
        problem.add(f"recomputed of {switches[0]} and its like", [(count, -1.0), *on], pulp.LpConstraintEQ, 0)
    return problem


def _host_memory(problem: Problem) -> None:
    """Σ x·host bytes ≤ the host's memory."""
    question = problem.question
    terms = [term for unit, sizes in question.room.host.items() for term in problem.patterns(unit, sizes)]
    if terms:
        problem.add("the host's memory", terms, pulp.LpConstraintLE, question.host_mib)


def _memory(problem: Problem) -> Terms:
    """Σ x·resident bytes + Σ b, and for every shared buffer b: b ≥ Σ_p x[u,p]·bytes_p for every unit u,
    b ≥ base_e + Σ_u Σ_p x[u,p]·added_{p,e} for every event e."""
    room = problem.question.room
    terms = [term for unit, sizes in room.resident.items() for term in problem.patterns(unit, sizes)]
    for buffer in room.shared:
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
    """Run HiGHS on one thread with a fixed seed: within the gap, a solution that may be farther, or none.

    ``enough``: the objective at which to stop, whatever else there is; ``proof``: likewise the bound.
    """

    def look(kind: Any, message: str, out: Any, into: Any, data: Any) -> None:
        # Infinite where nothing is left below the period's upper limit: that is for HiGHS to say.
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
