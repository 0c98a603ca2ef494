"""Executes a schedule on a device that queues work: the compute thread launches all, and waits for nothing.

Every stream of the schedule is a queue of the device, a CUDA stream. What a compute task's end launches, in
the schedule's total order, goes into the queues at once; events make the device wait where the schedule has
an edge from one queue to another. The host is ahead of the device by up to a step.

The device is a small protocol, so that what is launched, in which order and after which events can be looked
at without one (``tests/unit/test_launcher.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import torch

from hzplan.core.schedule import COMPUTE_STREAM, Schedule, Task
from hzplan.runtime.executor import StepRecord, Streams, booking, first_waits, launches, needs, span
from hzplan.runtime.faults import named
from hzplan.runtime.hang_watch import HangWatch


class Event(Protocol):
    """A place in a queue: reached when everything before it is done."""

    def synchronize(self) -> None:
        """Return when it is reached."""

    def is_reached(self) -> bool:
        """Whether it is; returns at once."""

    def after_s(self, earlier: Event) -> float:
        """Seconds from another event to this one; both must be timed and reached."""


class Queue(Protocol):
    """Work that a device does in order."""

    def record(self, *, timed: bool = False) -> Event:
        """An event after everything that is in the queue; ``after_s`` needs ``timed`` ones."""

    def wait(self, event: Event) -> None:
        """What is put into the queue from now on begins after the event."""

    def current(self) -> AbstractContextManager[object]:
        """What this thread launches inside goes into this queue."""


class Device(Protocol):
    """What queues work."""

    def here(self) -> Queue:
        """The queue that this thread launches into: compute's."""

    def queue(self, name: str) -> Queue:
        """A new one, for a stream of the schedule."""

    def now_s(self) -> float:
        """The host's clock, for records."""


TIME_EVERY, FIRST_TIMED = 17, 3
"""Of so many steps one is timed, from which one on: two events for each task, read on the thread that
launches. Not the first steps, which touch buffers and create state, and at an odd distance, so that it is not
always the step after an evaluation or a checkpoint."""


@dataclass
class _Times:
    """Events of a step that is timed; ``first`` and ``zero_s``: an event at its begin, and when that was put
    there (or a little earlier than it was reached)."""

    first: Event
    zero_s: float
    began: list[tuple[int, Event]] = field(default_factory=list)
    ended: list[tuple[int, Event]] = field(default_factory=list)
    waits: list[tuple[Event, Event, list[tuple[Event, str]]]] = field(default_factory=list)


@dataclass
class _Launched:
    """What was launched in a step; ``last``: by queue, the end of what was put there."""

    record: StepRecord
    last: dict[str, Event] = field(default_factory=dict)
    times: _Times | None = None


class Launcher:
    """Runs steps of one schedule. All methods are called on the compute thread, or autograd's for its device.

    The same methods as ``Executor``; ``record`` is of the last step but one, which the device has done.
    """

    def __init__(
        self,
        schedule: Schedule,
        run: Callable[[Task, int], None],
        idle: Callable[[Task], bool],
        device: Device,
        streams: Streams = Streams.TIERS,
        tier_names: tuple[str, ...] = (),
        watch: HangWatch | None = None,
    ) -> None:
        """``watch``: told of every communication task."""
        self._watch = watch
        self.schedule, self.tasks = schedule, schedule.tasks
        self._run, self._device, self._tier_names = run, device, tier_names
        left_out = {task.index for task in self.tasks if task.stream != COMPUTE_STREAM and idle(task)}
        self._streams = streams
        # By compute task: what is launched at its end, as many tasks together as go into one queue.
        self._next = {
            index: [(name, [*found]) for name, found in groupby(launched, self._queue_of)]
            for index, launched in launches(schedule, left_out).items()
        }
        now, previous = needs(schedule, left_out)
        self._before = [sorted(a | b) for a, b in zip(now, previous, strict=True)]
        self._waits = first_waits(schedule, now, previous)
        self._queues: dict[str, Queue] = {}
        if streams is not Streams.NONE:
            names = [task.stream for task in self.tasks if task.stream != COMPUTE_STREAM]
            for name in dict.fromkeys(names if streams is Streams.TIERS else ["all"] * bool(names)):
                self._queues[name] = device.queue(name)
        # By task: where, after what it was put there last, and whether that has a time.
        self._ended: dict[int, tuple[str, Event, bool]] = {}
        self._ran: dict[int, int] = {}  # by task: the step in which it was launched last
        self._all_timed_from = sys.maxsize  # a step
        self.step = -1
        self._ends_timed = False
        device.here()  # it refuses other streams than this one from now on
        self._last_compute = schedule.streams[COMPUTE_STREAM][-1]
        self.record = StepRecord(timed=False)
        self._step = _Launched(self.record)
        self._before_last: _Launched | None = None

    def waits(self, task: Task) -> bool:
        """See ``Executor``."""
        return task.index in self._waits

    def launches(self, task: Task) -> bool:
        """See ``Executor``."""
        return bool(self._next[task.index])

    def time_every_step(self) -> None:
        """Time all steps from the next but one on, for who asks for each one's waits or traces them."""
        # A timed step also reads how the one before it ended.
        self._all_timed_from = min(self._all_timed_from, self.step + 2)

    def _is_timed(self, step: int) -> bool:
        return step % TIME_EVERY == FIRST_TIMED or step >= self._all_timed_from

    def begin_step(self) -> None:
        """Start the next step; its first unshards are launched."""
        here = self._device.here()  # first: it refuses what cannot be captured
        last = self._before_last
        self.record = StepRecord(timed=False) if last is None else self._read(last)
        if last is not None and self._watch is not None:
            self._watch.forget(last.last)
        self._before_last = self._step if self.step >= 0 else None
        self.step += 1
        self._step = _Launched(StepRecord(self.step, timed=self._is_timed(self.step)))
        self._ends_timed = self._is_timed(self.step) or self._is_timed(self.step + 1)
        if self._is_timed(self.step):
            self._step.times = _Times(here.record(timed=True), self._device.now_s())
        self.start(self.tasks[0])
        self.end(self.tasks[0])

    def start(self, task: Task) -> None:
        """The compute task that is launched next waits, on the device, for what it needs."""
        here = self._device.here()
        needed = [(index, *self._ended[index]) for index in self._before[task.index] if index in self._ended]
        times = self._step.times
        # Of tasks that have no times nobody knows which came last.
        books = times is not None and bool(needed) and all(timed for *_, timed in needed)
        asked = here.record(timed=True) if books else None
        for _, _, event, _ in needed:
            here.wait(event)
        if times is None:
            return
        began = here.record(timed=True)
        if asked is not None:
            causes = [(event, booking(self.tasks[index])) for index, _, event, _ in needed]
            times.waits.append((asked, began, causes))
        times.began.append((task.index, began))

    def end(self, task: Task) -> None:
        """A compute task is launched: so is what follows it in the total order."""
        times = self._step.times
        if times is None and not self._next[task.index] and task is not self._last_compute:
            return
        here = self._device.here()
        done = here.record(timed=self._ends_timed)
        self._step.last[COMPUTE_STREAM] = done
        if times is not None:
            times.ended.append((task.index, done))
        if self._next[task.index]:
            # Also in an evaluation: what is allocated meanwhile is used in training, too.
            with torch.inference_mode(False), torch.no_grad():
                self._launch_after(task, here, done)

    def _launch_after(self, task: Task, here: Queue, done: Event) -> None:
        """Launch what follows a compute task, whose end is ``done``."""
        waited: set[str] = set()
        for name, launched in self._next[task.index]:
            queue = self._queues.get(name, here)
            with queue.current():
                if name != COMPUTE_STREAM and name not in waited:  # once: later ones come after it there
                    queue.wait(done)
                    waited.add(name)
                for index in launched:
                    self._launch(index, name, queue)

    def _launch(self, index: int, name: str, queue: Queue) -> None:
        """Put a task into the queue that is the current one."""
        task, times, ended_before = self.tasks[index], self._step.times, self._ended
        try:
            for before in self._before[index]:
                if before in ended_before and ended_before[before][0] != name:
                    queue.wait(ended_before[before][1])
            if times is not None:
                times.began.append((index, queue.record(timed=True)))
            with span(task):
                self._run(task, 0)
            ended = queue.record(timed=self._ends_timed)
        except Exception as error:  # a device may tell at any call what failed before
            with named(self._label(task)):
                raise error
        ended_before[index] = name, ended, self._ends_timed
        if self._watch is not None and task.tier >= 0:
            self._watch.launched(name, f"{self._label(task)} of step {self.step}", ended)
        self._step.last[name] = ended
        if times is not None:
            times.ended.append((index, ended))
        self._step.record.launched.append(index)
        self._step.record.begun.setdefault(task.stream, []).append(index)
        self._ran[index] = self.step

    def _queue_of(self, index: int) -> str:
        """The name of the queue that a task is put into."""
        stream = self.tasks[index].stream
        return {Streams.TIERS: stream, Streams.ONE: "all", Streams.NONE: COMPUTE_STREAM}[self._streams]

    def _label(self, task: Task) -> str:
        tier = f" ({self._tier_names[task.tier]})" if 0 <= task.tier < len(self._tier_names) else ""
        return f"stream {task.stream}{tier}, task {task}"

    def ran(self, task: Task) -> bool:
        """Whether a task was launched in this step."""
        return self._ran.get(task.index) == self.step

    def synchronize(self) -> None:
        """Wait until everything launched is done."""
        for _, event, _ in self._ended.values():
            event.synchronize()
        self._device.here().record().synchronize()

    def skip_step(self) -> None:
        """Count the rest of this step as done (it was done by other means)."""
        self.synchronize()
        self._ended.clear()  # all of it is done: nobody needs to wait for it

    def resume(self, task: Task) -> None:
        """See ``Executor.resume``: nothing is under way, so there is nothing to wait for, and nothing to be
        read of a step that did not begin here."""
        self._ended.clear()
        self._before_last, self._ends_timed = None, False
        self._step = _Launched(StepRecord(self.step, timed=False))

    def close(self) -> None:
        """Wait for the device."""
        self.synchronize()
        if self._watch is not None:
            self._watch.close()

    def _read(self, launched: _Launched) -> StepRecord:
        """What the device did in a step, when it has done it: the host is ahead by two steps at most."""
        for event in launched.last.values():
            event.synchronize()
        record, times = launched.record, launched.times
        if times is None:
            return record
        first, zero_s = times.first, times.zero_s
        record.start_s = {index: zero_s + event.after_s(first) for index, event in times.began}
        record.end_s = {index: zero_s + event.after_s(first) for index, event in times.ended}
        for asked, began, causes in times.waits:
            _, cause = max((event.after_s(asked), cause) for event, cause in causes)
            waited = began.after_s(asked)
            record.exposed_s[cause] = record.exposed_s.get(cause, 0.0) + waited
            start = zero_s + asked.after_s(first)
            record.waits.append((start, start + waited, cause))
        return record
