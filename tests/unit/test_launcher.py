"""What is launched on a device that queues work: on a recorded one, which knows what happens before what."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hzplan.core.schedule import COMPUTE_STREAM, Kind, Schedule, Task
from hzplan.cost.simulate import replay
from hzplan.errors import UserError
from hzplan.runtime.cuda import Device
from hzplan.runtime.executor import StepRecord, Streams
from hzplan.runtime.launcher import FIRST_TIMED, TIME_EVERY, Event, Launcher
from tests.unit.steps import Step, chain, steps

STEPS = 7


@dataclass
class Recorded:
    """A device that does at once what is launched, and notes when it would have been done.

    A mark is (the marks before it, as a bit set; when it is reached). ``ran``: the mark at the end of every
    task of every step.
    """

    lengths: Sequence[int]
    marks: int = 0
    timed: int = 0
    step: int = -1
    active: list[RecordedQueue] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    ran: dict[tuple[int, int], RecordedEvent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.compute = RecordedQueue(self)

    def here(self) -> RecordedQueue:
        return self.active[-1] if self.active else self.compute

    def queue(self, name: str) -> RecordedQueue:
        self.names.append(name)
        return RecordedQueue(self)

    def now_s(self) -> float:
        return 0.0

    def run(self, task: Task, scratch: int = 0) -> None:
        """A task's work, in the queue that is current."""
        assert task.stream == COMPUTE_STREAM or not torch.is_grad_enabled()
        queue = self.here()
        queue.at_ns += self.lengths[task.index]
        queue.before |= 1 << self.marks
        self.ran[self.step, task.index] = RecordedEvent(queue.before, queue.at_ns, self.marks)
        self.marks += 1


@dataclass(frozen=True)
class RecordedEvent:
    before: int
    at_ns: float
    mark: int = -1
    timed: bool = True

    def synchronize(self) -> None:
        pass

    def is_reached(self) -> bool:
        return True

    def after_s(self, earlier: Event) -> float:
        assert isinstance(earlier, RecordedEvent) and earlier.timed and self.timed
        return (self.at_ns - earlier.at_ns) / 1e9


@dataclass
class RecordedQueue:
    device: Recorded
    before: int = 0
    at_ns: float = 0

    def record(self, *, timed: bool = False) -> RecordedEvent:
        self.device.timed += timed
        return RecordedEvent(self.before, self.at_ns, timed=timed)

    def wait(self, event: Event) -> None:
        assert isinstance(event, RecordedEvent)
        self.before |= event.before
        self.at_ns = max(self.at_ns, event.at_ns)

    @contextmanager
    def current(self) -> Iterator[None]:
        self.device.active.append(self)
        yield
        self.device.active.pop()


def _take(launcher: Launcher, device: Recorded, schedule: Schedule) -> None:
    device.step += 1
    launcher.begin_step()
    for task in schedule.tasks[1:]:
        if task.stream == COMPUTE_STREAM:
            launcher.start(task)
            device.run(task)
            launcher.end(task)


def run_steps(
    schedule: Schedule,
    lengths: Sequence[int],
    idle: set[int],
    streams: Streams = Streams.TIERS,
    *,
    times_all: bool = True,
    count: int = STEPS,
) -> tuple[Recorded, list[StepRecord]]:
    """Steps as the engine takes them, and what is said of them."""
    device = Recorded(lengths)
    launcher = Launcher(schedule, device.run, lambda task: task.index in idle, device, streams)
    if times_all:
        launcher.time_every_step()
    records = []
    for _ in range(count):
        _take(launcher, device, schedule)
        records.append(launcher.record)
    launcher.synchronize()
    return device, records


def some_idle(schedule: Schedule, rng: random.Random) -> set[int]:
    """Tasks that a plan leaves empty: collectives, and both ways of a unit's state; never an update."""
    here = {unit for unit in schedule.requires if rng.random() < 0.3}
    found = set()
    for task in schedule.tasks:
        if task.kind in (Kind.FETCH, Kind.STORE):
            found |= {task.index} if here.issuperset(task.units) else set()
        elif task.tier >= 0 and rng.random() < 0.3:
            found.add(task.index)
    return found


def _through(schedule: Schedule, idle: set[int], index: int) -> set[int]:
    """What a task comes after in its step, with what that comes after in place of what is left out."""
    found = set[int]()
    for before in schedule.tasks[index].needs:
        found |= _through(schedule, idle, before) if before in idle else {before}
    return found


@given(steps(), st.integers(0, 2**16), st.sampled_from(Streams))
def test_every_edge_of_the_schedule_is_kept(drawn: Step, seed: int, streams: Streams) -> None:
    schedule, rng = drawn.build(), random.Random(seed)
    idle = some_idle(schedule, rng)
    device, _ = run_steps(schedule, [rng.randint(1, 9) for _ in schedule.tasks], idle, streams)
    for step in range(STEPS):
        for task in schedule.tasks[1:]:
            if task.index in idle:
                continue
            mine = device.ran[step, task.index]
            for before in _through(schedule, idle, task.index) - {0}:
                assert mine.before >> device.ran[step, before].mark & 1, f"{task} before {before}"
            for before in set(task.needs_previous) - idle - {0}:
                if step:
                    assert mine.before >> device.ran[step - 1, before].mark & 1, f"{task} before {before}"


@given(steps(), st.integers(0, 2**16))
def test_the_order_of_launches_is_the_schedules(drawn: Step, seed: int) -> None:
    schedule, rng = drawn.build(), random.Random(seed)
    able = [task.index for task in schedule.tasks if task.stream != COMPUTE_STREAM]
    idle = some_idle(schedule, rng)
    device, records = run_steps(schedule, [1] * len(schedule.tasks), idle)
    expected = [index for index in able if index not in idle]
    assert all(record.launched == expected for record in records[2:])
    assert device.names == list(dict.fromkeys(schedule.tasks[index].stream for index in able))
    for record in records[2:]:
        for stream, begun in record.begun.items():
            assert begun == [index for index in expected if schedule.tasks[index].stream == stream]


@given(steps(), st.integers(0, 2**16))
def test_a_device_takes_as_long_as_the_simulator_says(drawn: Step, seed: int) -> None:
    """The third reader of the schedule: periods and waits are the replay's, where it is steady."""
    schedule, rng = drawn.build(), random.Random(seed)
    # Nothing is computed at these two; only clipping takes time there.
    instant = (Kind.BEGIN,) if drawn.clip else (Kind.BEGIN, Kind.STEP)
    lengths = [0 if task.kind in instant else rng.randint(1, 50) for task in schedule.tasks]
    timeline = replay(schedule, lengths)
    device, records = run_steps(schedule, lengths, set())
    ends = [device.ran[step, schedule.tasks[-1].index].at_ns for step in range(STEPS)]
    periods = [later - earlier for earlier, later in itertools.pairwise(ends)]
    if len({*periods[-3:]}) > 1:
        return  # it alternates
    assert periods[-1] == timeline.period_ns
    exposed = sum(records[-1].exposed_s.values()) * 1e9
    assert exposed == pytest.approx(sum(timeline.exposed_ns.values()), abs=1e-3)


def test_waits_are_booked_to_what_came_last() -> None:
    schedule = chain(1, tiers=2).build()
    slow = [9 if str(t).startswith("unshard.1@0") else 10 * (t.kind is Kind.COMPUTE) for t in schedule.tasks]
    _, records = run_steps(schedule, slow, set())
    waited = {cause: round(seconds * 1e9) for cause, seconds in records[-1].exposed_s.items() if seconds}
    assert sum(waited.values()) == 9
    assert records[0].start_s == {} and records[3].start_s


def test_few_steps_are_timed() -> None:
    """One in ``TIME_EVERY``; the others have no times, and no events that could have some."""
    schedule = chain(3, tiers=2).build()
    lengths = [10 * (task.kind is Kind.COMPUTE) for task in schedule.tasks]
    count = 2 * TIME_EVERY + 2
    every, all_records = run_steps(schedule, lengths, set(), count=count)
    device, records = run_steps(schedule, lengths, set(), times_all=False, count=count)
    assert device.timed < every.timed / TIME_EVERY * 3  # of two, and the ends before them
    timed = [record.step for record in records if record.timed]
    assert timed == [FIRST_TIMED, FIRST_TIMED + TIME_EVERY]
    for record, whole in zip(records, all_records, strict=True):
        assert record.launched == whole.launched and record.step == whole.step
        assert record.start_s == (whole.start_s if record.timed else {})
        assert record.exposed_s == (whole.exposed_s if record.timed else {})
    assert all(record.timed for record in all_records[4:]) and all_records[4].start_s


def test_asked_twice_every_step_is_timed_from_the_first_time_on() -> None:
    schedule = chain(2).build()
    device = Recorded([1] * len(schedule.tasks))
    launcher = Launcher(schedule, device.run, lambda task: False, device)
    launcher.time_every_step()
    for step in range(6):
        launcher.time_every_step()
        _take(launcher, device, schedule)
        assert launcher.record.timed == (step - 2 >= 1)


@pytest.mark.parametrize("left", range(2 * TIME_EVERY))
@pytest.mark.parametrize("resumes", [False, True])
def test_a_step_that_is_left_leaves_no_ends_that_a_timed_one_reads(left: int, resumes: bool) -> None:
    """Outside of the schedule from its first unit on; it goes on with its last compute task."""
    schedule = chain(2, clip=True).build()
    device = Recorded([1] * len(schedule.tasks))
    launcher = Launcher(schedule, device.run, lambda task: False, device)
    for step in range(2 * TIME_EVERY + 6):
        if step != left:
            _take(launcher, device, schedule)
            continue
        launcher.skip_step()
        launcher.step += 1  # as the engine counts it
        device.step += 1
        if resumes:
            task = [one for one in schedule.tasks if one.stream == COMPUTE_STREAM][-1]
            launcher.resume(task)
            launcher.start(task)
            launcher.end(task)
    assert launcher.step == 2 * TIME_EVERY + 5


def test_what_was_done_by_other_means_is_not_waited_for() -> None:
    schedule = chain(2).build()
    device = Recorded([1] * len(schedule.tasks))
    launcher = Launcher(schedule, device.run, lambda task: False, device)
    device.step = 0
    launcher.begin_step()
    assert any(launcher.ran(task) for task in schedule.tasks if task.kind is Kind.UNSHARD)
    launcher.skip_step()
    launcher.step += 1  # as the engine counts a step that goes by no schedule
    assert not any(map(launcher.ran, schedule.tasks))
    device.step = 1
    launcher.begin_step()
    launcher.start(schedule.compute[0])
    launcher.close()
    assert launcher.step == 2


def test_a_step_is_not_captured_into_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UserError, match="CUDA graph"):
        Device(torch.device("cuda", 0)).here()


def test_a_step_stays_on_the_stream_that_it_was_parallelized_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = ["the first"]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream[0])
    device = Device(torch.device("cuda", 0))
    device.here()
    device.here()
    stream[0] = "another"
    with pytest.raises(UserError, match="another CUDA stream"):
        device.here()
