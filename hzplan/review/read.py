"""Which kind of file a user has, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

from hzplan.core.hierarchy import Mesh
from hzplan.errors import UserError
from hzplan.review import deepspeed, fsdp2
from hzplan.review.setting import Setting


def read(path: Path, mesh: Mesh) -> Setting | None:
    """The setting of a file; None where it is a plan. UserError of one line for any other."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if path.suffix == ".py":
        return fsdp2.read(str(path), text, mesh)
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        data = None
    if isinstance(data, dict) and str(data.get("format", "")).startswith("hzplan."):
        return None
    return deepspeed.read(str(path), text, mesh)
