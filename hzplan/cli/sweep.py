"""``--sweep``: a table of plans over budgets, numbers of nodes or networks, and a figure of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hzplan.cli import console
from hzplan.cli.paths import check_writable
from hzplan.cli.quantities import parse_bytes
from hzplan.cost.collectives import MOST_NODES, nodes_of, with_nodes
from hzplan.cost.memory import budget_of
from hzplan.cost.parallel import share
from hzplan.errors import JobFailed, NoPlanFits, UserError
from hzplan.formats.certificate import save
from hzplan.formats.parallel import ModelParallel
from hzplan.formats.profile import Profile
from hzplan.show import front
from hzplan.show.readable import at_most
from hzplan.solver.certificate import certify
from hzplan.solver.emit import emit
from hzplan.solver.evaluate import Evaluation
from hzplan.solver.solve import Failed, Request, SearchState, Solved
from hzplan.solver.sweep import Point, on_front, sweep, with_network

AXES = "memory=40GiB,60GiB,80GiB, nodes=8,16,32, or network=0.5,1,2 (times as fast as profiled)"


def run(
    text: str,
    profile: Profile,
    request: Request,
    path: Path,
    output: Path,
    *,
    keep: Sequence[Path],
    parallel: ModelParallel | None,
    reserved: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Solve every point; plans of other budgets or numbers of nodes are written beside ``output``, one each,
    those of other nodes with their profiles, each of a rank's share under what is ``parallel``.

    ``keep``: other files that are not to be written. ``reserved``: the budget is the device's memory, less
    the reserve, which depends on the nodes.
    Plans for another network are shown only: no cluster has it. ``plot``: a figure of all.
    """
    check_plot(plot, [path, *keep])
    points = solved_at(text, profile, request, parallel, reserved=reserved)
    written = [_written(point, path, output, keep) for point in points]
    rows = [
        _row(point, best, plan) for point, best, plan in zip(points, on_front(points), written, strict=True)
    ]
    if plot is not None:
        axis = text.partition("=")[0]
        front.draw(profile.model.name, PLOTTED[axis], [_place(point) for point in points], plot)
    if as_json:
        print(json.dumps({"sweep": rows}))
        return
    show(profile, rows)
    if plot is not None:
        console.stdout().print(f"plot: {plot}", soft_wrap=True)


def check_plot(plot: Path | None, keep: Sequence[Path]) -> None:
    """UserError before any work where a figure cannot be drawn or written."""
    if plot is not None:
        check_writable(plot, keep=keep)
        front.check()


def solved_at(
    text: str,
    profile: Profile,
    request: Request,
    parallel: ModelParallel | None = None,
    *,
    reserved: bool = False,
) -> list[Point]:
    """Every point's answer; NoPlanFits or JobFailed where there is no plan at any."""
    asked = _points(text, profile, request, parallel, reserved=reserved)
    with console.Bar("solve") as bar:

        def show(number: int, label: str, state: SearchState) -> None:
            bar.update(f"{label}: {state}", number / len(asked))

        points = sweep(asked, show)
    if all(isinstance(point.outcome, Failed) for point in points):
        raise JobFailed(f"--sweep {text}: no plan was found in the time at any point; raise --time-limit")
    if not any(isinstance(point.outcome, Solved) for point in points):
        raise NoPlanFits(f"--sweep {text}: no plan fits at any point; try hzplan solve without --sweep")
    return points


def beside(
    found: Evaluation, gap: float, points: Sequence[Point], profile: Profile, plot: Path | None
) -> list[dict[str, object]]:
    """A plan and what its question answers at other points: rows as ``run`` prints them, and a figure in
    which the plan is marked."""
    axis, _, _ = points[0].label.partition("=")
    own = {"memory": found.memory.peak / 2**30, "nodes": float(nodes_of(profile)), "network": 1.0}[axis]
    if plot is not None:
        places = [_place(point) for point in points]
        front.draw(profile.model.name, PLOTTED[axis], places, plot, (own, found.step_s))
    row: dict[str, object] = {"point": "this plan", "status": "given", "gap": gap, "step_s": found.step_s}
    row |= {"peak_memory_bytes": found.memory.peak, "micro_batch": found.micro_batch, "on_front": None}
    others = [_row(point, best, None) for point, best in zip(points, on_front(points), strict=True)]
    return [row, *others]


PLOTTED = {
    "memory": "memory per rank that the plan takes (GiB)",
    "nodes": "nodes",
    "network": "network, times as fast as profiled",
}


def _place(point: Point) -> tuple[float, float] | None:
    if not isinstance(point.outcome, Solved):
        return None
    axis, _, value = point.label.partition("=")
    best = point.outcome.best
    return best.memory.peak / 2**30 if axis == "memory" else float(value), best.step_s


def _points(
    text: str, profile: Profile, request: Request, parallel: ModelParallel | None, *, reserved: bool
) -> list[tuple[str, Profile, Request]]:
    axis, _, given = text.partition("=")
    values = list(dict.fromkeys(value.strip() for value in given.split(",") if value.strip()))
    if axis not in ("memory", "nodes", "network") or not values:
        raise UserError(f"--sweep {text}: write {AXES}")
    if axis == "nodes":
        moved = {value: with_nodes(profile, _count(value, text)) for value in values}
        if parallel is not None:
            moved = {value: share(one, parallel) for value, one in moved.items()}
        return [
            (
                f"nodes={value}",
                one,
                replace(request, memory_bytes=budget_of(one)) if reserved else request,
            )
            for value, one in moved.items()
        ]
    if axis == "memory":
        return [
            (f"memory={value}", profile, replace(request, memory_bytes=parse_bytes(value, "--sweep memory")))
            for value in values
        ]
    return [(f"network={value}", with_network(profile, _factor(value, text)), request) for value in values]


def _count(value: str, text: str) -> int:
    if not value.isdecimal() or len(value) > 9 or not 1 <= int(value) <= MOST_NODES:
        raise UserError(f"--sweep {text}: {value} is no number of nodes; write {AXES}")
    return int(value)


def _factor(value: str, text: str) -> float:
    try:
        factor = float(value)
    except ValueError:
        factor = 0.0
    if not 1e-3 <= factor <= 1e3:
        raise UserError(f"--sweep {text}: {value} is no number between 0.001 and 1000; write {AXES}")
    return factor


def _written(point: Point, path: Path, output: Path, keep: Sequence[Path]) -> Path | None:
    if not isinstance(point.outcome, Solved) or point.label.startswith("network="):
        return None
    plan_path = output.with_name(f"{output.stem}.{point.label.replace('=', '-')}{output.suffix}")
    if point.label.startswith("nodes="):
        check_writable(made := plan_path.with_name(f"{plan_path.stem}.profile.json"), keep=[path, *keep])
        point.profile.save(made)
        path = made
    plan = emit(point.profile, point.request, point.outcome, profile_path=path, plan_path=plan_path)
    save(plan, certify(point.profile, point.outcome), plan_path)
    return plan_path


def _row(point: Point, best_of: bool, plan: Path | None) -> dict[str, object]:
    row: dict[str, object] = {"point": point.label}
    if isinstance(point.outcome, Solved):
        best = point.outcome.best
        row |= {
            "status": point.outcome.status,
            "gap": point.outcome.gap,
            "step_s": best.step_s,
            "peak_memory_bytes": best.memory.peak,
            "micro_batch": best.micro_batch,
            "on_front": best_of if point.label.startswith("memory") else None,
            "plan": str(plan) if plan else None,
        }
    else:
        row["status"] = type(point.outcome).__name__.lower()
    return row


def show(profile: Profile, rows: Sequence[dict[str, object]]) -> None:
    out = console.stdout()
    table = console.table(profile.model.name, "point", "step", "peak", "gap", "dearer, not faster")
    for row in rows:
        if "step_s" in row:
            table.add_row(
                str(row["point"]),
                console.duration(float(str(row["step_s"]))),
                console.size(int(str(row["peak_memory_bytes"]))),
                at_most(float(str(row["gap"]))),
                "yes" if row["on_front"] is False else "",
            )
        else:
            table.add_row(str(row["point"]), str(row["status"]), "", "", "")
    out.print(table)
    for row in rows:
        if row.get("plan"):
            out.print(f"{row['point']}: {row['plan']}", soft_wrap=True)
