"""A dry run of one rank of many: rate-limited collectives take a given time, and nothing is sent.

Everything else is the runtime's own: buffers, streams, copies, optimizer. What would arrive is made of this
rank's values, so that shapes and lifetimes are those of the real run; values are not.
``Link`` shares a tier's rate among collectives on a CPU, the kernel in ``device_link`` on a GPU, alike.
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
from hzplan.runtime.backends.base import Split
from hzplan.runtime.backends.device_link import DeviceLink
from hzplan.runtime.backends.native import NativeGroup, Pair

DONE_S = 1e-6
"""A transfer with no more seconds left than this has arrived."""
TRIED_S, TRIES = 4e-3, 16
"""Seconds of a trial wait, and number of trials, from which the lateness of waits is measured."""
MOST_LATE_S = 3e-4
"""Upper limit of the lateness of a wait, seconds. Later waits are treated as disturbances."""
Seconds = Callable[[str, Stage, int], float]
"""Seconds of an operation (a profile's name for it) over a stage, for a whole buffer of so many bytes."""


@cache
def _lateness_s() -> float:
    """Measure the lateness of this process's waits, seconds, third quartile: about 1e-4."""
    never, found = threading.Event(), []
    for _ in range(TRIES):
        began = time.perf_counter()
        never.wait(TRIED_S)
        found.append(time.perf_counter() - began - TRIED_S)
    return min(max(0.0, sorted(found)[3 * TRIES // 4]), MOST_LATE_S)


class Link:
    """A tier's link: streams with transfers under way share it equally, transfers of one stream go in order.

    ``contention``: how many times as long several streams take together as one after the other.
    """

    def __init__(self, contention: float = 1.0) -> None:
        self._contention = contention
        self._on_device: DeviceLink | None = None
        self._changed = threading.Condition()
        # By stream, in order: seconds that each transfer under way would still need alone.
        self._left: dict[str, dict[object, float]] = {}
        self._settled = 0.0

    def start(self, seconds: float, stream: str = "") -> object:
        """Put a transfer under way that would take ``seconds`` alone; returns what to wait for."""
        key = object()
        with self._changed:
            self._settle()
            if seconds > DONE_S:
                self._left.setdefault(stream, {})[key] = seconds
            self._changed.notify_all()
        return key

    def start_on(self, device: torch.device, seconds: float, stream: str = "") -> torch.cuda.Event:
        """The same on a GPU, from where its current CUDA stream is."""
        if self._on_device is None:
            self._on_device = DeviceLink(device, self._contention)
        return self._on_device.start(stream, seconds)

    def wait(self, key: object) -> None:
        """Return when a transfer has arrived; on a GPU the current CUDA stream goes on then."""
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
        """Seconds left of the transfer that is on the link, by stream."""
        return {stream: next(iter(queue.values())) for stream, queue in self._left.items()}

    def _slowdown(self) -> float:
        many = len(self._left)
        return many * self._contention if many > 1 else 1.0

    def _settle(self) -> None:
        """Take the time since the last call off the transfers under way, end by end. Lock held."""
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
class _Carried:
    """A gather under way; ``over``: to call when it has arrived."""

    link: Link
    key: object
    over: Callable[[], None]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it has arrived."""
        self.link.wait(self.key)
        self.over()
        return True


class RateLimitedGroup(NativeGroup):
    """Collectives that take as long as ``seconds`` says, on the link of the stage's tier."""

    def __init__(self, world: RateLimitedWorld, mesh: Mesh, kind: str, stage: Stage) -> None:
        members = mesh.group(world.rank, stage)
        super().__init__(members, members.index(world.rank))
        tier = mesh.tier_of(stage.high - 1)  # of a stage over several the slowest
        self._link, self._stream, self._stage = world.links[tier], kind, stage
        self._seconds, self._under_way = world.seconds, world.under_way[tier]
        self.needs_scratch = world.exchanges

    def _start(self, seconds: float, whole: Tensor) -> object:
        """Put a transfer under way."""
        if whole.is_cuda:
            return self._link.start_on(whole.device, seconds, self._stream)
        return self._link.start(seconds, self._stream)

    def issue_all_gathers(self, pairs: Sequence[Pair]) -> _Carried:
        """See NativeGroup. ``whole`` is made of copies of ``part``.

        Exchanges over several stages of a tier wait for one latency only.
        """
        before = self._under_way[threading.get_ident()]
        nbytes = sum(whole.nbytes for whole, _ in pairs)
        seconds = self._seconds("all_gather", self._stage, nbytes)
        if before and self.needs_scratch:
            paid = max(self._seconds("all_gather", stage, 0) for stage in before)
            seconds -= min(paid, self._seconds("all_gather", self._stage, 0))
        before[self._stage] = nbytes
        key = self._start(max(0.0, seconds), pairs[0][0])
        for whole, part in pairs:
            for place, row in enumerate(whole.view(self.size, -1)):
                if place != self.place or row.data_ptr() != part.data_ptr():
                    row.copy_(part)
        return _Carried(self._link, key, before.clear)

    def issue_reduce_scatters(self, pairs: Sequence[Pair]) -> None:
        """See NativeGroup. The sum is this rank's slice, as often as there are ranks."""
        sizes = [whole.nbytes for whole, _ in pairs]
        messages = sizes if self.needs_scratch else [sum(sizes)]  # exchanges go one after the other
        seconds = sum(self._seconds("reduce_scatter", self._stage, nbytes) for nbytes in messages)
        key = self._start(seconds, pairs[0][0])
        for whole, part in pairs:
            own = whole.view(self.size, -1)[self.place]
            if own.data_ptr() != part.data_ptr():
                part.copy_(own)
            part.mul_(self.size)
        self._link.wait(key)

    def issue_all_reduces(self, wholes: Sequence[Tensor]) -> _Carried:
        """See NativeGroup. The sum is this rank's values, as often as there are ranks."""
        seconds = sum(self._seconds("all_reduce", self._stage, whole.nbytes) for whole in wholes)
        key = self._start(seconds, wholes[0])
        for whole in wholes:
            whole.mul_(self.size)
        return _Carried(self._link, key, lambda: None)

    def issue_exchanges(self, pairs: Sequence[tuple[Split, Split]]) -> _Carried:
        """See NativeGroup. Where the cluster's reductions are exchanges, they are what was measured."""
        return self._exchange("reduce_scatter" if self.needs_scratch else "all_to_all", pairs)

    def issue_all_to_all(self, pairs: Sequence[tuple[Split, Split]]) -> _Carried:
        """See NativeGroup."""
        return self._exchange("all_to_all", pairs)

    def _exchange(self, operation: str, pairs: Sequence[tuple[Split, Split]]) -> _Carried:
        """What arrives is what there is of this rank's values."""
        sizes = [max(sent.values.nbytes, received.values.nbytes) for sent, received in pairs]
        seconds = sum(self._seconds(operation, self._stage, nbytes) for nbytes in sizes)
        key = self._start(seconds, pairs[0][0].values)
        for sent, received in pairs:
            many = min(sent.values.numel(), received.values.numel())
            received.values[:many].copy_(sent.values[:many])
        return _Carried(self._link, key, lambda: None)


class RateLimitedWorld:
    """One rank of many. See World.

    ``exchanges``: whether the cluster's collectives go point to point; ``norm_s``: seconds of an all-reduce
    of one number; ``under_way``: by tier, thread and stage, bytes of the gathers of a thread's task.
    """

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
        self.seconds, self.exchanges, self._norm_s = seconds, exchanges, norm_s
        _lateness_s()  # which takes a while, the first time
        self.links = [Link(factor) for factor in contention or [1.0] * len(mesh.tiers)]
        self._meeting = Link()
        self.under_way: list[dict[int, dict[Stage, int]]] = [defaultdict(dict) for _ in self.links]

    def meets(self, ranks: Iterable[int]) -> bool:
        """See World."""
        return False

    def new_group(self, mesh: Mesh, kind: str, stage: Stage, device: torch.device) -> RateLimitedGroup:
        """See World."""
        return RateLimitedGroup(self, mesh, kind, stage)

    def apart(self) -> RateLimitedWorld:
        """See World."""
        return self

    def meet(self, what: str) -> None:
        """See World: nobody else is there."""

    def broadcast(self, tensor: Tensor) -> None:
        """See World: this rank's values are everyone's."""

    def all_reduce(self, tensor: Tensor, operation: Any = None) -> None:
        """See World: all ranks have this rank's values, which stay as they are."""
        meeting, seconds = self._meeting, self._norm_s
        on_gpu = tensor.is_cuda
        meeting.wait(meeting.start_on(tensor.device, seconds) if on_gpu else meeting.start(seconds))
