"""Starting local ranks: torch's own elastic launcher, re-executing a command of ours in each."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hzplan
from hzplan.errors import JobFailed, Preempted, UserError
from hzplan.launch.job import LAUNCHED, with_exit_code

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def start(arguments: Sequence[str], ranks: int) -> None:
    """Run ``hzplan <arguments>`` as this many ranks on this machine and return when all are done.

    Ranks read the environment (``launch.job.rank_info``). When one fails, the others are ended.

    Raises what a rank failed with, where that is the user's mistake; JobFailed naming the rank otherwise;
    KeyboardInterrupt after Ctrl-C.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence("torch.distributed")
    sys.unraisablehook = _unraisable
    os.environ[LAUNCHED] = "1"
    if ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="hzplan-") as folder, _as_before(), _ranks_in_our_session():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)(*_python_arguments(), *arguments)
        except ChildFailedError as error:
            raise _explain(error.failures) from None
        except SignalException as received:
            if received.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            saved = _preempted(Path(folder))
            if saved is not None:
                raise saved from None
            raise SystemExit(128 + received.sigval) from None


def cluster_line(arguments: Sequence[str], *, nodes: int | None = None, ranks_per_node: int) -> str:
    """What to type on each of ``nodes`` (None: not known) to run ``hzplan <arguments>`` with torchrun."""
    meeting = (
        "" if nodes == 1 else f"--nnodes {nodes or 'NODES'} --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
    )
    command = shlex.join(_without_nproc(arguments))
    return f"torchrun {meeting}--nproc-per-node {ranks_per_node} -m hzplan {command}"


def _without_nproc(arguments: Sequence[str]) -> Iterator[str]:
    """The launcher of a cluster says how many ranks there are."""
    rest = iter(arguments)
    for argument in rest:
        if argument == "--nproc":
            next(rest, None)
        elif not argument.startswith("--nproc="):
            yield argument


def _python_arguments() -> list[str]:
    """``python -m hzplan``, without the current folder's modules in the way unless hzplan is one of them."""
    here = Path(hzplan.__file__).resolve().parents[1] == Path.cwd().resolve()
    return ["-u", "-m", "hzplan"] if here else ["-u", "-P", "-m", "hzplan"]


def _silence(name: str) -> None:
    """Keep a library's log from the user's terminal: what went wrong is said once, by us."""
    for known in list(logging.root.manager.loggerDict):
        if known == name or known.startswith(f"{name}."):
            logging.getLogger(known).disabled = True


def _unraisable(what: sys.UnraisableHookArgs) -> None:
    """All but one: the agent's timer may be collected on its own thread, which its finalizer then joins."""
    if "cannot join current thread" not in str(what.exc_value):
        sys.__unraisablehook__(what)


@contextmanager
def _ranks_in_our_session() -> Iterator[None]:
    """Each is a group of processes of its own, so that we say who gets Ctrl-C, but no session.

    Linux shares processors between sessions first (``sched_autogroup_enabled``), and where four ranks share
    two processors it was measured to give one of them 13.7 s of 14.2 and another 3.3: messages then wait for
    seconds until their receiver runs (docs/decisions.md). Within a session all threads are served alike.
    """
    try:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        usual = SubprocessHandler._popen
    except (ImportError, AttributeError):  # another torch: a session each, as it does
        yield
        return

    def popen(self: Any, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(args, env=env, process_group=0, stdout=self._stdout, stderr=self._stderr)

    setattr(SubprocessHandler, usual.__name__, popen)
    # A group in the background may write to its terminal whatever `stty tostop` says, and what it reads there
    # is an error, not a stop that nobody notices. Ranks inherit both.
    stops = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTTOU, signal.SIGTTIN)}
    try:
        yield
    finally:
        for number, handler in stops.items():
            signal.signal(number, handler)
        setattr(SubprocessHandler, usual.__name__, usual)


@contextmanager
def _as_before() -> Iterator[None]:
    """Put back what the launcher and the ranks may leave changed: signal handlers, a hidden cursor."""
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")


def _preempted(folder: Path) -> UserError | None:
    """What ranks that saved before they ended have left word of; None where none did."""
    for path in sorted(folder.rglob("error.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            ours = json.loads(path.read_text(encoding="utf-8"))["hzplan"]
            if ours["exit_code"] == Preempted.exit_code:
                return with_exit_code(str(ours["message"]), Preempted.exit_code)
    return None


def _explain(failures: Mapping[int, ProcessFailure]) -> UserError:
    """What brought the job down, as one error: the rank that failed first, not those that missed it."""
    rank, failure = min(failures.items(), key=lambda item: _blame(item[0], item[1]))
    ours = _ours(failure)
    if ours:
        return with_exit_code(str(ours["message"]), int(ours["exit_code"]))
    if failure.exitcode < 0:
        advice = "; the machine may be out of memory" if -failure.exitcode == signal.SIGKILL else ""
        return JobFailed(f"rank {rank} was ended by {failure.signal_name()}{advice}")
    return JobFailed(f"rank {rank} ended with exit code {failure.exitcode} and said nothing of why")


def _blame(rank: int, failure: ProcessFailure) -> tuple[int, float, int]:
    """Sorts the likeliest culprit first: ended abruptly; reported an error; lost its peers; we ended it."""
    ours = _ours(failure)
    if ours:
        return (2 if ours["lost_peer"] else 1, float(ours["time"]), rank)
    return (3 if failure.exitcode == -signal.SIGTERM else 0, float(failure.timestamp), rank)


def _ours(failure: ProcessFailure) -> dict[str, Any]:
    """What ``hzplan.launch.job.record_failure`` wrote in the rank; empty when it could not."""
    found = failure.error_file_data.get("hzplan")
    return found if isinstance(found, dict) else {}
