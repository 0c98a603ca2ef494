"""The data of an HTML report: filled by ``solver.report``, drawn by ``show.page`` and ``show.charts``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tensor:
    """A row of the shards table. ``shards``: of parameter, gradient and optimizer state; ``nbytes``: of the
    whole parameter."""

    unit: str
    name: str
    nbytes: int
    shards: tuple[int, int, int]


@dataclass(frozen=True)
class TaskSpan:
    """A task of the step: ``what`` is its kind of work, ``stage`` its place in the step in words;
    ``critical``: whether the step's end waited for it."""

    stream: str
    what: str
    units: str
    stage: str
    start_s: float
    end_s: float
    nbytes: int
    critical: bool


@dataclass(frozen=True)
class Occupancy:
    """Memory over a step: ``static`` bytes by category, and activations that begin to be ``bytes`` at
    ``times_s``."""

    static: Sequence[tuple[str, int]]
    times_s: Sequence[float]
    activations: Sequence[int]
    peak_bytes: int
    budget_bytes: int


@dataclass(frozen=True)
class Tier:
    """A tier's traffic in a step, per rank; ``exposed_s``: seconds that compute waits for it."""

    name: str
    sent_bytes: int
    busy_s: float
    exposed_s: float


@dataclass(frozen=True)
class PathPart:
    """Seconds of the critical path in one kind of work, and the units with the most of them."""

    what: str
    seconds: float
    units: Sequence[str] = ()


@dataclass(frozen=True)
class ComparedScheme:
    """A plan, or a known scheme at its best, on the same question."""

    name: str
    step_s: float
    exposed_s: float
    sent_bytes: int
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class Beside:
    """A figure predicted and measured; seconds, or bytes."""

    what: str
    predicted: float
    measured: float
    bytes: bool = False


@dataclass(frozen=True)
class Report:
    """A plan's report. ``schemes``: the plan itself first; ``beside``: empty where nothing was measured,
    else over ``measured_steps``; ``binding``: the load that takes longer than the critical path."""

    title: str
    subtitle: str
    facts: Sequence[tuple[str, str]]
    step_s: float
    tensors: Sequence[Tensor]
    spans: Sequence[TaskSpan]
    occupancy: Occupancy
    tiers: Sequence[Tier]
    optimizer_exposed_s: float
    path: Sequence[PathPart]
    path_s: float
    binding: PathPart | None
    schemes: Sequence[ComparedScheme]
    beside: Sequence[Beside] = ()
    measured_steps: int = 0
