"""The ILP: choose a pattern for every unit, in PuLP. ``rows`` says what it is made of.

The schedule enters as lazy constraints: one row for each violated cycle of the event graph (``paths``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import highspy
import pulp

from hzplan.solver import rows
from hzplan.solver.paths import LazyConstraint
from hzplan.solver.question import Question
from hzplan.solver.rows import MEMORY, PERIOD, Row

SEED = 1


@dataclass
class Problem:
    """The PuLP model over the patterns ``offered`` (indices by unit). ``columns``: the variables that are no
    choice of a pattern, by name; there is no violation, which is 0 in every plan."""

    question: Question
    offered: Mapping[str, Sequence[int]]
    lp: pulp.LpProblem
    columns: dict[str, pulp.LpVariable] = field(default_factory=dict)
    chosen: dict[str, list[pulp.LpVariable]] = field(default_factory=dict)
    cycles: int = 0

    def add(self, row: Row) -> None:
        """A row over the patterns offered."""
        terms = [(self.columns[name], of) for name, of in row.columns.items() if name in self.columns]
        for unit in row.units:
            values = row.of(unit, self.offered[unit])
            terms += [(x, -float(of)) for x, of in zip(self.chosen[unit], values, strict=True) if of]
        sense = pulp.LpConstraintEQ if row.low == row.high else pulp.LpConstraintGE
        self.lp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, row.name, row.low))

    def choice(self) -> dict[str, int]:
        """The pattern of every unit in the solution found."""
        return {
            unit: self.offered[unit][max(range(len(xs)), key=lambda p: xs[p].value() or 0.0)]
            for unit, xs in self.chosen.items()
        }

    def add_cycles(self, cuts: Sequence[LazyConstraint]) -> None:
        """Add a row per cycle."""
        for cut in cuts:
            self.add(rows.cycle(self.question, self.cycles, cut))
            self.cycles += 1


def build_fastest(
    question: Question, offered: Mapping[str, Sequence[int]], cuts: Sequence[LazyConstraint]
) -> Problem:
    """The model that minimises the period within the memory budget."""
    problem = _with_choices(question, offered)
    problem.columns[PERIOD] = problem.lp.add_variable(PERIOD, 0)
    problem.lp.setObjective(pulp.LpAffineExpression([(problem.columns[PERIOD], 1.0)]))
    problem.add_cycles(cuts)
    _add_memory(problem, question.budget_mib)
    return problem


def build_smallest(question: Question, offered: Mapping[str, Sequence[int]]) -> Problem:
    """The model that minimises the peak memory, whatever the period."""
    problem = _with_choices(question, offered)
    _add_memory(problem, None)
    problem.lp.setObjective(pulp.LpAffineExpression([(problem.columns[MEMORY], 1.0)]))
    return problem


def _with_choices(question: Question, offered: Mapping[str, Sequence[int]]) -> Problem:
    """The model with its choices, the host's memory, and the integer counts of recomputed units."""
    problem = Problem(question, offered, pulp.LpProblem("hzplan", pulp.LpMinimize))
    for number, unit in enumerate(question.pools):
        problem.chosen[unit] = [
            problem.lp.add_variable(f"x_{number}_{p}", 0, 1, pulp.LpBinary) for p in offered[unit]
        ]
        problem.add(rows.one_pattern(question, unit))
    if question.memory_use.host:
        problem.add(rows.host(question))
    for group, binaries in enumerate(question.alike):
        name = rows.count_name(group)
        problem.columns[name] = problem.lp.add_variable(name, 0, len(binaries), pulp.LpInteger)
        problem.add(rows.count(question, group))
    return problem


def _add_memory(problem: Problem, budget_mib: float | None) -> None:
    question = problem.question
    problem.columns[MEMORY] = problem.lp.add_variable(MEMORY, None, budget_mib)
    for buffer in question.memory_use.shared:
        problem.columns[buffer.name] = problem.lp.add_variable(buffer.name, 0)
    for row in (*rows.of_buffers(question), *rows.of_events(question), rows.memory(question)):
        problem.add(row)


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
