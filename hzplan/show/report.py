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
class Spike:
    """Memory at the peak that only the loss needs: ``nbytes`` above the most at uses of other units.

    ``unit``: the last unit of the forward, whose uses compute the loss and its gradients. ``in_chunks``:
    bytes by which the peak would be lower with the loss in chunks of tokens; None where the unit cannot
    compute it so, or already does.
    """

    unit: str
    nbytes: int
    in_chunks: int | None


@dataclass(frozen=True)
class Occupancy:
    """Memory over a step: ``static`` bytes by category, and activations that begin to be ``bytes`` at
    ``times_s``. ``spike``: the loss' part of the peak; None where another unit's activations make it."""

    static: Sequence[tuple[str, int]]
    times_s: Sequence[float]
    activations: Sequence[int]
    peak_bytes: int
    budget_bytes: int
    spike: Spike | None = None


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
class Bound:
    """Seconds of the critical path that one resource takes: compute, a tier's links, the host's link."""

    resource: str
    seconds: float


@dataclass(frozen=True)
class ComparedScheme:
    """A plan, or a known scheme at its best, on the same question. ``setting``: its micro-batch size and what
    it recomputes, in words; ``allowed``: whether the options of the question admit it."""

    name: str
    step_s: float
    exposed_s: float
    sent_bytes: int
    peak_bytes: int
    fits: bool
    setting: str = ""
    allowed: bool = True


@dataclass(frozen=True)
class Cause:
    """A choice of the plan, and the share by which its step is longer with that choice alone as in the
    scheme it is compared with; None where the plan does not fit so."""

    what: str
    share: float | None


@dataclass(frozen=True)
class Worth:
    """The plan beside the fastest known scheme that fits, called ``over``, whose step is ``step_s``.

    ``same``: the plan is that scheme. ``tie``: share of a step by which predictions may differ and count as
    equal. ``causes``: where the gain comes from; empty where there is none.
    """

    over: str
    step_s: float
    same: bool
    tie: float
    causes: Sequence[Cause] = ()


@dataclass(frozen=True)
class WhatIf:
    """The question solved again with one thing changed: ``step_s`` of its plan, None where there is none;
    ``said``: how the solver ended."""

    what: str
    step_s: float | None
    said: str


@dataclass(frozen=True)
class Beside:
    """A figure predicted and measured; seconds, or bytes."""

    what: str
    predicted: float
    measured: float
    bytes: bool = False


@dataclass(frozen=True)
class Report:
    """A plan's report.

    ``basis``: where its seconds come from, in words; ``expected``: the published error of such predictions,
    None where nothing is known. ``schemes``: the plan itself first; ``worth``: None where no known scheme
    fits. ``bounds``: the critical path by resource, the longest first; ``binding``: the load that takes
    longer than the critical path. ``recomputed_s``: seconds of the critical path in which activations are
    recomputed, and ``recompute_asked`` whether the question asked for that. ``what_if``: empty where nothing
    was solved again. ``beside``: empty where nothing was measured, else over ``measured_steps``.
    """

    title: str
    subtitle: str
    basis: str
    expected: str | None
    facts: Sequence[tuple[str, str]]
    step_s: float
    tensors: Sequence[Tensor]
    spans: Sequence[TaskSpan]
    occupancy: Occupancy
    tiers: Sequence[Tier]
    optimizer_exposed_s: float
    path: Sequence[PathPart]
    path_s: float
    bounds: Sequence[Bound]
    binding: PathPart | None
    recomputed_s: float
    recompute_asked: bool
    schemes: Sequence[ComparedScheme]
    worth: Worth | None = None
    what_if: Sequence[WhatIf] = ()
    beside: Sequence[Beside] = ()
    measured_steps: int = 0
