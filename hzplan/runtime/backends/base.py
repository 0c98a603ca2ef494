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

from torch import Tensor

from hzplan.core.hierarchy import Stage
from hzplan.runtime.backends.packing import Cast, Form, Step


class Buffers(NamedTuple):
    """``whole`` and ``part`` of one collective.

    ``form``: what values travel in, where it is not as they are. They are rounded where they lie, into a part
    of their own memory. ``adds``: reductions that accumulate add to ``part``.
    """

    whole: Tensor
    part: Tensor
    form: Form | None = None
    adds: bool = True

    @property
    def narrow(self) -> Form | None:
        """The form, None where the buffers have it already."""
        own = isinstance(self.form, Cast) and self.form.dtype == self.whole.dtype
        return None if own else self.form


class Collectives(ABC):
    """One stage's collectives of several buckets that leave the same values on every rank, under way
    together.

    All-gathers: every rank's ``part`` into ``whole``, in group order. In a narrower form every rank has the
    same rounded values in ``whole``, its own too. All-reduces: the sum of all ranks' ``whole`` in
    its place.
    """

    in_order = False
    """Whether they are told apart by the order in which every rank begins them, and ``begin`` only hands them
    over: then whoever finds that they may begin does so, and no thread has to wake up for it."""

    @abstractmethod
    def begin(self, tag: int = 0) -> None:
        """Put all under way. ``tag``: collectives of one tag on a group run in the same order on every rank;
        others need not."""

    @abstractmethod
    def end(self) -> None:
        """Return when all have arrived where they are read."""

    def run(self) -> None:
        """Begin and end."""
        self.begin()
        self.end()


class Reductions(ABC):
    """One stage's reduce-scatters of several buckets: the sum of all ranks' ``whole``, this rank's slice in
    ``part``.

    ``part`` must not be a slice of ``whole`` where it is added to; the rest of ``whole`` is not kept.
    """

    @abstractmethod
    def run(self, *, accumulate: bool = False, tag: int = 0) -> None:
        """Return when every ``part`` holds the sum, or with ``accumulate``, where ``Buffers.adds``, what it
        held before plus the sum; ``tag``: see ``Gathers``."""


class Split(NamedTuple):
    """A flat buffer, and how many of its elements, one after the other, are of each rank of a group."""

    values: Tensor
    sizes: Sequence[int]


class Rounded(NamedTuple):
    """An all-gather's ``whole`` and ``part`` in the form that travels, and what brings values there (before
    they are sent) and back (when they have arrived)."""

    whole: Tensor
    part: Tensor
    narrow: list[Step]
    widen: list[Step]

    @classmethod
    def of(cls, buffers: Buffers, place: int) -> Rounded:
        """``place``: this rank's index in the group. Values travel in the last bytes of ``whole``."""
        if (form := buffers.narrow) is None:
            return cls(buffers.whole, buffers.part, [], [])
        length, whole = form.units(buffers.part.numel()), form.back(buffers.whole)
        own = whole[place * length : (place + 1) * length]
        return cls(whole, own, [form.pack(buffers.part, own)], [form.unpack(whole, buffers.whole)])


class Group(ABC):
    """The ranks of one stage and stream. ``ranks``: members by place in the group, as numbered in the job;
    ``place``: this rank's."""

    needs_scratch: bool
    """Whether reductions receive into scratch memory of the caller's."""
    concurrent: bool
    """Whether several tasks of a stream may be under way at once, begun in another order by every rank."""

    def __init__(self, ranks: Sequence[int], place: int) -> None:
        self.ranks, self.place, self.size = tuple(map(int, ranks)), place, len(ranks)

    @abstractmethod
    def all_gather(self, buffers: Sequence[Buffers]) -> Collectives:
        """Prepare all-gathers of one stage, to be under way together."""

    @abstractmethod
    def reduce_scatter(self, buffers: Sequence[Buffers], scratch: Tensor) -> Reductions:
        """Prepare reduce-scatters of one stage. ``scratch``, of any dtype: memory to receive into, where the
        group needs it."""

    @abstractmethod
    def all_to_all(self, sent: Split, received: Split) -> Collectives:
        """Prepare an exchange in which every rank sends every other one elements of its own."""

    def all_reduce(self, buffers: Sequence[Buffers], scratch: Tensor) -> Collectives:
        """Prepare all-reduces of one stage; each ``part`` is this rank's slice of its ``whole``. Here: a
        reduce-scatter, then an all-gather."""
        return _Halves(self.reduce_scatter(buffers, scratch), self.all_gather(buffers))


class _Halves(Collectives):
    """All-reduces as the collectives that they are made of."""

    def __init__(self, reductions: Reductions, gathers: Collectives) -> None:
        self._reductions, self._gathers = reductions, gathers

    def begin(self, tag: int = 0) -> None:
        """See Collectives; sums are complete when it returns."""
        self._reductions.run(tag=tag)
        self._gathers.begin(tag)

    def end(self) -> None:
        """See Collectives."""
        self._gathers.end()


Groups = Mapping[tuple[str, Stage], Group]
"""A plan's groups by (stream kind, stage)."""


def convert(steps: Sequence[Step]) -> None:
    """Run conversions, in order."""
    for step in steps:
        step.run()
