"""Collectives as exchanges point to point, a receive posted before the send beside it.

gloo sends only what a receiver has announced to want, and the announcement travels behind the data that the
receiver sends itself: a rank that sends first and is late gets its peers' data only when its own have gone,
one direction after the other. And gloo's own reduce-scatter moves as many bytes as an all-reduce, an exchange
and a local sum half of that.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hzplan.runtime.backends.base import Buffers, Collectives, Group, Reductions, Rounded, Split, convert
from hzplan.runtime.backends.packing import Step
from hzplan.runtime.faults import Transfer, Work, wait

MOST_BUFFERS = 1 << 8
"""Upper limit of the pairs of buffers in one gather; each has a tag of its own while they are under way."""

PROBE_TAG = 0x687A7072
"""Tag of a message that is sent only to see whether it can be."""

Message = tuple[list[Tensor], int]
"""A contiguous view, and the place in the group of the rank that it comes from or goes to."""


class ExchangeGroup(Group):
    """A group that sends and receives messages. Both return at once; ``wait`` of the work ends them.

    Messages between two ranks arrive in the order sent, tag by tag. What lies on a GPU (ranks that share one,
    which NCCL refuses) goes through the host's memory, and the host waits for the current CUDA stream: slow.
    """

    needs_scratch = concurrent = True

    @abstractmethod
    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Send one tensor in the host's memory to the rank at a place of the group."""

    @abstractmethod
    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Receive into one tensor in the host's memory from the rank at a place of the group."""

    def all_gather(self, buffers: Sequence[Buffers]) -> Collectives:
        """See Group."""
        return _Gathers([RingGather(self, one) for one in buffers])

    def reduce_scatter(self, buffers: Sequence[Buffers], scratch: Tensor) -> Reductions:
        """See Group. ``scratch``: n elements, or at least 2: two portions, see ``PairwiseReduction``."""
        members = [PairwiseReduction(self, one, scratch.view(one.whole.dtype)) for one in buffers]
        return _Reductions(members, [one.adds for one in buffers])

    def all_to_all(self, sent: Split, received: Split) -> Collectives:
        """See Group."""
        return _AllToAll(self, sent, received)

    def post_send(self, message: Message, tag: int) -> Transfer:
        """Send a view."""
        views, peer = message
        if not views[0].is_cuda:
            return Transfer(self.send(views, peer, tag), self.ranks[peer])
        leaves = [view.cpu() for view in views]
        return Transfer(_ThroughHost(self.send(leaves, peer, tag), leaves, []), self.ranks[peer])

    def post_receive(self, message: Message, tag: int) -> Transfer:
        """Receive into a view."""
        views, peer = message
        if not views[0].is_cuda:
            return Transfer(self.recv(views, peer, tag), self.ranks[peer])
        arrives = [torch.empty_like(view, device="cpu") for view in views]
        return Transfer(_ThroughHost(self.recv(arrives, peer, tag), arrives, views), self.ranks[peer])


class GlooGroup(ExchangeGroup):
    """Exchanges over one process group. ``handle``: torch's group."""

    def __init__(self, handle: dist.ProcessGroup) -> None:
        super().__init__(dist.get_process_group_ranks(handle), handle.rank())
        self.handle = handle

    # As ``dist.irecv`` and ``dist.isend``, without what they check in Python each time.

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """See ExchangeGroup."""
        return self.handle.send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """See ExchangeGroup."""
        return self.handle.recv(tensors, peer, tag)

    def all_reduce(self, buffers: Sequence[Buffers], scratch: Tensor) -> Collectives:
        """See Group. In the library where it sums what it sends: not in a narrower dtype than it is kept in,
        and not on a GPU."""
        if any(one.narrow is not None or one.whole.is_cuda for one in buffers):
            return super().all_reduce(buffers, scratch)
        return _AllReduces(self, [one.whole for one in buffers])

    def suspects(self, late: bool) -> Sequence[int]:
        """The ranks that may be why a collective of the group does not finish: where one is lost those to
        whom nothing can be sent, if there are such, else all others."""
        others = [place for place in range(self.size) if place != self.place]
        lost = [] if late else [place for place in others if not self._can_send(place)]
        return [self.ranks[place] for place in lost or others]

    def _can_send(self, place: int) -> bool:
        try:
            self.send([torch.zeros(1)], place, PROBE_TAG)  # nobody receives it: the job is at its end
        except RuntimeError:
            return False
        return True


class _AllReduces(Collectives):
    """The library's own, on threads of its own."""

    in_order = True

    def __init__(self, group: GlooGroup, tensors: Sequence[Tensor]) -> None:
        self._group, self._tensors = group, [[one] for one in tensors]

    def begin(self, tag: int = 0) -> None:
        """See Collectives. The order of these calls tells the messages apart, not their tag."""
        handle, suspects = self._group.handle, self._group.suspects
        self._under_way = [Transfer(handle.allreduce(one), suspects=suspects) for one in self._tensors]

    def end(self) -> None:
        """See Collectives."""
        wait(self._under_way)


class _AllToAll(Collectives):
    """A message from every rank to every other one that has something for it: in step k to the k-th after it,
    so that no two send to the same."""

    def __init__(self, group: ExchangeGroup, sent: Split, received: Split) -> None:
        leaves, arrives = sent.values.split([*sent.sizes]), received.values.split([*received.sizes])
        place, size = group.place, group.size
        self._group = group
        self._own = arrives[place], leaves[place]
        peers = [((place - step) % size, (place + step) % size) for step in range(1, size)]
        self._receives = [([arrives[peer]], peer) for peer, _ in peers if arrives[peer].numel()]
        self._sends = [([leaves[peer]], peer) for _, peer in peers if leaves[peer].numel()]

    def begin(self, tag: int = 0) -> None:
        tag *= MOST_BUFFERS
        self._under_way = [self._group.post_receive(message, tag) for message in self._receives]
        self._under_way += [self._group.post_send(message, tag) for message in self._sends]
        target, source = self._own
        target.copy_(source)

    def end(self) -> None:
        wait(self._under_way)


class _Gathers(Collectives):
    def __init__(self, members: Sequence[RingGather]) -> None:
        assert len(members) <= MOST_BUFFERS
        self._members = members

    def begin(self, tag: int = 0) -> None:
        for index, member in enumerate(self._members):
            member.begin(tag * MOST_BUFFERS + index)

    def end(self) -> None:
        for member in self._members:
            member.end()


class _Reductions(Reductions):
    """One after the other."""

    def __init__(self, members: Sequence[PairwiseReduction], adds: Sequence[bool]) -> None:
        self._members = list(zip(members, adds, strict=True))

    def run(self, *, accumulate: bool = False, tag: int = 0) -> None:
        for member, adds in self._members:
            member.run(accumulate=accumulate and adds, tag=tag)


class RingGather:
    """All-gather of one pair: every rank passes on to the next one what it had from the one before.

    Each rank then receives from one other only; several senders at once were measured to be slower.
    """

    def __init__(self, group: ExchangeGroup, buffers: Buffers) -> None:
        self._group = group
        whole, self._part, self._narrow, self._widen = Rounded.of(buffers, group.place)
        slices, place, size = whole.view(group.size, -1), group.place, group.size
        passed = [self._part, *(slices[(place - step) % size] for step in range(1, size))]
        self.receives = [([view], (place - 1) % size) for view in passed[1:]]
        self._sends = [([view], (place + 1) % size) for view in passed[:-1]]
        self._own = None if slices[place].data_ptr() == self._part.data_ptr() else slices[place]

    def begin(self, tag: int) -> None:
        """Round, and send and receive the first message."""
        convert(self._narrow)
        self._tag = tag
        self._arriving = [self._group.post_receive(message, tag) for message in self.receives]
        self._sent = [self._group.post_send(message, tag) for message in self._sends[:1]]
        if self._own is not None:
            self._own.copy_(self._part)

    def end(self) -> None:
        """Return when what has arrived is where it is read."""
        for arriving, following in zip(self._arriving, [*self._sends[1:], None], strict=True):
            wait([arriving])
            if following is not None:
                self._sent.append(self._group.post_send(following, self._tag))
        wait(self._sent)
        convert(self._widen)


class PairwiseReduction:
    """Reduce-scatter of one pair: every rank sends all others their slices and adds up what arrives.

    In portions of n elements, or where ``scratch`` is smaller of half of it: one is summed while the next one
    travels. In step k everyone sends to the k-th rank after it, so that no two send to the same. The order of
    the sum is fixed by the rank, so results do not depend on timing; it is in the buffers' dtype.
    """

    def __init__(self, group: ExchangeGroup, buffers: Buffers, scratch: Tensor) -> None:
        self._group = group
        whole, part, form = buffers.whole, buffers.part, buffers.narrow
        size, place = group.size, group.place
        slices, length = whole.view(size, -1), part.numel()
        grain = 1 if form is None else form.grain
        portion = length if scratch.numel() >= length else scratch.numel() // 2 // grain * grain
        bounds = [(start, min(start + portion, length)) for start in range(0, length, portion)]
        self._part, self._own = part, slices[place]
        self._steps = [
            [
                _Portion(
                    receive=([arrives], (place - step) % size),
                    send=([leaves], (place + step) % size),
                    narrow=None if form is None else form.pack(sent, leaves),
                    widen=None if form is None else form.unpack(arrives, received),
                    received=received,
                    first=self._own[start:end] if step == 1 else part[start:end],
                    target=part[start:end],
                )
                for index, (start, end) in enumerate(bounds)
                for received in [scratch[index % 2 * portion :][: end - start]]
                for sent in [slices[(place + step) % size][start:end]]
                for arrives in [received if form is None else form.back(received)]
                for leaves in [sent if form is None else form.front(sent)]
            ]
            for step in range(1, size)
        ]

    def run(self, *, accumulate: bool, tag: int) -> None:
        """See ``Reductions``."""
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
                torch.add(sum_so_far, portion.received, out=portion.target)
                if index + 2 < len(portions):
                    under_way.append(self._begin(portions[index + 2], tag))
                wait([send])

    def _begin(self, portion: _Portion, tag: int) -> tuple[Transfer, Transfer]:
        receive = self._group.post_receive(portion.receive, tag)
        if portion.narrow is not None:
            portion.narrow.run()
        return receive, self._group.post_send(portion.send, tag)


@dataclass(frozen=True)
class _Portion:
    """One message to a rank and one from another; ``target`` becomes ``first`` plus ``received``."""

    receive: Message
    send: Message
    narrow: Step | None
    widen: Step | None
    received: Tensor
    first: Tensor
    target: Tensor


@dataclass(frozen=True)
class _ThroughHost:
    """A transfer from or to the host's memory; ``values`` are kept for as long as it is under way."""

    work: Work
    values: list[Tensor]
    into: Sequence[Tensor]

    def wait(self, *timeout: timedelta) -> bool:
        """See Work; then the current CUDA stream copies what has arrived."""
        over = self.work.wait(*timeout)
        for view, values in zip(self.into, self.values[: len(self.into)], strict=True):
            view.copy_(values)
        return over
