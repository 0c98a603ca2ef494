"""Running one problem: its relaxation over all patterns by column generation, or the ILP itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import pulp

from hzplan.solver.problem import Coefficients, Problem, Question

SEED = 1
TOLERANCE = 1e-7

Build = Callable[[Question, Mapping[str, list[int]]], Problem]


def relax(
    question: Question, offered: Mapping[str, list[int]], build: Build
) -> tuple[float, dict[str, Coefficients]] | None:
    """The linear relaxation over all patterns, by column generation from those offered.

    Returns a lower bound and every pattern's excess; None when what is offered does not fit. With r_p the
    reduced costs at some duals and m_u = min(0, min_p r_p), any plan with pattern p of unit u costs at least
    z + Σ_v m_v + (r_p − m_u), because it takes one pattern per unit; so the result holds at any iteration.
    """
    offered = {unit: list(indices) for unit, indices in offered.items()}
    best: tuple[float, dict[str, Coefficients]] | None = None
    for _ in range(12):
        problem = build(question, offered)
        if optimise(problem, 0.0, 60.0, relaxed=True) != "solution":
            return best
        reduced = problem.reduced_costs()
        floors = {unit: min(0.0, float(values.min())) for unit, values in reduced.items()}
        bound = problem.lp.solverModel.getInfo().objective_function_value + sum(floors.values())
        if best is None or bound > best[0]:
            best = bound, {unit: np.maximum(values - floors[unit], 0.0) for unit, values in reduced.items()}
        added = False
        for unit, values in reduced.items():
            for index in np.argsort(values, kind="stable")[:4]:
                if values[index] < -TOLERANCE and int(index) not in offered[unit]:
                    offered[unit].append(int(index))
                    added = True
        if not added:
            break
    return best


def optimise(
    problem: Problem, gap: float, seconds: float, *, relaxed: bool = False
) -> Literal["solution", "infeasible", "nothing"]:
    """Run HiGHS on one thread with a fixed seed. A solution found by the time limit counts as one."""
    solver = pulp.HiGHS(
        mip=not relaxed,
        msg=False,
        threads=1,
        gapRel=gap,
        gapAbs=0.0,
        timeLimit=seconds,
        random_seed=SEED,
        mip_feasibility_tolerance=1e-9,
        primal_feasibility_tolerance=1e-9,
    )
    problem.lp.solve(solver)
    if problem.lp.status == pulp.LpStatusInfeasible:
        return "infeasible"
    # PuLP calls a time-out optimal, also one without a solution; HiGHS says whether there is one.
    has_solution = problem.lp.solverModel.getInfo().primal_solution_status == 2
    return "solution" if has_solution else "nothing"
