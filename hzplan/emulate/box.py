"""The private namespaces seen from outside: starting them, passing signals, reading their reports."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import hzplan
from hzplan.emulate.cluster import Cluster, rate_text
from hzplan.emulate.outcome import Ended, culprit
from hzplan.emulate.ranks import SIGNAL_GRACE_S
from hzplan.emulate.spec import Spec
from hzplan.emulate.verify import TOLERANCE
from hzplan.errors import JobFailed, UserError


@dataclass
class JobOutcome:
    """The result of an emulated job."""

    measured: dict[int, float] = field(default_factory=dict)
    """Measured bits/s of the tiers with a limit, if they were to be measured."""

    ended: list[Ended] = field(default_factory=list)
    """How the ranks ended, in that order."""

    received: signal.Signals | None = None
    """The signal that the user sent, if any."""

    @property
    def code(self) -> int:
        """The job's exit code: ``culprit``'s; after a signal 128 and its number."""
        if self.received is not None:
            return 128 + self.received
        worst = culprit(self.ended)
        return worst.exit_code if worst else 0


class Box:
    """The private namespaces of one job, run by ``hzplan.emulate.world``, and their reports."""

    def __init__(self, cluster: Cluster, say: Callable[[str], None]) -> None:
        self.began = False
        self.outcome = JobOutcome()
        self._cluster, self._say = cluster, say
        self._over = False
        self._error: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._patience: float | None = None

    def run(self, unshare: Sequence[str], spec: Spec, env: Mapping[str, str]) -> str:
        """Until it ends. Returns what unshare said, which matters where the world never began.

        Raises UserError where the world reported one, JobFailed where it was lost.
        """
        with tempfile.TemporaryFile() as said, ExitStack() as ours:
            control, control_w = _pipe(ours)
            report, report_w = _pipe(ours)
            ours.enter_context(self._signals(control_w.fileno()))
            # Not as 1 and 2: until the world begins, and when it breaks, what is said there is for us.
            out, err = _high(spec.stdout, ours), _high(spec.stderr, ours)
            theirs = (control.fileno(), report_w.fileno(), out, err)
            spec = replace(spec, control=theirs[0], report=theirs[1], stdout=out, stderr=err)
            # A session of its own, so that Ctrl-C comes to us and we say who gets it when.
            self._process = subprocess.Popen(
                [*unshare, *_python(), "-m", "hzplan.emulate.world", spec.to_text()],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=theirs,
                env=env,
                start_new_session=True,
            )
            control.close()
            report_w.close()
            try:
                self._listen(report.fileno())
            finally:
                if not self._over:
                    self._process.kill()
                self._process.wait()
            said.seek(0)
            words = said.read().decode(errors="replace")
        if self._error is not None:
            raise UserError(self._error)
        if self.began and not self._over and self.outcome.received is None:
            raise JobFailed(f"the emulated cluster ended unexpectedly: {last_line(words)}")
        return words

    @contextmanager
    def _signals(self, control: int) -> Iterator[None]:
        """Ctrl-C and SIGTERM go to the ranks; a second one ends the world at once."""

        def on_signal(number: int, frame: object) -> None:
            if self.outcome.received is not None and self._process is not None:
                self._process.kill()
            self.outcome.received = signal.Signals(number)
            self._patience = time.monotonic() + SIGNAL_GRACE_S + 2
            with suppress(OSError):
                os.write(control, bytes([number]))

        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _listen(self, report: int) -> None:
        """Until the report ends, or the world does not heed a signal."""
        pending = b""
        while True:
            if not select.select([report], [], [], 0.5)[0]:
                if self._patience is not None and time.monotonic() > self._patience:
                    return
                continue
            data = os.read(report, 2**16)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self._on_event(**json.loads(line))

    def _on_event(self, event: str, **what: Any) -> None:
        match event:
            case "hello":
                self.began = True
                self._say(self._cluster.describe())
            case "rate":
                self.outcome.measured[what["tier"]] = what["measured"]
                self._say_rate(what["tier"], what["measured"])
            case "error":
                self._error, self._over = what["message"], True
            case "ended":
                self.outcome.ended, self._over = [Ended(**rank) for rank in what["ranks"]], True

    def _say_rate(self, tier: int, measured: float) -> None:
        asked = self._cluster.rates[tier]
        assert asked is not None
        name = self._cluster.tier_name(tier)
        self._say(f"  {name}: asked for {rate_text(asked)}, measured {rate_text(measured)}")
        if abs(measured / asked - 1) > TOLERANCE:
            self._say(
                f"  warning: {name} is off by more than {TOLERANCE:.0%}; is the machine busy, "
                "or the rate more than it can do?"
            )


def environment() -> dict[str, str]:
    """This process's environment, with the folder of this Python on PATH, so that ``hzplan`` is found."""
    beside = os.path.dirname(sys.executable)
    return {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:{beside}"}


def last_line(said: str) -> str:
    """The last line of a failed process's output."""
    lines = said.strip().splitlines()
    return lines[-1] if lines else "it said nothing; the machine may be out of memory"


def _pipe(stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Both ends, closed with the stack."""
    source, sink = os.pipe()
    return stack.enter_context(open(source, "rb", 0)), stack.enter_context(open(sink, "wb", 0))


def _high(descriptor: int, stack: ExitStack) -> int:
    """The same, under a number that is not a standard stream's, closed with the stack."""
    made = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    stack.callback(os.close, made)
    return made


def _python() -> list[str]:
    """Our Python, without the current folder's modules in the way unless hzplan is one of them."""
    here = Path(hzplan.__file__).resolve().parents[1] == Path.cwd().resolve()
    return [sys.executable] if here else [sys.executable, "-P"]
