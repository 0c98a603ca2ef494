"""Collectives that are issued as one operation, by a library or by the rate-limited dry run."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from hzplan.runtime.backends.base import Buffers, Gather, Group, Reduction, convert
from hzplan.runtime.backends.convert import Conversion, front
from hzplan.runtime.faults import Transfer, Work, wait


class NativeGroup(Group):
    """A group that issues a collective as one operation on all of ``whole``."""

    concurrent = False

    @abstractmethod
    def issue_all_gather(self, whole: Tensor, part: Tensor) -> Work | None:
        """Start an all-gather of ``part`` [n] into ``whole`` [group size × n].

        None where it is in the order of the current device stream, as later work on it is.
        """

    @abstractmethod
    def issue_reduce_scatter(self, part: Tensor, whole: Tensor) -> None:
        """Sum ``whole`` [group size × n] into ``part`` [n], in the order of the current device stream."""

    def gather(self, buffers: Buffers) -> Gather:
        """See Group."""
        return _Gather(self, buffers)

    def reduction(self, buffers: Buffers, scratch: Tensor) -> Reduction:
        """See Group. Without scratch."""
        return _Reduction(self, buffers)


class _Gather(Gather):
    def __init__(self, group: NativeGroup, buffers: Buffers) -> None:
        super().__init__(buffers, group.place)
        self._group = group

    def start(self, tag: int) -> None:
        self._under_way = Transfer(self._group.issue_all_gather(self.whole, self.part))

    def finish(self) -> None:
        if self._under_way.work is not None:  # else it is in order on the current stream
            wait([self._under_way])


class _Reduction(Reduction):
    """Sums in the communication dtype, in place where the sum is to be added or widened."""

    def __init__(self, group: NativeGroup, buffers: Buffers) -> None:
        whole, part = buffers.whole, buffers.part
        self._part, self._whole, self._group = part, whole, group
        self._own = self._sum = whole.view(group.size, -1)[group.place]
        self._narrow: list[Conversion] = []
        self._widen: dict[bool, list[Conversion]] = {False: [], True: []}  # by whether it is added
        if (dtype := buffers.narrow_dtype) is not None:
            self._whole = front(whole, dtype)
            self._sum = self._whole.view(group.size, -1)[group.place]
            self._narrow = [Conversion(whole, self._whole)]
            self._widen = {False: [Conversion(self._sum, part)], True: [Conversion(self._sum, self._own)]}

    def run(self, *, accumulate: bool, tag: int) -> None:
        convert(self._narrow)
        target = self._sum if accumulate or self._narrow else self._part
        self._group.issue_reduce_scatter(target, self._whole)
        convert(self._widen[accumulate])
        if accumulate:
            self._part.add_(self._own)
