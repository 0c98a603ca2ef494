"""``hzplan review``: what a user's own setting costs, and what would be better."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hzplan.core.wire import KEPT
from hzplan.errors import JobFailed, NoPlanFits, UserError

if TYPE_CHECKING:
    from hzplan.cli.solve_report import SolveReport
    from hzplan.formats.profile import Profile
    from hzplan.review.setting import Setting
    from hzplan.solver.baseline import Baseline
    from hzplan.solver.schemes import Row
    from hzplan.solver.solve import Request


def command(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="What hzplan profile wrote.")],
    setting: Annotated[
        str,
        typer.Argument(
            metavar="FILE|SETTING",
            help="Python that calls fully_shard, FSDP or DDP (which is read, not run), a DeepSpeed "
            "configuration, a plan, or as in hsdp,recompute=selective,micro_batch=1.",
        ),
    ],
    global_batch: Annotated[
        int | None,
        typer.Option(help="Sequences per step, over all ranks; by default what the file says."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Budget per rank, as in 72GiB; by default the device's, less a reserve."),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="How much of the host's memory the plan may take for a rank.")
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(help="Sequences per forward pass of yours; by default the file's, or the best."),
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            metavar="none|all|selective|every-K|operations",
            help="What yours recomputes, where the file does not tell; by default the best of these.",
        ),
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds to search at most.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Say what your setting costs, what would be better, by how much, from what, and how sure that is.

    Writes nothing. Where nothing fits the budget it exits with 3, as hzplan solve does.

    Example: hzplan review profile.json train.py --global-batch 512 --memory 72GiB
    """
    from hzplan.cli import console
    from hzplan.cli.quantities import parse_bytes
    from hzplan.cli.solve import nothing_fits
    from hzplan.cost.memory import budget_of
    from hzplan.formats.profile import Profile
    from hzplan.solver.solve import Failed, Infeasible, Request, SearchState, solve

    if not 0 < time_limit < float("inf"):
        raise UserError("--time-limit must be a number above 0")
    loaded = Profile.load(profile)
    read = _read(setting, loaded)
    answered = _question_of(setting, read)
    batch = global_batch or (read.global_batch if read is not None else None)
    batch = batch or (answered.global_batch if answered is not None else None)
    if batch is None:
        raise UserError(f"{setting} does not say how many sequences a step has; add --global-batch")
    request = Request(
        parse_bytes(memory, "--memory") if memory else budget_of(loaded),
        batch,
        time_limit_s=time_limit,
        clip=read.clip is not False if read is not None else True,
        host_bytes=parse_bytes(host_memory, "--host-memory") if host_memory else 0,
    )
    if answered is not None:
        names = ("clip", "reduce_dtype", "narrow_sums", "wire")
        request = replace(request, **{name: getattr(answered, name) for name in names})
        if not host_memory:
            request = replace(request, host_bytes=answered.host_bytes)
    elif read is not None and read.reduce_dtype == "bfloat16":
        # Its runtime sums in what travels, where a library sums.
        sums = loaded.cluster.backend == "nccl"
        request = replace(request, reduce_dtype="bfloat16", narrow_sums=sums)
    own = _baseline(setting, read, loaded, request, micro_batch, recompute)
    with console.Bar("review") as bar:

        def show(state: SearchState) -> None:
            bar.update(str(state), min(1.0, state.seconds / request.time_limit_s))

        outcome = solve(loaded, request, show, interruptible=True, baseline=own)
    if isinstance(outcome, Infeasible):
        raise NoPlanFits(nothing_fits(loaded, request, outcome, as_json=as_json))
    if isinstance(outcome, Failed):
        raise JobFailed(outcome.reason)
    row = next(row for row in outcome.rows if row.name == own.name)
    report = _report(loaded, request, outcome, row, profile)
    opened = _open(read, micro_batch, recompute)
    if as_json:
        print(json.dumps(_as_json(report, row, read, opened)))
    else:
        _show(report, row, setting, read, opened, profile)


def _question_of(setting: str, read: Setting | None) -> Request | None:
    """The question that a plan answers; None where the setting is none."""
    from hzplan.formats.plan import Plan
    from hzplan.solver.guard import request_of

    return request_of(Plan.load(Path(setting))) if read is None and setting.endswith(".json") else None


def _read(setting: str, profile: Profile) -> Setting | None:
    """What a file says; None of a plan, or of a setting in words."""
    from hzplan.review.read import read

    path = Path(setting)
    if path.suffix not in (".py", ".json"):
        return None
    found = read(path, profile.mesh)
    if found is not None and found.dtype == "float16":
        left = "fp16: taken as bf16, which takes as long; the plan needs no loss scaling"
        reduce = "bfloat16" if found.reduce_dtype == "float16" else found.reduce_dtype
        found = replace(found, dtype="bfloat16", reduce_dtype=reduce, open=(*found.open, left))
    if found is not None and found.dtype not in (None, profile.model.dtype):
        raise UserError(
            f"{path} computes in {found.dtype}, the profile in {profile.model.dtype}; profile with --dtype "
            f"{'bf16' if found.dtype == 'bfloat16' else 'fp32'}"
        )
    return found


def _baseline(
    setting: str,
    read: Setting | None,
    profile: Profile,
    request: Request,
    micro_batch: int | None,
    recompute: str | None,
) -> Baseline:
    from hzplan.cli.solve import own_setting

    text = setting if read is None else read.as_baseline
    if text.endswith(".json"):
        if micro_batch is not None or recompute is not None:
            raise UserError("--micro-batch and --recompute are what a plan says itself; leave them out")
        return own_setting(text, profile, request)
    asked = {"micro_batch": micro_batch, "recompute": recompute}
    kept = [part for part in text.split(",") if asked.get(part.partition("=")[0].strip()) is None]
    more = [f"{name}={value}" for name, value in asked.items() if value is not None]
    try:
        return own_setting(",".join([*kept, *more]), profile, request)
    except UserError as error:  # of the option that has the same grammar
        raise UserError(str(error).replace("--baseline", setting)) from None


def _report(profile: Profile, request: Request, solved: Any, row: Row, path: Path) -> SolveReport:
    """The plan beside the user's own setting."""
    from hzplan.cli.solve_report import SolveReport
    from hzplan.solver.emit import emit
    from hzplan.solver.gain import over

    plan = emit(profile, request, solved, profile_path=path, plan_path=Path("plan.json"))
    return SolveReport(profile, request, solved, over(solved.best, row, request), plan, Path("plan.json"))


def _open(read: Setting | None, micro_batch: int | None, recompute: str | None) -> list[str]:
    """What the file leaves open and nobody has said."""
    found = [*(read.open if read is not None else ())]
    if recompute is not None:
        found = [text for text in found if "--recompute" not in text]
    if read is not None and read.micro_batch is None and micro_batch is None:
        found.append("micro-batch: the best is taken; say yours with --micro-batch")
    return found


def _as_json(report: SolveReport, row: Row, read: Setting | None, opened: list[str]) -> dict[str, object]:
    assert report.gained is not None, "a row was given"
    gained = report.gained
    return {
        "read": [*(read.said if read is not None else ())],
        "open": opened,
        "yours": {
            "step_s": row.found.step_s,
            "peak_memory_bytes": row.found.memory.peak,
            "fits": row.fits,
            "micro_batch": row.found.micro_batch,
            "prefetch": row.found.schedule.prefetch,
        },
        "plan": {
            "step_s": report.plan.predicted.step_s,
            "peak_memory_bytes": report.plan.predicted.peak_memory_bytes,
            "gap": report.plan.proof.gap,
        },
        "gain": {
            "share": gained.share,
            "is_the_plan": gained.same,
            "without": {part.freedom: part.share for part in gained.parts},
        },
        "modelled": report.profile.modelled is not None,
    }


def _show(
    report: SolveReport, row: Row, setting: str, read: Setting | None, opened: list[str], profile: Path
) -> None:
    from rich.table import Table

    from hzplan.cli import console

    out, said = console.stdout(), Table.grid(padding=(0, 2))
    said.add_column()
    said.add_column(overflow="fold")
    budget = console.size(report.request.memory_bytes)
    said.add_row("read", f"{setting}: {'; '.join(read.said)}" if read is not None else setting)
    fits = f" of {budget}" if row.fits else f", which do not fit the budget of {budget}"
    found = row.found
    said.add_row(
        "yours",
        f"{console.duration(found.step_s)} a step, {console.size(found.memory.peak)}{fits}; micro-batch "
        f"{found.micro_batch}, prefetch {found.schedule.prefetch}, recompute {report.recompute(found)}",
    )
    predicted = report.plan.predicted
    said.add_row(
        "the plan",
        f"{console.duration(predicted.step_s)} a step, {console.size(predicted.peak_memory_bytes)}",
    )
    said.add_row("gain", _gain(report, row))
    if report.gained is not None and report.gained.parts and report.gained.share > 0:
        said.add_row("from", report.parts())
    said.add_row("how sure", report.expected_error())
    for text in opened:
        said.add_row("open", text)
    out.print(said)
    request = report.request
    more = [] if request.clip else ["--no-clip"]
    if request.reduce_dtype == "bfloat16":
        more.append(f"--reduce-dtype bf16{'-sum' * request.narrow_sums}")
    if request.wire is not None:
        more.append(f"--wire {request.wire.admitting}")
        if request.wire.kept != KEPT:
            more.append(f"--wire-exact {shlex.quote(','.join(request.wire.kept))}")
    if request.host_bytes:
        more.append(f"--host-memory {request.host_bytes}")
    out.print(
        f"next: hzplan solve {profile} --global-batch {request.global_batch} --memory "
        f"{request.memory_bytes} {' '.join([*more, '-o plan.json'])}",
        soft_wrap=True,
    )


def _gain(report: SolveReport, row: Row) -> str:
    gained = report.gained
    assert gained is not None, "a row was given"
    if gained.same:
        return "none: no plan is faster than yours by more than what counts as equal"
    if gained.share < 0 and not row.fits:
        return f"none: yours would be {-gained.share:.1%} faster, if it fitted"
    if gained.share < 0:
        why = "which counts as equal" if row.allowed else "and answers another question"
        return f"none: yours is {-gained.share:.1%} faster, {why}"
    return f"{gained.share:.1%} faster than yours" + ("" if row.fits else ", which does not fit")
