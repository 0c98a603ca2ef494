"""Converters of files from one version to the next. Pure: data in, data out.

Version 2 of profiles and links renames fields of version 1 to the words of the field; values are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Migration = Callable[[dict[str, Any]], dict[str, Any]]

_RENAMED_IN_2: Mapping[tuple[str, ...], Mapping[str, str]] = {
    ("cluster",): {
        "handoff_seconds": "wakeup_seconds",
        "scattered_by_exchange": "reduce_scatter_by_exchange",
    },
    ("interference",): {
        "compute_lost": "compute_loss",
        "slowdown": "communication_slowdown",
        "collision": "contention",
    },
    ("stragglers",): {"times": "slowdown"},
    ("uses",): {"reads": "reads_parameters"},
    ("uses", "costs"): {"late_seconds": "straggler_seconds", "recomputed": "recompute"},
}
"""By path from the top (through lists), the new name of each field that was renamed."""


def _renamed(data: Any, path: tuple[str, ...] = ()) -> Any:
    if isinstance(data, list):
        return [_renamed(item, path) for item in data]
    if not isinstance(data, dict):
        return data
    names = _RENAMED_IN_2.get(path, {})
    return {names.get(key, key): _renamed(value, (*path, key)) for key, value in data.items()}


MIGRATIONS: Mapping[str, Mapping[int, Migration]] = {
    "hzplan.profile": {1: _renamed},
    "hzplan.links": {1: _renamed},
}
"""By format and version: the function from that version's data to the next version's."""
