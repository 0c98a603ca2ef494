"""What ``hzplan check`` found: for people, and for the systems that they review changes in."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from hzplan.cli import console
from hzplan.errors import UserError
from hzplan.formats.base import write_text
from hzplan.solver.guard import Verdict


def report(
    verdicts: Sequence[Verdict], *, as_json: bool, junit: Path | None, summary: Path | None, github: bool
) -> None:
    """Everything that was asked for."""
    print(json.dumps(_as_json(verdicts))) if as_json else _show(verdicts)
    if junit is not None:
        write_text(junit, _junit(verdicts))
    page = os.environ.get("GITHUB_STEP_SUMMARY") if github else None
    for path in (summary, Path(page) if page else None):
        if path is not None:
            _append(path, _markdown(verdicts))
    if github:
        for verdict in verdicts:
            for change in verdict.changes:
                level = "error" if change.fails else "notice"
                print(f"::{level} file={_property(str(verdict.path))}::{_message(str(change))}")


def _as_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "ok": all(verdict.ok for verdict in verdicts),
        "plans": [
            {
                "plan": str(verdict.path),
                "ok": verdict.ok,
                "reason": verdict.reason,
                "objective_s": dict(zip(("golden", "now"), verdict.objective_s, strict=True)),
                "peak_memory_bytes": dict(zip(("golden", "now"), verdict.peak_memory_bytes, strict=True)),
            }
            for verdict in verdicts
        ],
    }


def _show(verdicts: Sequence[Verdict]) -> None:
    out = console.stdout()
    table = console.table("plans", *_HEAD)
    for verdict in verdicts:
        table.add_row(*_row(verdict))
    out.print(table)
    for verdict in verdicts:
        for change in verdict.changes:
            out.print(f"{verdict.path}: {change}", soft_wrap=True)


_HEAD = ("plan", "objective", "now", "peak", "now", "")


def _row(verdict: Verdict) -> list[str]:
    return [
        verdict.path.stem,
        *(console.duration(seconds) for seconds in verdict.objective_s),
        *(console.size(nbytes) for nbytes in verdict.peak_memory_bytes),
        "WORSE" if not verdict.ok else "changed" if verdict.changes else "ok",
    ]


def _junit(verdicts: Sequence[Verdict]) -> str:
    """A test case per plan, as Jenkins, GitLab and others read it."""
    failed = sum(not verdict.ok for verdict in verdicts)
    suite = ElementTree.Element(
        "testsuite", name="hzplan check", tests=str(len(verdicts)), failures=str(failed)
    )
    for verdict in verdicts:
        case = ElementTree.SubElement(
            suite, "testcase", classname="plans", name=_printable(str(verdict.path))
        )
        if not verdict.ok:
            reason = _printable(verdict.reason)
            ElementTree.SubElement(case, "failure", message=reason).text = reason
        elif verdict.changes:
            said = ElementTree.SubElement(case, "system-out")
            said.text = _printable("\n".join(map(str, verdict.changes)))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _printable(text: str) -> str:
    """XML has no place for control characters, escaped or not."""
    return "".join(c if c in "\n\t" or c.isprintable() else "?" for c in text)


def _markdown(verdicts: Sequence[Verdict]) -> str:
    """A table, and what changed."""
    failed = sum(not verdict.ok for verdict in verdicts)
    lines = [f"### hzplan check: {failed} of {len(verdicts)} plans got worse", ""]
    lines += [f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|"]
    lines += [f"| {' | '.join(map(_cell, _row(verdict)))} |" for verdict in verdicts]
    lines += [""]
    lines += [f"- `{v.path}`: {_cell(str(change))}" for v in verdicts for change in v.changes]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


# As GitHub's workflow commands want it: what ends a line or a property is written in per cent.


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
