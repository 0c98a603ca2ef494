"""Published prediction errors, ``cost_models/accuracy.json``, from regimes that no decision was tuned on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hzplan.errors import UserError
from hzplan.formats.base import Document, Fraction, PositiveInt, Strict
from hzplan.formats.cluster import FOLDERS


class AccuracyEntry(Strict):
    """Plans measured on one backend, in regimes held out of every decision.

    Shares of what was measured: ``step_mean`` and ``step_worst`` of steps, ``calibrated_mean`` of those after
    a run of another plan had corrected the profile, ``memory_worst`` of peak memory.
    """

    backend: str
    where: str
    plans: PositiveInt
    step_mean: Fraction
    step_worst: Fraction
    calibrated_mean: Fraction
    memory_worst: Fraction


class Accuracy(Document):
    """The published figures."""

    format: Literal["hzplan.accuracy"] = "hzplan.accuracy"
    version: Literal[1] = 1
    date: str
    commit: str
    entries: tuple[AccuracyEntry, ...] = Field(min_length=1)


def published(backend: str) -> AccuracyEntry | None:
    """The published errors of a backend; None without any."""
    for folder in FOLDERS:
        try:
            entries = Accuracy.load(folder / "accuracy.json").entries
        except UserError:  # without the file no error is published
            continue
        return next((entry for entry in entries if entry.backend == backend), None)
    return None
