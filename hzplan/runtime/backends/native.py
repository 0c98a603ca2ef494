"""Collectives that are issued as one operation, by a library or by the rate-limited dry run.

What a task moves over one stage, of several buckets, is one operation too: a launch, a latency.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from hzplan.runtime.backends.base import Buffers, Collectives, Group, Reductions, Rounded, Split, convert
from hzplan.runtime.backends.convert import Conversion, front
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
    def issue_all_to_all(self, sent: Split, received: Split) -> Work | None:
        """Start an exchange. None: see ``issue_all_gathers``."""

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
        """See Group. Without scratch; sums are in the communication dtype."""
        return _AllReduces(self, buffers)


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
        self._under_way = Transfer(self._group.issue_all_to_all(self._sent, self._received))

    def end(self) -> None:
        """See Collectives."""
        if self._under_way.work is not None:
            wait([self._under_way])


class _Reductions(Reductions):
    """Sums in the communication dtype, in place where the sum is to be added or widened."""

    def __init__(self, group: NativeGroup, buffers: Sequence[Buffers]) -> None:
        self._group = group
        self._narrow: list[Conversion] = []
        # By whether sums are added:
        self._pairs: dict[bool, list[Pair]] = {False: [], True: []}
        self._widen: dict[bool, list[Conversion]] = {False: [], True: []}
        self._added: list[tuple[Tensor, Tensor]] = []  # (to, what)
        for one in buffers:
            whole, part = one.whole, one.part
            own = total = whole.view(group.size, -1)[group.place]
            narrow = one.narrow_dtype
            if narrow is not None:
                whole = front(one.whole, narrow)
                total = whole.view(group.size, -1)[group.place]
                self._narrow.append(Conversion(one.whole, whole))
            for accumulates in (False, True):
                adds = accumulates and one.adds
                self._pairs[accumulates].append((whole, total if adds or narrow is not None else part))
                if narrow is not None:
                    self._widen[accumulates].append(Conversion(total, own if adds else part))
            if one.adds:
                self._added.append((part, own))

    def run(self, *, accumulate: bool = False, tag: int = 0) -> None:
        """See Reductions."""
        convert(self._narrow)
        self._group.issue_reduce_scatters(self._pairs[accumulate])
        convert(self._widen[accumulate])
        if accumulate:
            for target, total in self._added:
                target.add_(total)


class _AllReduces(Collectives):
    def __init__(self, group: NativeGroup, buffers: Sequence[Buffers]) -> None:
        self._group = group
        self._sent = [
            one.whole if one.narrow_dtype is None else front(one.whole, one.narrow_dtype) for one in buffers
        ]
        travels = [
            (one.whole, sent) for one, sent in zip(buffers, self._sent, strict=True) if sent is not one.whole
        ]
        self._narrow = [Conversion(whole, sent) for whole, sent in travels]
        self._widen = [Conversion(sent, whole) for whole, sent in travels]

    def begin(self, tag: int = 0) -> None:
        """See Collectives."""
        convert(self._narrow)
        self._under_way = Transfer(self._group.issue_all_reduces(self._sent))

    def end(self) -> None:
        """See Collectives."""
        if self._under_way.work is not None:
            wait([self._under_way])
        convert(self._widen)
