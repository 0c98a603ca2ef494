"""What a measurement has found so far, kept in a file beside the result: one that was cut short goes on."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from hzplan.errors import UserError
from hzplan.formats.base import read_json, write_text
from hzplan.profiler.session.ranks import Ranks

MOST_AGE_S = 24 * 3600.0
"""A cluster of yesterday may be another one."""

Found = TypeVar("Found")


@dataclass
class Kept:
    """Parts by name. Nothing is kept where there is no file to keep it in."""

    ranks: Ranks
    path: Path | None = None
    question: str = ""
    said: Callable[[str], None] = lambda text: None
    _parts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        ranks: Ranks,
        path: Path | None,
        question: object,
        said: Callable[[str], None] = lambda text: None,
    ) -> Kept:
        """What rank 0 finds in the file of an earlier try at the same question; every rank calls it.

        ``question`` is anything whose text tells it from others; ``said`` hears what is taken over.
        """
        digest = hashlib.sha256(repr(question).encode()).hexdigest()
        parts = _read(path, digest) if ranks.rank == 0 and path is not None else {}
        return cls(ranks, path, digest, said, ranks.share(parts))

    def part(self, name: str, kind: Any, measure: Callable[[], Found]) -> Found:
        """What was kept under a name, or what ``measure`` finds; the same on every rank.

        ``kind``: what pydantic reads it as.
        """
        adapter: TypeAdapter[Found] = TypeAdapter(kind)
        if name in self._parts:
            try:
                found = adapter.validate_json(json.dumps(self._parts[name]), strict=True)
            except ValidationError:
                pass
            else:
                if self.ranks.rank == 0:
                    self.said(f"{name}: taken from {self.path}, measured before")
                return found
        found = self.ranks.share(measure())
        self._parts[name] = adapter.dump_python(found, mode="json")
        if self.ranks.rank == 0 and self.path is not None:
            entry = {"question": self.question, "time": time.time(), "parts": self._parts}
            write_text(self.path, json.dumps(entry) + "\n")
        return found


def _read(path: Path, question: str) -> dict[str, Any]:
    """The parts in a file, if they answer the question."""
    if not path.exists():
        return {}
    try:
        data = read_json(path)
    except UserError:  # not ours, or damaged: measure anew
        return {}
    if not isinstance(data, dict) or data.get("question") != question:
        return {}
    age, parts = time.time() - _number(data.get("time")), data.get("parts")
    return parts if isinstance(parts, dict) and 0 <= age <= MOST_AGE_S else {}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
