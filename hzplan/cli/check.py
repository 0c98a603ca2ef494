"""``hzplan check``: fail the build when a plan in the repository got worse."""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hzplan.errors import CheckFailed, UserError, one_line, printable

if TYPE_CHECKING:
    from hzplan.solver.guard import Verdict

TOLERANCES = "check.toml"
"""The file beside the plans with a table ``[tolerance]`` of shares by plan, and perhaps ``default``."""


def command(
    plans: Annotated[Path, typer.Argument(metavar="[PLANS]", help="A plan, or a folder of plans.")] = Path(
        "plans"
    ),
    update: Annotated[bool, typer.Option("--update", help="Write what solving again gives.")] = False,
    replay_only: Annotated[
        bool, typer.Option("--replay-only", help="Do not solve again; replay the recorded choices.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Also train narrow copies of built-in models, as verify does."),
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="How many plans are checked at once.")] = 1,
    junit: Annotated[Path | None, typer.Option(help="Write a JUnit report for a CI system here.")] = None,
    summary: Annotated[Path | None, typer.Option(help="Append a Markdown table to this file.")] = None,
    github: Annotated[
        bool,
        typer.Option(
            "--github", help="Print annotations for GitHub, and add the table to its page of the job."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Solve every plan's question again from its profile; exit 1 when one got slower or larger.

    A figure may grow by 0.5 %, or by what the table tolerance in PLANS/check.toml says for a plan or as
    default. Where a proof lies beside a plan (.proof), it is multiplied out, and its bounds must follow. No
    plan is written unless --update is given. Exit 2 when a plan or its profile cannot be read; the others
    are checked all the same.

    Example: hzplan check plans/
    Example: hzplan check plans/ --junit report.xml --github
    """
    from hzplan.cli import check_report, console
    from hzplan.cli.paths import check_writable
    from hzplan.formats.certificate import save
    from hzplan.solver.guard import tolerance_of

    if update and replay_only:
        raise UserError("--update needs to solve again; leave --replay-only out")
    if github and as_json:
        raise UserError("--github and --json both go to stdout; choose one")
    paths = _plans(plans)
    folder = plans if plans.is_dir() else plans.parent
    page = os.environ.get("GITHUB_STEP_SUMMARY") if github else None
    summaries = [path for path in (summary, Path(page) if page else None) if path is not None]
    read = [*paths, *_profiles(paths), folder / TOLERANCES]
    for report in summaries:
        check_writable(report, keep=read)
    if junit is not None:
        check_writable(junit, keep=read)
        if junit.resolve() in [path.resolve() for path in summaries]:
            raise UserError(f"--junit {junit}: the summary goes there; name another file")
    tolerances = _tolerances(folder)
    judge = partial(_checked, replay_only=replay_only, verify=verify, update=update)
    asked = [(path, tolerance_of(path, tolerances)) for path in paths]
    with console.Bar("check") as bar:
        verdicts = list(_all_checked(judge, asked, jobs, bar.update))
    if update:
        for verdict in verdicts:
            if verdict.fresh is not None and verdict.certificate is not None and verdict.trains:
                save(verdict.fresh, verdict.certificate, verdict.path)
    check_report.report(verdicts, as_json=as_json, junit=junit, summaries=summaries, github=github)
    _conclude(verdicts, f"hzplan check {plans}", update=update)


def _all_checked(
    judge: Callable[[Path, float], Verdict],
    asked: Sequence[tuple[Path, float]],
    jobs: int,
    update: Callable[[str, float], None],
) -> Iterator[Verdict]:
    """The verdicts on plans with their tolerances, in their order; ``jobs`` at once, each in a process of its
    own."""
    jobs = min(jobs, len(asked))
    if jobs <= 1:
        for number, (path, tolerance) in enumerate(asked):
            update(printable(path), number / len(asked))
            yield judge(path, tolerance)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    try:
        pending = [pool.submit(judge, *one) for one in asked]
        for number, ((path, _), one) in enumerate(zip(asked, pending, strict=True)):
            update(printable(path), number / len(asked))
            try:
                yield one.result()
            except BrokenProcessPool:
                raise UserError(
                    f"{path}: its check was killed, perhaps for want of memory; use fewer --jobs"
                ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _checked(path: Path, tolerance: float, *, replay_only: bool, verify: bool, update: bool) -> Verdict:
    """A plan's verdict; an unreadable file is a verdict too, so that other plans are still checked."""
    from hzplan.solver.guard import Verdict, guard

    try:
        verdict = guard(path, replay_only=replay_only, tolerance=tolerance)
    except UserError as error:
        return Verdict(path, unreadable=str(error))
    return _verified(verdict, fresh=update) if verify and not verdict.unreadable else verdict


def _conclude(verdicts: Sequence[Verdict], command: str, *, update: bool) -> None:
    """Raise what decides the exit code, the worst first."""
    unreadable = [verdict for verdict in verdicts if verdict.unreadable is not None]
    failed = [verdict for verdict in verdicts if not verdict.ok]
    if unreadable:
        more = f" (and {len(unreadable) - 1} more like it, above)" if len(unreadable) > 1 else ""
        raise UserError(f"{unreadable[0].unreadable}{more}")
    if wrong := [verdict for verdict in failed if not verdict.trains]:
        raise CheckFailed(
            f"{_named(wrong)}: training under it is not training in one process, which no update mends; "
            "see hzplan verify"
        )
    if update and (beyond := [verdict for verdict in failed if verdict.fresh is None]):
        raise CheckFailed(
            f"{_named(beyond)}: not updated, because solving again found no plan (why is said above)"
        )
    if (
        refused := [v for v in failed if any(c.kind == "proof" and c.fails for c in v.changes)]
    ) and not update:
        raise CheckFailed(
            f"{_named(refused)}: the proof does not hold (why is said above); write what is proven now with "
            f"{command} --update"
        )
    if failed and not update:
        raise CheckFailed(
            f"{len(failed)} of {len(verdicts)} plans got worse: {_named(failed)}; "
            f"accept with {command} --update"
        )


def _named(verdicts: Sequence[Verdict]) -> str:
    return ", ".join(str(verdict.path) for verdict in verdicts)


def _profiles(paths: Sequence[Path]) -> list[Path]:
    """Of those plans that can be read."""
    from hzplan.formats.plan import Plan
    from hzplan.formats.source import profile_path

    found = []
    for path in paths:
        with contextlib.suppress(UserError):
            found.append(profile_path(path, Plan.load(path)))
    return found


def _tolerances(folder: Path) -> Mapping[str, float]:
    """By plan; UserError naming file and field."""
    path = folder / TOLERANCES
    if not path.exists():
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, RecursionError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: not TOML ({error})") from None
    found = table.pop("tolerance", {})
    if table or not isinstance(found, dict):
        raise UserError(f"{path}: it has one table, [tolerance], of shares by plan")
    for name, share in found.items():
        if isinstance(share, dict):
            raise UserError(f"{path}: field tolerance.{name}: write a name that has dots in quotes")
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise UserError(f"{path}: field tolerance.{name}: {share!r} is not a share, as in 0.005")
        if name != "default" and not os.path.exists(folder / f"{name}.json"):
            raise UserError(f"{path}: field tolerance.{name}: there is no {name}.json beside it")
    return found


def _verified(verdict: Verdict, *, fresh: bool) -> Verdict:
    """The verdict with the result of training a narrow copy, under the recorded or the ``fresh`` plan.

    A factory's model is not run.
    """
    from hzplan.formats.plan import Plan
    from hzplan.models.workload import BUILT_IN
    from hzplan.solver.guard import Change
    from hzplan.training.verify import verify

    plan = verdict.fresh if fresh and verdict.fresh is not None else Plan.load(verdict.path)
    if plan.parallel is not None:
        said = Change("training", f"a rank's share ({plan.parallel}) was not run", False)
    elif not plan.model.name.startswith(BUILT_IN):
        said = Change("training", f"{plan.model.name} is a factory and was not run; use hzplan verify", False)
    else:
        try:
            found = verify(plan)
        except UserError as error:
            return replace(verdict, unreadable=f"{verdict.path}: cannot be verified: {error}")
        except Exception as error:
            return replace(verdict, unreadable=f"{verdict.path}: cannot be verified: {one_line(error)}")
        if found.ok:
            return verdict
        said = Change("training", f"differs from one process, farthest in {found.worst}", True)
    return replace(verdict, changes=(*verdict.changes, said))


def _is_another(path: Path) -> bool:
    """Whether a file is one of hzplan's and no plan: profiles lie beside plans that need them."""
    from hzplan.formats.base import read_json

    try:
        data = read_json(path)
    except UserError:
        return False  # which is said
    kind = data.get("format") if isinstance(data, dict) else None
    return isinstance(kind, str) and kind.startswith("hzplan.") and kind != "hzplan.plan"


def _plans(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(one for one in path.glob("*.json") if not _is_another(one))
        if not found:
            raise UserError(f"{path}: no plans (*.json) in this folder")
        return found
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    return [path]
