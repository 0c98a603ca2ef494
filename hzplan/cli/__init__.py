"""The command line: one small file per command, and here the one place where an error becomes a line."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from typing import Annotated, NoReturn

import typer

from hzplan import __version__
from hzplan.errors import JobFailed, OutOfMemory, StreamError, UserError, is_lost_peer, last_cause, one_line
from hzplan.launch import job

NO_TORCH = (
    "this command needs torch, which is not installed: pip install torch, in the build for your device; "
    "solve, check and show of files that are there need none"
)
COMMANDS = (
    "profile",
    "solve",
    "review",
    "rehearse",
    "run",
    "meet",
    "weights",
    "calibrate",
    "export",
    "show",
    "check",
    "verify",
    "diff",
    "doctor",
    "demo",
    "emulate",
)
INTERRUPTED = 130

app = typer.Typer(
    name="hzplan",
    help="Plan the fastest sharded data-parallel training that fits in memory, and run it.",
    epilog="Begin with: hzplan demo",
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    if version:
        print(f"hzplan {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


for _name in COMMANDS:
    if importlib.util.find_spec(f"hzplan.cli.{_name}"):
        app.command(_name)(importlib.import_module(f"hzplan.cli.{_name}").command)


def main() -> NoReturn:
    """Run what the command line says and end the process with an exit code of ``hzplan.errors``.

    Every error is one line on stderr; HZPLAN_DEBUG=1 adds the traceback. A rank that our launcher started
    leaves its line to the launcher.
    """
    # Before anyone imports torch: its C++ parts warn about what is no concern of the user.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        code = app(prog_name="hzplan", standalone_mode=False)
        if _rank_info():
            _leave(code or 0)
        sys.exit(code)
    except KeyboardInterrupt:
        _fail(UserError("interrupted"), INTERRUPTED)
    except UserError as error:
        _fail(error, error.exit_code)
    except Exception as error:
        usage = _usage_message(error)
        if usage:
            _fail(UserError(usage), UserError.exit_code)
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            _fail(UserError(NO_TORCH), UserError.exit_code)
        _fail(error, JobFailed.exit_code if _rank_info() else 1)


def _leave(code: int) -> NoReturn:
    """End a rank whose work is done, without taking the interpreter apart.

    torch's communication threads outlive their groups; one that needs the interpreter while it is being
    taken apart aborts the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fail(error: Exception, exit_code: int) -> NoReturn:
    """Say it once, and end."""
    here = _rank_info()
    theirs = not isinstance(error, UserError)
    cause = last_cause(error)
    message = one_line(cause) if theirs else str(error)
    of_rank = theirs or isinstance(error, StreamError | OutOfMemory)  # others are every rank's
    if here and of_rank:
        message = f"rank {here.rank}: {message}"
    if theirs and not _debug():
        message += " (HZPLAN_DEBUG=1 shows where)"
    if _debug():
        traceback.print_exc()
    if here:
        lost = error.lost_peer if isinstance(error, StreamError) else theirs and is_lost_peer(cause)
        job.record_failure(message, exit_code, lost_peer=lost)
    if here is None or not (here.launched_here or (here.rank and not of_rank)):
        print(f"hzplan: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if here:
        os._exit(exit_code)  # threads may wait in collectives for ranks that will never come
    sys.exit(exit_code)


def _usage_message(error: Exception) -> str:
    """What typer's option parser has to say; its exceptions are private, a method gives them away."""
    if not hasattr(error, "format_message"):
        return ""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "hzplan"
    return f"{error.format_message().rstrip('.')}; see {command} --help"


def _rank_info() -> job.RankInfo | None:
    try:
        return job.rank_info()
    except UserError:
        return None


def _debug() -> bool:
    return os.environ.get("HZPLAN_DEBUG", "") not in ("", "0")
