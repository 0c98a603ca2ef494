"""One forward and backward at each micro-batch size: the order of its calls, their memory and FLOPs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from hzplan.core.recompute import Way
from hzplan.core.schedule import Use
from hzplan.errors import UserError, one_line
from hzplan.models.recompute import Switch
from hzplan.profiler.model.build import RunnableModel
from hzplan.profiler.model.calls import RecordedCalls, Step
from hzplan.profiler.model.flops import FlopProbe
from hzplan.profiler.model.memory import Segment, memory_trace
from hzplan.profiler.model.outside import Outside, OutsideReads, merged
from hzplan.profiler.session.ranks import Ranks

WARM_UPS = 2
"""Passes before the first that counts: allocators, caches and libraries are then set up."""

NOT_FIXED = "the order in which modules are used must be fixed for a plan; take branches out that depend on"


@dataclass(frozen=True)
class Pass:
    """One forward and backward at a micro-batch size, as far as it is the same every time.

    ``outside``: what is read during other units' calls, on any rank.
    """

    micro_batch: int
    step: Step
    uses: tuple[Use, ...]
    memory: tuple[Segment, ...]
    flops: tuple[int, ...]
    outside: Outside = field(default_factory=dict)


@dataclass(frozen=True)
class _Recorded:
    """One rank's uses, twice, and their memory; or why they failed."""

    uses: tuple[Use, ...] = ()
    repeated: tuple[Use, ...] = ()
    memory: Sequence[Segment] = ()
    outside: Outside = field(default_factory=dict)
    failure: str = ""


def record_passes(
    ranks: Ranks,
    model: RunnableModel,
    micro_batches: Sequence[int],
    progress: Callable[[float], None],
) -> list[Pass]:
    """Record a pass of every size; the same on every rank. All ranks run at the same time.

    A weight-shared model's memory and FLOPs are those of its shapes.

    Raises UserError when the model cannot run, or does not use its units in the same order every time.
    """
    shapes = model.shapes if model.weight_shared else None
    passes = []
    for size in micro_batches:
        step = model.steps[size]
        by_rank = ranks.gather(_record(ranks, model, step))
        for rank, recorded in enumerate(by_rank):
            if recorded.failure:
                where = f" on rank {rank}" if ranks.size > 1 else ""
                raise UserError(
                    f"{model.name}: a forward and backward with micro-batch {size} failed{where}: "
                    f"{recorded.failure}"
                )
        uses = by_rank[0].uses
        if any({recorded.uses, recorded.repeated} != {uses} for recorded in by_rank):
            raise UserError(f"{model.name}: {NOT_FIXED} rank, data or chance")
        if shapes is not None:
            if uses != shapes.uses:
                raise UserError(f"{model.name}: {NOT_FIXED} values")
            memory = tuple(Segment(cost.retained_bytes, cost.peak_bytes) for cost in shapes.costs[size])
            flops, outside = [cost.flops for cost in shapes.costs[size]], shapes.outside
        else:
            memory = _middle([recorded.memory for recorded in by_rank])
            # Counting has no noise, but costs seconds of imports: one rank does it.
            flops = ranks.share(_flops(model.calls, step) if ranks.rank == 0 else [])
            outside = merged(recorded.outside for recorded in by_rank)
        passes.append(Pass(size, step, uses, memory, tuple(flops), outside))
        progress(len(passes) / len(micro_batches))
    return passes


def _record(ranks: Ranks, model: RunnableModel, step: Step) -> _Recorded:
    """A weight-shared model's parameters are in the same memory, so that nobody could tell which are read."""
    calls = model.calls
    reads = OutsideReads(() if model.weight_shared else model.units, lambda: calls.current_unit)
    try:
        with _Alone() if ranks.size > 1 else nullcontext(), reads:  # type: ignore[no-untyped-call]
            uses = calls.run(step)
        for _ in range(WARM_UPS - 1):
            uses = calls.run(step)
        if not uses:
            return _Recorded(failure="its loss uses no module that has parameters")
        if model.weight_shared:
            return _Recorded(uses, uses)
        with memory_trace(ranks.device) as trace:
            repeated = calls.run(step, trace)
        return _Recorded(uses, repeated, trace.segments(), reads.found)
    except Exception as error:  # the user's model, which may raise anything
        return _Recorded(failure=one_line(error))


class _Alone(TorchDispatchMode):
    """Refuses messages. Ranks run a model as often as their own measurements need, so that one's messages
    would wait for ever for another's."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            raise UserError(
                f"it sends messages of its own ({func}), and cannot be measured by itself; leave them out of "
                "what gives the loss"
            )
        return func(*args, **(kwargs or {}))


def record_recomputation(
    ranks: Ranks, calls: RecordedCalls, passes: Sequence[Pass], switch: Switch, way: Way, *, warm: bool
) -> list[Pass]:
    """The same passes with every unit's forward computed again that way; none where the model does not allow
    it. ``warm``: after one of its kind that is not looked at."""
    recomputing = []
    for recorded in passes:
        step, memory, as_before = switch.around(recorded.step, way), list[Segment](), False
        try:
            if warm:
                calls.run(step)
            with memory_trace(ranks.device) as trace:
                as_before = calls.run(step, trace) == recorded.uses
            memory = trace.segments()
        except Exception:  # the user's model, which may not bear to be run twice
            as_before = False
        by_rank = ranks.gather((as_before, memory))
        if not all(same for same, _ in by_rank):
            return []
        middle = _middle([segments for _, segments in by_rank])
        recomputing.append(Pass(recorded.micro_batch, step, recorded.uses, middle, recorded.flops))
    return recomputing


def _middle(by_rank: Sequence[Sequence[Segment]]) -> tuple[Segment, ...]:
    """The middle rank's memory; ranks differ only where the model looks at its data."""
    return tuple(
        Segment(
            statistics.median_high(segment.retained_bytes for segment in segments),
            statistics.median_high(segment.peak_bytes for segment in segments),
        )
        for segments in zip(*by_rank, strict=True)
    )


def _flops(calls: RecordedCalls, step: Step) -> list[int]:
    probe = FlopProbe()
    with probe.counter:
        calls.run(step, probe)
    return probe.flops()
