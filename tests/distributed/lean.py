"""A model's uses as the profiler writes them down: what reads no parameter, and what travels together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from hzplan.core.schedule import Use
from hzplan.models.units import find_units
from hzplan.profiler.model import entries
from hzplan.profiler.model.calls import RecordedCalls
from hzplan.profiler.model.reads import unread_uses

SMALL = 2
"""Test models are small: their norms are no sixteenth of anything."""


def lean(model: nn.Module, step: Callable[[], Tensor]) -> tuple[tuple[Use, ...], dict[str, Any]]:
    """The uses of a forward and backward, and what units need whole."""
    units = find_units(model)
    calls = RecordedCalls(units, 1)
    uses, unread = calls.run(step), unread_uses(calls, units, step)
    calls.detach()
    with patch.object(entries, "SMALL", SMALL):
        requires = entries.joined(
            {unit.name: unit.requires for unit in units},
            {unit.name: sum(tensor.nbytes for tensor in unit.tensors) for unit in units},
            uses,
        )
    return tuple(Use(u.unit, u.phase, i not in unread) for i, u in enumerate(uses)), requires
