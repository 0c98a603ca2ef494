"""The ILP. One function per family of rows; each docstring states the inequality.

Sets: units u, patterns p ∈ P_u, tasks v of the schedule, tiers t. Variables:

    x[u,p] ∈ {0,1}     unit u uses pattern p
    d[u,k,t] ≥ 0       milliseconds of u's part in tasks of kind k on tier t
    s[v] ≥ 0           start of task v, in milliseconds after the step's begin
    T                  the period of the step, in milliseconds: the objective

Memory is in MiB. A step of many micro-batches is represented by its first ones and its last one; the others
enter through the work they put on every stream. Each such row is a path of the full schedule, so the optimum
is a lower bound on the objective of the full schedule, and equal to it where no micro-batch is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pulp
from numpy.typing import NDArray

from hzplan.cost import CostModel
from hzplan.memory import Slots
from hzplan.schedule import Kind, Schedule, Task
from hzplan.solver.patterns import Family, duration_keys

MS = 1e-6  # nanoseconds to milliseconds
MIB = 2.0**-20  # bytes to MiB

Terms = list[tuple[pulp.LpVariable, float]]
Coefficients = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Question:
    """One micro-batch size, prefetch depth and budget, and all patterns of every unit."""

    model: CostModel
    schedule: Schedule  # of the whole step
    short: Schedule  # of as many micro-batches as have rows of their own
    slots: Slots
    families: Mapping[str, Family]
    micro_batch: int
    budget_bytes: int


@dataclass
class Problem:
    """The PuLP problem over some of the patterns, and what it takes to price the others.

    ``columns``: for every row, and for the objective (name ""), the coefficients of a unit's patterns, all of
    them, offered or not.
    """

    question: Question
    offered: Mapping[str, Sequence[int]]
    lp: pulp.LpProblem
    chosen: dict[str, list[pulp.LpVariable]] = field(default_factory=dict)
    lengths: dict[tuple[str, Kind, int], pulp.LpVariable] = field(default_factory=dict)
    starts: dict[int, pulp.LpVariable] = field(default_factory=dict)
    rows: dict[str, pulp.LpConstraint] = field(default_factory=dict)
    columns: list[tuple[str, str, Coefficients]] = field(default_factory=list)

    def add(self, name: str, terms: Terms, sense: int, rhs: float) -> None:
        """One row: Σ coefficient·variable (≤, =, ≥) rhs."""
        row = pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, name, rhs)
        self.rows[name] = row
        self.lp.addConstraint(row)

    def patterns(self, row: str, unit: str, coefficients: Coefficients) -> Terms:
        """A unit's part of a row: Σ_p coefficient_p · x[u,p] over the patterns offered."""
        self.columns.append((row, unit, coefficients))
        pairs = zip(self.chosen[unit], self.offered[unit], strict=True)
        return [(x, float(coefficients[p])) for x, p in pairs if coefficients[p]]

    def choice(self) -> dict[str, int]:
        """The pattern of every unit in the solution found."""
        return {
            unit: self.offered[unit][max(range(len(xs)), key=lambda p: xs[p].value() or 0.0)]
            for unit, xs in self.chosen.items()
        }

    def reduced_costs(self) -> dict[str, Coefficients]:
        """For every pattern, offered or not: by how much a plan with it exceeds the relaxation's optimum.

        c_p − Σ_rows dual·coefficient, after the relaxation was solved. Any plan that uses p costs at least
        the relaxation's optimum plus this (linear programming duality).
        """
        families = self.question.families
        found: dict[str, Coefficients] = {u: np.zeros(len(f.levels)) for u, f in families.items()}
        for row, unit, coefficients in self.columns:
            found[unit] += coefficients if not row else -(self.rows[row].pi or 0.0) * coefficients
        return found


def build_fastest(question: Question, offered: Mapping[str, Sequence[int]]) -> Problem:
    """Minimise the period within the budget."""
    problem = _with_choices(question, offered)
    period = problem.lp.add_variable("period", 0)
    problem.lp.setObjective(pulp.LpAffineExpression([(period, 1.0)]))
    _length_rows(problem)
    _edge_rows(problem, period)
    _middle_rows(problem)
    _capacity_rows(problem, period)
    total = _memory_terms(problem, "memory at the peak")
    budget = (question.budget_bytes - question.model.activation_peak_bytes(question.micro_batch)) * MIB
    problem.add("memory at the peak", total, pulp.LpConstraintLE, budget)
    return problem


def build_smallest(question: Question, offered: Mapping[str, Sequence[int]]) -> Problem:
    """Minimise the peak memory, whatever the time."""
    problem = _with_choices(question, offered)
    problem.lp.setObjective(pulp.LpAffineExpression(_memory_terms(problem, "")))
    return problem


def _with_choices(question: Question, offered: Mapping[str, Sequence[int]]) -> Problem:
    """Σ_p x[u,p] = 1 for every unit u."""
    problem = Problem(question, offered, pulp.LpProblem("hzplan", pulp.LpMinimize))
    for number, (unit, family) in enumerate(question.families.items()):
        problem.chosen[unit] = [
            problem.lp.add_variable(f"x_{number}_{p}", 0, 1, pulp.LpBinary) for p in offered[unit]
        ]
        row = f"one pattern for {unit}"
        problem.add(row, problem.patterns(row, unit, np.ones(len(family.levels))), pulp.LpConstraintEQ, 1)
    return problem


def _length_rows(problem: Problem) -> None:
    """d[u,k,t] − Σ_p x[u,p] · milliseconds of pattern p in a task of kind k on tier t = 0.

    A part that no pattern takes time for needs no variable.
    """
    short = problem.question.short
    keys = duration_keys(short.tiers)
    present = {(unit, task.kind, task.tier) for task in short.tasks for unit in task.units}
    for unit, family in problem.question.families.items():
        for column, (kind, tier) in enumerate(keys):
            times = family.durations_ns[:, column] * MS
            if (unit, kind, tier) not in present or not times.any():
                continue
            length = problem.lp.add_variable(f"d_{len(problem.lengths)}", 0)
            problem.lengths[unit, kind, tier] = length
            row = f"length of {kind.value} {tier} {unit}"
            terms = [(length, 1.0), *problem.patterns(row, unit, -times)]
            problem.add(row, terms, pulp.LpConstraintEQ, 0)


def _length(problem: Problem, task: Task) -> tuple[Terms, float]:
    """A task's milliseconds as variables and a constant."""
    if task.kind is Kind.COMPUTE:
        index = task.position % len(problem.question.short.uses)
        return [], problem.question.model.compute_ns(index, problem.question.micro_batch) * MS
    keys = ((unit, task.kind, task.tier) for unit in task.units)
    return [(problem.lengths[key], 1.0) for key in keys if key in problem.lengths], 0.0


def _edge_rows(problem: Problem, period: pulp.LpVariable) -> None:
    """s[v] ≥ s[u] + d[u] for every edge u → v; s[v] + T ≥ s[u] + d[u] where u is of the step before."""
    tasks = problem.question.short.tasks
    for task in tasks:
        problem.starts[task.index] = problem.lp.add_variable(f"s_{task.index}", 0)
    for task in tasks:
        edges = [(u, False) for u in task.after] + [(u, True) for u in task.after_previous]
        for before, wraps in edges:
            _after(problem, f"{before} to {task.index}", before, task.index, period if wraps else None)


def _after(
    problem: Problem,
    name: str,
    before: int,
    task: int,
    period: pulp.LpVariable | None = None,
    extra: Terms | None = None,
    extra_ms: float = 0.0,
) -> None:
    """s[task] (+ T) − s[before] − d[before] − extra ≥ 0."""
    lengths, constant = _length(problem, problem.question.short.tasks[before])
    terms: dict[pulp.LpVariable, float] = defaultdict(float, {problem.starts[task]: 1.0})
    if period is not None:
        terms[period] += 1.0
    terms[problem.starts[before]] -= 1.0
    for variable, coefficient in [*lengths, *(extra or [])]:
        terms[variable] -= coefficient
    problem.add(name, list(terms.items()), pulp.LpConstraintGE, constant + extra_ms)


def _middle_rows(problem: Problem) -> None:
    """For every stream: the last micro-batch's first task starts no earlier than the last task of the one
    before it that has rows ends, plus the stream's work for each micro-batch left out."""
    model, schedule = problem.question.model, problem.question.short
    between = problem.question.schedule.accumulation - schedule.accumulation
    if between <= 0:
        return
    three = model.schedule(
        prefetch=schedule.prefetch,
        accumulation=3,
        clip=schedule.clip,
        gradient_buffers=schedule.gradient_buffers,
    )
    for stream, tasks in schedule.streams.items():
        placed = [task for task in tasks if task.position >= 0]
        first = [task for task in placed if schedule.micro_batch(task) == schedule.accumulation - 2]
        last = [task for task in placed if schedule.micro_batch(task) == schedule.accumulation - 1]
        if not first or not last:
            continue
        load: dict[pulp.LpVariable, float] = defaultdict(float)
        constant = 0.0
        for task in three.streams[stream]:
            if task.position >= 0 and three.micro_batch(task) == 1:
                terms, fixed = _length(problem, task)
                constant += fixed
                for variable, coefficient in terms:
                    load[variable] += coefficient
        extra = [(variable, between * coefficient) for variable, coefficient in load.items()]
        _after(
            problem,
            f"middle {stream}",
            first[-1].index,
            last[0].index,
            extra=extra,
            extra_ms=between * constant,
        )


def _capacity_rows(problem: Problem, period: pulp.LpVariable) -> None:
    """T ≥ Σ d over all tasks of a tier in the whole step: a tier cannot carry its bytes faster.

    T ≥ compute + Σ_t lost_t · Σ d of tier t: compute waits or is slowed while a tier is at work.
    """
    whole = problem.question.schedule
    loads: list[dict[pulp.LpVariable, float]] = [defaultdict(float) for _ in range(whole.tiers)]
    compute = 0.0
    for task in whole.tasks:
        lengths, constant = _length(problem, task)
        compute += constant
        if task.tier >= 0:
            for variable, coefficient in lengths:
                loads[task.tier][variable] += coefficient
    for tier, load in enumerate(loads):
        terms = [(period, 1.0), *((variable, -coefficient) for variable, coefficient in load.items())]
        problem.add(f"capacity of tier {tier}", terms, pulp.LpConstraintGE, 0)
    lost = problem.question.model.interference.lost
    if any(lost):
        work: dict[pulp.LpVariable, float] = defaultdict(float)
        for share, load in zip(lost, loads, strict=True):
            for variable, coefficient in load.items():
                work[variable] += share * coefficient
        terms = [(period, 1.0), *((variable, -coefficient) for variable, coefficient in work.items())]
        problem.add("capacity of processors", terms, pulp.LpConstraintGE, compute)


def _memory_terms(problem: Problem, row: str) -> Terms:
    """Σ x·resident bytes, and one variable per shared buffer, at least as large as each user of it:

    slot c ≥ Σ_p x[u,p]·bytes_p for every unit u that has slot c; likewise exchange buffers per tier, and
    the optimizer's temporaries, with clipping what they exceed the activations by. What remains of the peak
    is constant.
    """
    families, slots = problem.question.families, problem.question.slots
    terms: Terms = []
    for unit, family in families.items():
        terms += problem.patterns(row, unit, family.resident * MIB)

    def shared(name: str, users: Mapping[str, NDArray[np.int64]], free: int = 0) -> None:
        if not any((sizes > free).any() for sizes in users.values()):
            return
        buffer = problem.lp.add_variable(name, 0)
        terms.append((buffer, 1.0))
        for unit, sizes in users.items():
            own = f"{name} holds {unit}"
            held = problem.patterns(own, unit, -sizes * MIB)
            problem.add(own, [(buffer, 1.0), *held], pulp.LpConstraintGE, -free * MIB)

    for name, assigned, of in (
        ("unshard_slot", slots.unshard, "unshard"),
        ("gradient_slot", slots.staging, "staging"),
    ):
        for slot in sorted(set(assigned.values())):
            users = [unit for unit in families if assigned.get(unit) == slot]
            shared(f"{name}_{slot}", {unit: getattr(families[unit], of) for unit in users})
    for tier in range(problem.question.short.tiers):
        shared(f"exchange_{tier}", {unit: family.scratch[:, tier] for unit, family in families.items()})
    clip, micro_batch = problem.question.short.clip, problem.question.micro_batch
    free = problem.question.model.activation_peak_bytes(micro_batch) if clip else 0
    shared("update", {unit: family.temporary for unit, family in families.items()}, free)
    return terms
