"""What users keep beside a checkpoint, such as a scheduler's state, as JSON says it and back.

What JSON has stays as it is. What it lacks, such as tuples, infinity, and dicts whose keys are numbers, as
schedulers have them, becomes a dict of one key, ``!``, that names the kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import isfinite
from typing import Any

from hzplan.errors import UserError

KIND = "!"


def packed(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON can say of it. UserError, naming the place, for what is not numbers, texts, None, and dicts,
    lists and tuples of these; of a dict's subclass it is a dict that comes back."""
    try:
        return {_text(name): _said(value, f"extra[{name!r}]") for name, value in extra.items()}
    except RecursionError:
        raise UserError("extra: it has itself among its values") from None


def unpacked(found: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``packed``. UserError for a kind that is not known."""
    return {name: _read(value) for name, value in found.items()}


def _text(name: object) -> str:
    if not isinstance(name, str):
        raise UserError(f"extra: its keys are texts, and one is {name!r}"[:200])
    return name


def _said(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else {KIND: ["float", repr(float(value))]}
    if isinstance(value, list):
        return [_said(one, f"{where}[{place}]") for place, one in enumerate(value)]
    if isinstance(value, tuple):
        return {KIND: ["tuple", [_said(one, f"{where}[{place}]") for place, one in enumerate(value)]]}
    if isinstance(value, Counter):
        return {KIND: ["counter", _said(dict(value), where)]}
    if isinstance(value, dict):
        if KIND not in value and all(isinstance(key, str) for key in value):
            return {key: _said(one, f"{where}[{key!r}]") for key, one in value.items()}
        pairs = [
            [_said(key, f"{where}: a key"), _said(one, f"{where}[{key!r}]")] for key, one in value.items()
        ]
        return {KIND: ["dict", pairs]}
    raise UserError(
        f"{where}: a {type(value).__name__} is not kept; give numbers, texts, and dicts, lists and tuples of "
        "these, or what each rank has for itself as own="
    )


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {KIND}:
        return {key: _read(one) for key, one in value.items()}
    match value[KIND]:
        case ["counter", dict(of)] if isinstance(counted := _read(of), dict):
            return Counter(counted)
        case ["float", str(text)] if text in ("inf", "-inf", "nan"):
            return float(text)
        case ["tuple", [*of]]:
            return tuple(_read(one) for one in of)
        case ["dict", [*pairs]] if all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            try:
                return {_read(key): _read(one) for key, one in pairs}
            except TypeError:  # a list as a key
                pass
    raise UserError("the checkpoint's field extra is damaged, or of a newer version")
