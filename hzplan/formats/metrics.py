"""The metrics of a run: a JSON object per line, as ``hzplan run --metrics`` writes them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from hzplan.errors import UserError
from hzplan.formats.base import MAX_FILE_BYTES, Finite, NonNegativeInt, Seconds, Strict

WARM_UP_STEPS = 3
"""Number of first steps left out of medians: they touch buffers and create optimizer state."""


class MetricsLine(Strict):
    """One step: loss, seconds, the time that rank 0's compute waited by tier (empty where nobody timed it),
    tokens and peak memory. ``rounding``: by tier the largest error of values that travelled narrow, as a
    share of them, where ranks compared it."""

    step: NonNegativeInt
    loss: Finite | None
    step_s: Seconds
    exposed_comm_s: dict[str, Seconds]
    tokens: NonNegativeInt
    peak_memory_bytes: NonNegativeInt | None
    skipped: str | None = None
    rounding: dict[str, Seconds] | None = None


@dataclass(frozen=True)
class Measured:
    """Medians of a run's steps. ``exposed_s``: by tier name, and "optim", of steps that were timed, empty
    without any; ``peak_bytes``: the most of any step, None where nobody counted."""

    steps: int
    step_s: float
    exposed_s: Mapping[str, float]
    peak_bytes: int | None = None


def read_metrics(path: Path) -> Measured:
    """Medians of the steps after the first ones; UserError that names file, line and field."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if len(content) > MAX_FILE_BYTES:
        raise UserError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB, not metrics of hzplan")
    lines = [
        _line(path, number, text) for number, text in enumerate(content.splitlines(), start=1) if text.strip()
    ]
    kept = [line for line in lines if line.step >= WARM_UP_STEPS and not line.skipped]
    if not kept:
        raise UserError(f"{path}: no step after the first {WARM_UP_STEPS}; run with more --steps")
    waits = [line.exposed_comm_s for line in kept if line.exposed_comm_s]
    names = dict.fromkeys(name for of_step in waits for name in of_step)
    peaks = [line.peak_memory_bytes for line in kept if line.peak_memory_bytes is not None]
    return Measured(
        len(kept),
        statistics.median(line.step_s for line in kept),
        {name: statistics.median(of_step.get(name, 0.0) for of_step in waits) for name in names},
        max(peaks, default=None),
    )


def _line(path: Path, number: int, text: bytes) -> MetricsLine:
    try:
        data = json.loads(text.decode("utf-8"))
        return MetricsLine.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "(the whole line)"
        raise UserError(f"{path}: line {number}: field {field}: {first['msg']}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: line {number}: not JSON; is it what run --metrics wrote?") from None
