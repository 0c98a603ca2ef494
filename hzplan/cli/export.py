"""``hzplan export``: a plan for FSDP2, DeepSpeed or Megatron-FSDP (and its v2)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hzplan.errors import CheckFailed, UserError

if TYPE_CHECKING:
    from hzplan.export.shape import Exported, Lost
    from hzplan.formats.plan import Plan

TARGETS = ("fsdp2", "deepspeed", "deepspeed-mics", "megatron-fsdp", "megatron-fsdp-v2")
MOST_SHOWN = 12
"""Lines about losses that are printed."""


def command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan, as hzplan solve wrote it.")],
    to: Annotated[str, typer.Option(help=f"The target: {', '.join(TARGETS)}.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; by default on stdout.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1, and write nothing, when anything gets lost.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write it though it takes more memory than the plan's budget.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Say a plan in the words of another runtime, and what that cannot say, with its predicted cost.

    Example: hzplan export plan.json --to fsdp2 -o sharding.py
    Example: hzplan export plan.json --to deepspeed -o zero.json
    """
    import json
    from dataclasses import asdict
    from importlib import import_module

    from hzplan.cli import console
    from hzplan.cli.paths import check_writable
    from hzplan.cli.trust import check_alone
    from hzplan.export.price import priced
    from hzplan.export.shape import elements
    from hzplan.formats.base import write_text
    from hzplan.formats.plan import Plan
    from hzplan.formats.source import profile_of
    from hzplan.solver.target import no_matrices

    if to not in TARGETS:
        raise UserError(f"--to {to}: one of {', '.join(TARGETS)}")
    if as_json and output is None:
        raise UserError("--json: say with --output where the file goes")
    if output is not None:
        check_writable(output, keep=[plan])
    chosen = Plan.load(plan)
    check_alone(plan, chosen, "export")
    if any(bucket.matrix for unit in chosen.units for bucket in unit.buckets):
        raise UserError(f"{plan}: {no_matrices(to, chosen.optimizer)}")
    try:
        profile = profile_of(plan, chosen)
    except UserError as error:
        profile = None
        console.remark(f"{error}; what gets lost has no predicted cost")
    specs = [] if profile is None else [t.spec for unit in profile.units for t in unit.tensors]
    target, options = ("deepspeed", {"mics": True}) if to == "deepspeed-mics" else (to, {})
    made: Exported = import_module(f"hzplan.export.{target.replace('-', '_')}").export(
        plan, chosen, elements(specs), **options
    )
    total = None
    if profile is not None and made.lost:
        made, total = priced(plan, chosen, profile, made)
    if strict and made.lost:
        raise CheckFailed(
            f"{plan}: {to} cannot say {len(made.lost)} thing{'s' * (len(made.lost) > 1)}; the first: "
            f"{made.lost[0].where}: {made.lost[0].what}"
        )
    if total is not None and not force:
        _within_budget(plan, to, chosen, int(total["peak_bytes"]))
    if output is None:
        print(made.text, end="")
    else:
        write_text(output, made.text)
    if as_json:
        print(
            json.dumps(
                {"file": str(output), "to": to, "lost": [asdict(one) for one in made.lost]}
                | {"beside": made.beside}
                | (total or {})
            )
        )
        return
    _say(made, to, total, output)


def _within_budget(path: Path, to: str, plan: Plan, more: int) -> None:
    """CheckFailed where what gets lost takes a plan over its budget."""
    from hzplan.cli import console

    peak, budget = plan.predicted.peak_memory_bytes + more, plan.source.memory_budget_bytes
    if peak > budget:
        raise CheckFailed(
            f"{path}: as {to} it would take {console.size(peak)}, more than the budget of "
            f"{console.size(budget)}: what gets lost takes {console.size(more)}; solve for it (hzplan "
            f"solve --for {to}), or write it all the same with --force"
        )


def _say(made: Exported, to: str, total: dict[str, float] | None, output: Path | None) -> None:
    from hzplan.cli import console

    if not made.lost:
        console.remark(f"{to} says all of the plan.")
    of_s = total["plan_step_s"] if total is not None else 0.0
    free = [one for one in made.lost if one.step_s is not None and not _costs(one, of_s)]
    listed = [one for one in made.lost if one not in free]
    for one in listed[:MOST_SHOWN]:
        cost = (
            ""
            if one.step_s is None or one.peak_bytes is None
            else f" ({_cost(one.step_s, one.peak_bytes, of_s)})"
        )
        console.remark(f"lost: {one.where}: {one.what}{cost}")
    if len(listed) > MOST_SHOWN:
        console.remark(f"and {len(listed) - MOST_SHOWN} more; --json lists all")
    if free:
        more = f" and {len(free) - 1} more" if len(free) > 1 else ""
        console.remark(f"lost at no cost: {free[0].where}: {free[0].what}{more}; --json lists all")
    if total is not None:
        whole = _cost(total["step_s"], int(total["peak_bytes"]), of_s)
        console.remark(f"in all, by hzplan's own model: {whole}")
    for said in made.beside:
        console.remark(f"beside the file: {said}")
    if output is not None:
        console.remark(f"Wrote {output}.")


FREE_SHARE, FREE_BYTES = 1e-4, 2**20
"""Cost below which a loss is called free: share of the step, and bytes."""


def _costs(one: Lost, of_s: float) -> bool:
    return abs(one.step_s or 0.0) >= FREE_SHARE * of_s or abs(one.peak_bytes or 0) >= FREE_BYTES


def _cost(step_s: float, peak_bytes: int, of_s: float) -> str:
    """``+65.6 s a step (+30%), +1.2 GiB``."""
    from hzplan.cli import console

    sign = "+" if peak_bytes >= 0 else "-"
    return f"{console.difference(of_s + step_s, of_s)} a step, {sign}{console.size(abs(peak_bytes))}"
