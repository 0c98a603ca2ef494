"""Seconds in which values are rounded to a format that travels, and read back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from hzplan.core.wire import BLOCK, FORMATS, Format
from hzplan.formats.profile import RoundingEntry, RoundingPoint
from hzplan.profiler.session.ranks import Ranks
from hzplan.profiler.session.rounds import rounds
from hzplan.profiler.session.statistics import nanoseconds, rising
from hzplan.runtime.backends.packing import Step, form_of

SIZES = (16 * BLOCK, 1024 * BLOCK, 8192 * BLOCK)
"""Values in a curve's points: what calls cost, and what memory does."""
REPEATS = 4
MIN_REPEATS, MAX_REPEATS = 3, 10
BUDGET_S = 0.5
"""Seconds of a format after which no other round is begun."""


def measure_rounding(ranks: Ranks, progress: Callable[[float], None]) -> tuple[RoundingEntry, ...]:
    """A curve for each format, all ranks at once; a sample is the slowest rank's time, a point their
    median."""
    formats = [form for form in FORMATS if form != "exact"]
    found = []
    for number, form in enumerate(formats):
        progress(number / len(formats))
        found.append(_entry(ranks, form))
    return tuple(found)


def _entry(ranks: Ranks, name: Format) -> RoundingEntry:
    steps = [step for size in SIZES for step in _steps(name, size, ranks.device)]
    results = rounds(
        ranks,
        [partial(_seconds, ranks, step) for step in steps],
        at_least=MIN_REPEATS,
        at_most=MAX_REPEATS,
        budget_s=BUDGET_S,
        progress=lambda done: None,
    )
    medians = [statistics.median(max(by_rank) for by_rank in result) for result in results]
    packs, unpacks = rising(medians[::2]), rising(medians[1::2])
    return RoundingEntry(
        format=name,
        points=tuple(
            RoundingPoint(elements=size, pack_seconds=nanoseconds(pack), unpack_seconds=nanoseconds(unpack))
            for size, pack, unpack in zip(SIZES, packs, unpacks, strict=True)
        ),
    )


def _steps(name: Format, size: int, device: torch.device) -> tuple[Step, Step]:
    """To the format, at random as gradients are, and back."""
    form = form_of(name, dithered=True)
    values = torch.linspace(-1, 1, size, device=device)
    packed = torch.zeros(form.units(size), dtype=form.dtype, device=device)
    return form.pack(values, packed), form.unpack(packed, values)


def _seconds(ranks: Ranks, step: Step) -> float:
    ranks.barrier()
    started = time.perf_counter()
    for _ in range(REPEATS):
        step.run()
    ranks.finish_device()
    return (time.perf_counter() - started) / REPEATS
