"""Parameters of which ``make test`` takes some and ``make test-all`` takes all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def shorter(values: Iterable[Any], *, without: Collection[Any]) -> list[Any]:
    """The values; those ``without`` are only in ``make test-all``, because they take long."""
    return [pytest.param(value, marks=[pytest.mark.long] * (value in without)) for value in values]
