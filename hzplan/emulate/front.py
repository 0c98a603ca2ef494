"""``emulate.run``: checks the machine, runs the job in its namespaces, explains failures."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hzplan.emulate import advice
from hzplan.emulate.box import Box, JobOutcome, environment
from hzplan.emulate.cluster import Cluster
from hzplan.emulate.outcome import Ended, culprit
from hzplan.emulate.spec import Spec, log_name
from hzplan.errors import JobFailed, UserError

LAST_LINES = 15
OTHERS = 4
_WORLD = ("--net", "--mount", "--pid", "--fork", "--kill-child")
_AS_USER = ("--user", "--map-root-user")


def available() -> str | None:
    """Why this machine cannot emulate a cluster and what to do about it; None where it can, after a try."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        run(
            Cluster.parse("1x2", "none,1gbit"), ["true"], verify=False, stdout=null, stderr=null, say=_nothing
        )
    except UserError as error:
        return str(error)
    finally:
        os.close(null)
    return None


def run(
    cluster: Cluster,
    command: Sequence[str],
    *,
    logs: Path | None = None,
    verify: bool = True,
    say: Callable[[str], None] | None = None,
    stdout: int = 1,
    stderr: int = 2,
) -> int:
    """Run a command as one job on an emulated cluster; the job's exit code, see ``execute`` and
    ``JobOutcome``.

    ``logs``: where every rank's output is written, as ``node0-rank0.log``; by default a temporary folder that
    is kept when the job fails. ``verify``: measure the rates first. ``say`` is called with lines for the
    user, by default they go to stderr. ``stdout``, ``stderr``: descriptors that rank 0's output goes to.

    Raises UserError where the machine or the command is not up to it, JobFailed when the world is lost.
    """
    say = say or _to_stderr
    with _folder(logs) as (folder, keep):
        try:
            outcome = execute(cluster, command, folder, verify=verify, say=say, stdout=stdout, stderr=stderr)
        except JobFailed as error:
            if _holds_logs(folder):
                keep()
                raise JobFailed(f"{error}; logs of all ranks: {folder}") from None
            raise
        worst = culprit(outcome.ended)
        if outcome.received is not None:
            say(f"hzplan: ended by {outcome.received.name}")
        elif worst is not None:
            _explain(outcome.ended, worst, folder, say)
        if outcome.code != 0 and _holds_logs(folder):
            keep()
            say(f"logs of all ranks: {folder}")
        return outcome.code


def execute(
    cluster: Cluster,
    command: Sequence[str],
    logs: Path,
    *,
    verify: bool,
    say: Callable[[str], None],
    stdout: int,
    stderr: int,
) -> JobOutcome:
    """Run a job and return what became of it, without a word on failures; arguments and errors as ``run``."""
    missing = [tool for tool in ("ip", "tc", "unshare") if _tool(tool) is None]
    lacking = advice.lacks(sys.platform, missing)
    if lacking:
        raise UserError(lacking)
    spec = Spec(
        tiers=cluster.tiers,
        rates=cluster.rates,
        slow=cluster.slow,
        cuts=cluster.cuts,
        executable=_executable(command),
        command=tuple(command),
        ip=str(_tool("ip")),
        tc=str(_tool("tc")),
        logs=str(logs.resolve()),
        verify=verify,
        stdout=stdout,
        stderr=stderr,
    )
    root = os.geteuid() == 0
    # A container's root may have to be root of user namespaces only.
    for flags in ((), _AS_USER) if root else (_AS_USER,):
        world = Box(cluster, say)
        said = world.run([str(_tool("unshare")), *_WORLD, *flags], spec, environment())
        if world.began or world.outcome.received is not None:
            return world.outcome
    raise advice.not_begun(said, root=root)


@contextmanager
def _folder(logs: Path | None) -> Iterator[tuple[Path, Callable[[], None]]]:
    """The folder for logs and what keeps it: one that we made goes unless there is something to look up."""
    if logs is not None:
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--logs {logs}: {error.strerror}; name a folder that can be made") from None
        yield logs, _nothing
        return
    made = Path(tempfile.mkdtemp(prefix="hzplan-emulate-"))
    kept: list[bool] = []
    try:
        yield made, lambda: kept.append(True)
    finally:
        if not kept:
            shutil.rmtree(made, ignore_errors=True)


def _explain(ended: Sequence[Ended], worst: Ended, logs: Path, say: Callable[[str], None]) -> None:
    """Say how ranks failed, the first to fail last, with the end of its log (rank 0's was shown already)."""
    others = [end for end in ended if end.code != 0 and end is not worst]
    for end in others[:OTHERS]:
        say(end.describe() + (" when the others had failed" if end.by_us else ""))
    if others[OTHERS:]:
        say(f"… and so on: {len(others) - OTHERS} more")
    if worst.rank != 0:
        for line in _last_lines(logs / log_name(worst.node, worst.rank)):
            say(f"  | {line}")
    say(f"hzplan: {worst.describe()}")


def _holds_logs(folder: Path) -> bool:
    return next(folder.glob("*.log"), None) is not None


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 2**16))
            return file.read().decode(errors="replace").splitlines()[-LAST_LINES:]
    except OSError:
        return []


def _executable(command: Sequence[str]) -> str:
    if not command:
        raise UserError("no COMMAND to run; write it after --, as in: -- python train.py")
    found = shutil.which(command[0], path=environment()["PATH"])
    if found is None:
        raise UserError(f"{command[0]} is no command that can be run here; check its name and PATH")
    return found


def _tool(name: str) -> str | None:
    """A tool's path; administrators' folders are not on everyone's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin")


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _nothing(*_: object) -> None:
    pass
