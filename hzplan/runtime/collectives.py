"""Collectives on given buffers, prepared once and run as often as needed.

Buffers nest: the smaller one is a rank's slice of the larger one, so gathers and scatters run in place.

On gloo both are exchanges, point to point, a receive posted before the send beside it. gloo sends only what
a receiver has announced to want, and the announcement travels behind the data that the receiver sends
itself: a rank that sends first and is late gets its peers' data only when its own have gone, one direction
after the other. All views are cut when a collective is prepared: ranks that share processors pay for every
line of Python that runs beside their compute.

``wire``: a narrower dtype to travel in. Values are rounded where they lie, into a part of their own memory,
so that nothing is allocated for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hzplan.runtime.convert import Conversion, back, front
from hzplan.runtime.faults import Transfer, Work, wait
from hzplan.runtime.paced import PacedGroup
from hzplan.runtime.world import ThreadGroup

# torch renamed both; the older names remain for the older versions that the package admits.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def exchanges(device: torch.device, group: Group | None = None) -> bool:
    """Whether a group's collectives on a device's tensors go point to point: on gloo.

    Its own reduce-scatter moves as many bytes as an all-reduce, an exchange and a local sum half of that.
    The backend is asked, not its name in the job's start, which may leave the choice to torch.
    """
    if isinstance(group, ThreadGroup):
        return True
    if isinstance(group, PacedGroup):
        return False
    group = group or dist.group.WORLD
    assert group is not None
    return str(group._get_backend(device).name()) == "gloo"


def receives_apart(device: torch.device, group: Group) -> bool:
    """Whether a group's reductions need scratch to receive into."""
    return group.needs_scratch if isinstance(group, PacedGroup) else exchanges(device, group)


Group = dist.ProcessGroup | ThreadGroup | PacedGroup

Message = tuple[list[Tensor], int, int]
"""A contiguous view, and whom it comes from or goes to: the rank in the group, and in the world."""


class Gather:
    """Gathers every rank's ``part`` [n] into ``whole`` [group size × n], in group order.

    ``part`` may be this rank's slice of ``whole``. With ``wire`` it must be, and is rounded like all others,
    so that ranks end up with the same values.

    An exchange goes round in a ring: every rank passes on to the next one what it had from the one before.
    Each rank then receives from one other only; several senders at once were measured to be slower.
    """

    def __init__(self, whole: Tensor, part: Tensor, group: Group, wire: torch.dtype | None = None) -> None:
        self._group = group
        self._before: list[Conversion] = []
        self._after: list[Conversion] = []
        if wire is not None and wire != whole.dtype:
            length, place = part.numel(), group.rank()
            travels = back(whole, wire)
            mine = travels[place * length : (place + 1) * length]
            self._before, self._after = [Conversion(part, mine)], [Conversion(travels, whole)]
            whole, part = travels, mine
        self._whole, self._part = whole, part
        self._exchanges = exchanges(whole.device, group)
        self._under_way: list[Transfer] = []
        if self._exchanges:
            slices, place, size = whole.view(group.size(), -1), group.rank(), group.size()
            passed = [part, *(slices[(place - step) % size] for step in range(1, size))]
            self._receives = [_message(view, (place - 1) % size, group) for view in passed[1:]]
            self._sends = [_message(view, (place + 1) % size, group) for view in passed[:-1]]
            self._own = None if slices[place].data_ptr() == part.data_ptr() else slices[place]

    def run(self) -> None:
        """From begin to end."""
        self.begin()
        self.end()

    def begin(self, tag: int = 0) -> None:
        """Under way; ``end`` waits for it.

        ``tag``: exchanges of one tag on a group are in the same order on every rank; others need not be.
        """
        _convert(self._before)
        self._tag = tag
        if not self._exchanges:
            self._under_way = [Transfer(_gathered(self._whole, self._part, self._group))]
            return
        self._under_way = [_receive(self._group, message, tag) for message in self._receives]
        self._sent = [_send(self._group, message, tag) for message in self._sends[:1]]
        if self._own is not None:
            self._own.copy_(self._part)

    def end(self) -> None:
        """Return when what has arrived is where it is read."""
        if self._exchanges:
            for transfer, following in zip(self._under_way, [*self._sends[1:], None], strict=True):
                wait([transfer])
                if following is not None:
                    self._sent.append(_send(self._group, following, self._tag))
            wait(self._sent)
        else:
            wait(self._under_way)
        _convert(self._after)


class Reduction:
    """Sums all ranks' ``whole`` [group size × n] and leaves (or adds) this rank's slice in ``part`` [n].

    ``part`` may be this rank's slice of ``whole``, unless it is added to; the rest of ``whole`` is not kept.
    Exchanges sum in an order fixed by the rank, so results do not depend on timing, and in the buffers' dtype
    whatever the ``wire``. Their ``scratch`` is for what another rank sends: n elements, or where it is
    smaller (at least 2 elements) a portion in each half, one of which is summed while the other one travels.
    """

    def __init__(
        self,
        part: Tensor,
        whole: Tensor,
        group: Group,
        scratch: Tensor,
        wire: torch.dtype | None = None,
    ) -> None:
        wire = None if wire == whole.dtype else wire
        self._how: _Exchange | _Native = (
            _Exchange(part, whole, group, scratch, wire)
            if exchanges(whole.device, group)
            else _Native(part, whole, group, wire)
        )

    def run(self, *, accumulate: bool = False, tag: int = 0) -> None:
        """Return when it is done. ``accumulate``: add; ``tag``: as for ``Gather.begin``."""
        self._how.run(accumulate, tag)


class _Native:
    """The backend's own reduce-scatter."""

    def __init__(self, part: Tensor, whole: Tensor, group: Group, wire: torch.dtype | None) -> None:
        self._part, self._whole, self._group = part, whole, group
        size, place = group.size(), group.rank()
        self._own = self._into = whole.view(size, -1)[place]
        self._narrow: list[Conversion] = []
        self._widen: dict[bool, list[Conversion]] = {False: [], True: []}  # by whether it is added
        if wire is not None:
            self._whole = front(whole, wire)
            self._into = self._whole.view(size, -1)[place]
            self._narrow = [Conversion(whole, self._whole)]
            self._widen = {
                False: [Conversion(self._into, part)],
                True: [Conversion(self._into, self._own)],
            }

    def run(self, accumulate: bool, tag: int) -> None:
        _convert(self._narrow)
        # In place where it is added or narrow: what was there has been summed.
        target = self._into if accumulate or self._narrow else self._part
        _scattered(target, self._whole, self._group)
        _convert(self._widen[accumulate])
        if accumulate:
            self._part.add_(self._own)


class _Exchange:
    """Every rank sends every other one its slice, one after the other, and adds up what arrives.

    In portions of at most half of ``scratch``: one is summed while the next one travels. In step k everyone
    sends to the k-th rank after it, so that no two send to the same.
    """

    def __init__(
        self,
        part: Tensor,
        whole: Tensor,
        group: Group,
        scratch: Tensor,
        wire: torch.dtype | None,
    ) -> None:
        self._group = group
        size, place = group.size(), group.rank()
        slices, length = whole.view(size, -1), part.numel()
        portion = length if scratch.numel() >= length else scratch.numel() // 2
        bounds = [(start, min(start + portion, length)) for start in range(0, length, portion)]
        self._part, self._own = part, slices[place]
        self._steps = [
            [
                _Portion(
                    receive=_message(arrives, (place - step) % size, group),
                    send=_message(travels, (place + step) % size, group),
                    narrow=None if wire is None else Conversion(sent, travels),
                    widen=None if wire is None else Conversion(arrives, room),
                    room=room,
                    first=self._own[start:end] if step == 1 else part[start:end],
                    target=part[start:end],
                )
                for index, (start, end) in enumerate(bounds)
                for room in [scratch[index % 2 * portion :][: end - start]]
                for sent in [slices[(place + step) % size][start:end]]
                for arrives in [room if wire is None else back(room, wire)]
                for travels in [sent if wire is None else front(sent, wire)]
            ]
            for step in range(1, size)
        ]

    def run(self, accumulate: bool, tag: int) -> None:
        if accumulate:
            self._part.add_(self._own)
        for portions in self._steps:
            under_way = [self._begin(portion, tag) for portion in portions[:2]]
            for index, portion in enumerate(portions):
                receive, send = under_way[index]
                wait([receive])
                if portion.widen is not None:
                    portion.widen.run()
                sum_so_far = portion.target if accumulate else portion.first
                torch.add(sum_so_far, portion.room, out=portion.target)
                if index + 2 < len(portions):
                    under_way.append(self._begin(portions[index + 2], tag))
                wait([send])

    def _begin(self, portion: _Portion, tag: int) -> tuple[Transfer, Transfer]:
        receive = _receive(self._group, portion.receive, tag)
        if portion.narrow is not None:
            portion.narrow.run()
        return receive, _send(self._group, portion.send, tag)


@dataclass(frozen=True)
class _Portion:
    """What goes to one rank and comes from another at once.

    ``target`` becomes ``first`` plus what arrives in ``room``.
    """

    receive: Message
    send: Message
    narrow: Conversion | None
    widen: Conversion | None
    room: Tensor
    first: Tensor
    target: Tensor


def _gathered(whole: Tensor, part: Tensor, group: Group) -> Work | None:
    """The backend's own all-gather, under way."""
    if isinstance(group, PacedGroup):
        return group.all_gather(whole, part)
    work: Work | None = _all_gather(whole, part, group=group, async_op=True)
    return work


def _scattered(part: Tensor, whole: Tensor, group: Group) -> None:
    """The backend's own reduce-scatter."""
    if isinstance(group, PacedGroup):
        group.reduce_scatter(part, whole)
    else:
        _reduce_scatter(part, whole, group=group)


def _convert(conversions: Sequence[Conversion]) -> None:
    for conversion in conversions:
        conversion.run()


def _message(view: Tensor, peer: int, group: Group) -> Message:
    assert not isinstance(group, PacedGroup), "which exchanges nothing"
    in_world = group.ranks[peer] if isinstance(group, ThreadGroup) else dist.get_global_rank(group, peer)
    return [view], peer, in_world


# As ``dist.irecv`` and ``dist.isend``, without what they check in Python each time. gloo sends from the
# host's memory only, so what lies on a GPU (ranks that share one, which NCCL refuses) goes through it, and
# the host waits for the current CUDA stream: right, and slow.


def _receive(group: Group, message: Message, tag: int) -> Transfer:
    views, peer, rank = message
    assert not isinstance(group, PacedGroup), "which exchanges nothing"
    if not views[0].is_cuda:
        return Transfer(group.recv(views, peer, tag), rank)
    arrives = [torch.empty_like(view, device="cpu") for view in views]
    return Transfer(_Lands(group.recv(arrives, peer, tag), arrives, views), rank)


def _send(group: Group, message: Message, tag: int) -> Transfer:
    views, peer, rank = message
    assert not isinstance(group, PacedGroup), "which exchanges nothing"
    if not views[0].is_cuda:
        return Transfer(group.send(views, peer, tag), rank)
    leaves = [view.cpu() for view in views]
    return Transfer(_Lands(group.send(leaves, peer, tag), leaves, []), rank)


@dataclass(frozen=True)
class _Lands:
    """A transfer from or to the host's memory, whose ``values`` are kept for as long as it is under way."""

    work: Work
    values: list[Tensor]
    into: list[Tensor]

    def wait(self, *timeout: timedelta) -> bool:
        """See Work; then what has arrived is put into the current CUDA stream."""
        over = self.work.wait(*timeout)
        for view, values in zip(self.into, self.values[: len(self.into)], strict=True):
            view.copy_(values)
        return over
