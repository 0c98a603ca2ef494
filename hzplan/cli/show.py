"""``hzplan show``: why a plan takes as long as it does, and what would change that."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hzplan.errors import UserError

if TYPE_CHECKING:
    from hzplan.formats.metrics import Measured
    from hzplan.formats.plan import Plan
    from hzplan.formats.profile import Profile
    from hzplan.show.report import Beside
    from hzplan.solver.evaluate import Evaluation
    from hzplan.solver.explain import Alternative, Chain
    from hzplan.solver.schemes import Row
    from hzplan.solver.sweep import Point

SHOWN_SHARE = 1e-4
"""Share of a step below which a part of it is not worth words."""
SHOWN = 8
"""Rows of the table of alternatives."""
MORE_BYTES = 2**30
"""Bytes that --what-if adds to the budget."""


def command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan, as hzplan solve wrote it.")],
    unit: Annotated[
        str | None, typer.Option(help="Also what this unit's tensors would cost under other shards.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEME", help="Also this plan beside zero3, hsdp, zero1 or ddp, at their best."
        ),
    ] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Solve again with 1 GiB more, and with a network twice as fast.")
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=VALUES",
            help="Also its question solved again at other points, as hzplan solve --sweep takes them.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Also draw that, the plan marked.")
    ] = None,
    metrics: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also what a run of it measured, as run --metrics wrote it."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also write a report to open in a browser: one file, needs no network."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the predicted step, for ui.perfetto.dev."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Say what a plan's step waits for, one after the other, and how busy every link is.

    The profile must be where the plan says. Only --html, --trace and --plot write files.

    Example: hzplan show plan.json --metrics metrics.jsonl --html report.html
    """
    from hzplan.formats.metrics import read_metrics
    from hzplan.formats.plan import Plan
    from hzplan.formats.source import profile_of, profile_path
    from hzplan.solver.evaluate import replay
    from hzplan.solver.explain import alternatives, longest_chain, sharing_s, tier_shares
    from hzplan.solver.report import beside

    if plot is not None and sweep is None:
        raise UserError("--plot draws what --sweep finds; give that too")
    loaded = Plan.load(plan)
    profile = profile_of(plan, loaded)
    measured = read_metrics(metrics) if metrics is not None else None
    if html is not None:
        _check_report(html, [plan, profile_path(plan, loaded), *([metrics] if metrics is not None else [])])
    found = replay(loaded, profile, plan)
    if trace is not None:
        _write_trace(trace, [plan, profile_path(plan, loaded)], found)
    chain = longest_chain(found, loaded.cluster.tier_names)
    budget = loaded.source.memory_budget_bytes
    host = loaded.source.host_memory_bytes or 0
    others = alternatives(found, unit, budget, host) if unit is not None else []
    scheme = _scheme(against, loaded, profile) if against is not None else None
    better = _what_if(loaded, profile) if what_if else []
    swept = _sweep(sweep, plot, plan, loaded, profile, found) if sweep is not None else []
    compared = beside(found, measured) if measured is not None else []
    if html is not None:
        _write_report(html, plan, loaded, profile, found, measured, better)
    if as_json:
        shares = dict(zip(loaded.cluster.tier_names, tier_shares(found), strict=True))
        answer = {
            "step_s": found.step_s,
            "chain": asdict(chain),
            "sharing_s": sharing_s(found),
            "busy": shares,
        }
        if unit is not None:
            answer["alternatives"] = [_alternative(profile, other) for other in others]
        if scheme is not None:
            peak = scheme.memory.peak
            answer["against"] = {"step_s": scheme.step_s, "peak_memory_bytes": peak, "fits": peak <= budget}
        if what_if:
            answer["what_if"] = [
                {"what": point.label, "step_s": _step_s(point), "answer": _answer(point)} for point in better
            ]
        if sweep is not None:
            answer["sweep"] = swept
        if measured is not None:
            answer["measured"] = {"steps": measured.steps, "beside": [asdict(row) for row in compared]}
        if html is not None:
            answer["html"] = str(html)
        print(json.dumps(answer))
        return
    from hzplan.cli import console
    from hzplan.cli import sweep as sweeping

    _show(loaded, found, chain)
    if unit is not None:
        _show_alternatives(found, unit, others)
    if scheme is not None:
        _show_against(str(against), found, scheme)
    _show_what_if(found, better)
    if swept:
        sweeping.show(profile, swept)
    if plot is not None:
        console.stdout().print(f"plot: {plot}", soft_wrap=True)
    if measured is not None:
        _show_measured(measured.steps, compared)
    if html is not None:
        console.stdout().print(f"Wrote {html}; open it in a browser.", soft_wrap=True)


def _sweep(
    text: str, plot: Path | None, path: Path, plan: Plan, profile: Profile, found: Evaluation
) -> list[dict[str, object]]:
    """The plan's question at other points."""
    from hzplan.cli import sweep as sweeping
    from hzplan.formats.source import profile_path
    from hzplan.solver.guard import request_of

    sweeping.check_plot(plot, [path, profile_path(path, plan)])
    points = sweeping.solved_at(text, profile, request_of(plan))
    return sweeping.beside(found, plan.proof.gap, points, profile, plot)


def _write_trace(trace: Path, read: list[Path], found: Evaluation) -> None:
    from hzplan.cli.paths import check_writable
    from hzplan.formats.base import write_text
    from hzplan.show.trace import document, predicted

    check_writable(trace, keep=read)
    write_text(trace, document({"predicted": predicted(found.schedule, found.predicted)}))


def _check_report(html: Path, read: list[Path]) -> None:
    """UserError before any work where the report cannot be drawn or written."""
    from hzplan.cli.paths import check_writable
    from hzplan.show.page import check

    check()
    check_writable(html, keep=read)


def _write_report(
    html: Path,
    path: Path,
    plan: Plan,
    profile: Profile,
    found: Evaluation,
    measured: Measured | None,
    better: list[Point],
) -> None:
    from hzplan.cli.expectation import described
    from hzplan.formats.base import write_text
    from hzplan.show.page import page
    from hzplan.show.report import WhatIf
    from hzplan.solver.guard import request_of
    from hzplan.solver.report import build_report

    report = build_report(
        str(path),
        plan,
        profile,
        found,
        known(plan, profile),
        request_of(plan),
        measured,
        expected=described(profile, plan),
        what_if=[WhatIf(point.label, _step_s(point), _answer(point)) for point in better],
    )
    write_text(html, page(report))


def _scheme(name: str, plan: Plan, profile: Profile) -> Evaluation:
    by_name = {row.name.lower().replace("-", ""): row.found for row in known(plan, profile)}
    if name not in by_name:
        raise UserError(f"--against {name}: choose one of {', '.join(by_name)}")
    return by_name[name]


def known(plan: Plan, profile: Profile) -> list[Row]:
    """The known schemes at their best, on the plan's question; not allowed where its pins or target forbid
    them."""
    from hzplan.solver.guard import request_of
    from hzplan.solver.schemes import Settings
    from hzplan.solver.search import grammar_for, pins_of
    from hzplan.solver.solve import searches_of

    request = request_of(plan)
    pins, grammar = pins_of(profile, request), grammar_for(profile, request)

    def allowed(found: Evaluation) -> bool:
        return pins.keep(profile, found.levels) and (grammar is None or grammar.says(found))

    settings = Settings(searches_of(profile, replace(request, host_bytes=0)), request)
    rows = map(settings.as_fast, settings.rows())
    return [replace(row, allowed=allowed(row.found)) for row in rows]


def _what_if(plan: Plan, profile: Profile) -> list[Point]:
    """The plan's question solved with 1 GiB more, and with a network twice as fast."""
    from hzplan.cli import console
    from hzplan.solver.guard import request_of
    from hzplan.solver.sweep import sweep, with_network

    request = request_of(plan)
    more = replace(request, memory_bytes=request.memory_bytes + MORE_BYTES)
    asked = [("the same question again", profile, request), ("1 GiB more", profile, more)]
    asked.append(("a network twice as fast", with_network(profile, 2.0), request))
    with console.Bar("show") as bar:
        return sweep(
            asked, lambda number, label, standing: bar.update(f"{label}: {standing}", number / len(asked))
        )


def _step_s(point: Point) -> float | None:
    from hzplan.solver.solve import Solved

    return point.outcome.best.step_s if isinstance(point.outcome, Solved) else None


def _answer(point: Point) -> str:
    from hzplan.solver.solve import Infeasible, Solved

    if isinstance(point.outcome, Solved):
        return point.outcome.status
    return "nothing fits" if isinstance(point.outcome, Infeasible) else point.outcome.reason


def _alternative(profile: Profile, other: Alternative) -> dict[str, object]:
    figures = asdict(other)
    levels = figures.pop("levels")
    return {"shards": levels and list(levels.shards(profile.mesh)), **figures}


def _show(plan: Plan, found: Evaluation, chain: Chain) -> None:
    from hzplan.cli import console
    from hzplan.show import readable
    from hzplan.solver.explain import sharing_s, tier_shares

    out = console.stdout()
    title = f"what a step of {plan.model.name} waits for, one after the other"
    table = console.table(title, "", "seconds", "share", "mostly of")
    table.columns[3].justify = "left"
    for part in chain.parts:
        table.add_row(
            part.what,
            console.duration(part.seconds),
            f"{part.seconds / chain.seconds:.1%}" if chain.seconds else "",
            ", ".join(part.units),
        )
    out.print(table)
    if not isinstance(plan.replica_sync, str):
        out.print(f"This is one group's step: {readable.relaxed(plan.replica_sync)}.")
    if chain.binding is not None:
        out.print(
            f"These are {console.duration(chain.seconds)} in all; {chain.binding.what} is longer: "
            f"{console.duration(chain.binding.seconds)}."
        )
    said = f"predicted {console.duration(found.step_s)}"
    if sharing_s(found) > SHOWN_SHARE * found.step_s:
        wakeups = ", and streams wake each other up" if found.model.interference.wakeup_ns else ""
        shared = "links and processors are" if found.schedule.order is None else "processors are"
        said += f", of which {console.duration(sharing_s(found))} because {shared} shared{wakeups}"
    if found.schedule.order is not None:
        said += "; each tier carries one message at a time"
    out.print(said)
    busy = zip(plan.cluster.tier_names, tier_shares(found), strict=True)
    out.print("busy: " + ", ".join(f"{name} {share:.0%} of the step" for name, share in busy))


def _show_alternatives(found: Evaluation, unit: str, others: list[Alternative]) -> None:
    from hzplan.cli import console

    table = console.table(f"{unit} otherwise", "choice", "step", "memory", "fits")
    shown = others[:SHOWN]
    for other in [*shown, *(other for other in others[SHOWN:] if other.levels is None)]:
        more = other.peak_bytes - found.memory.peak
        table.add_row(
            other.what,
            console.difference(other.step_s, found.step_s) if other.step_s is not None else "",
            f"{'+' if more >= 0 else '-'}{console.size(abs(more))}",
            "yes" if other.fits else "no",
        )
    console.stdout().print(table)


def _show_against(name: str, found: Evaluation, other: Evaluation) -> None:
    from hzplan.cli import console

    table = console.table(f"beside {name}", "", "this plan", name)
    table.add_row("step", console.duration(found.step_s), console.duration(other.step_s))
    sent = found.communication_ns / 1e9, other.communication_ns / 1e9
    table.add_row("links at work", *map(console.duration, sent))
    theirs = other.memory.by_category()
    for category, nbytes in found.memory.by_category().items():
        if nbytes or theirs.get(category):
            table.add_row(
                category.replace("_", " "), console.size(nbytes), console.size(theirs.get(category, 0))
            )
    table.add_row("memory at the peak", console.size(found.memory.peak), console.size(other.memory.peak))
    console.stdout().print(table)


def _show_measured(steps: int, compared: list[Beside]) -> None:
    from hzplan.cli import console

    table = console.table(
        f"predicted beside {steps} measured steps", "", "predicted", "measured", "difference"
    )
    for row in compared:
        text = console.size if row.bytes else console.duration
        change = f"{row.measured / row.predicted - 1:+.1%}" if row.predicted else ""
        table.add_row(row.what, text(row.predicted), text(row.measured), change)
    console.stdout().print(table)


def _show_what_if(found: Evaluation, better: list[Point]) -> None:
    from hzplan.cli import console

    for point in better:
        step_s = _step_s(point)
        if step_s is None:
            console.stdout().print(f"{point.label}: {_answer(point)}")
        else:
            change = step_s / found.step_s - 1 if found.step_s else 0.0
            console.stdout().print(f"{point.label}: {console.duration(step_s)} ({change:+.1%})")
