"""A world of which one rank is here: collectives take the time that is said, and nothing is sent.

Everything else is the runtime's own: buffers, streams, copies, optimizer. What would arrive is made of what
this rank has, so that shapes and lifetimes are those of the real run; values are not.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hzplan.core.hierarchy import Mesh, Stage
from hzplan.runtime.paced_cuda import DeviceWire

DONE_S = 1e-6
TRIED_S, TRIES = 4e-3, 16
"""For how long, and how often, the lateness of waits is tried."""
MOST_LATE_S = 3e-4
"""What is later was disturbed."""
Seconds = Callable[[str, Stage, int], float]
"""Of an operation, as a profile calls it, over a stage, whose whole buffer has so many bytes."""


@cache
def _lateness_s() -> float:
    """By how much three of four waits of this process, at most, end later than asked: about 0.1 ms."""
    never, found = threading.Event(), []
    for _ in range(TRIES):
        began = time.perf_counter()
        never.wait(TRIED_S)
        found.append(time.perf_counter() - began - TRIED_S)
    return min(max(0.0, sorted(found)[3 * TRIES // 4]), MOST_LATE_S)


class Wire:
    """A tier's link: the streams that have something under way share it equally, each of them in order.

    ``contention``: how many times as long several streams take together as one after the other.
    """

    def __init__(self, contention: float = 1.0) -> None:
        self._contention = contention
        self._on_device: DeviceWire | None = None
        self._changed = threading.Condition()
        # By stream, in order: seconds that what is under way would still need alone.
        self._left: dict[str, dict[object, float]] = {}
        self._settled = 0.0

    def start(self, seconds: float, stream: str = "") -> object:
        """Something is under way from now on that would take so long alone."""
        key = object()
        with self._changed:
            self._settle()
            if seconds > DONE_S:
                self._left.setdefault(stream, {})[key] = seconds
            self._changed.notify_all()
        return key

    def start_on(self, device: torch.device, seconds: float, stream: str = "") -> torch.cuda.Event:
        """The same on a GPU, in its own time."""
        if self._on_device is None:
            self._on_device = DeviceWire(device, self._contention)
        return self._on_device.start(stream, seconds)

    def wait(self, key: object) -> None:
        """Return when it has arrived; on a GPU the current CUDA stream goes on then."""
        if isinstance(key, torch.cuda.Event):
            torch.cuda.current_stream().wait_event(key)
            return
        while True:
            with self._changed:
                self._settle()
                if not any(key in queue for queue in self._left.values()):
                    return
                # Until the next end, whosever it is: the rest goes faster then.
                left = min(self._heads().values()) * self._slowdown() - _lateness_s()
                if left > 0:
                    self._changed.wait(left)
            if left <= 0:
                os.sched_yield()  # too short to be waited for, by which others go on

    def _heads(self) -> dict[str, float]:
        """What is on the link, by stream."""
        return {stream: next(iter(queue.values())) for stream, queue in self._left.items()}

    def _slowdown(self) -> float:
        many = len(self._left)
        return many * self._contention if many > 1 else 1.0

    def _settle(self) -> None:
        """What has passed since the last time, in turn to the next end. Lock held."""
        now = time.perf_counter()
        passed, self._settled = now - self._settled, now
        while self._left and passed > 0:
            slowdown = self._slowdown()
            step = min(passed, max(DONE_S, min(self._heads().values())) * slowdown)
            passed -= step
            for stream, queue in list(self._left.items()):
                key = next(iter(queue))
                queue[key] -= step / slowdown
                if queue[key] <= DONE_S:
                    del queue[key]
                if not queue:
                    del self._left[stream]


@dataclass
class Carried:
    """A gather under way."""

    wire: Wire
    key: object
    over: Callable[[], None]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it has arrived."""
        self.wire.wait(self.key)
        self.over()
        return True


@dataclass
class PacedGroup:
    """What the runtime uses of a process group. ``ranks``: its members in the world; ``latency_once``:
    gathers that a task has under way at once over several stages wait for one latency only;
    ``needs_scratch``: whether the cluster's reductions receive into memory of the runtime's."""

    wire: Wire
    stream: str
    stage: Stage
    place: int
    ranks: tuple[int, ...]
    seconds: Seconds
    latency_once: bool
    needs_scratch: bool
    under_way: dict[int, dict[Stage, int]]  # by thread: bytes that it gathers on this wire

    def rank(self) -> int:
        """This rank's place in the group."""
        return self.place

    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)

    def start(self, seconds: float, whole: Tensor) -> object:
        """Under way from now on."""
        if whole.is_cuda:
            return self.wire.start_on(whole.device, seconds, self.stream)
        return self.wire.start(seconds, self.stream)

    def all_gather(self, whole: Tensor, part: Tensor) -> Carried:
        """``whole`` [size × n] from ``part`` [n], this rank's slice or apart from it; under way."""
        thread = threading.get_ident()
        before = self.under_way[thread]
        nbytes = before.get(self.stage, 0)
        seconds = self.seconds("all_gather", self.stage, nbytes + whole.nbytes)
        if nbytes:  # gathers of a stage take as long as one of all their bytes
            seconds -= self.seconds("all_gather", self.stage, nbytes)
        elif before and self.latency_once:
            paid = max(self.seconds("all_gather", stage, 0) for stage in before)
            seconds -= min(paid, self.seconds("all_gather", self.stage, 0))
        before[self.stage] = nbytes + whole.nbytes
        key = self.start(max(0.0, seconds), whole)
        for place, row in enumerate(whole.view(self.size(), -1)):
            if place != self.place or row.data_ptr() != part.data_ptr():
                row.copy_(part)
        return Carried(self.wire, key, before.clear)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> None:
        """This rank's slice of ``whole`` [size × n], as often as there are ranks, into ``part`` [n]."""
        key = self.start(self.seconds("reduce_scatter", self.stage, whole.nbytes), whole)
        own = whole.view(self.size(), -1)[self.place]
        if own.data_ptr() != part.data_ptr():
            part.copy_(own)
        part.mul_(self.size())
        self.wire.wait(key)


class PacedWorld:
    """One rank of many. ``norm_s``: how long all take to add up a number."""

    is_part = False

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        seconds: Seconds,
        *,
        exchanges: bool,
        contention: Sequence[float] = (),
        norm_s: float = 0.0,
    ) -> None:
        self.rank, self.size = rank, mesh.world
        self._seconds, self._exchanges, self._norm_s = seconds, exchanges, norm_s
        _lateness_s()  # which takes a while, the first time
        self._wires = [Wire(factor) for factor in contention or [1.0] * len(mesh.tiers)]
        self._meeting = Wire()
        self._under_way: list[dict[int, dict[Stage, int]]] = [defaultdict(dict) for _ in self._wires]

    def meets(self, ranks: Iterable[int]) -> bool:
        """See World."""
        return False

    def groups(self, mesh: Mesh, wanted: Iterable[tuple[str, Stage]]) -> dict[tuple[str, Stage], PacedGroup]:
        """See World."""
        found = {}
        for kind, stage in wanted:
            bounds = enumerate(mesh.tier_bounds)
            tier = next(tier for tier, (low, high) in bounds if low <= stage.low < high)
            ranks = tuple(mesh.group(self.rank, stage))
            found[kind, stage] = PacedGroup(
                wire=self._wires[tier],
                stream=kind,
                stage=stage,
                place=ranks.index(self.rank),
                ranks=ranks,
                seconds=self._seconds,
                latency_once=self._exchanges,
                needs_scratch=self._exchanges,
                under_way=self._under_way[tier],
            )
        return found

    def broadcast(self, tensor: Tensor) -> None:
        """See World: this rank's values are everyone's."""

    def all_reduce(self, tensor: Tensor, operation: Any = None) -> None:
        """See World: what the others would have is as much as this one has."""
        meeting, seconds = self._meeting, self._norm_s
        on_gpu = tensor.is_cuda
        meeting.wait(meeting.start_on(tensor.device, seconds) if on_gpu else meeting.start(seconds))
