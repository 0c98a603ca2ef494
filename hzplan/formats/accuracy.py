"""Published prediction errors, ``cost_models/accuracy.json``, from regimes that no decision was tuned on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from hzplan.errors import UserError
from hzplan.formats.base import Fraction, PositiveInt, Strict, read, to_text, write_text
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


class Accuracy(Strict):
    """The published figures."""

    format: Literal["hzplan.accuracy"] = "hzplan.accuracy"
    version: Literal[1] = 1
    date: str
    commit: str
    entries: tuple[AccuracyEntry, ...] = Field(min_length=1)

    @classmethod
    def load(cls, path: Path) -> Accuracy:
        """Read figures; UserError of one line when the file does not hold any."""
        return read(path, cls, form="hzplan.accuracy", version=1)

    def save(self, path: Path) -> None:
        """Write the canonical text, whole or not at all."""
        write_text(path, to_text(self))


def published(backend: str) -> AccuracyEntry | None:
    """The published errors of a backend; None without any."""
    for folder in FOLDERS:
        try:
            entries = Accuracy.load(folder / "accuracy.json").entries
        except UserError:  # without the file no error is published
            continue
        return next((entry for entry in entries if entry.backend == backend), None)
    return None
