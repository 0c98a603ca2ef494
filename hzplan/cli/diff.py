"""``hzplan diff``: what changed from one plan to another."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hzplan.errors import CheckFailed, UserError

if TYPE_CHECKING:
    from hzplan.formats.plan import Plan
    from hzplan.solver.difference import Difference


def command(
    one: Annotated[Path, typer.Argument(metavar="A", help="A plan.")],
    other: Annotated[Path, typer.Argument(metavar="B", help="Another plan.")],
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 1 when a choice differs, as git diff does.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Show whose shards changed from plan A to plan B, and what that does to time, memory and traffic.

    Traffic is counted where each plan's profile is where the plan says.

    Example: hzplan diff plans/old.json plans/new.json
    """
    from hzplan.formats.plan import Plan
    from hzplan.solver.difference import choices, figures

    plans = Plan.load(one), Plan.load(other)
    changed, numbers = choices(*plans), dict(figures(*plans))
    traffic = _traffic(one, plans[0]), _traffic(other, plans[1])
    if traffic[0] is not None and traffic[1] is not None:
        for name in dict.fromkeys([*traffic[0], *traffic[1]]):
            numbers[f"sent_bytes.{name}"] = traffic[0].get(name, 0), traffic[1].get(name, 0)
    if as_json:
        _print_json(changed, numbers)
    else:
        _show(one, other, changed, numbers)
    if changed and exit_code:
        raise CheckFailed(f"{one} and {other} differ in {len(changed)} choices")


def _traffic(path: Path, plan: Plan) -> Mapping[str, int] | None:
    """Bytes that a rank sends in a step, by tier; None without the profile."""
    from hzplan.formats.source import profile_of
    from hzplan.solver.evaluate import replay, sent_bytes

    try:
        profile = profile_of(path, plan)
        found = sent_bytes(replay(plan, profile, path))
    except UserError:
        return None
    return dict(zip(plan.cluster.tier_names, found, strict=True))


def _print_json(changed: Sequence[Difference], numbers: Mapping[str, tuple[float, float]]) -> None:
    from hzplan.solver.difference import shards_text

    print(
        json.dumps(
            {
                "choices": [
                    {
                        "unit": choice.unit,
                        "tensors": list(choice.tensors),
                        "before": shards_text(choice.before),
                        "after": shards_text(choice.after),
                    }
                    for choice in changed
                ],
                "figures": {
                    name: {"before": before, "after": after} for name, (before, after) in numbers.items()
                },
            }
        )
    )


def _show(
    one: Path, other: Path, changed: Sequence[Difference], numbers: Mapping[str, tuple[float, float]]
) -> None:
    from hzplan.cli import console
    from hzplan.solver.difference import shards_text

    out = console.stdout()
    if changed:
        table = console.table(f"{one} → {other}", "unit", "tensors", "before", "after")
        table.columns[1].justify = "left"
        for choice in changed:
            names = [name.removeprefix(f"{choice.unit}.") for name in choice.tensors]
            listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            table.add_row(
                choice.unit or "(root)", listed, shards_text(choice.before), shards_text(choice.after)
            )
        out.print(table)
    else:
        out.print("The same choices.")
    table = console.table("predicted, per rank and step", "", "before", "after", "change")
    for name, (before, after) in numbers.items():
        text = console.duration if name.partition(".")[0].endswith("_s") else console.size
        change = f"{after / before - 1:+.1%}" if before else "new"
        table.add_row(_words(name), text(before), text(after), "" if before == after else change)
    out.print(table)


def _words(name: str) -> str:
    kind, _, rest = name.partition(".")
    words = {"step_s": "step", "objective_s": "objective", "bound_s": "bound", "waits_s": "waits for"}
    words |= {"bytes": "memory:", "sent_bytes": "sent over"}
    return f"{words.get(kind, kind)} {rest.replace('_', ' ')}".strip()
