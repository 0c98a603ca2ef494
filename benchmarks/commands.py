"""What a user types, and what of a comparison's figures several benchmarks read."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT
from benchmarks.regimes import NoResult
from hzplan.formats.base import write_text

Ratio = tuple[str, float, float, float]
"""A contender's name, and its step over the plan's with a 95% interval."""


def last_line(command: Sequence[str]) -> str:
    """The last line that ``hzplan`` with these arguments prints; NoResult with the last one of its errors."""
    done = subprocess.run(
        [sys.executable, "-m", "hzplan", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NoResult((done.stderr.strip().splitlines() or ["no message"])[-1])
    return done.stdout.strip().splitlines()[-1]


def best_of(
    contenders: Sequence[dict[str, Any]], names: Sequence[str], *, fits: bool = False
) -> Ratio | None:
    """The fastest of some contenders that train alike; ``fits``: of those within the plan's budget. None
    without any."""
    ratios = [
        (one["name"], one["ratio"]["value"], one["ratio"]["low"], one["ratio"]["high"])
        for one in contenders
        if one["name"] in names and one["losses_agree"] and (one["fits"] or not fits)
    ]
    return min(ratios, key=lambda ratio: ratio[1], default=None)


def step_s(contenders: Sequence[dict[str, Any]]) -> float:
    """Median seconds of the plan's own step."""
    ours = next(one for one in contenders if one["name"] == "hzplan")
    return float(ours["step_s"]["median"])


def ratio_text(ratio: Ratio | None) -> str:
    """For a table's cell."""
    if ratio is None:
        return "none fits"
    name, value, low, high = ratio
    return f"{name}: {value:.2f} ({low:.2f}–{high:.2f})"


def write_section(docs: Path, title: str, text: str) -> None:
    """Replace a section of a page, up to the next title of its rank, or add it at the end."""
    before, _, rest = docs.read_text(encoding="utf-8").partition(title)
    _, follows, after = rest.partition("\n## ")
    page = f"{before.rstrip()}\n\n{text.rstrip()}\n".lstrip()
    write_text(docs, page + (f"\n## {after}" if follows else ""))


def measured(
    names: Sequence[str],
    measure: Callable[[int, Path], dict[str, Any]],
    row: Callable[[dict[str, Any]], str],
    output: Path,
) -> dict[str, Any]:
    """Results by name, from ``output`` where they are there, else measured, in a folder each, and kept."""
    found: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    for number, name in enumerate(names):
        if name not in found:
            print(f"[{number + 1}/{len(names)}] {name}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found[name] = measure(number, Path(folder))
                except NoResult as error:
                    found[name] = {"failed": str(error)}
            output.write_text(json.dumps(found, indent=1) + "\n")
        print(f"    {row(found[name])}", flush=True)
    return found
