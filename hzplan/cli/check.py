"""``hzplan check``: fail the build when a plan in the repository got worse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hzplan.errors import CheckFailed, UserError

if TYPE_CHECKING:
    from hzplan.solver.guard import Verdict


def command(
    plans: Annotated[Path, typer.Argument(metavar="[PLANS]", help="A plan, or a folder of plans.")] = Path(
        "plans"
    ),
    update: Annotated[bool, typer.Option("--update", help="Write what solving again gives.")] = False,
    replay_only: Annotated[
        bool, typer.Option("--replay-only", help="Do not solve again; replay the recorded choices.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Solve every plan's question again from its profile; exit 1 when one got slower or larger.

    Nothing is written unless --update is given.

    Example: hzplan check plans/
    """
    from hzplan.cli import console
    from hzplan.solver.guard import guard

    if update and replay_only:
        raise UserError("--update needs to solve again; leave --replay-only out")
    paths = _plans(plans)
    verdicts: list[Verdict] = []
    with console.Bar("check") as bar:
        for number, path in enumerate(paths):
            bar.update(str(path), number / len(paths))
            verdicts.append(guard(path, replay_only=replay_only))
    if update:
        for verdict in verdicts:
            if verdict.fresh is not None:
                verdict.fresh.save(verdict.path)
    print(json.dumps(_as_json(verdicts))) if as_json else _show(verdicts)
    failed = [verdict for verdict in verdicts if not verdict.ok]
    beyond = [verdict for verdict in failed if verdict.fresh is None]
    if beyond and update:
        raise CheckFailed(
            f"{', '.join(str(v.path) for v in beyond)}: not updated, no plan was found within the budget; "
            "solve again with more --memory"
        )
    if failed and not update:
        raise CheckFailed(
            f"{len(failed)} of {len(verdicts)} plans got worse: {', '.join(str(v.path) for v in failed)}; "
            "accept with hzplan check --update"
        )


def _plans(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(path.glob("*.json"))
        if not found:
            raise UserError(f"{path}: no plans (*.json) in this folder")
        return found
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    return [path]


def _as_json(verdicts: list[Verdict]) -> dict[str, Any]:
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


def _show(verdicts: list[Verdict]) -> None:
    from hzplan.cli import console

    out = console.stdout()
    table = console.table("plans", "plan", "objective", "now", "peak", "now", "")
    for verdict in verdicts:
        table.add_row(
            verdict.path.stem,
            *(console.duration(seconds) for seconds in verdict.objective_s),
            *(console.size(nbytes) for nbytes in verdict.peak_memory_bytes),
            "ok" if verdict.ok else "WORSE",
        )
    out.print(table)
    for verdict in verdicts:
        if not verdict.ok:
            out.print(f"{verdict.path}: {verdict.reason}", soft_wrap=True)
