"""A check that the solver is installed and solves a small problem, for ``hzplan doctor``."""

from __future__ import annotations

from importlib.metadata import version

import pulp

SIZES = (7, 5, 4, 3, 1)
HALF, BEST = 11, 11


def health() -> str:
    """One line: versions, and whether a small problem comes out right."""
    problem = pulp.LpProblem(sense=pulp.LpMaximize)
    items = [pulp.LpVariable(f"x{index}", cat="Binary") for index in range(len(SIZES))]
    problem += pulp.lpDot(SIZES, items)
    problem += pulp.lpDot(SIZES, items) <= HALF
    problem.solve(pulp.HiGHS(msg=False))
    right = problem.status == pulp.LpStatusOptimal and round(pulp.value(problem.objective)) == BEST
    return f"HiGHS {version('highspy')} {'works' if right else 'is wrong'}, PuLP {version('pulp')}"
