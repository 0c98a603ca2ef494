"""Partial results of a measurement, in a file beside its result: one that was cut short goes on from them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from hzplan.errors import UserError
from hzplan.formats.base import read_json, write_text
from hzplan.profiler.session.ranks import Ranks

MAX_AGE_S = 24 * 3600.0
"""Oldest partial results, in seconds, that a restarted measurement resumes from: nodes may have changed
since."""

Result = TypeVar("Result")


class PartialResults:
    """Results by name, of one measurement. Every rank makes one and calls it alike."""

    def __init__(
        self, ranks: Ranks, path: Path | None, question: object, message: Callable[[str], None]
    ) -> None:
        """Rank 0 reads those of an earlier try at the same question, if there are any, and writes new ones;
        without a ``path`` none are.

        ``question``: anything whose text tells it from others; ``message`` is told of results read.
        """
        self._ranks, self._path, self._message = ranks, path, message
        self._question = hashlib.sha256(repr(question).encode()).hexdigest()
        earlier = _read(path, self._question) if ranks.rank == 0 and path is not None else {}
        self._results = ranks.share(earlier)

    def result(self, name: str, kind: Any, measure: Callable[[], Result]) -> Result:
        """The result of an earlier try, or of ``measure``; the same on every rank.

        ``kind``: the type that pydantic reads it as.
        """
        adapter: TypeAdapter[Result] = TypeAdapter(kind)
        if name in self._results:
            try:
                found = adapter.validate_json(json.dumps(self._results[name]), strict=True)
            except ValidationError:
                pass
            else:
                self._message(f"{name}: taken from {self._path}, measured before")
                return found
        found = self._ranks.share(measure())
        self._results[name] = adapter.dump_python(found, mode="json")
        if self._ranks.rank == 0 and self._path is not None:
            entry = {"question": self._question, "time": time.time(), "parts": self._results}
            write_text(self._path, json.dumps(entry) + "\n")
        return found


def _read(path: Path, question: str) -> dict[str, Any]:
    """The results in a file, if they answer the question."""
    if not path.exists():
        return {}
    try:
        data = read_json(path)
    except UserError:  # not ours, or damaged: measure anew
        return {}
    if not isinstance(data, dict) or data.get("question") != question:
        return {}
    written, results = data.get("time"), data.get("parts")
    age = time.time() - (float(written) if isinstance(written, int | float) else 0.0)
    return results if isinstance(results, dict) and 0 <= age <= MAX_AGE_S else {}
