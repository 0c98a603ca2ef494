"""Interference on a device that queues work: what is measured, on a device whose times are known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from hzplan.profiler.network import queued
from hzplan.runtime import launcher

COMPUTE_S, GATHER_S, REDUCE_S = 10.0, 2.0, 3.0
LOSS, SLOWDOWN, CONTENTION = 0.2, 1.5, 1.25


@dataclass
class Event:
    device: Known
    queue: str
    place: int
    made: float
    timed: bool

    def synchronize(self) -> None:
        self.device.run()

    def is_reached(self) -> bool:
        return True

    def after_s(self, earlier: launcher.Event) -> float:
        assert isinstance(earlier, Event) and earlier.timed and self.timed
        return self.device.at(self) - self.device.at(earlier)


@dataclass
class Known:
    """Queues whose work slows down while other queues have some; in steps of a hundredth of a second.

    It begins at once, and the host takes ``launch_s`` for each launch, in which it works. ``work``: by queue,
    seconds of each piece, its kind and the event that it waits for.
    """

    launch_s: float = 0.1
    work: dict[str, list[tuple[float, str, Event | None]]] = field(default_factory=dict)
    held: dict[str, Event] = field(default_factory=dict)
    ends: dict[str, list[float]] = field(default_factory=dict)
    rest: dict[str, float] = field(default_factory=dict)
    current: list[str] = field(default_factory=lambda: ["compute"])
    now: float = 0.0

    def here(self) -> Queue:
        return Queue(self, self.current[-1])

    def queue(self, name: str) -> Queue:
        return Queue(self, name)

    def now_s(self) -> float:
        return 0.0

    def put(self, seconds: float, kind: str) -> None:
        queue = self.current[-1]
        self.work.setdefault(queue, []).append((seconds, kind, self.held.pop(queue, None)))
        self.run(self.now + self.launch_s)

    def at(self, event: Event) -> float:
        ends = self.ends.get(event.queue, [])
        return max(event.made, ends[event.place - 1] if event.place else 0.0)

    def may_begin(self, event: Event | None) -> bool:
        return event is None or len(self.ends.get(event.queue, [])) >= event.place

    def first(self, queue: str) -> tuple[float, str, Event | None] | None:
        done, pieces = len(self.ends.get(queue, [])), self.work[queue]
        return pieces[done] if done < len(pieces) else None

    def run(self, until: float = math.inf) -> None:
        while self.now < until:
            at_head = {queue: piece for queue in self.work if (piece := self.first(queue)) is not None}
            able = {queue for queue, piece in at_head.items() if self.may_begin(piece[2])}
            if not able and until == math.inf:
                return
            kinds = {at_head[queue][1] for queue in able}
            self.now += 0.01
            for queue in able:
                rate = 1.0
                if at_head[queue][1] == "compute":
                    rate = 1 - LOSS if len(kinds) > 1 else 1.0
                elif "compute" in kinds:
                    rate = 1 / SLOWDOWN
                elif len(able) > 1:
                    rate = 1 / (2 * CONTENTION)
                self.rest[queue] = self.rest.get(queue, at_head[queue][0]) - 0.01 * rate
                if self.rest[queue] <= 1e-9:
                    self.ends.setdefault(queue, []).append(self.now)
                    del self.rest[queue]


@dataclass
class Queue:
    device: Known
    name: str

    def record(self, *, timed: bool = False) -> Event:
        place = len(self.device.work.get(self.name, []))
        return Event(self.device, self.name, place, self.device.now, timed)

    def wait(self, event: launcher.Event) -> None:
        assert isinstance(event, Event)
        self.device.held[self.name] = event

    @contextmanager
    def current(self) -> Iterator[None]:
        self.device.current.append(self.name)
        yield
        self.device.current.pop()


def test_alone_is_what_events_say() -> None:
    device = Known()
    assert queued.alone(device, lambda: device.put(GATHER_S, "link"), 5) == pytest.approx(GATHER_S, rel=0.02)


@pytest.mark.parametrize("launch_s", [0.0, 0.1, 0.5])
def test_compute_and_communication_are_counted_where_both_run(launch_s: float) -> None:
    device = Known(launch_s)
    computed, communicated = queued.together(
        device,
        lambda: device.put(COMPUTE_S, "compute"),
        lambda: device.put(GATHER_S, "link"),
        (COMPUTE_S, GATHER_S),
        *(30.0, 4),
    )
    assert 1 - COMPUTE_S / computed == pytest.approx(LOSS, abs=0.02)
    assert communicated / GATHER_S == pytest.approx(SLOWDOWN, rel=0.02)
    assert {*device.work} == {"compute", "link"}


def test_a_host_that_launches_too_slowly_sees_no_interference() -> None:
    """Events are then as far apart as launches, alone and beside each other."""
    alone = (
        queued.alone((one := Known(50.0)), lambda: one.put(COMPUTE_S, "compute"), 3),
        queued.alone((other := Known(50.0)), lambda: other.put(GATHER_S, "link"), 3),
    )
    device = Known(50.0)
    found = queued.together(
        device,
        lambda: device.put(COMPUTE_S, "compute"),
        lambda: device.put(GATHER_S, "link"),
        *(alone, 200.0, 4),
    )
    assert found == pytest.approx(alone, rel=0.02)


def test_gathers_beside_reductions_contend() -> None:
    device = Known()
    found = queued.contention(
        device, lambda: device.put(GATHER_S, "link"), lambda: device.put(GATHER_S, "link"), 6
    )
    assert found == pytest.approx(CONTENTION, rel=0.05)
    assert {*device.work} == {"gather", "reduce", "compute"}  # together on two, apart on the current one
