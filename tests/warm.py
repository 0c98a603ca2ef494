"""Starts pythons by forking one that has imported torch and hzplan: in milliseconds, not seconds.

``Popen`` is ``subprocess.Popen``; asked for this Python with a module, a script or code, it forks a process
instead of executing one. Who forks is a server, one for each process of pytest, which has no threads and has
done nothing but import. What a forked command starts in its turn (the ranks of ``hzplan run`` or of torchrun)
the command itself forks. Ranks execute what they start: they have threads.

To its parent a forked process is a child like any other. It is waited for and signalled, and has its own
arguments, environment, folder, standard streams, session and exit code. It differs from a new process in
three ways: all hash strings alike, ``/proc/PID/cmdline`` and ``environ`` are the server's, and the
interpreter is not taken apart at the end. Tests of these, and one of each kind of launch, say
``cold=True``; HZPLAN_TESTS_COLD=1 makes every process a new one. New processes, too, are other programs,
other options of Python's, those with variables for Python itself, and all where the system is not Linux.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import logging
import os
import pkgutil
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import hzplan

ROOT = Path(__file__).resolve().parents[1]

COLD = sys.platform != "linux" or os.environ.get("HZPLAN_TESTS_COLD", "") not in ("", "0")
"""Whether every process is executed."""

IMPORTED = (
    "torch.distributed.run",
    "torch._dynamo",
    "torch.distributed.fsdp",
)
"""What the server imports besides hzplan: what most commands and ranks need."""

LEFT_OUT = ("hzplan.peers", "hzplan.runtime.backends.kernels")
"""What it does not of hzplan: what needs packages that need not be there."""

BRIEF: dict[str, dict[str, Any]] = {
    "hzplan.profiler.model.optimizer": {"MAX_REPEATS": 3},
    "hzplan.profiler.model.time": {"MAX_BLOCKS": 2},
    "hzplan.profiler.network.host": {"MAX_REPEATS": 3},
    "hzplan.profiler.network.interference": {"TOGETHER_S": 0.05, "ALONE_S": 0.02, "PAIRS_S": 0.02},
    "hzplan.profiler.network.links": {"MAX_REPEATS": 3, "MAX_CALLS": 1, "LAST_BYTES": 1 << 18},
    "hzplan.profiler.session.machine": {"PEAK_SIZES": (256,)},
}
"""The profiler's constants in forked processes, which measure as little as can be; new ones as usual."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LARGEST = 1 << 18
"""Bytes of a request: arguments and environment."""

_SIGNALS = [getattr(signal, f"SIG{name}") for name in ("TERM", "HUP", "QUIT", "CHLD", "USR1", "USR2")]
"""What a new process does not handle."""

_real_popen = subprocess.Popen


@dataclass(frozen=True)
class Program:
    """A command line of Python: ``-m module``, ``-c code`` or a script, and what comes after it."""

    kind: str
    name: str
    arguments: tuple[str, ...]
    unbuffered: bool = False
    safe_path: bool = False


@dataclass(frozen=True)
class Process:
    """What a process is besides its program; ``folder`` None is its parent's."""

    program: Program
    folder: str | None
    environment: dict[str, str]
    new_session: bool
    group: int  # to join; 0 is one of its own, -1 its parent's


def program_of(command: Sequence[str]) -> Program | None:
    """The program in a command line of this Python; None where it is something else."""
    options, rest = {"-u": False, "-P": False}, [*command[1:]]
    if not command or command[0] != sys.executable:
        return None
    while rest and rest[0] in options:
        options[rest.pop(0)] = True
    if len(rest) > 1 and rest[0] in ("-m", "-c"):
        kind, name, *arguments = rest
    elif rest and not rest[0].startswith("-"):
        kind, (name, *arguments) = "script", rest
    else:
        return None
    return Program(kind, name, tuple(arguments), options["-u"], options["-P"])


class Popen(_real_popen):  # type: ignore[type-arg]
    """``subprocess.Popen`` that forks where it can."""

    def _execute_child(  # type: ignore[override]
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: Any,
        pass_fds: Any,
        cwd: Any,
        env: Mapping[str, str] | None,
        startupinfo: Any,
        creationflags: Any,
        shell: Any,
        *rest: Any,
    ) -> None:
        variables = dict(os.environ if env is None else env)
        command = [os.fspath(word) for word in args] if isinstance(args, list | tuple) else []
        program = program_of(command) if all(isinstance(word, str) for word in command) else None
        if executable or preexec_fn or pass_fds or shell or program is None or not _forkable(variables):
            usual = super()._execute_child  # type: ignore[misc]
            usual(
                args,
                executable,
                preexec_fn,
                close_fds,
                pass_fds,
                cwd,
                env,
                startupinfo,
                creationflags,
                shell,
                *rest,
            )
            return
        process = Process(program, None if cwd is None else os.fspath(cwd), variables, *rest[-2:])
        stdin, _, _, stdout, _, stderr = rest[:6]
        streams = [number if number != -1 else usual for usual, number in enumerate((stdin, stdout, stderr))]
        self.pid = _fork(process, streams) if _usual_path else _server().fork(process, streams)
        self._child_created = True
        self._close_pipe_fds(*rest[:6])  # type: ignore[attr-defined]


def _forkable(variables: Mapping[str, str]) -> bool:
    """Whether a process with these variables imports what the server has, and this one may fork it."""
    if COLD or "RANK" in os.environ:
        return False
    others = any(name.startswith("PYTHON") and name != "PYTHONPATH" for name in variables)
    return not others and str(ROOT) in variables.get("PYTHONPATH", "").split(os.pathsep)


# ---- the server, as seen by who asks -------------------------------------------------------------------


class _Server:
    """A process that forks on demand. Its children become those of this process, their nearest subreaper."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = os.getpid()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._process = _real_popen(
            [sys.executable, "-c", "from tests.warm import serve; serve()", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env=kept | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        atexit.register(self._end)

    def fork(self, process: Process, streams: Sequence[int]) -> int:
        """The number of a new child of this process."""
        words = json.dumps(asdict(process) | {"folder": process.folder or os.getcwd()}).encode()
        with self._lock:
            socket.send_fds(self._ours, [words], [*streams])
            answer = self._ours.recv(64)
        if not answer:
            raise RuntimeError("the server of warm processes has ended; its traceback is above")
        return int(answer)

    def _end(self) -> None:
        if os.getpid() == self._owner:
            self._ours.close()
            self._process.wait()


_servers: list[_Server] = []


def _server() -> _Server:
    if not _servers:
        _servers.append(_Server())
    return _servers[0]


# ---- the server itself ---------------------------------------------------------------------------------

_usual_path: list[str] = []
"""``sys.path`` of this Python, without what differs between commands; empty where this is not the server."""


def _serve(asked: socket.socket) -> None:
    """Fork whatever is asked for until nobody is left to ask.

    A child is forked by a process in between, which ends: that makes it a child of who asked.
    """
    while True:
        words, streams, *_ = socket.recv_fds(asked, _LARGEST, 3)
        if not words:
            return
        process = _process(json.loads(words))
        said, told = os.pipe()
        between = os.fork()
        if not between:
            here = os.getpid()
            child = os.fork()
            if child:
                os.write(told, str(child).encode())
                os._exit(0)
            while os.getppid() == here:
                os.sched_yield()
            _be(process, streams)
        os.waitpid(between, 0)
        os.close(told)
        with open(said, "rb") as answer:
            asked.send(answer.read())
        for number in streams:
            os.close(number)


def _process(found: dict[str, Any]) -> Process:
    program = found.pop("program")
    return Process(Program(**program | {"arguments": tuple(program["arguments"])}), **found)


def _fork(process: Process, streams: Sequence[int]) -> int:
    """A child of this process, which the server forked; it has its own session when this returns."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    said, told = os.pipe()
    child = os.fork() or _be(process, streams)
    os.close(told)
    os.read(said, 1)  # nothing: the child closes its end
    os.close(said)
    return child


def _be(process: Process, streams: Sequence[int]) -> NoReturn:
    """Be a new process from here to its end."""
    code = 1
    try:
        _forget()
        _take(process, streams)
        code = _run(process.program)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _forget() -> None:
    """Undo what the parent did since it imported: signals, hooks, logs, random numbers, user's modules."""
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.disabled = False
    random.seed()
    sys.modules["torch"].default_generator.manual_seed(67280421310721)  # torch's own, of a new process
    atexit._clear()
    tempfile.tempdir = None
    own = (str(ROOT), sys.prefix, sys.base_prefix)
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if file and not file.startswith(own):
            del sys.modules[name]


def _take(process: Process, streams: Sequence[int]) -> None:
    """Become what was asked for, but for running it."""
    program = process.program
    if process.new_session:
        os.setsid()
    if process.group >= 0:
        os.setpgid(0, process.group)
    for usual, number in enumerate(streams):
        if number != usual:
            os.dup2(number, usual)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(process.environment)
    if process.folder:
        os.chdir(process.folder)
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=program.unbuffered)  # type: ignore[union-attr]
    sys.stdin = open(0, encoding=sys.stdin.encoding, closefd=False)  # noqa: SIM115
    first = {"-m": os.getcwd(), "-c": "", "script": str(Path(program.name).resolve().parent)}[program.kind]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*([] if program.safe_path else [first]), *paths, *_usual_path]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    if os.environ.get("OMP_NUM_THREADS") != threads:
        count = os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
        sys.modules["torch"].set_num_threads(int(count))


def _run(program: Program) -> int:
    """The exit code."""
    code, interrupted = 0, False
    try:
        sys.argv = [program.name if program.kind == "script" else program.kind, *program.arguments]
        if program.kind == "-m":
            runpy.run_module(program.name, run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            if program.kind == "script":
                main.__file__ = os.path.abspath(program.name)
                compiled = compile(Path(program.name).read_bytes(), main.__file__, "exec")
            else:
                compiled = compile(program.name, "<string>", "exec")
            exec(compiled, main.__dict__)
    except SystemExit as ended:
        if isinstance(ended.code, int) or ended.code is None:
            code = ended.code or 0
        else:
            print(ended.code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        interrupted, code = isinstance(error, KeyboardInterrupt), 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code & 0xFF


def serve() -> None:
    """Be the server; its only argument is the number of the socket on which it is asked."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _usual_path[:] = [path for path in sys.path if path and Path(path).resolve() != ROOT]
    os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99"}  # as hzplan.cli.main sets them
    subprocess.Popen = Popen  # type: ignore[misc]
    found = pkgutil.walk_packages(hzplan.__path__, "hzplan.")
    ours = [module.name for module in found if not module.name.startswith(LEFT_OUT)]
    for name in (*IMPORTED, *ours):
        if not name.endswith("__main__"):
            importlib.import_module(name)
    for name, constants in BRIEF.items():
        for constant, value in constants.items():
            assert hasattr(sys.modules[name], constant), f"{name}.{constant} has another name now"
            setattr(sys.modules[name], constant, value)
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
