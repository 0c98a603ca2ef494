"""Executes a schedule: launches tasks in its order, runs each stream on a thread of its own.

Two poorer ways to run it are there to be compared with (``Streams``): they follow the total launch order,
which is the same on every rank and a topological order of the DAG, so they cannot deadlock either.

The compute stream is the caller's thread. When it ends a compute task, the tasks that follow in the total
launch order, up to the next compute task, are launched; a launched task runs once everything before it in
the DAG is done. Since each stream's order is part of the DAG, a thread takes what is ready. Tasks with
nothing to do end at once, on whatever thread ended the last task before them.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from hzplan.schedule import COMPUTE_STREAM, Schedule, Task

POLL_S = 1.0


@dataclass
class StepRecord:
    """What happened in one step: launch order, run order, and seconds (perf_counter) per task."""

    launched: list[int] = field(default_factory=list)
    finished: dict[str, list[int]] = field(default_factory=dict)
    start_s: dict[int, float] = field(default_factory=dict)
    end_s: dict[int, float] = field(default_factory=dict)
    exposed_s: dict[str, float] = field(default_factory=dict)


class Streams(Enum):
    """On what communication and optimizer tasks run."""

    TIERS = "a thread per stream"
    ONE = "one thread for all"
    NONE = "the compute thread"


class StreamError(RuntimeError):
    """A task on a background thread failed; ``__cause__`` says how."""


class Executor:
    """Runs steps of one schedule. All methods are called on the compute thread."""

    def __init__(
        self,
        schedule: Schedule,
        run: Callable[[Task], None],
        idle: Callable[[Task], bool],
        streams: Streams = Streams.TIERS,
    ) -> None:
        """``run`` does a task's work on its stream's thread; ``idle`` says that a task has none."""
        self.schedule = schedule
        self.tasks = schedule.tasks
        self._run = run
        self._streams = streams
        self._idle = [task.stream != COMPUTE_STREAM and idle(task) for task in self.tasks]
        self._next = _launches(schedule)
        self._after = [task.after for task in self.tasks]
        self._after_previous = [task.after_previous for task in self.tasks]
        if streams is not Streams.TIERS:
            self._chain()
        self._followers: list[list[tuple[int, int]]] = [[] for _ in self.tasks]  # (task, steps ahead)
        for task in self.tasks:
            for before in self._after[task.index]:
                self._followers[before].append((task.index, 0))
            for before in self._after_previous[task.index]:
                self._followers[before].append((task.index, 1))
        self._lock = threading.Lock()
        self._done = [-1] * len(self.tasks)  # the last step in which a task ended
        self._launched = [-1] * len(self.tasks)
        self._waiting = [0] * len(self.tasks)  # how many tasks a launched one still waits for
        self._cause = [""] * len(self.tasks)  # what the last wait of a task was for
        self._compute_ready = threading.Event()
        self._all_done = threading.Condition(self._lock)
        self._open = 0  # launched and not ended
        self._error: BaseException | None = None
        self.step = -1
        self.record = StepRecord()
        self._records = [self.record] * len(self.tasks)  # of the step in which a task was last launched
        self._lanes = {
            task.stream: task.stream if streams is Streams.TIERS else "all"
            for task in self.tasks
            if task.stream != COMPUTE_STREAM and not self._idle[task.index]
        }
        self._queues: dict[str, queue.SimpleQueue[int | None]] = {
            lane: queue.SimpleQueue() for lane in sorted(set(self._lanes.values()))
        }
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name=f"hzplan {lane}", daemon=True)
            for lane in self._queues
            if streams is not Streams.NONE
        ]
        for thread in self._threads:
            thread.start()

    def _chain(self) -> None:
        """Make one stream of all: every task with something to do after the one before it in launch order."""
        busy = [t.index for t in self.tasks if t.stream != COMPUTE_STREAM and not self._idle[t.index]]
        for before, index in itertools.pairwise(busy):
            self._after[index] = tuple(sorted({*self._after[index], before}))
        if busy:
            self._after_previous[busy[0]] = tuple(sorted({*self._after_previous[busy[0]], busy[-1]}))

    def close(self) -> None:
        """End the threads, after what was launched is done (or has failed)."""
        with suppress(StreamError):
            self.drain()
        for stream_queue in self._queues.values():
            stream_queue.put(None)
        for thread in self._threads:
            thread.join(timeout=10)

    def begin_step(self) -> None:
        """Start the next step; its first unshards are launched."""
        self.step += 1
        self.record = StepRecord()
        self.start(self.tasks[0])
        self.end(self.tasks[0])

    def start(self, task: Task) -> None:
        """Wait until a compute task may run. Raises StreamError when a background task failed."""
        self._compute_ready.clear()
        asked = time.perf_counter()
        with self._lock:
            ready = self._admit(task.index)
        if not ready:
            while not self._compute_ready.wait(POLL_S):
                self._raise_error()
            waited = time.perf_counter() - asked
            cause = self._cause[task.index]
            self.record.exposed_s[cause] = self.record.exposed_s.get(cause, 0.0) + waited
        self._raise_error()
        self.record.start_s[task.index] = time.perf_counter()

    def end(self, task: Task) -> None:
        """A compute task is done: launch what follows it in the total order."""
        self.record.end_s[task.index] = time.perf_counter()
        with self._lock:
            self._complete(task.index)
            for index in self._next[task.index]:
                self.record.launched.append(index)
                if self._admit(index):
                    self._release(index, "")
        if self._streams is Streams.NONE:
            self._work_here()

    def wait(self, tasks: Iterable[int]) -> None:
        """Wait until tasks of this step are done."""
        wanted = list(tasks)
        with self._all_done:
            while any(self._done[index] < self.step for index in wanted) and self._error is None:
                self._all_done.wait(POLL_S)
        self._raise_error()

    def drain(self) -> None:
        """Wait until everything launched is done."""
        with self._all_done:
            while self._open and self._error is None:
                self._all_done.wait(POLL_S)
        self._raise_error()

    def skip_step(self) -> None:
        """Count the rest of this step as done (it was done by other means)."""
        self.drain()
        with self._lock:
            self._done = [self.step] * len(self.tasks)

    def _admit(self, index: int) -> bool:
        """Note a task as launched; True when nothing before it is still open. Lock held."""
        task = self.tasks[index]
        assert self._done[index] == self._launched[index] or self._done[index] == self.step - 1, (
            f"{task} is launched while it still runs for the step before: the schedule lacks an edge"
        )
        self._launched[index] = self.step
        self._records[index] = self.record
        self._open += task.stream != COMPUTE_STREAM
        self._waiting[index] = sum(self._done[u] < self.step for u in self._after[index]) + sum(
            self._done[u] < self.step - 1 for u in self._after_previous[index]
        )
        return self._waiting[index] == 0

    def _release(self, index: int, cause: str) -> None:
        """Everything before a task is done. Lock held."""
        task = self.tasks[index]
        self._cause[index] = cause
        if task.stream == COMPUTE_STREAM:
            self._compute_ready.set()
        elif self._idle[index]:
            self._complete(index)
        else:
            self._queues[self._lanes[task.stream]].put(index)

    def _complete(self, index: int) -> None:
        """A task is done: release what waited for it alone. Lock held."""
        task = self.tasks[index]
        step = self._launched[index]
        self._done[index] = step
        self._open -= task.stream != COMPUTE_STREAM
        cause = self._cause[index] if self._idle[index] else _booking(task)
        for follower, ahead in self._followers[index]:
            if self._launched[follower] == step + ahead and self._done[follower] < step + ahead:
                self._waiting[follower] -= 1
                if self._waiting[follower] == 0:
                    self._release(follower, cause)
        self._all_done.notify_all()

    def _work(self, lane: str) -> None:
        """A thread: run what is ready, in order."""
        while (index := self._queues[lane].get()) is not None:
            if not self._execute(index):
                return

    def _work_here(self) -> None:
        """Run what is ready on the compute thread, which waits for nothing else meanwhile."""
        for waiting in self._queues.values():
            while not waiting.empty():
                index = waiting.get()
                if index is None or not self._execute(index):
                    self._raise_error()
                    return
                record, cause = self._records[index], _booking(self.tasks[index])
                seconds = record.end_s[index] - record.start_s[index]
                record.exposed_s[cause] = record.exposed_s.get(cause, 0.0) + seconds

    def _execute(self, index: int) -> bool:
        """Run a task and release what waited for it; False when it failed."""
        started = time.perf_counter()
        try:
            self._run(self.tasks[index])
        except BaseException as error:
            self._fail(index, error)
            return False
        record = self._records[index]
        record.start_s[index] = started
        record.end_s[index] = time.perf_counter()
        record.finished.setdefault(self.tasks[index].stream, []).append(index)
        with self._lock:
            self._complete(index)
        return True

    def _fail(self, index: int, error: BaseException) -> None:
        failure = StreamError(f"{self.tasks[index].stream}: task {self.tasks[index]} failed: {error}")
        failure.__cause__ = error
        with self._lock:
            self._error = self._error or failure
            self._all_done.notify_all()
        self._compute_ready.set()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _launches(schedule: Schedule) -> dict[int, list[int]]:
    """For every compute task the tasks launched at its end, in order."""
    launches: dict[int, list[int]] = {}
    current = 0
    for task in schedule.tasks:
        if task.stream == COMPUTE_STREAM:
            current = task.index
            launches[current] = []
        else:
            launches[current].append(task.index)
    return launches


def _booking(task: Task) -> str:
    """What waiting for a task is booked to."""
    return f"tier {task.tier}" if task.tier >= 0 else "optim"
