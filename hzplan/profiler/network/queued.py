"""Compute and communication beside each other on a device that queues work: timed by events on two queues.

On a thread of the host's they would share the device's default stream, and run one after the other. NOT RUN
ON A GPU YET: no machine of ours has one.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

from hzplan.runtime.launcher import Device, Event, Queue

Call = Callable[[], object]

SURPLUS = 1.5
"""How many times as long as compute alone communication is queued for: it is to outlast slower compute."""


def together(
    device: Device, compute: Call, communicate: Call, seconds: tuple[float, float], least_s: float, calls: int
) -> tuple[float, float]:
    """Mean seconds of a call of compute, and of communication on a queue of its own, while both run.

    ``seconds``: of a call of each alone. Both run for at least ``least_s`` and ``calls`` calls of compute,
    launched in turns, for a device begins at once and its queues are not endless. Counted are the calls of
    one that the other was there for, from begin to end; where there are none, because the host launches more
    slowly than the device works, there is no interference either, and ``seconds`` are returned.
    """
    link = device.queue("link")
    computes = max(calls, math.ceil(least_s / seconds[0]))
    share = math.ceil(SURPLUS * seconds[0] / seconds[1])
    begin = device.here().record(timed=True)
    link.wait(begin)
    computed, communicated = list[_Call](), list[_Call]()
    for _ in range(computes):
        communicated += _timed(link, communicate, share)
        computed += _timed(device.here(), compute, 1)
    for calls_of in (computed, communicated):
        calls_of[-1].ended.synchronize()
    low = max(of[0].began.after_s(begin) for of in (computed, communicated))
    high = min(of[-1].ended.after_s(begin) for of in (computed, communicated))
    inside = [
        [one.seconds for one in of if low <= one.began.after_s(begin) and one.ended.after_s(begin) <= high]
        for of in (computed, communicated)
    ]
    if not all(inside):
        return seconds
    return statistics.fmean(inside[0]), statistics.fmean(inside[1])


def alone(device: Device, call: Call, calls: int) -> float:
    """Mean seconds of a call on the current queue."""
    timed = _timed(device.here(), call, calls)
    timed[-1].ended.synchronize()
    return timed[-1].ended.after_s(timed[0].began) / calls


def contention(device: Device, gather: Call, reduce: Call, calls: int) -> float:
    """Seconds of gathers on one queue beside as many reductions on another, over seconds of all of them one
    after the other."""
    queues = device.queue("gather"), device.queue("reduce")
    begin = device.here().record(timed=True)
    for queue in queues:
        queue.wait(begin)
    for _ in range(calls):
        ends = [_timed(queue, one, 1)[-1].ended for queue, one in zip(queues, (gather, reduce), strict=True)]
    for end in ends:
        end.synchronize()
    beside = max(end.after_s(begin) for end in ends)
    return beside / (calls * (alone(device, gather, calls) + alone(device, reduce, calls)))


class _Call(NamedTuple):
    """Events before and after a call's work."""

    began: Event
    ended: Event

    @property
    def seconds(self) -> float:
        """Both must be reached."""
        return self.ended.after_s(self.began)


def _timed(queue: Queue, call: Call, calls: int) -> list[_Call]:
    """Put so many calls into a queue; an event before and after each."""
    with queue.current():
        events = [queue.record(timed=True)]
        for _ in range(calls):
            call()
            events.append(queue.record(timed=True))
    return [_Call(*pair) for pair in itertools.pairwise(events)]
