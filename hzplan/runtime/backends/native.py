"""Collectives that are issued as one operation, by a library or by the rate-limited dry run.

What a task moves over one stage, of several buckets, is one operation too: a launch, a latency.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from hzplan.runtime.backends.base import Buffers, Collectives, Group, Reductions, Rounded, Split, convert
from hzplan.runtime.backends.packing import Cast, Step
from hzplan.runtime.faults import Transfer, Work, wait

Pair = tuple[Tensor, Tensor]
"""``whole`` [group size × n] and ``part`` [n] of one collective."""


class NativeGroup(Group):
    """A group that issues the collectives of several buckets together, each on all of its ``whole``."""

    concurrent = False

    @abstractmethod
    def issue_all_gathers(self, pairs: Sequence[Pair]) -> Work | None:
        """Start all-gathers of each ``part`` into its ``whole``.

        None where they are in the order of the current device stream, as later work on it is.
        """

    @abstractmethod
    def issue_reduce_scatters(self, pairs: Sequence[Pair]) -> None:
        """Sum each ``whole`` into its ``part``, in the order of the current device stream."""

    @abstractmethod
    def issue_all_reduces(self, wholes: Sequence[Tensor]) -> Work | None:
        """Start sums of each tensor in its place. None: see ``issue_all_gathers``."""

    @abstractmethod
    def issue_all_to_all(self, pairs: Sequence[tuple[Split, Split]]) -> Work | None:
        """Start exchanges of what is sent and what is received. None: see ``issue_all_gathers``."""

    def issue_exchanges(self, pairs: Sequence[tuple[Split, Split]]) -> Work | None:
        """The same of what is summed afterwards."""
        return self.issue_all_to_all(pairs)

    def all_gather(self, buffers: Sequence[Buffers]) -> Collectives:
        """See Group."""
        return _Gathers(self, buffers)

    def all_to_all(self, sent: Split, received: Split) -> Collectives:
        """See Group."""
        return _AllToAll(self, sent, received)

    def reduce_scatter(self, buffers: Sequence[Buffers], scratch: Tensor) -> Reductions:
        """See Group. Without scratch."""
        return _Reductions(self, buffers)

    def all_reduce(self, buffers: Sequence[Buffers], scratch: Tensor) -> Collectives:
        """See Group. Without scratch. In the library where it sums in what it sends."""
        if any(map(_is_exchanged, buffers)):
            return super().all_reduce(buffers, scratch)
        return _AllReduces(self, buffers)


def _is_exchanged(buffers: Buffers) -> bool:
    """Whether values travel in a form that they are not to be summed in."""
    form = buffers.narrow
    return form is not None and not (isinstance(form, Cast) and form.sums)


class _Gathers(Collectives):
    def __init__(self, group: NativeGroup, buffers: Sequence[Buffers]) -> None:
        self._group = group
        rounded = [Rounded.of(one, group.place) for one in buffers]
        self._pairs = [(one.whole, one.part) for one in rounded]
        self._narrow = [*chain.from_iterable(one.narrow for one in rounded)]
        self._widen = [*chain.from_iterable(one.widen for one in rounded)]

    def begin(self, tag: int = 0) -> None:
        """See Collectives."""
        convert(self._narrow)
        self._under_way = Transfer(self._group.issue_all_gathers(self._pairs))

    def end(self) -> None:
        """See Collectives."""
        if self._under_way.work is not None:  # else they are in order on the current stream
            wait([self._under_way])
        convert(self._widen)


class _AllToAll(Collectives):
    def __init__(self, group: NativeGroup, sent: Split, received: Split) -> None:
        self._group, self._sent, self._received = group, sent, received

    def begin(self, tag: int = 0) -> None:
        """See Collectives."""
        self._under_way = Transfer(self._group.issue_all_to_all([(self._sent, self._received)]))

    def end(self) -> None:
        """See Collectives."""
        if self._under_way.work is not None:
            wait([self._under_way])


class _Reductions(Reductions):
    """Those that the library sums, then those that are exchanged and summed here."""

    def __init__(self, group: NativeGroup, buffers: Sequence[Buffers]) -> None:
        exchanged = [one for one in buffers if _is_exchanged(one)]
        summed = [one for one in buffers if not _is_exchanged(one)]
        self._parts: list[_Summed | _Exchanged] = []
        self._parts += [_Summed(group, summed)] if summed else []
        self._parts += [_Exchanged(group, exchanged)] if exchanged else []

    def run(self, *, accumulate: bool = False, tag: int = 0) -> None:
        """See Reductions."""
        for part in self._parts:
            part.run(accumulate=accumulate)


class _Summed:
    """Sums in the form that travels, in place where the sum is to be added or widened."""

    def __init__(self, group: NativeGroup, buffers: Sequence[Buffers]) -> None:
        self._group = group
        self._narrow: list[Step] = []
        # By whether sums are added:
        self._pairs: dict[bool, list[Pair]] = {False: [], True: []}
        self._widen: dict[bool, list[Step]] = {False: [], True: []}
        self._added: list[tuple[Tensor, Tensor]] = []  # (to, what)
        for one in buffers:
            whole, part = one.whole, one.part
            own = total = whole.view(group.size, -1)[group.place]
            form = one.narrow
            if form is not None:
                whole = form.front(one.whole)
                total = whole.view(group.size, -1)[group.place]
                self._narrow.append(form.pack(one.whole, whole))
            for accumulates in (False, True):
                adds = accumulates and one.adds
                self._pairs[accumulates].append((whole, total if adds or form is not None else part))
                if form is not None:
                    self._widen[accumulates].append(form.unpack(total, own if adds else part))
            if one.adds:
                self._added.append((part, own))

    def run(self, *, accumulate: bool) -> None:
        """See Reductions."""
        convert(self._narrow)
        self._group.issue_reduce_scatters(self._pairs[accumulate])
        convert(self._widen[accumulate])
        if accumulate:
            for target, total in self._added:
                target.add_(total)


class _Exchanged:
    """Every rank gets what all have for it, and adds it up in the buffers' dtype, in the order of places.

    What leaves lies in front in the memory of ``whole``, what arrives behind: both are at most half as long.
    The sum begins where what has left was.
    """

    def __init__(self, group: NativeGroup, buffers: Sequence[Buffers]) -> None:
        self._group = group
        self._narrow: list[Step] = []
        self._pairs: list[tuple[Split, Split]] = []
        self._sum: list[Step] = []
        self._totals: list[tuple[Tensor, Tensor, bool]] = []  # (to, what, whether it may be added)
        for one in buffers:
            form, size = one.narrow, group.size
            assert form is not None
            sent, received = form.front(one.whole), form.back(one.whole)
            if sent.numel() + received.numel() > one.whole.view(form.dtype).numel():
                raise ValueError("values that are exchanged travel in at most half of their own bytes")
            sizes = [form.units(one.part.numel())] * size
            total = one.whole[: one.part.numel()]
            self._narrow.append(form.pack(one.whole, sent))
            self._pairs.append((Split(sent, sizes), Split(received, sizes)))
            for place, arrived in enumerate(received.split(sizes)):
                self._sum.append(form.unpack(arrived, total, adds=place > 0))
            self._totals.append((one.part, total, one.adds))

    def run(self, *, accumulate: bool) -> None:
        """See Reductions."""
        convert(self._narrow)
        under_way = Transfer(self._group.issue_exchanges(self._pairs))
        if under_way.work is not None:
            wait([under_way])
        convert(self._sum)
        for target, total, adds in self._totals:
            if accumulate and adds:
                target.add_(total)
            elif target.data_ptr() != total.data_ptr():
                target.copy_(total)


class _AllReduces(Collectives):
    def __init__(self, group: NativeGroup, buffers: Sequence[Buffers]) -> None:
        self._group = group
        self._sent = [one.whole if one.narrow is None else one.narrow.front(one.whole) for one in buffers]
        travels = [
            (one.narrow, one.whole, sent)
            for one, sent in zip(buffers, self._sent, strict=True)
            if one.narrow is not None
        ]
        self._narrow = [form.pack(whole, sent) for form, whole, sent in travels]
        self._widen = [form.unpack(sent, whole) for form, whole, sent in travels]

    def begin(self, tag: int = 0) -> None:
        """See Collectives."""
        convert(self._narrow)
        self._under_way = Transfer(self._group.issue_all_reduces(self._sent))

    def end(self) -> None:
        """See Collectives."""
        if self._under_way.work is not None:
            wait([self._under_way])
        convert(self._widen)
