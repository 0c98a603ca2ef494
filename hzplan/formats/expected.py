"""How far published runs were from modelled predictions, ``cost_models/expected.json``, by device.

Written by ``python -m benchmarks.published``. Ratios are published over predicted seconds of a step, each row
predicted by a model that was fitted without its source; where all rows of a chip are of one source, by the
model fitted with them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hzplan.errors import UserError
from hzplan.formats.base import Document, NonNegativeInt, PositiveInt, Strict
from hzplan.formats.cluster import FOLDERS

Ratio = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]


class Range(Strict):
    """The least and largest value that rows cover."""

    least: PositiveInt
    most: PositiveInt

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most


class Covered(Strict):
    """What some rows are of."""

    seq_len: Range
    devices: Range
    parameters: Range
    kernels: tuple[str, ...] = Field(min_length=1)


class ExpectedEntry(Covered):
    """The rows of a device's chip, ``own`` of which are of the device itself. ``low``, ``high``: eight of ten
    rows lie between; ``sources``: with 1, the model had seen the rows."""

    device: str
    rows: PositiveInt
    own: NonNegativeInt
    sources: PositiveInt
    low: Ratio
    high: Ratio


class Expected(Document):
    """``low``, ``high``: of devices without an entry, as each chip's ``rows`` came out when the model was
    fitted without them, and ``covered`` what these are of; ``few``: rows of chips that have too few for an
    entry, by device; ``difference``: of two settings of one model, at one length and number of devices, how
    much the predicted ratio of their steps was off in nine of ten of ``pairs``."""

    format: Literal["hzplan.expected"] = "hzplan.expected"
    version: Literal[1] = 1
    entries: tuple[ExpectedEntry, ...]
    rows: PositiveInt
    low: Ratio
    high: Ratio
    covered: Covered
    few: dict[str, PositiveInt]
    pairs: NonNegativeInt
    difference: Annotated[float, Field(ge=0, le=10)]

    def of(self, device: str) -> ExpectedEntry | None:
        """A device's entry, by its name; None where it has too few rows."""
        return next((entry for entry in self.entries if entry.device == device), None)


def expected() -> Expected | None:
    """What comes with hzplan; None without it."""
    for folder in FOLDERS:
        try:
            return Expected.load(folder / "expected.json")
        except UserError:
            continue
    return None
