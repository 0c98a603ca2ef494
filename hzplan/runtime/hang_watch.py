"""Hangs on a device that queues work, where the host waits for nothing and so nothing raises: a thread looks.

NCCL's own watchdog ends a process after the job's timeout, and says neither which task it was nor which rank
was waited for. This one looks at the oldest task under way of each stream, and ends the process a little
before, with the exit code of a job that failed. NOT SEEN TO FIRE ON A GPU YET.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn, Protocol

from hzplan.errors import JobFailed
from hzplan.runtime.hang_report import absent

POLL_S = 1.0
YOUNG_S = 30.0
"""Seconds after its launch in which a task's end is not asked for: to ask, on any thread, breaks off a
capture into a CUDA graph, as a unit may make."""
SHARE = 0.9
"""Of the job's timeout, after which a task is given up: before NCCL's watchdog does it."""


class Reached(Protocol):
    """What the device tells of an event, see ``launcher.Event``."""

    def is_reached(self) -> bool:
        """Whether everything before it is done; returns at once."""


class HangWatch:
    """``patience_s``: for how long a stream may be at one task, its launch included; ``on_hang`` is called
    once, on the thread of the watch, with the task's name and the seconds that it has been under way, at
    least."""

    def __init__(
        self,
        patience_s: float,
        on_hang: Callable[[str, float], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._young_s = min(YOUNG_S, patience_s / 2)
        # From when a task is looked at: from its launch on it is no longer than was asked for.
        self._patience_s, self._on_hang, self._now_s = patience_s - self._young_s, on_hang, now_s
        self._lock = threading.Lock()
        self._under_way: dict[str, deque[tuple[str, Reached, float]]] = defaultdict(deque)
        self._since: dict[
            str, tuple[Reached, float]
        ] = {}  # by stream: its oldest task's end, first since when
        self._ended = threading.Event()

    def start(self) -> None:
        """Look every second from now on."""
        threading.Thread(target=self._run, name="hzplan hang watch", daemon=True).start()

    def close(self) -> None:
        """Look no longer."""
        self._ended.set()

    def launched(self, stream: str, name: str, ended: Reached) -> None:
        """A task is in a stream; ``ended``: the event at its end."""
        with self._lock:
            self._under_way[stream].append((name, ended, self._now_s()))

    def forget(self, before: Mapping[str, Reached]) -> None:
        """Drop tasks that are known to be done: of each stream those up to an event, the end of one."""
        with self._lock:
            for stream, ended in before.items():
                tasks = self._under_way[stream]
                if any(one is ended for _, one, _ in tasks):
                    while tasks.popleft()[1] is not ended:
                        pass

    def look(self) -> bool:
        """Whether a stream has been at one task for too long; then ``on_hang`` was called."""
        late: list[tuple[float, str]] = []
        with self._lock:
            for stream, tasks in self._under_way.items():
                while tasks and self._is_old(tasks[0][2]) and tasks[0][1].is_reached():
                    tasks.popleft()
                if tasks and self._is_old(tasks[0][2]):
                    name, ended, _ = tasks[0]
                    known, since = self._since.get(stream, (None, 0.0))
                    if known is not ended:
                        self._since[stream] = ended, self._now_s()
                    elif self._now_s() - since > self._patience_s:
                        late.append((since, name))
        if late:  # the one that has waited longest may hold up the others
            since, name = min(late)
            self._on_hang(name, self._now_s() - since + self._young_s)
        return bool(late)

    def _is_old(self, launched_s: float) -> bool:
        return self._now_s() - launched_s >= self._young_s

    def _run(self) -> None:
        while not self._ended.wait(POLL_S):
            with suppress(RuntimeError):  # of a device that fails, which the thread that trains says
                if self.look():
                    return


def end_process(name: str, seconds: float, route: Callable[[Sequence[int]], str]) -> NoReturn:
    """Say what hangs, and which ranks have not come to say the same: these the others wait for."""
    ranks = absent("tasks under way")
    listed = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    who = f"; {listed}{route(ranks)} did not arrive" if ranks else ""
    print(f"hzplan: {name}: under way for {seconds:.0f} s{who}", file=sys.stderr, flush=True)
    os._exit(JobFailed.exit_code)  # the thread that trains may be in a call that does not return
