"""The rank processes inside the namespaces: start, output, signals, and the end of all when one fails."""

from __future__ import annotations

import os
import select
import selectors
import signal
import time
from contextlib import suppress
from functools import partial

from hzplan.emulate import namespaces
from hzplan.emulate.cluster import environment
from hzplan.emulate.outcome import Ended
from hzplan.emulate.spec import Spec, log_name
from hzplan.errors import UserError

FAILURE_GRACE_S = 10.0
"""Seconds that other ranks have after the first failure, to notice it and say so."""

SIGNAL_GRACE_S = 3.0
"""Seconds from a signal to a rank until it is killed."""

DRAIN_S = 2.0


class RankProcesses:
    """The processes of a job."""

    def __init__(self, spec: Spec, nodes: list[int]) -> None:
        """``nodes``: descriptors of their networks."""
        self._spec, self._nodes = spec, nodes
        self._alive: dict[int, int] = {}  # rank of a process
        self._ended: list[Ended] = []
        self._ending = False
        self._deadline: float | None = None
        self._next = signal.SIGTERM  # what ranks are sent at the deadline
        self._selector = selectors.DefaultSelector()

    def run(self) -> list[Ended]:
        """Start all ranks; how they ended, when all have. Raises UserError where they cannot be started."""
        self._selector.register(self._spec.control, selectors.EVENT_READ, self._on_control)
        self._wake_on_child()
        for rank in range(self._spec.cluster.world):
            self._start(rank)
        while self._alive:
            self._serve(self._patience())
            self._reap()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._end(self._next)
        self._drain()
        return self._ended

    def _start(self, rank: int) -> None:
        """A rank in its node's network; what rank 0 says is shown besides."""
        node = rank // self._spec.cluster.per_node
        try:
            log = os.open(
                os.path.join(self._spec.logs, log_name(node, rank)),
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC,
                0o644,
            )
        except OSError as error:
            raise UserError(f"--logs {self._spec.logs}: {error.strerror}") from None
        out, err = (self._shown(1, log), self._shown(2, log)) if rank == 0 else (log, log)
        try:
            with namespaces.inside(self._nodes[node]):
                process = os.posix_spawn(
                    self._spec.executable,
                    self._spec.command,
                    environment(self._spec.cluster, rank, dict(os.environ)),
                    file_actions=[
                        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                        (os.POSIX_SPAWN_DUP2, out, 1),
                        (os.POSIX_SPAWN_DUP2, err, 2),
                    ],
                    setpgroup=0,  # a signal for a rank is for its children too
                    setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores
                )
        except OSError as error:
            raise UserError(f"{self._spec.command[0]} cannot be started: {error.strerror}") from None
        self._alive[process] = rank
        if rank == 0:
            os.close(out)
            os.close(err)
        else:
            os.close(log)

    def _shown(self, number: int, log: int) -> int:
        """Where rank 0 writes stdout (1) or stderr (2): what comes is logged and passed on."""
        source, sink = os.pipe()
        os.set_blocking(source, False)
        target = self._spec.stdout if number == 1 else self._spec.stderr
        self._selector.register(source, selectors.EVENT_READ, partial(self._pass_on, source, log, target))
        return sink

    def _pass_on(self, source: int, log: int, target: int) -> bool:
        """Some of what came; False when there is nothing."""
        try:
            data = os.read(source, 2**16)
        except BlockingIOError:
            return False
        try:
            _write_all(log, data)
            _write_all(target, data)
        except OSError:  # nobody reads it any more: rank 0 is to learn that, as it would have without us
            data = b""
        if not data:
            self._selector.unregister(source)
            os.close(source)
        return bool(data)

    def _wake_on_child(self) -> None:
        woken, wakes = os.pipe()
        for end in (woken, wakes):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

        def on_child() -> bool:
            os.read(woken, 2**10)
            return False

        self._selector.register(woken, selectors.EVENT_READ, on_child)

    def _patience(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _serve(self, timeout_s: float | None) -> bool:
        """Whether output was passed on."""
        passed = [key.data() for key, _ in self._selector.select(timeout_s)]
        return any(passed)

    def _drain(self) -> None:
        """Pass on what rank 0 said last; a child it left behind may go on for ever."""
        until = time.monotonic() + DRAIN_S
        while self._serve(0) and time.monotonic() < until:
            pass

    def _on_control(self) -> bool:
        data = os.read(self._spec.control, 1)
        if not data:
            os._exit(1)  # the front is gone, and with us goes the world
        self._end(signal.Signals(data[0]))
        return False

    def _reap(self) -> None:
        """Note who ended. The world's first process also inherits what ranks leave behind."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            rank = self._alive.pop(process, None)
            if rank is None:
                continue
            now, code = time.monotonic(), os.waitstatus_to_exitcode(status)
            node = rank // self._spec.cluster.per_node
            self._ended.append(Ended(rank, node, code, now, self._ending))
            if code != 0 and self._deadline is None:
                self._deadline = now + FAILURE_GRACE_S

    def _end(self, number: signal.Signals) -> None:
        """Send the ranks a signal, and have the next one kill them."""
        self._ending = True
        for process in self._alive:
            with suppress(ProcessLookupError):
                os.killpg(process, number)
        self._deadline = time.monotonic() + SIGNAL_GRACE_S
        self._next = signal.SIGKILL


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # a terminal that another program left so
            select.select([], [descriptor], [])
