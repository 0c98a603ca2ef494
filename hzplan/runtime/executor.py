"""Executes a schedule: launches tasks in its order, runs each stream on a thread of its own.

Two poorer ways to run it are there to be compared with (``Streams``): they follow the total launch order,
which is the same on every rank and a topological order of the DAG, so they cannot deadlock either.

The compute stream is the caller's thread. When it ends a compute task, the tasks that follow in the total
launch order, up to the next compute task, are launched; a launched task runs once everything that it needs
is done and everything before it on its stream has begun. Tasks with nothing to do are left out: who needs
them needs what they need.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import sys
import threading
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch.autograd import profiler

from hzplan.core.order import LINK_STREAM
from hzplan.core.schedule import COMPUTE_STREAM, Kind, Schedule, Task
from hzplan.errors import StreamError
from hzplan.runtime.faults import named

POLL_S = 1.0

BETTER_S = 1.0
"""Seconds that a broken connection waits for another stream's error, which may name the cause."""

LEAVE_S = 30.0
FAILED_LEAVE_S = 0.5
"""How long a process whose script has ended waits for what it has launched; and after an error."""


@dataclass
class StepRecord:
    """What happened in one step: launch order, and seconds (perf_counter) per task.

    ``step``: as the executor counts. Without ``timed`` nobody noted times, and there are none.
    """

    step: int = -1
    timed: bool = True
    launched: list[int] = field(default_factory=list)
    begun: dict[str, list[int]] = field(default_factory=dict)  # by stream, in order
    start_s: dict[int, float] = field(default_factory=dict)
    end_s: dict[int, float] = field(default_factory=dict)
    exposed_s: dict[str, float] = field(default_factory=dict)
    waits: list[tuple[float, float, str]] = field(default_factory=list)  # of compute: from, to, for what


class Streams(Enum):
    """On what communication and optimizer tasks run."""

    TIERS = "a thread per stream"
    ONE = "one thread for all"
    NONE = "the compute thread"


class _Begun(NamedTuple):
    """A task that a thread is to see to, with a scratch buffer; ``end``: what is left of it, None: all."""

    task: int
    scratch: int
    end: Callable[[], None] | None


class _InFlightWindow:
    """Tasks that begin in order, up to ``width`` at once: what is ready waits for those before it to begin.

    Then the first task of a window that is not done on all ranks has begun wherever it can, so ranks whose
    tasks become ready in different orders do not wait for each other in a circle.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.tasks: list[int] = []
        self.begun: queue.SimpleQueue[_Begun | None] = queue.SimpleQueue()
        self._early: set[int] = set()
        self._next = 0
        self._free = [*range(width)]

    def release(self, index: int) -> None:
        """A task's needs are done."""
        self._early.add(index)

    def complete(self, scratch: int) -> None:
        """A task is done."""
        self._free.append(scratch)

    def next(self) -> tuple[int, int] | None:
        """The task that begins now, if one does, and its scratch buffer."""
        if not self._free or (first := self.tasks[self._next]) not in self._early:
            return None
        self._early.discard(first)
        self._next = (self._next + 1) % len(self.tasks)
        return first, self._free.pop()

    def restart(self, first: int = 0) -> None:
        """Nothing is launched; the next task to begin is the window's first one from index ``first`` on."""
        assert not self._early
        self._next = bisect_left(self.tasks, first) % len(self.tasks)


class Executor:
    """Runs steps of one schedule. All methods are called on the compute thread."""

    def __init__(
        self,
        schedule: Schedule,
        run: Callable[[Task, int], None],
        idle: Callable[[Task], bool],
        streams: Streams = Streams.TIERS,
        depth: int = 1,
        tier_names: tuple[str, ...] = (),
        begin: Callable[[Task, int], Callable[[], None] | None] = lambda task, scratch: None,
    ) -> None:
        """``run(task, scratch)`` does a task's work on a thread, without autograd's recording; ``idle`` says
        that a task has none.
        ``begin`` may do a part of it that waits for nothing, on the thread that finds that it may begin, and
        then returns what is left for its own thread.

        ``depth``: how many tasks of a tier's stream may be in flight at once, each with a scratch buffer of
        its own; more than one only where a backend does not need one order of launches on every rank.
        ``tier_names``: for messages.
        """
        self.schedule = schedule
        self.tasks = schedule.tasks
        self._tier_names = tier_names
        self._run, self._begin = run, begin
        self._streams = streams
        left_out = {task.index for task in self.tasks if task.stream != COMPUTE_STREAM and idle(task)}
        self._next = launches(schedule, left_out)
        self._needs, self._needs_previous = needs(schedule, left_out)
        self._followers: list[list[tuple[int, int]]] = [[] for _ in self.tasks]  # (task, steps ahead)
        for ahead, needed in enumerate((self._needs, self._needs_previous)):
            for index, before in enumerate(needed):
                for one in before:
                    self._followers[one].append((index, ahead))
        self._bookings = [booking(task) for task in self.tasks]
        self._here = self._of_compute_thread(left_out)
        self._waits = first_waits(schedule, self._needs, self._needs_previous, self._here)
        self._own = deque[_Begun]()  # of these, what has begun
        self._lock = threading.Lock()
        self._done = [-1] * len(self.tasks)  # the last step in which a task ended
        self._launched = [-1] * len(self.tasks)
        self._waiting = [0] * len(self.tasks)  # how many tasks a launched one still waits for
        self._cause = [""] * len(self.tasks)  # what the last wait of a task was for
        self._compute_ready = threading.Event()
        self._all_done = threading.Condition(self._lock)
        self._open = 0  # launched and not ended
        self._error: StreamError | None = None
        self.step = -1
        self.record = StepRecord()
        self._records = [self.record] * len(self.tasks)  # of the step in which a task was last launched
        self._windows: dict[str, _InFlightWindow] = {}
        for task in self.tasks:
            if task.stream != COMPUTE_STREAM and task.index not in left_out:
                name = task.stream if streams is Streams.TIERS else "all"
                alone = task.stream.startswith(LINK_STREAM)  # one message at a time
                width = depth if task.tier >= 0 and streams is Streams.TIERS and not alone else 1
                self._windows.setdefault(name, _InFlightWindow(width)).tasks.append(task.index)
        self._window_of = {index: window for window in self._windows.values() for index in window.tasks}
        self._threads = [
            threading.Thread(target=self._work, args=(window,), name=f"hzplan {name}", daemon=True)
            for name, window in self._windows.items()
            for _ in range(window.width)
            if not self._here.issuperset(window.tasks)
        ]
        for thread in self._threads:
            thread.start()
        _running.add(self)

    def _of_compute_thread(self, left_out: Set[int]) -> set[int]:
        """The tasks that compute's thread does itself, when it has launched them.

        Updates that the end of a step launches all together, for what they need is done by then: threads
        share processors, so on one of their own they would be done no earlier, and each would cost a wake-up.
        """
        background = {task.index for task in self.tasks if task.stream != COMPUTE_STREAM} - left_out
        if self._streams is Streams.NONE:
            return background
        if self._streams is Streams.ONE or not self.schedule.clip or self.schedule.offload_slots:
            return set()
        step = next(task.index for task in self.tasks if task.kind is Kind.STEP)
        found = {index for index in background if self.tasks[index].kind is Kind.UPDATE}
        if any(self.tasks[index].kind is Kind.ORTHOGONALIZE for index in background):
            return set()  # others of their stream, which wait for messages, go between
        assert all(self._needs[index] <= self._needs[step] for index in found)
        return found

    def close(self) -> None:
        """End the threads, after what was launched is done (or has failed)."""
        with suppress(StreamError):
            self.synchronize()
        self._end_threads(10.0)

    def _end_threads(self, most_s: float) -> bool:
        """Whether all have ended in time."""
        until = time.monotonic() + most_s
        for window in self._windows.values():
            for _ in range(window.width):
                window.begun.put(None)
        for thread in self._threads:
            thread.join(timeout=max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def end_with_process(self) -> bool:
        """What ``close`` does, for as long as the end of the process may take; False when it took too long.

        After an error the other ranks may be gone: nothing is waited for.
        """
        failed = getattr(sys, "last_value", None) is not None or self._error is not None
        until = time.monotonic() + (FAILED_LEAVE_S if failed else LEAVE_S)
        with self._all_done:
            while self._open and self._error is None and (left := until - time.monotonic()) > 0:
                self._all_done.wait(left)
        return self._end_threads(FAILED_LEAVE_S)

    def begin_step(self) -> None:
        """Start the next step; its first unshards are launched."""
        self.step += 1
        self.record = StepRecord(self.step)
        self.start(self.tasks[0])
        self.end(self.tasks[0])

    def start(self, task: Task) -> None:
        """Wait until a compute task may run. Raises StreamError when a background task failed."""
        asked = time.perf_counter()
        with self._lock:
            ready = self._admit(task.index)
            if not ready:
                self._compute_ready.clear()
        if not ready:
            while not self._compute_ready.wait(POLL_S):
                self._raise_error()
            self._note_wait(asked, time.perf_counter(), self._cause[task.index])
        self._raise_error()
        self.record.start_s[task.index] = time.perf_counter()

    def end(self, task: Task) -> None:
        """A compute task is done: launch what follows it in the total order."""
        self.record.end_s[task.index] = time.perf_counter()
        with self._lock:
            self._done[task.index] = self.step
            for index in self._next[task.index]:
                self.record.launched.append(index)
                if self._admit(index):
                    self._release(index, "")
        if self._own:
            with torch.no_grad():
                while self._own:
                    self._work_here(self._own.popleft())

    def waits(self, task: Task) -> bool:
        """Whether a compute task may have to wait."""
        return task.index in self._waits

    def launches(self, task: Task) -> bool:
        """Whether anything is launched at a compute task's end."""
        return bool(self._next[task.index])

    def time_every_step(self) -> None:
        """See ``Launcher``; here all are timed anyway."""

    def synchronize(self) -> None:
        """Wait until everything launched is done."""
        with self._all_done:
            while self._open and self._error is None:
                self._all_done.wait(POLL_S)
        self._raise_error()

    def ran(self, task: Task) -> bool:
        """Whether a task was launched in this step; after the step, whether it is done."""
        return self._launched[task.index] == self.step

    def skip_step(self) -> None:
        """Count the rest of this step as done (it was done by other means)."""
        self.synchronize()
        with self._lock:
            self._done = [self.step] * len(self.tasks)
            for window in self._windows.values():
                window.restart()

    def resume(self, task: Task) -> None:
        """Go on with a compute task: those before it in this step were done by other means.

        Nothing may be under way.
        """
        with self._lock:
            for index in range(task.index):
                self._done[index] = self.step
            for window in self._windows.values():
                window.restart(task.index)

    def _note_wait(self, start_s: float, end_s: float, cause: str) -> None:
        """Compute stood still."""
        record = self.record
        record.exposed_s[cause] = record.exposed_s.get(cause, 0.0) + end_s - start_s
        record.waits.append((start_s, end_s, cause))

    def _admit(self, index: int) -> bool:
        """Note a task as launched; True when nothing before it is still open. Lock held."""
        step, done = self.step, self._done
        background = index in self._window_of  # compute's tasks come one after the other, and may be left out
        assert not background or done[index] == self._launched[index] or done[index] == step - 1, (
            f"{self.tasks[index]} is launched while it runs for the step before: the schedule lacks an edge"
        )
        self._launched[index] = step
        self._records[index] = self.record
        self._open += index in self._window_of
        waiting = 0
        for before in self._needs[index]:
            waiting += done[before] < step
        for before in self._needs_previous[index]:
            waiting += done[before] < step - 1
        self._waiting[index] = waiting
        return waiting == 0

    def _release(self, index: int, cause: str) -> None:
        """Everything before a task is done. Lock held."""
        self._cause[index] = cause
        window = self._window_of.get(index)
        if window is None:
            self._compute_ready.set()
            return
        window.release(index)
        self._begin_next(window)

    def _begin_next(self, window: _InFlightWindow) -> None:
        """Begin what may begin. Lock held, so that tasks begin in order."""
        while (found := window.next()) is not None:
            index, scratch = found
            task, record = self.tasks[index], self._records[index]
            record.begun.setdefault(task.stream, []).append(index)
            record.start_s[index] = time.perf_counter()
            try:
                end = self._begin(task, scratch)
            except Exception as error:
                self._note_error(self._error_of(task, error))
                return
            begun = _Begun(index, scratch, end)
            self._own.append(begun) if index in self._here else window.begun.put(begun)

    def _complete(self, index: int, scratch: int) -> None:
        """A background task is done: release what waited for it alone. Lock held."""
        step, window = self._launched[index], self._window_of[index]
        self._done[index] = step
        self._open -= 1
        for follower, ahead in self._followers[index]:
            if self._launched[follower] == step + ahead and self._done[follower] < step + ahead:
                self._waiting[follower] -= 1
                if self._waiting[follower] == 0:
                    self._release(follower, self._bookings[index])
        window.complete(scratch)
        self._begin_next(window)
        if not self._open:
            self._all_done.notify_all()

    def _work(self, window: _InFlightWindow) -> None:
        """A thread: run what has begun, in order."""
        with torch.no_grad():
            while (begun := window.begun.get()) is not None:
                if not self._execute(begun):
                    return

    def _work_here(self, begun: _Begun) -> None:
        """Run what has begun on the compute thread, which stands still meanwhile."""
        if not self._execute(begun):
            self._raise_error()
        record, index = self._records[begun.task], begun.task
        self._note_wait(record.start_s[index], record.end_s[index], self._bookings[index])

    def _tier(self, task: Task) -> str:
        """The cluster's name for the links of a task's tier, in brackets."""
        return f" ({self._tier_names[task.tier]})" if 0 <= task.tier < len(self._tier_names) else ""

    def _error_of(self, task: Task, error: Exception) -> StreamError:
        """What a task failed with."""
        try:
            with self._named(task):
                raise error
        except StreamError as found:
            return found

    def _named(self, task: Task) -> AbstractContextManager[object]:
        """Errors as StreamError of a task."""
        return named(f"stream {task.stream}{self._tier(task)}, task {task}")

    def _execute(self, begun: _Begun) -> bool:
        """Run a task and release what waited for it; False when it failed."""
        index, scratch, end = begun
        task, record = self.tasks[index], self._records[index]
        try:
            with self._named(task), span(task):
                if end is not None:
                    end()
                else:
                    record.start_s[index] = time.perf_counter()
                    self._run(task, scratch)
        except StreamError as error:
            with self._lock:
                self._note_error(error)
            return False
        record.end_s[index] = time.perf_counter()
        with self._lock:
            self._complete(index, scratch)
        return True

    def _note_error(self, error: StreamError) -> None:
        """Keep the error that says most: a broken connection is often what another one's failure left. Lock
        held."""
        if self._error is None or (self._error.lost_peer and not error.lost_peer):
            self._error = error
        self._all_done.notify_all()
        self._compute_ready.set()

    def _raise_error(self) -> None:
        if self._error is not None:
            if self._error.lost_peer:
                time.sleep(BETTER_S)
            raise self._error


def launches(schedule: Schedule, left_out: Set[int]) -> dict[int, list[int]]:
    """For every compute task the tasks launched at its end, in order."""
    launches: dict[int, list[int]] = {}
    current = 0
    for task in schedule.tasks:
        if task.stream == COMPUTE_STREAM:
            current = task.index
            launches[current] = []
        elif task.index not in left_out:
            launches[current].append(task.index)
    return launches


def needs(schedule: Schedule, left_out: Set[int]) -> tuple[list[set[int]], list[set[int]]]:
    """What every task waits for, of its own step and of the one before, without what is left out.

    Compute tasks are not among it: those before a task are over when it is launched, or the device runs them
    before it.
    """
    own: list[set[int]] = []
    previous: list[set[int]] = []

    def not_left_out(needed: Iterable[int]) -> set[int]:
        found = set[int]()
        for before in needed:
            if before in left_out:
                found |= own[before]
            elif schedule.tasks[before].stream != COMPUTE_STREAM:
                found.add(before)
        return found

    for task in schedule.tasks:  # what a task needs of its own step has a lower index
        own.append(not_left_out(task.needs))
    for task in schedule.tasks:
        found = not_left_out(task.needs_previous)
        for before in left_out & set(task.needs):
            found |= previous[before]
        previous.append(found)
    # Else a task would wait for what happened two steps before.
    assert not any(previous[b] for task in schedule.tasks for b in left_out & set(task.needs_previous))
    return own, previous


def first_waits(
    schedule: Schedule, own: Sequence[Set[int]], previous: Sequence[Set[int]], here: Set[int] = frozenset()
) -> set[int]:
    """The compute tasks that need what none before them has waited for, and is not done on their thread
    (``here``). ``own`` and ``previous``: what tasks wait for."""
    compute = [task.index for task in schedule.streams[COMPUTE_STREAM]]
    waited = {task for index in compute for task in own[index]} | here  # of the step before
    found, now = set[int](), set[int](here)
    for index in compute:
        if own[index] - now or previous[index] - waited:
            found.add(index)
        now |= own[index]
        waited |= previous[index]
    return found


def booking(task: Task) -> str:
    """Account that waiting for a task is booked to."""
    return f"tier {task.tier}" if task.tier >= 0 else "optim"


def span(task: Task) -> AbstractContextManager[object]:
    """A task as torch's profiler shows it, where it shows all threads; free while no profiler runs."""
    if getattr(profiler, "_is_profiler_enabled", True):
        return profiler.record_function(f"hzplan {task}")
    return nullcontext()


_running: weakref.WeakSet[Executor] = weakref.WeakSet()


@atexit.register
def _end_with_process() -> None:
    """Threads that come back from a collective while the interpreter is taken apart abort the process.

    Where some are still in one, which happens when ranks fail, what would follow is left out: the process
    ends here, as one that failed.
    """
    ended = True
    for executor in list(_running):
        ended &= executor.end_with_process()
    if not ended:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
