"""The output of ``hzplan check``: a table, JSON, JUnit, Markdown and annotations for GitHub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from hzplan.cli import console
from hzplan.errors import UserError, printable
from hzplan.formats.base import write_text
from hzplan.solver.guard import Verdict


def report(
    verdicts: Sequence[Verdict],
    *,
    as_json: bool,
    junit: Path | None,
    summaries: Sequence[Path],
    github: bool,
) -> None:
    """Everything that was asked for; a table in Markdown is appended to ``summaries``."""
    print(json.dumps(_as_json(verdicts))) if as_json else _show(verdicts)
    if github:
        for verdict in verdicts:
            for fails, said in _remarks(verdict):
                level = "error" if fails else "notice"
                print(f"::{level} file={_property(printable(verdict.path))}::{_message(said)}")
    if junit is not None:
        write_text(junit, _junit(verdicts))
    for path in summaries:
        _append(path, _markdown(verdicts))


def _remarks(verdict: Verdict) -> Iterator[tuple[bool, str]]:
    """The remarks on a plan, each with whether it fails the check."""
    if verdict.unreadable is not None:
        yield True, printable(verdict.unreadable)
    for change in verdict.changes:
        yield change.fails, printable(change)


def _as_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "ok": all(verdict.ok for verdict in verdicts),
        "plans": [
            {
                "plan": str(verdict.path),
                "ok": verdict.ok,
                "reason": verdict.reason,
                "unreadable": verdict.unreadable,
                "changes": [asdict(change) for change in verdict.changes],
                "objective_s": _before_and_now(verdict.objective_s),
                "peak_memory_bytes": _before_and_now(verdict.peak_memory_bytes),
            }
            for verdict in verdicts
        ],
    }


def _before_and_now(figures: tuple[float, float] | None) -> dict[str, float] | None:
    return None if figures is None else dict(zip(("golden", "now"), figures, strict=True))


def _show(verdicts: Sequence[Verdict]) -> None:
    out = console.stdout()
    table = console.table("plans", *_HEAD)
    for verdict in verdicts:
        table.add_row(*_row(verdict))
    out.print(table)
    for verdict in verdicts:
        for _, said in _remarks(verdict):
            about = "" if verdict.unreadable is not None else f"{verdict.path}: "  # it names itself
            out.print(f"{about}{said}", soft_wrap=True)


_HEAD = ("plan", "objective", "now", "peak", "now", "")


def _row(verdict: Verdict) -> list[str]:
    return [
        verdict.path.stem,
        *(console.duration(seconds) for seconds in verdict.objective_s or ()),
        *(console.size(nbytes) for nbytes in verdict.peak_memory_bytes or ()),
        *("" for _ in range(0 if verdict.unreadable is None else 4)),
        _word(verdict),
    ]


def _word(verdict: Verdict) -> str:
    if verdict.unreadable is not None:
        return "UNREADABLE"
    changed = any(change.kind != "proof" for change in verdict.changes)
    return "WORSE" if not verdict.ok else "changed" if changed else "ok"


def _junit(verdicts: Sequence[Verdict]) -> str:
    """A test case per plan, as Jenkins, GitLab and others read it."""
    broken = sum(verdict.unreadable is not None for verdict in verdicts)
    failed = sum(not verdict.ok for verdict in verdicts) - broken
    counts = {"tests": len(verdicts), "failures": failed, "errors": broken}
    texts = {name: str(count) for name, count in counts.items()}
    suite = ElementTree.Element("testsuite", {"name": "hzplan check"} | texts)
    for verdict in verdicts:
        case = ElementTree.SubElement(suite, "testcase", classname="plans", name=printable(verdict.path))
        if not verdict.ok:
            reason = printable(verdict.reason)
            kind = "failure" if verdict.unreadable is None else "error"
            ElementTree.SubElement(case, kind, message=reason).text = reason
        elif verdict.changes:
            said = ElementTree.SubElement(case, "system-out")
            said.text = "\n".join(map(printable, verdict.changes))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _markdown(verdicts: Sequence[Verdict]) -> str:
    """A table, and what changed."""
    failed = sum(not verdict.ok for verdict in verdicts)
    lines = [f"### hzplan check: {failed} of {len(verdicts)} plans got worse", ""]
    lines += [f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|"]
    lines += [f"| {' | '.join(_cell(printable(text)) for text in _row(verdict))} |" for verdict in verdicts]
    lines += [""]
    lines += [f"- {_cell(printable(v.path))}: {_cell(said)}" for v in verdicts for _, said in _remarks(v)]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    for special in "\\|`*_[]":
        text = text.replace(special, f"\\{special}")
    return text.replace("<", "&lt;").replace("\n", " ")


def _append(path: Path, text: str) -> None:
    try:
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


# As GitHub's workflow commands want it: what ends a line or a property is written in per cent.


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
