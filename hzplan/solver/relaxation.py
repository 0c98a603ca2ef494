"""The LP relaxation over all patterns. Rows and columns (``rows``) are generated when a solution needs them.

The period is minimised (or the memory, for the least that fits), with a penalty of a violation of the memory
budget that rises until the violation is 0; counts of recomputed units are between limits.

With r_p the reduced costs at some duals and m_u = min(0, min_p r_p), any plan with pattern p of unit u costs
at least z + Σ_v m_v + (r_p − m_u), because it takes one pattern per unit. So every round gives a bound and,
for every pattern, the *margin* r_p − m_u by which plans with it exceed the bound, whether or not all rows and
columns exist.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

from hzplan.formats.certificate import Multipliers
from hzplan.solver import rows
from hzplan.solver.paths import LazyConstraint
from hzplan.solver.question import MemoryUse, Question
from hzplan.solver.rows import ALL, INFINITY, MEMORY, PERIOD, VIOLATION, Key, Row
from hzplan.solver.tree import Limits

Coefficients = NDArray[np.floating[Any]]
TOLERANCE = 1e-7
PENALTY_MS, MAX_PENALTY_MS = 1e3, 1e9
"""Penalty of a violation of the memory budget, milliseconds per MiB: the first and the largest one tried."""
OFFERED_AT_ONCE = 2
"""Columns per unit that one round of column generation adds at most."""


class Relaxation:
    """The LP, with rows and columns added over time. ``offered``: the patterns that have a column, by
    unit."""

    def __init__(self, question: Question, *, least_memory: bool = False) -> None:
        self.question, self.least_memory = question, least_memory
        self.units = list(question.pools)
        self.use: MemoryUse = question.memory_use
        self.lp = highspy.Highs()
        self.lp.setOptionValue("output_flag", False)
        self.lp.setOptionValue("threads", 1)
        self.lp.setOptionValue("presolve", "off")
        self.lp.setOptionValue("primal_feasibility_tolerance", 1e-9)
        self.lp.setOptionValue("dual_feasibility_tolerance", 1e-9)
        self.solved = False  # whether the LP was solved since ``restrict``
        self.cycles: list[tuple[int, LazyConstraint]] = []
        self.allowed = {unit: np.ones(len(f.levels), dtype=bool) for unit, f in question.pools.items()}
        self.offered: dict[str, list[int]] = {unit: [] for unit in self.units}
        self.penalty_ms = PENALTY_MS
        self._places: dict[str, list[int]] = {unit: [] for unit in self.units}
        self._columns: dict[str, int] = {}
        self._rows: dict[Key, int] = {}
        self._rows_of: dict[str, list[tuple[int, Row]]] = {unit: [] for unit in self.units}
        self._memory_of: dict[str, list[tuple[int, Row]]] = {unit: [] for unit in self.units}
        timed = 0.0 if least_memory else 1.0
        self._add_column(PERIOD, timed, 0.0, INFINITY)
        self._add_column(MEMORY, 1.0 - timed, -INFINITY, INFINITY if least_memory else question.budget_mib)
        self._add_column(VIOLATION, self.penalty_ms, 0.0, 0.0 if least_memory else INFINITY)
        for unit in self.units:
            self._add(rows.one_pattern(question, unit))
        for name in rows.columns(question):
            self._add_column(name, 0.0, 0.0, INFINITY)
        for row in (rows.memory(question), *rows.of_buffers(question)):
            self._add(row)
        for group in range(len(question.alike)):
            self._add(rows.count(question, group))
        if self.use.host:
            self._add(rows.host(question))
        for number, buffer in enumerate(self.use.shared):
            if len(buffer.events.base):
                self._add(rows.event(question, number, int(np.argmax(buffer.events.base))))

    @property
    def buffers(self) -> list[int]:
        """The columns of shared buffers."""
        return [self._columns[buffer.name] for buffer in self.use.shared]

    @property
    def recompute_counts(self) -> list[int]:
        """The columns of the numbers of recomputed units of each group of like units."""
        return [self._columns[rows.count_name(group)] for group in range(len(self.question.alike))]

    def add_event_rows(self) -> bool:
        """Add, for every buffer, the row of the event that the solution violates most; True if any was."""
        found = False
        for number, (column, buffer) in enumerate(zip(self.buffers, self.use.shared, strict=True)):
            if not len(buffer.events.base):
                continue
            needed = buffer.events.base.copy()
            for unit, of in buffer.events.added.items():
                for pattern, share in self.shares(unit).items():
                    needed += share * of[pattern]
            row = rows.event(self.question, number, int(np.argmax(needed)))
            if needed.max() > float(self.values[column]) + TOLERANCE and row.key not in self._rows:
                self._add(row)
                found = True
        return found

    def _add_column(self, name: str, cost: float, low: float, high: float) -> None:
        self.lp.addCol(cost, low, high, *_sparse({}))
        self._columns[name] = self.lp.getNumCol() - 1

    def _add(self, row: Row) -> int:
        """Add a row over the columns that there are; returns its place."""
        entries = {self._columns[name]: of for name, of in row.columns.items()}
        for unit in row.units:
            values = -row.of(unit, self.offered[unit])
            entries |= dict(zip(self._places[unit], values.tolist(), strict=True))
        self.lp.addRow(row.low, row.high, *_sparse(entries))
        place = self._rows[row.key] = self.lp.getNumRow() - 1
        for unit in row.units:
            self._rows_of[unit].append((place, row))
            if row.key[0] not in ("one", "cycle"):
                self._memory_of[unit].append((place, row))
        return place

    def offer(self, unit: str, patterns: Mapping[int, None] | list[int]) -> bool:
        """Add columns for patterns of a unit; True if any was new."""
        new = [pattern for pattern in patterns if pattern not in self.offered[unit]]
        if not new:
            return False
        values = [(place, -row.of(unit, new)) for place, row in self._rows_of[unit]]
        for number, pattern in enumerate(new):
            entries = {place: float(of[number]) for place, of in values}
            self.lp.addCol(0.0, 0.0, INFINITY, *_sparse(entries))
            self._places[unit].append(self.lp.getNumCol() - 1)
            self.offered[unit].append(pattern)
        return True

    def add_cycles(self, cuts: list[LazyConstraint]) -> None:
        """Add a row for every cycle."""
        for cut in cuts:
            row = rows.cycle(self.question, len(self.cycles), cut)
            self.cycles.append((self._add(row), cut))

    def restrict(self, limits: Limits) -> bool:
        """Set the limits of a branch-and-bound node; False when a unit has no pattern left.

        A buffer's lower limit bounds its size. Its upper limit forbids patterns that ask for more.
        """
        self.solved = False
        for number, count in enumerate(self.recompute_counts, start=len(self.buffers)):
            self.lp.changeColBounds(count, *limits.get(number, (0.0, INFINITY)))
        self.allowed = {unit: np.ones(len(f.levels), dtype=bool) for unit, f in self.question.pools.items()}
        for number, (column, buffer) in enumerate(zip(self.buffers, self.use.shared, strict=True)):
            low, high = limits.get(number, (0.0, INFINITY))
            self.lp.changeColBounds(column, low, INFINITY)
            for unit, sizes in buffer.sizes.items():
                self.allowed[unit] &= sizes <= high
        for unit, allowed in self.allowed.items():
            if not allowed.any():
                return False
            if not allowed[self.offered[unit]].any():
                lean = np.where(allowed, self.use.resident[unit], INFINITY)
                self.offer(unit, [int(np.argmin(lean))])
            for pattern, place in zip(self.offered[unit], self._places[unit], strict=True):
                self.lp.changeColBounds(place, 0.0, INFINITY if allowed[pattern] else 0.0)
        return True

    def raise_penalty(self) -> bool:
        """Raise the penalty of a memory violation; False when it is the largest already."""
        if self.penalty_ms >= MAX_PENALTY_MS:
            return False
        self.penalty_ms *= 1e3
        self.lp.changeColCost(self._columns[VIOLATION], self.penalty_ms)
        return True

    def fractional_buffer(self) -> tuple[int, float, float] | None:
        """The shared buffer to branch on: (index, size below, size above) in MiB; None where none is
        fractional.

        A buffer is fractional where a pattern with a share asks for more than the buffer has. The one with
        the largest difference is taken. ``above``: the smallest such size; ``below``: the next smaller size
        of any pattern. So every plan's buffer is at most ``below`` or at least ``above``.
        """
        worst, found = TOLERANCE, None
        for number, (column, buffer) in enumerate(zip(self.buffers, self.use.shared, strict=True)):
            held = float(self.values[column]) + TOLERANCE
            taken = [float(buffer.sizes[u][p]) for u in buffer.sizes for p in self.shares(u)]
            if max(taken, default=0.0) - held > worst:
                worst = max(taken) - held
                above = min(size for size in taken if size > held)
                below = max(float(np.max(of, where=of < above, initial=0.0)) for of in buffer.sizes.values())
                found = number, below, above
        return found

    def fractional_count(self) -> tuple[int, float] | None:
        """The recompute count that is farthest from an integer: (index among the limits, value); None where
        all are integers."""
        worst, found = 0.01, None
        for number, count in enumerate(self.recompute_counts, start=len(self.buffers)):
            value = float(self.values[count])
            if abs(value - round(value)) > worst:
                worst, found = abs(value - round(value)), (number, value)
        return found

    def solve(self) -> bool:
        """Optimise from the last basis; False when HiGHS finds no optimum."""
        self.lp.run()
        if self.lp.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return False
        solution = self.lp.getSolution()
        self.values = np.array(solution.col_value)
        self.duals = np.array(solution.row_dual)
        self.value = float(self.lp.getInfo().objective_function_value)
        self.solved = True
        return True

    @property
    def period_ms(self) -> float:
        """The solution's period."""
        return float(self.values[self._columns[PERIOD]])

    @property
    def memory_violation_mib(self) -> float:
        """MiB by which the solution exceeds the memory budget."""
        return float(self.values[self._columns[VIOLATION]])

    def shares(self, unit: str) -> dict[int, float]:
        """The values of x[unit, pattern] that are above 0 in the last solution, by pattern."""
        solved = [place for place in self._places[unit] if place < len(self.values)]
        values = self.values[solved]
        return {
            pattern: float(value)
            for pattern, value in zip(self.offered[unit], values, strict=False)
            if value > TOLERANCE
        }

    def durations(self) -> Coefficients:
        """Milliseconds [units, duration keys] of the last, fractional, solution."""
        found = np.zeros(self.question.network.shape)
        for unit in self.units:
            shares = self.shares(unit)
            found[self.question.network.rows[unit]] = sum(
                share * self.question.durations_ms[unit][pattern] for pattern, share in shares.items()
            )
        return found

    def reduced_costs(self) -> dict[str, Coefficients]:
        """Reduced cost of every pattern, ms, by unit [patterns]; infinite where the limits forbid it."""
        price = np.zeros(self.question.network.shape)
        for place, cut in self.cycles:
            if self.duals[place]:
                price += self.duals[place] * cut.weights
        found = {}
        for unit in self.units:
            reduced = self.question.durations_ms[unit] @ price[self.question.network.rows[unit]]
            reduced = reduced - self.duals[self._rows["one", unit]] + self.memory_ms(unit)
            found[unit] = np.where(self.allowed[unit], reduced, INFINITY)
        return found

    def multipliers(self) -> Multipliers:
        """The last solution's duals, by what their rows say."""
        duals = self.duals.tolist()  # a row added since has none yet
        of: dict[object, list[tuple[Any, ...]]] = defaultdict(list)
        for (family, *index), place in self._rows.items():
            if place < len(duals) and (duals[place] > 0 or (duals[place] and family == "count")):
                of[family].append((*index, duals[place]))
        return Multipliers(
            rows=tuple((number + 1, value) for number, value in of["cycle"]),
            memory=sum(value for (value,) in of["memory"]),
            host=sum(value for (value,) in of["host"]),
            buffers=tuple(of["buffer"]),
            events=tuple(sorted(of["event"])),
            counts=tuple(of["count"]),
        )

    def bound(self, reduced: Mapping[str, Coefficients]) -> tuple[float, dict[str, Coefficients]]:
        """A lower bound on every plan, ms, and every pattern's margin over it, ms; see the module."""
        floors = {unit: min(0.0, float(costs.min())) for unit, costs in reduced.items()}
        margins = {unit: np.maximum(costs - floors[unit], 0.0) for unit, costs in reduced.items()}
        return self.value + sum(floors.values()), margins

    def grow(self, reduced: Mapping[str, Coefficients]) -> bool:
        """Add columns for the patterns with the most negative reduced costs; True if any was new."""
        grown = [
            self.offer(unit, [int(p) for p in np.argsort(costs)[:OFFERED_AT_ONCE] if costs[p] < -TOLERANCE])
            for unit, costs in reduced.items()
        ]
        return any(grown)

    def memory_ms(self, unit: str) -> Coefficients:
        """The memory rows' part of the reduced cost of a unit's patterns, ms [patterns]."""
        found = np.zeros(len(self.question.pools[unit].levels))
        for place, row in self._memory_of[unit]:
            if place < len(self.duals) and self.duals[place]:  # a row added since has no dual yet
                found += self.duals[place] * row.of(unit, ALL)
        return found


def _sparse(entries: Mapping[int, float]) -> tuple[int, NDArray[np.int32], NDArray[np.float64]]:
    """The arguments of HiGHS' ``addRow`` and ``addCol``: count, indices and values of the entries not 0."""
    kept = {place: value for place, value in entries.items() if value}
    places = np.fromiter(kept, np.int32, len(kept))
    return len(kept), places, np.fromiter(kept.values(), np.float64, len(kept))
