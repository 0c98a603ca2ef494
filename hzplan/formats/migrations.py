"""Converters of files from one version to the next. Pure: data in, data out.

Version 2 of profiles and links renames fields of version 1 to the words of the field; values are the same.
Version 2 of plans has the gap of the predicted step to the bound, version 1 that of the ILP's objective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import ceil, inf
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


def _renamed(data: dict[str, Any], table: Mapping[tuple[str, ...], Mapping[str, str]]) -> dict[str, Any]:
    for path, names in table.items():
        data = _rename_at(data, path, names)
    return data


def _rename_at(node: Any, path: tuple[str, ...], names: Mapping[str, str]) -> Any:
    """Rename the keys of the objects at ``path`` (through lists); ValueError where one has a new name."""
    if isinstance(node, list):
        return [_rename_at(item, path, names) if isinstance(item, dict) else item for item in node]
    if not isinstance(node, dict):
        return node
    if path:
        key, *rest = path
        return {**node, key: _rename_at(node[key], tuple(rest), names)} if key in node else node
    if new := sorted(node.keys() & {*names.values()}):
        raise ValueError(f"field {new[0]} is not of this version")
    return {names.get(key, key): value for key, value in node.items()}


def as_version_1(data: dict[str, Any]) -> dict[str, Any]:
    """A profile's data of version 2 with the names of version 1, whose text older plans have the hash of."""
    back = {path: {new: old for old, new in names.items()} for path, names in _RENAMED_IN_2.items()}
    return {**_renamed(data, back), "version": 1}


def _with_gap_of_step(data: dict[str, Any]) -> dict[str, Any]:
    proof, predicted = data.get("proof"), data.get("predicted")
    if not isinstance(proof, dict) or not isinstance(predicted, dict):
        return data  # the reader says what is missing
    step_s, bound_s = _positive(predicted.get("step_s")), _positive(proof.get("bound_s"))
    if proof.get("status") == "given" or not step_s or not bound_s:
        return data
    return {**data, "proof": {**proof, "gap": ceil(max(0.0, step_s / bound_s - 1) * 1e6) / 1e6}}


def _positive(value: Any) -> float | None:
    return value if type(value) in (int, float) and 0 < value < inf else None


MIGRATIONS: Mapping[str, Mapping[int, Migration]] = {
    "hzplan.profile": {1: partial(_renamed, table=_RENAMED_IN_2)},
    "hzplan.plan": {1: _with_gap_of_step},
    "hzplan.links": {1: partial(_renamed, table=_RENAMED_IN_2)},
}
"""By format and version: the function from that version's data to the next version's."""
