"""Collectives on given buffers, prepared once and run as often as needed.

Buffers nest: the smaller one is a rank's slice of the larger one, so gathers and scatters run in place.

On gloo both are exchanges, point to point, every receive posted before the first send. gloo sends only what
a receiver has announced to want, and the announcement travels behind the data that the receiver sends
itself: a rank that sends first and is late gets its peers' data only when its own have gone, one direction
after the other. All views are cut when a collective is prepared: ranks that share processors pay for every
line of Python that runs beside their compute.

``wire``: a narrower dtype to travel in. Values are rounded where they lie, into a part of their own memory,
so that nothing is allocated for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hzplan.runtime.convert import Conversion, back, front
from hzplan.runtime.faults import Transfer, wait

# torch renamed both; the older names remain for the older versions that the package admits.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def exchanges(device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Whether a group's collectives on a device's tensors go point to point: on gloo.

    Its own reduce-scatter moves as many bytes as an all-reduce, an exchange and a local sum half of that.
    The backend is asked, not its name in the job's start, which may leave the choice to torch.
    """
    group = group or dist.group.WORLD
    assert group is not None
    return str(group._get_backend(device).name()) == "gloo"


Message = tuple[list[Tensor], int, int]
"""A contiguous view, and whom it comes from or goes to: the rank in the group, and in the world."""


class Gather:
    """Gathers every rank's ``part`` [n] into ``whole`` [group size × n], in group order.

    ``part`` may be this rank's slice of ``whole``. With ``wire`` it must be, and is rounded like all others,
    so that ranks end up with the same values.
    """

    def __init__(
        self, whole: Tensor, part: Tensor, group: dist.ProcessGroup, wire: torch.dtype | None = None
    ) -> None:
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
        if self._exchanges:
            slices, place, others = whole.view(group.size(), -1), group.rank(), _others(group)
            self._receives = [_message(slices[peer], peer, group) for peer in reversed(others)]
            self._sends = [_message(part, peer, group) for peer in others]
            self._own = None if slices[place].data_ptr() == part.data_ptr() else slices[place]

    def begin(self, tag: int = 0) -> list[Transfer]:
        """Under way; ``wait`` for what it returns, then ``end``.

        ``tag``: exchanges of one tag on a group are in the same order on every rank; others need not be.
        """
        _convert(self._before)
        if not self._exchanges:
            return [Transfer(_all_gather(self._whole, self._part, group=self._group, async_op=True))]
        under_way = _receive(self._group, self._receives, tag)
        under_way += _send(self._group, self._sends, tag)
        if self._own is not None:
            self._own.copy_(self._part)
        return under_way

    def end(self) -> None:
        """What has arrived is put where it is read."""
        _convert(self._after)


class Reduction:
    """Sums all ranks' ``whole`` [group size × n] and leaves (or adds) this rank's slice in ``part`` [n].

    ``part`` may be this rank's slice of ``whole``, unless it is added to; the rest of ``whole`` is not kept.
    Exchanges sum in group order on every rank, so results do not depend on timing, and in the buffers'
    dtype whatever the ``wire``. Their ``scratch`` is for what others send: of every one of them n elements,
    or where it is smaller (at least 2 × (group size − 1) elements) as many as fit twice, so that one portion
    is summed while the next one travels.
    """

    def __init__(
        self,
        part: Tensor,
        whole: Tensor,
        group: dist.ProcessGroup,
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

    def __init__(
        self, part: Tensor, whole: Tensor, group: dist.ProcessGroup, wire: torch.dtype | None
    ) -> None:
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
        _reduce_scatter(target, self._whole, group=self._group)
        _convert(self._widen[accumulate])
        if accumulate:
            self._part.add_(self._own)


class _Exchange:
    """Every rank sends every other one its slice, in portions, and sums what arrives."""

    def __init__(
        self,
        part: Tensor,
        whole: Tensor,
        group: dist.ProcessGroup,
        scratch: Tensor,
        wire: torch.dtype | None,
    ) -> None:
        self._group = group
        size, self._place = group.size(), group.rank()
        slices, others = whole.view(size, -1), _others(group)
        length, fits = part.numel(), scratch.numel() // (size - 1)
        portion = length if fits >= length else fits // 2
        bounds = [(start, min(start + portion, length)) for start in range(0, length, portion)]
        halves = scratch[: min(2, len(bounds)) * (size - 1) * portion].view(-1, size - 1, portion)
        self._receives: list[list[Message]] = []
        self._sends: list[list[Message]] = []
        self._terms: list[list[Tensor]] = []  # of every portion, in group order
        self._parts = [part[start:end] for start, end in bounds]
        self._narrow: list[list[Conversion]] = []  # before a portion is sent
        self._widen: list[list[Conversion]] = []  # after one has arrived
        for index, (start, end) in enumerate(bounds):
            room = {peer: halves[index % 2][row, : end - start] for row, peer in enumerate(sorted(others))}
            sent = {peer: slices[peer][start:end] for peer in others}
            terms = room | {self._place: slices[self._place][start:end]}
            self._terms.append([terms[member] for member in range(size)])
            narrow, widen = [], []
            if wire is not None:
                travel = {peer: front(view, wire) for peer, view in sent.items()}
                arrive = {peer: back(view, wire) for peer, view in room.items()}
                narrow = [Conversion(sent[peer], travel[peer]) for peer in others]
                widen = [Conversion(arrive[peer], room[peer]) for peer in others]
                sent, room = travel, arrive
            self._narrow.append(narrow)
            self._widen.append(widen)
            self._receives.append([_message(room[peer], peer, group) for peer in reversed(others)])
            self._sends.append([_message(sent[peer], peer, group) for peer in others])

    def run(self, accumulate: bool, tag: int) -> None:
        ahead = min(2, len(self._parts))
        receives = [_receive(self._group, messages, tag) for messages in self._receives[:ahead]]
        sends = [sent for index in range(ahead) for sent in self._send(index, tag)]
        for index, (terms, part) in enumerate(zip(self._terms, self._parts, strict=True)):
            wait(receives[index])
            _convert(self._widen[index])
            if accumulate:
                for term in terms:
                    part.add_(term)
            else:
                _sum(terms, self._place, part)
            if index + 2 < len(self._parts):
                receives.append(_receive(self._group, self._receives[index + 2], tag))
                sends += self._send(index + 2, tag)
        wait(sends)

    def _send(self, index: int, tag: int) -> list[Transfer]:
        _convert(self._narrow[index])
        return _send(self._group, self._sends[index], tag)


def _convert(conversions: Sequence[Conversion]) -> None:
    for conversion in conversions:
        conversion.run()


def _sum(terms: Sequence[Tensor], place: int, out: Tensor) -> None:
    """Add up in order; ``out`` may be the memory of ``terms[place]``: what comes before goes elsewhere."""
    total = terms[0]
    for index, term in enumerate(terms[1:], start=1):
        total = torch.add(total, term, out=terms[0] if index < place else out)


def _others(group: dist.ProcessGroup) -> list[int]:
    """The other ranks of a group, the next one first, so that no two ranks begin with the same."""
    size, place = group.size(), group.rank()
    return [(place + step) % size for step in range(1, size)]


def _message(view: Tensor, peer: int, group: dist.ProcessGroup) -> Message:
    return [view], peer, dist.get_global_rank(group, peer)


# As ``dist.irecv`` and ``dist.isend``, without what they check in Python each time.


def _receive(group: dist.ProcessGroup, messages: Sequence[Message], tag: int) -> list[Transfer]:
    return [Transfer(group.recv(views, peer, tag), rank) for views, peer, rank in messages]


def _send(group: dist.ProcessGroup, messages: Sequence[Message], tag: int) -> list[Transfer]:
    return [Transfer(group.send(views, peer, tag), rank) for views, peer, rank in messages]
