"""The rows of the choice problem, each written once: for the relaxation, the ILP and the certificate.

    Σ_p x[u,p] = 1                          one pattern for every unit u
    MEMORY + VIOLATION ≥ Σ bytes·x + Σ b    the memory at the peak, with the buffers b that units share
    b ≥ Σ_p bytes_p·x[u,p]                  for every unit u that uses b
    b ≥ base_e + Σ bytes_e·x                for every event e
    VIOLATION ≥ Σ host bytes·x − budget     the host's memory
    n = Σ x[s,on]                           over the binaries s of like units (``Question.alike``)
    PERIOD ≥ constant + Σ weight·d·x        a cycle of the event graph (``paths``)

All variables are at least 0. VIOLATION is 0 in every plan, MEMORY within the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hzplan.solver.paths import LazyConstraint
from hzplan.solver.question import Coefficients, Question

INFINITY = float("inf")
PERIOD, MEMORY, VIOLATION = "period", "memory", "violation"

Index = slice | Sequence[int]
ALL = slice(None)

Key = tuple[str | int, ...]
"""What a row says, and of what: the family's name, then indices."""


@dataclass(frozen=True)
class Row:
    """low ≤ Σ coefficient·variable over ``columns`` − Σ_u Σ_p of(u)_p·x[u,p] ≤ high, over ``units``."""

    key: Key
    columns: Mapping[str, float]
    units: Sequence[str]
    of: Callable[[str, Index], Coefficients]
    low: float = 0.0
    high: float = INFINITY

    @property
    def name(self) -> str:
        """The key in words."""
        return " ".join(map(str, self.key))


def _row(
    key: Key,
    columns: Mapping[str, float],
    needs: Mapping[str, Coefficients],
    low: float = 0.0,
    high: float = INFINITY,
) -> Row:
    return Row(key, columns, tuple(needs), lambda unit, patterns: needs[unit][patterns], low, high)


def count_name(group: int) -> str:
    """The variable: how many units of a group of like ones are recomputed."""
    return f"count_recomputed_{group}"


def columns(question: Question) -> Iterator[str]:
    """The sizes of shared buffers, and the counts of recomputed units: what a search branches on."""
    yield from (buffer.name for buffer in question.memory_use.shared)
    yield from map(count_name, range(len(question.alike)))


def one_pattern(question: Question, unit: str) -> Row:
    """A unit has one pattern."""
    return _row(("one", unit), {}, {unit: -np.ones(len(question.pools[unit].levels))}, 1.0, 1.0)


def memory(question: Question) -> Row:
    """The memory at the peak."""
    use = question.memory_use
    buffers = dict.fromkeys((buffer.name for buffer in use.shared), -1.0)
    return _row(("memory",), {MEMORY: 1.0, VIOLATION: 1.0, **buffers}, use.resident)


def holds(question: Question, number: int, unit: str) -> Row:
    """A shared buffer holds what a unit asks for."""
    buffer = question.memory_use.shared[number]
    return _row(("buffer", number, unit), {buffer.name: 1.0}, {unit: buffer.sizes[unit]})


def event(question: Question, number: int, place: int) -> Row:
    """A shared buffer holds what an event asks for."""
    buffer = question.memory_use.shared[number]
    added = {unit: of[:, place] for unit, of in buffer.events.added.items()}
    return _row(("event", number, place), {buffer.name: 1.0}, added, float(buffer.events.base[place]))


def host(question: Question) -> Row:
    """The host's memory."""
    return _row(("host",), {VIOLATION: 1.0}, question.memory_use.host, -question.host_budget_mib)


def count(question: Question, group: int) -> Row:
    """How many units of a group are recomputed. Like units can trade places, so it is what to branch on."""
    on = {s: question.pools[s].recompute.astype(float) for s in question.alike[group]}
    return _row(("count", group), {count_name(group): 1.0}, on, 0.0, 0.0)


def cycle(question: Question, number: int, cut: LazyConstraint) -> Row:
    """A step lasts as long as a cycle of its event graph."""
    rows, durations = question.network.rows, question.durations_ms
    units = tuple(unit for unit, row in rows.items() if cut.weights[row].any())
    return Row(
        *(("cycle", number), {PERIOD: 1.0}, units),
        lambda unit, patterns: durations[unit][patterns] @ cut.weights[rows[unit]],
        cut.constant,
    )


def of_buffers(question: Question) -> Iterator[Row]:
    """Of every shared buffer what its units ask for."""
    for number, buffer in enumerate(question.memory_use.shared):
        yield from (holds(question, number, unit) for unit in buffer.sizes)


def of_events(question: Question) -> Iterator[Row]:
    """Of every shared buffer what all events ask for."""
    for number, buffer in enumerate(question.memory_use.shared):
        yield from (event(question, number, place) for place in range(len(buffer.events.base)))
