"""The linear relaxation over all patterns, by rows and columns made when they are needed.

    min T                    (or the memory, for the least that fits)
    Σ_p x[u,p] = 1           for every unit u
    T ≥ every walk           (``paths``)
    memory ≥ Σ bytes·x + Σ buffers,  buffer ≥ bytes of every unit that uses it, and at every event
                             (``problem.room``)
    memory ≤ budget + over   where ``over`` costs more and more
    Σ host bytes·x ≤ the host's memory + over
    again_k = Σ x[s,on]      over the switches of like units (``problem.alike``), between limits

With r_p the reduced costs at some duals and m_u = min(0, min_p r_p), any plan with pattern p of unit u costs
at least z + Σ_v m_v + (r_p − m_u), because it takes one pattern per unit: so every round gives a bound, and
every pattern's ``excess`` over it, whether or not all rows and columns were made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

from hzplan.solver.paths import Cut
from hzplan.solver.problem import Question, Room

Coefficients = NDArray[np.floating[Any]]
Limits = Mapping[int, tuple[float, float]]
"""By the number of a shared buffer: between which sizes, in MiB, its own lies. After the buffers come the
groups of like units: between which numbers of them are recomputed."""

TOLERANCE = 1e-7
OVER_MS, MOST_OVER_MS = 1e3, 1e9
"""What a MiB over the budget costs at first and at most, in milliseconds."""
INFINITY = float("inf")
OFFERED_AT_ONCE = 2
"""Patterns of a unit that a round adds."""


class Relaxation:
    """A linear program that grows. ``offered``: the patterns in it, by unit."""

    def __init__(self, question: Question, *, least_memory: bool = False) -> None:
        self.question, self.least_memory = question, least_memory
        self.units = list(question.families)
        self.room: Room = question.room
        self.lp = highspy.Highs()
        self.lp.setOptionValue("output_flag", False)
        self.lp.setOptionValue("threads", 1)
        self.lp.setOptionValue("presolve", "off")
        self.lp.setOptionValue("primal_feasibility_tolerance", 1e-9)
        self.lp.setOptionValue("dual_feasibility_tolerance", 1e-9)
        self.solved = False  # since the limits were set
        self.rows = 0
        self.columns = 0
        self.cuts: list[tuple[int, Cut]] = []
        self.offered: dict[str, list[int]] = {unit: [] for unit in self.units}
        self._places: dict[str, list[int]] = {unit: [] for unit in self.units}
        timed = 0.0 if least_memory else 1.0
        self.period = self._column(timed, 0.0, INFINITY)
        budget = INFINITY if least_memory else question.room_mib
        self.memory = self._column(1.0 - timed, -INFINITY, budget)
        self.over_ms = OVER_MS
        self.over = self._column(self.over_ms, 0.0, 0.0 if least_memory else INFINITY)
        self.one = {unit: self._row(1.0, 1.0, {}) for unit in self.units}
        self.buffers = [self._column(0.0, 0.0, INFINITY) for _ in self.room.shared]
        buffers = dict.fromkeys(self.buffers, -1.0)
        self.total = self._row(0.0, INFINITY, {self.memory: 1.0, self.over: 1.0, **buffers})
        counted: list[tuple[str, int]] = []
        self.holds = [
            {unit: self._row(0.0, INFINITY, {column: 1.0}) for unit in buffer.sizes}
            for column, buffer in zip(self.buffers, self.room.shared, strict=True)
        ]
        self.again = []  # columns: how many units of each group are recomputed
        for switches in question.alike:
            count = self._column(0.0, 0.0, INFINITY)
            self.again.append(count)
            row = self._row(0.0, 0.0, {count: 1.0})
            for switch in switches:
                counted.append((switch, row))
        self.allowed = {unit: np.ones(len(f.levels), dtype=bool) for unit, f in question.families.items()}
        # Of each unit: the rows that its patterns have bytes in, and the bytes.
        self._bytes: dict[str, list[tuple[int, Coefficients]]] = {
            unit: [(self.total, self.room.resident[unit])] for unit in self.units
        }
        for rows, buffer in zip(self.holds, self.room.shared, strict=True):
            for unit, row in rows.items():
                self._bytes[unit].append((row, buffer.sizes[unit]))
        for switch, row in counted:
            on = question.families[switch].recompute.astype(float)
            self._bytes[switch].append((row, on))
        if self.room.host:
            row = self._row(-question.host_mib, INFINITY, {self.over: 1.0})
            for unit, sizes in self.room.host.items():
                self._bytes[unit].append((row, sizes))
        self._events: list[set[int]] = [set() for _ in self.buffers]  # those that have a row
        for number, buffer in enumerate(self.room.shared):
            if len(buffer.events.base):
                self._at_event(number, int(np.argmax(buffer.events.base)))

    def _at_event(self, number: int, event: int) -> None:
        """A buffer is as large as is needed at an event."""
        events = self.room.shared[number].events
        entries = {self.buffers[number]: 1.0}
        for unit, of in events.added.items():
            added = of[self.offered[unit], event]
            entries |= dict(zip(self._places[unit], (-added).tolist(), strict=True))
        row = self._row(float(events.base[event]), INFINITY, entries)
        for unit, of in events.added.items():
            self._bytes[unit].append((row, of[:, event]))
        self._events[number].add(event)

    def widen(self) -> bool:
        """Add the event of every buffer at which it is farthest from large enough; whether there was one."""
        found = False
        for number, (column, buffer) in enumerate(zip(self.buffers, self.room.shared, strict=True)):
            if not len(buffer.events.base):
                continue
            needed = buffer.events.base.copy()
            for unit, of in buffer.events.added.items():
                for pattern, share in self.shares(unit).items():
                    needed += share * of[pattern]
            event = int(np.argmax(needed))
            if needed[event] > float(self.values[column]) + TOLERANCE and event not in self._events[number]:
                self._at_event(number, event)
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
        """Add patterns of a unit; whether any was new."""
        new = [pattern for pattern in patterns if pattern not in self.offered[unit]]
        if not new:
            return False
        durations = self.question.durations_ms[unit][new]
        row = self.question.network.rows[unit]
        values = [(place, -(durations @ cut.weights[row])) for place, cut in self.cuts]
        for number, pattern in enumerate(new):
            entries = {self.one[unit]: 1.0}
            entries |= {place: -float(sizes[pattern]) for place, sizes in self._bytes[unit]}
            entries |= {place: float(of[number]) for place, of in values}
            self._places[unit].append(self._column(0.0, 0.0, INFINITY, entries))
            self.offered[unit].append(pattern)
        return True

    def cut(self, cuts: list[Cut]) -> None:
        """Add walks."""
        for cut in cuts:
            entries = {self.period: 1.0}
            for unit in self.units:
                values = (
                    self.question.durations_ms[unit][self.offered[unit]]
                    @ cut.weights[self.question.network.rows[unit]]
                )
                entries |= dict(zip(self._places[unit], (-values).tolist(), strict=True))
            self.cuts.append((self._row(cut.constant, INFINITY, entries), cut))

    def restrict(self, limits: Limits) -> bool:
        """Allow only patterns within the limits of what they take in shared buffers, which are at least as
        large as their lower limits, and so many recomputed units. False when a unit has none."""
        self.solved = False
        for number, count in enumerate(self.again, start=len(self.buffers)):
            self.lp.changeColBounds(count, *limits.get(number, (0.0, INFINITY)))
        self.allowed = {
            unit: np.ones(len(f.levels), dtype=bool) for unit, f in self.question.families.items()
        }
        for number, (column, buffer) in enumerate(zip(self.buffers, self.room.shared, strict=True)):
            low, high = limits.get(number, (0.0, INFINITY))
            self.lp.changeColBounds(column, low, INFINITY)
            for unit, sizes in buffer.sizes.items():
                self.allowed[unit] &= sizes <= high
        for unit, allowed in self.allowed.items():
            if not allowed.any():
                return False
            if not allowed[self.offered[unit]].any():
                lean = np.where(allowed, self.room.resident[unit], INFINITY)
                self.offer(unit, [int(np.argmin(lean))])
            for pattern, place in zip(self.offered[unit], self._places[unit], strict=True):
                self.lp.changeColBounds(place, 0.0, INFINITY if allowed[pattern] else 0.0)
        return True

    def dearer(self) -> bool:
        """Raise what a MiB over the budget costs; False when it costs the most already."""
        if self.over_ms >= MOST_OVER_MS:
            return False
        self.over_ms *= 1e3
        self.lp.changeColCost(self.over, self.over_ms)
        return True

    def torn(self) -> tuple[int, float, float] | None:
        """The buffer that is smallest beside what its users take in part, by MiB: its number, the smallest
        size taken that it does not hold whole, and before it the largest size that any pattern has, so that
        every plan's buffer is at most the one or at least the other. None where all are whole.
        """
        worst, found = TOLERANCE, None
        for number, (column, buffer) in enumerate(zip(self.buffers, self.room.shared, strict=True)):
            held = float(self.values[column]) + TOLERANCE
            taken = [float(buffer.sizes[u][p]) for u in buffer.sizes for p in self.shares(u)]
            if max(taken, default=0.0) - held > worst:
                worst = max(taken) - held
                above = min(size for size in taken if size > held)
                below = max(float(np.max(of, where=of < above, initial=0.0)) for of in buffer.sizes.values())
                found = number, below, above
        return found

    def undecided(self) -> tuple[int, float] | None:
        """The group of like units of which the least clear number is recomputed: its number among the limits,
        and that number; None where all are whole."""
        worst, found = 0.01, None
        for number, count in enumerate(self.again, start=len(self.buffers)):
            value = float(self.values[count])
            if abs(value - round(value)) > worst:
                worst, found = abs(value - round(value)), (number, value)
        return found

    def solve(self) -> bool:
        """Optimise from where the last round ended; False when HiGHS gives up."""
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
    def excess_mib(self) -> float:
        """By how much the patterns offered exceed the budget at least."""
        return float(self.values[self.over])

    def shares(self, unit: str) -> dict[int, float]:
        """How much of each pattern a unit takes in the last solution."""
        solved = [place for place in self._places[unit] if place < len(self.values)]
        values = self.values[solved]
        return {
            pattern: float(value)
            for pattern, value in zip(self.offered[unit], values, strict=False)
            if value > TOLERANCE
        }

    def durations(self) -> Coefficients:
        """Milliseconds [units, keys] at the shares."""
        found = np.zeros(self.question.network.shape)
        for unit in self.units:
            shares = self.shares(unit)
            found[self.question.network.rows[unit]] = sum(
                share * self.question.durations_ms[unit][pattern] for pattern, share in shares.items()
            )
        return found

    def reduced_costs(self) -> dict[str, Coefficients]:
        """Of every pattern, offered or not; infinite where it is not allowed."""
        price = np.zeros(self.question.network.shape)
        for place, cut in self.cuts:
            if self.duals[place]:
                price += self.duals[place] * cut.weights
        found = {}
        for unit in self.units:
            reduced = self.question.durations_ms[unit] @ price[self.question.network.rows[unit]]
            reduced = reduced - self.duals[self.one[unit]] + self.memory_ms(unit)
            found[unit] = np.where(self.allowed[unit], reduced, INFINITY)
        return found

    def bound(self, reduced: Mapping[str, Coefficients]) -> tuple[float, dict[str, Coefficients]]:
        """What every plan costs at least, and by pattern how much more one with it does; see the module."""
        floors = {unit: min(0.0, float(costs.min())) for unit, costs in reduced.items()}
        excess = {unit: np.maximum(costs - floors[unit], 0.0) for unit, costs in reduced.items()}
        return self.value + sum(floors.values()), excess

    def grow(self, reduced: Mapping[str, Coefficients]) -> bool:
        """Offer every unit its patterns of the least negative reduced costs; whether any was new."""
        grown = [
            self.offer(unit, [int(p) for p in np.argsort(costs)[:OFFERED_AT_ONCE] if costs[p] < -TOLERANCE])
            for unit, costs in reduced.items()
        ]
        return any(grown)

    def memory_ms(self, unit: str) -> Coefficients:
        """What the memory of a unit's patterns costs at the duals; and of a switch, that it counts."""
        found = np.zeros(len(self.question.families[unit].levels))
        for place, sizes in self._bytes[unit]:
            if place < len(self.duals) and self.duals[place]:  # else a row that is newer
                found += self.duals[place] * sizes
        return found


def _sparse(entries: Mapping[int, float]) -> tuple[int, NDArray[np.int32], NDArray[np.float64]]:
    """How many are not zero, where, and what."""
    kept = {place: value for place, value in entries.items() if value}
    places = np.fromiter(kept, np.int32, len(kept))
    return len(kept), places, np.fromiter(kept.values(), np.float64, len(kept))
