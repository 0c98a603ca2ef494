"""What each use of a unit costs at a micro-batch size: seconds, FLOPs, memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hzplan.errors import UserError, one_line
from hzplan.formats.profile import UseCost
from hzplan.profiler.clock import clock
from hzplan.profiler.flops import FlopProbe
from hzplan.profiler.memory import Segment, memory_trace
from hzplan.profiler.quiet import no_garbage_collection
from hzplan.profiler.ranks import Ranks
from hzplan.profiler.samples import nanoseconds, spread
from hzplan.profiler.turns import Turns
from hzplan.schedule import Use

WARM_UPS = 2
MIN_REPEATS = 5
MAX_REPEATS = 15
STEADY_SPREAD = 0.03
"""Repeats end early when the spread of a rank's whole passes is below this, at the median rank."""
MIN_S = 1.0
"""Repeats do not end before this, fewer than ``MAX_REPEATS``: a short calm is no proof."""
TIME_LIMIT_S = 6.0
"""Of the repeats at one micro-batch size, once there are enough."""


@dataclass(frozen=True)
class Pass:
    """One forward and backward at a micro-batch size: its uses in order, and what each costs."""

    uses: tuple[Use, ...]
    costs: tuple[UseCost, ...]


def measure_pass(
    ranks: Ranks,
    turns: Turns,
    step: Callable[[], Tensor],
    micro_batch: int,
    *,
    label: str,
    progress: Callable[[float], None],
) -> Pass:
    """Measure a forward and backward; the same result on every rank, all of which run at the same time.

    ``step`` computes the loss of a micro-batch; ``label`` names the model in messages. The uses' seconds are
    medians over repeats and ranks, scaled so that they add up to the median of whole passes: where ranks take
    turns on a core, medians of parts alone would miss the pauses.

    Raises UserError when the model cannot run, or does not use its units in the same order every time.
    """
    uses = _warm_up(turns, step, micro_batch, label)
    _require_same(ranks, uses, label)
    progress(0.1)
    memory = _memory(ranks, turns, step)
    # Counting has no noise, but costs seconds of imports: one rank does it.
    flops = ranks.share(_flops(turns, step) if ranks.rank == 0 else [])
    progress(0.2)
    rows = _times(ranks, turns, step, uses, label, progress=lambda done: progress(0.2 + 0.8 * done))
    by_use = [list(samples) for samples in zip(*rows, strict=True)]
    medians = [statistics.median(samples) for samples in by_use]
    scale = statistics.median(map(sum, rows)) / sum(medians)
    return Pass(
        uses,
        tuple(
            UseCost(
                micro_batch=micro_batch,
                seconds=nanoseconds(median * scale),
                spread=spread(samples),
                flops=count,
                retained_bytes=segment.retained_bytes,
                peak_bytes=segment.peak_bytes,
            )
            for median, samples, count, segment in zip(medians, by_use, flops, memory, strict=True)
        ),
    )


def _warm_up(turns: Turns, step: Callable[[], Tensor], micro_batch: int, label: str) -> tuple[Use, ...]:
    try:
        runs = [turns.run(step) for _ in range(WARM_UPS)]
    except UserError:
        raise
    except Exception as error:  # the user's model, which may raise anything
        raise UserError(
            f"{label}: a forward and backward with micro-batch {micro_batch} failed: {one_line(error)}"
        ) from error
    if not runs[-1]:
        raise UserError(f"{label}: the loss was computed without using any module that has parameters")
    return runs[-1]


def _require_same(ranks: Ranks, uses: tuple[Use, ...], label: str) -> None:
    for rank, others in enumerate(ranks.gather(uses)):
        if others != uses:
            raise UserError(
                f"{label}: ranks {ranks.rank} and {rank} used its modules in different orders; "
                "a plan needs one order, so take branches that depend on data or rank out"
            )


def _memory(ranks: Ranks, turns: Turns, step: Callable[[], Tensor]) -> list[Segment]:
    """The middle rank's figures; ranks differ only where the model's branches do."""
    with memory_trace(ranks.device) as trace:
        turns.run(step, trace)
    by_rank = ranks.gather(trace.segments())
    return [
        Segment(
            statistics.median_high(segment.retained_bytes for segment in segments),
            statistics.median_high(segment.peak_bytes for segment in segments),
        )
        for segments in zip(*by_rank, strict=True)
    ]


def _flops(turns: Turns, step: Callable[[], Tensor]) -> list[int]:
    probe = FlopProbe()
    with probe.counter:
        turns.run(step, probe)
    return probe.flops()


def _times(
    ranks: Ranks,
    turns: Turns,
    step: Callable[[], Tensor],
    uses: Sequence[Use],
    label: str,
    *,
    progress: Callable[[float], None],
) -> list[list[float]]:
    """Seconds of each use, by repeat and rank; the same list on every rank."""
    rows: list[list[float]] = []
    totals: list[list[float]] = []  # by repeat, then rank
    started = time.perf_counter()
    with no_garbage_collection():
        for repeat in range(MAX_REPEATS):
            ranks.barrier()
            timer = clock(ranks.device)
            ran = turns.run(step, timer)
            if ran != tuple(uses):
                raise UserError(
                    f"{label}: used its modules in another order when run again; "
                    "a plan needs one order, so take random branches out"
                )
            seconds = timer.seconds()
            gathered = ranks.gather((seconds, time.perf_counter() - started))
            rows += [row for row, _ in gathered]
            totals.append([sum(row) for row, _ in gathered])
            elapsed = max(spent for _, spent in gathered)
            progress(max((repeat + 1) / MAX_REPEATS, min(elapsed / TIME_LIMIT_S, 1.0)))
            steady = elapsed > MIN_S and _steady(totals)
            if repeat + 1 >= MIN_REPEATS and (elapsed > TIME_LIMIT_S or steady):
                break
    return rows


def _steady(totals: Sequence[Sequence[float]]) -> bool:
    by_rank = [spread(samples) for samples in zip(*totals, strict=True)]
    return statistics.median(by_rank) < STEADY_SPREAD
