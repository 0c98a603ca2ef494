"""Collectives on given buffers, prepared once and run as often as needed: the interface of the back ends.

A collective takes ``whole`` [group size × n] and ``part`` [n], contiguous, of one dtype and on one device.
The i-th n elements of ``whole`` are the slice of the group's i-th rank, and ``part`` may be this rank's slice
of it: gathers and reductions run in place. Views are cut, and whatever else is needed is allocated, when a
collective is prepared: ranks that share processors pay for every line of Python beside their compute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hzplan.core.hierarchy import Stage
from hzplan.runtime.backends.convert import Conversion, back

MOST_BUFFERS = 1 << 8
"""Upper limit of the pairs of buffers in one gather; each has a tag of its own while they are under way."""


class Buffers(NamedTuple):
    """``whole`` and ``part`` of one collective.

    ``dtype``: the communication dtype, where it is narrower than the buffers'. Values are rounded where they
    lie, into a part of their own memory. ``adds``: reductions that accumulate add to ``part``.
    """

    whole: Tensor
    part: Tensor
    dtype: torch.dtype | None = None
    adds: bool = True

    @property
    def narrow_dtype(self) -> torch.dtype | None:
        """The communication dtype, None where the buffers have it already."""
        return None if self.dtype == self.whole.dtype else self.dtype


class Gather(ABC):
    """All-gather of one pair of buffers: every rank's ``part`` into ``whole``, in group order.

    With a communication dtype ``part`` must be this rank's slice, and is rounded like all others, so that
    ranks end up with the same values.
    """

    def __init__(self, buffers: Buffers, place: int) -> None:
        """``place``: this rank's index in the group."""
        whole, part = buffers.whole, buffers.part
        self._narrow: list[Conversion] = []
        self._widen: list[Conversion] = []
        if (dtype := buffers.narrow_dtype) is not None:
            length, narrow = part.numel(), back(whole, dtype)
            own = narrow[place * length : (place + 1) * length]
            self._narrow, self._widen = [Conversion(part, own)], [Conversion(narrow, whole)]
            whole, part = narrow, own
        self.whole, self.part = whole, part

    def begin(self, tag: int) -> None:
        """Round and send."""
        convert(self._narrow)
        self.start(tag)

    def end(self) -> None:
        """Return when what has arrived is where it is read."""
        self.finish()
        convert(self._widen)

    @abstractmethod
    def start(self, tag: int) -> None:
        """Put ``part`` and ``whole`` under way, in the communication dtype."""

    @abstractmethod
    def finish(self) -> None:
        """Return when all of ``whole`` has arrived."""


class Reduction(ABC):
    """Reduce-scatter of one pair of buffers: the sum of all ranks' ``whole``, this rank's slice in ``part``.

    ``part`` must not be a slice of ``whole`` where it is added to; the rest of ``whole`` is not kept.
    """

    @abstractmethod
    def run(self, *, accumulate: bool, tag: int) -> None:
        """Return when ``part`` holds the sum, or with ``accumulate`` what it held before plus the sum."""


class Gathers:
    """One stage's all-gathers of several buckets, under way together."""

    def __init__(self, members: Sequence[Gather]) -> None:
        assert len(members) <= MOST_BUFFERS
        self._members = members

    def begin(self, tag: int = 0) -> None:
        """Put all under way. ``tag``: collectives of one tag on a group run in the same order on every rank;
        others need not."""
        for index, member in enumerate(self._members):
            member.begin(tag * MOST_BUFFERS + index)

    def end(self) -> None:
        """Return when all have arrived."""
        for member in self._members:
            member.end()

    def run(self) -> None:
        """Begin and end."""
        self.begin()
        self.end()


class Reductions:
    """One stage's reduce-scatters of several buckets, one after the other."""

    def __init__(self, members: Sequence[tuple[Reduction, bool]]) -> None:
        """``members``: each with whether it can accumulate."""
        self._members = members

    def run(self, *, accumulate: bool = False, tag: int = 0) -> None:
        """Return when all are done. ``accumulate``: add, where ``Buffers.adds``; ``tag``: see ``Gathers``."""
        for member, adds in self._members:
            member.run(accumulate=accumulate and adds, tag=tag)


class Group(ABC):
    """The ranks of one stage and stream. ``ranks``: members by place in the group, as numbered in the job;
    ``place``: this rank's."""

    needs_scratch: bool
    """Whether reductions receive into scratch memory of the caller's."""
    concurrent: bool
    """Whether several tasks of a stream may be under way at once, begun in another order by every rank."""

    def __init__(self, ranks: Sequence[int], place: int) -> None:
        self.ranks, self.place, self.size = tuple(ranks), place, len(ranks)

    def all_gather(self, buffers: Sequence[Buffers]) -> Gathers:
        """Prepare all-gathers of one stage, to be under way together."""
        return Gathers([self.gather(one) for one in buffers])

    def reduce_scatter(self, buffers: Sequence[Buffers], scratch: Tensor) -> Reductions:
        """Prepare reduce-scatters of one stage. ``scratch``, of any dtype: memory to receive into, where the
        group needs it."""
        members = [(self.reduction(one, scratch.view(one.whole.dtype)), one.adds) for one in buffers]
        return Reductions(members)

    @abstractmethod
    def gather(self, buffers: Buffers) -> Gather:
        """Prepare one all-gather."""

    @abstractmethod
    def reduction(self, buffers: Buffers, scratch: Tensor) -> Reduction:
        """Prepare one reduce-scatter; ``scratch`` in the buffers' dtype."""


Groups = Mapping[tuple[str, Stage], Group]
"""A plan's groups by (stream kind, stage)."""


def convert(conversions: Sequence[Conversion]) -> None:
    """Run conversions, in order."""
    for conversion in conversions:
        conversion.run()
