"""The LP relaxation over all patterns. Rows and columns are generated when a solution needs them.

    min T                    (or the memory, for the least that fits)
    Σ_p x[u,p] = 1           for every unit u
    T ≥ every cycle          (``paths``)
    memory ≥ Σ bytes·x + Σ buffers,  buffer ≥ bytes of every unit that uses it, and at every event
                             (``problem.MemoryUse``)
    memory ≤ budget + violation           where the penalty of a violation rises until it is 0
    Σ host bytes·x ≤ the host's memory + violation
    count_k = Σ x[s,on]      over the binaries of like units (``problem.alike``), between limits

With r_p the reduced costs at some duals and m_u = min(0, min_p r_p), any plan with pattern p of unit u costs
at least z + Σ_v m_v + (r_p − m_u), because it takes one pattern per unit. So every round gives a bound and,
for every pattern, the *margin* r_p − m_u by which plans with it exceed the bound, whether or not all rows and
columns exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

from hzplan.formats.certificate import Multipliers
from hzplan.solver.paths import LazyConstraint
from hzplan.solver.problem import MemoryUse, Question
from hzplan.solver.tree import Limits

Coefficients = NDArray[np.floating[Any]]
TOLERANCE = 1e-7
PENALTY_MS, MAX_PENALTY_MS = 1e3, 1e9
"""Penalty of a violation of the memory budget, milliseconds per MiB: the first and the largest one tried."""
INFINITY = float("inf")
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
        self.rows = 0
        self.columns = 0
        self.cycles: list[tuple[int, LazyConstraint]] = []
        self.offered: dict[str, list[int]] = {unit: [] for unit in self.units}
        self._places: dict[str, list[int]] = {unit: [] for unit in self.units}
        timed = 0.0 if least_memory else 1.0
        self.period = self._column(timed, 0.0, INFINITY)
        budget = INFINITY if least_memory else question.budget_mib
        self.memory = self._column(1.0 - timed, -INFINITY, budget)
        self.penalty_ms = PENALTY_MS
        self.violation = self._column(self.penalty_ms, 0.0, 0.0 if least_memory else INFINITY)
        self.assignment_row = {unit: self._row(1.0, 1.0, {}) for unit in self.units}
        self.buffers = [self._column(0.0, 0.0, INFINITY) for _ in self.use.shared]
        buffers = dict.fromkeys(self.buffers, -1.0)
        self.memory_row = self._row(0.0, INFINITY, {self.memory: 1.0, self.violation: 1.0, **buffers})
        counted: list[tuple[str, int]] = []
        self.buffer_rows = [
            {unit: self._row(0.0, INFINITY, {column: 1.0}) for unit in buffer.sizes}
            for column, buffer in zip(self.buffers, self.use.shared, strict=True)
        ]
        self.recompute_counts = []  # columns: the number of recomputed units of each group of like units
        self._count_rows = []
        for binaries in question.alike:
            count = self._column(0.0, 0.0, INFINITY)
            self.recompute_counts.append(count)
            row = self._row(0.0, 0.0, {count: 1.0})
            self._count_rows.append(row)
            for binary in binaries:
                counted.append((binary, row))
        self.allowed = {unit: np.ones(len(f.levels), dtype=bool) for unit, f in question.pools.items()}
        # By unit: the memory rows in which its patterns have coefficients, and the MiB of each pattern.
        self._bytes: dict[str, list[tuple[int, Coefficients]]] = {
            unit: [(self.memory_row, self.use.resident[unit])] for unit in self.units
        }
        for rows, buffer in zip(self.buffer_rows, self.use.shared, strict=True):
            for unit, row in rows.items():
                self._bytes[unit].append((row, buffer.sizes[unit]))
        for binary, row in counted:
            on = question.pools[binary].recompute.astype(float)
            self._bytes[binary].append((row, on))
        self._host_row = None
        if self.use.host:
            self._host_row = self._row(-question.host_budget_mib, INFINITY, {self.violation: 1.0})
            for unit, sizes in self.use.host.items():
                self._bytes[unit].append((self._host_row, sizes))
        self._events: list[dict[int, int]] = [{} for _ in self.buffers]  # the row of an event, by buffer
        for number, buffer in enumerate(self.use.shared):
            if len(buffer.events.base):
                self._add_event_row(number, int(np.argmax(buffer.events.base)))

    def _add_event_row(self, number: int, event: int) -> None:
        """Add the row: a buffer is at least as large as one event needs."""
        events = self.use.shared[number].events
        entries = {self.buffers[number]: 1.0}
        for unit, of in events.added.items():
            added = of[self.offered[unit], event]
            entries |= dict(zip(self._places[unit], (-added).tolist(), strict=True))
        row = self._row(float(events.base[event]), INFINITY, entries)
        for unit, of in events.added.items():
            self._bytes[unit].append((row, of[:, event]))
        self._events[number][event] = row

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
            event = int(np.argmax(needed))
            if needed[event] > float(self.values[column]) + TOLERANCE and event not in self._events[number]:
                self._add_event_row(number, event)
                found = True
        return found

    def _column(
        self, cost: float, low: float, high: float, entries: Mapping[int, float] | None = None
    ) -> int:
        self.lp.addCol(cost, low, high, *_sparse(entries or {}))
        self.columns += 1
        return self.columns - 1

    def _row(self, low: float, high: float, entries: Mapping[int, float]) -> int:
        self.lp.addRow(low, high, *_sparse(entries))
        self.rows += 1
        return self.rows - 1

    def offer(self, unit: str, patterns: Mapping[int, None] | list[int]) -> bool:
        """Add columns for patterns of a unit; True if any was new."""
        new = [pattern for pattern in patterns if pattern not in self.offered[unit]]
        if not new:
            return False
        durations = self.question.durations_ms[unit][new]
        row = self.question.network.rows[unit]
        values = [(place, -(durations @ cut.weights[row])) for place, cut in self.cycles]
        for number, pattern in enumerate(new):
            entries = {self.assignment_row[unit]: 1.0}
            entries |= {place: -float(sizes[pattern]) for place, sizes in self._bytes[unit]}
            entries |= {place: float(of[number]) for place, of in values}
            self._places[unit].append(self._column(0.0, 0.0, INFINITY, entries))
            self.offered[unit].append(pattern)
        return True

    def add_cycles(self, cuts: list[LazyConstraint]) -> None:
        """Add a row for every cycle."""
        for cut in cuts:
            entries = {self.period: 1.0}
            for unit in self.units:
                values = (
                    self.question.durations_ms[unit][self.offered[unit]]
                    @ cut.weights[self.question.network.rows[unit]]
                )
                entries |= dict(zip(self._places[unit], (-values).tolist(), strict=True))
            self.cycles.append((self._row(cut.constant, INFINITY, entries), cut))

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
        self.lp.changeColCost(self.violation, self.penalty_ms)
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
    def memory_violation_mib(self) -> float:
        """MiB by which the solution exceeds the memory budget."""
        return float(self.values[self.violation])

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
            reduced = reduced - self.duals[self.assignment_row[unit]] + self.memory_ms(unit)
            found[unit] = np.where(self.allowed[unit], reduced, INFINITY)
        return found

    def multipliers(self) -> Multipliers:
        """The last solution's duals, by what their rows say."""
        of = self.duals.tolist()
        known = len(of)  # a row added since has no dual yet
        return Multipliers(
            rows=tuple((n, of[at]) for n, (at, _) in enumerate(self.cycles, 1) if at < known and of[at] > 0),
            memory=max(0.0, of[self.memory_row]),
            host=max(0.0, of[self._host_row]) if self._host_row is not None else 0.0,
            buffers=tuple(
                (number, unit, of[row])
                for number, rows in enumerate(self.buffer_rows)
                for unit, row in rows.items()
                if of[row] > 0
            ),
            events=tuple(
                (number, event, of[row])
                for number, rows in enumerate(self._events)
                for event, row in sorted(rows.items())
                if row < known and of[row] > 0
            ),
            counts=tuple((group, of[row]) for group, row in enumerate(self._count_rows) if of[row]),
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
        for place, sizes in self._bytes[unit]:
            if place < len(self.duals) and self.duals[place]:  # a row added since has no dual yet
                found += self.duals[place] * sizes
        return found


def _sparse(entries: Mapping[int, float]) -> tuple[int, NDArray[np.int32], NDArray[np.float64]]:
    """The arguments of HiGHS' ``addRow`` and ``addCol``: count, indices and values of the entries not 0."""
    kept = {place: value for place, value in entries.items() if value}
    places = np.fromiter(kept, np.int32, len(kept))
    return len(kept), places, np.fromiter(kept.values(), np.float64, len(kept))
