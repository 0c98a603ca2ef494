"""The way between groups: one rank's exchanges with the ranks at its place in the other groups, on a thread.

Exchanges are in rounds, one after the other. When one fails the group goes on without its result; the roll
says who takes part in the next.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from hzplan.core.relaxed import Policy
from hzplan.core.wire import BLOCK
from hzplan.runtime.backends.base import Buffers
from hzplan.runtime.backends.exchange import ExchangeGroup, Message
from hzplan.runtime.backends.packing import form_of
from hzplan.runtime.faults import Transfer, Work
from hzplan.runtime.relaxed.roll import PREFIX, Record, Roll

STATE_TAG = 1 << 20
"""Tag of the messages with outer state, to a group that comes."""


class SiteGroup(ExchangeGroup):
    """Exchanges over a gloo process group that no other one knows of. ``ranks``: groups."""

    def __init__(self, handle: Any, members: tuple[int, ...], place: int) -> None:
        super().__init__(members, place)
        self.handle = handle

    def post_send(self, message: Message, tag: int) -> Transfer:
        """See ExchangeGroup. Groups are no ranks of the job: they are not told of as late ones."""
        return super().post_send(message, tag)._replace(peer=None)

    def post_receive(self, message: Message, tag: int) -> Transfer:
        """See ExchangeGroup."""
        return super().post_receive(message, tag)._replace(peer=None)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """See ExchangeGroup."""
        return self.handle.send(tensors, peer, tag)  # type: ignore[no-any-return]

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """See ExchangeGroup."""
        return self.handle.recv(tensors, peer, tag)  # type: ignore[no-any-return]


@dataclass
class Round:
    """A round that was sent. ``values`` [elements], in the host's memory, become the mean of all groups'.

    ``advanced``: the outer state that a mean leads to, flat, for groups that come; ``arrived``: that state,
    where this group comes. ``record``: what became of it; None where the store does not answer. ``settled``:
    whether the group's ranks agree on that; ``left``: how many buckets have not taken it yet.
    """

    number: int
    values: Tensor
    advanced: Callable[[Tensor], Tensor] = lambda mean: mean[:0]
    arrived: Tensor | None = None
    record: Record | None = None
    done: threading.Event = field(default_factory=threading.Event)
    settled: bool = False
    left: int = 0


class Link:
    """Rounds of one rank, in the order that they are sent in. ``place``: this rank's, in its group."""

    def __init__(self, store: Any, roll: Roll, policy: Policy, place: int, allow_s: float) -> None:
        """``allow_s``: how long an exchange may take."""
        self._store, self.roll, self._policy, self._place = store, roll, policy, place
        self._allowed = timedelta(seconds=allow_s)
        self._record: Record | None = None  # of the round before the one that is next
        self._groups: dict[tuple[int, tuple[int, ...]], SiteGroup] = {}
        self._broken = -1  # a generation
        self._jobs: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._abandoned = False

    def begin_with(self, record: Record) -> None:
        """Who takes part in the first round."""
        self._record = record

    def now(self, one: Round) -> None:
        """A round that is waited for, and that no group may be missing from: an error where one is."""
        assert self._record is not None
        self._exchange(one, self._record, at_once=True)

    def send(self, one: Round) -> None:
        """Put a round under way."""
        if self._abandoned:
            one.done.set()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="hzplan link", daemon=True)
            self._thread.start()
        self._jobs.put(one)

    def abandon(self) -> None:
        """Have the thread end as soon as it can, with nothing more said to the others."""
        self._abandoned = True
        self._jobs.put(None)
        self.roll.leave()
        self._groups.clear()  # connections that are closed are noticed at once

    def close(self) -> None:
        """End the thread when what was sent is through, and be away from the roll."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout=self.roll.patience_s)
        self.roll.leave()
        self._groups.clear()

    def _work(self) -> None:
        while (one := self._jobs.get()) is not None:
            try:
                if self._record is not None and not self._abandoned:
                    one.record = self._record = self._run(one, self._record)
            except Exception:  # the store is gone, or what came from it makes no sense: for others to go on
                self._record = None
            finally:
                one.done.set()

    def _run(self, one: Round, before: Record) -> Record | None:
        """``before``: the record of the round before; None where this group is not of the round."""
        if self.roll.group not in before.members:
            return None
        try:
            self._exchange(one, before)
            well = True
        except Exception:
            self._broken = before.generation
            well = False
        if self._abandoned:
            return None
        self.roll.report(one.number, well=well)
        return self.roll.outcome(one.number, before)

    @torch.no_grad()
    def _exchange(self, one: Round, record: Record, *, at_once: bool = False) -> None:
        """Make ``values`` the weighted mean, the same to the bit in all groups."""
        own, number, parts = self.roll.group, one.number, self._policy.timetable.parts
        weights = {g: self.roll.weight(g) for g in record.weighs(number, parts)}
        coming = [g for g in record.members if record.receives(g, number, parts)]
        if not weights:
            raise RuntimeError("nobody in this round has trained")
        values = one.values
        if own in weights:
            values.mul_(weights[own] / sum(weights.values()))
        else:
            values.zero_()
        if len(record.members) > 1:
            if record.generation == self._broken:
                raise RuntimeError("the connections of this generation broke")
            if own in coming:
                self.roll.await_others(number, record.members)
            elif not at_once:
                self.roll.sends(number)
            group = self._group(record)
            self._sum(values, group)
            self._hand_on(one, group, [*weights], coming)
        if not bool(values.isfinite().all()):  # the same in all groups: nobody takes it
            raise RuntimeError("what was sent is not finite")

    def _sum(self, values: Tensor, group: SiteGroup) -> None:
        """All groups' values in the place of this one's."""
        if not len(values):
            return
        wire, periodic = self._policy.wire, self._policy.rule == "periodic"
        form = None if wire == "exact" else form_of(wire, dithered=periodic)
        share = -(-len(values) // (BLOCK * group.size)) * BLOCK
        whole = values.new_zeros(share * group.size)
        whole[: len(values)] = values
        part = whole[group.place * share : (group.place + 1) * share]
        group.all_reduce([Buffers(whole, part, form)], whole.new_empty(share)).run()
        values.copy_(whole[: len(values)])

    def _hand_on(self, one: Round, group: SiteGroup, sources: list[int], coming: list[int]) -> None:
        """The outer state after the round, from the first group that has it to those that come."""
        if self._policy.rule != "periodic" or not coming:
            return
        places, own = {g: place for place, g in enumerate(group.ranks)}, self.roll.group
        if own == sources[0]:
            state = one.advanced(one.values)
            for work in [group.send([state], places[g], STATE_TAG) for g in coming]:
                work.wait()
        elif own in coming:
            copies = 2 if self._policy.momentum else 1
            one.arrived = one.values.new_empty(copies * len(one.values))
            group.recv([one.arrived], places[sources[0]], STATE_TAG).wait()

    def _group(self, record: Record) -> SiteGroup:
        key = record.generation, record.members
        if key not in self._groups:
            self._groups.clear()
            self.roll.forget_weights()
            name = f"{PREFIX}/{self.roll.epoch}/groups/{record.generation}/{self._place}"
            place = record.members.index(self.roll.group)
            allowed_s = self._allowed.total_seconds()
            self.roll.await_connections(record.generation, self._place, record.members, allowed_s)
            handle = ProcessGroupGloo(
                PrefixStore(name, self._store), place, len(record.members), self._allowed
            )
            self._groups[key] = SiteGroup(handle, record.members, place)
        return self._groups[key]


def agreed(
    found: Record | None, groups: int, all_reduce: Callable[[Tensor], None]
) -> tuple[Record | None, bool]:
    """A record on all ranks of a group, where any of them has it, and whether all have. ``all_reduce``: the
    largest numbers of all ranks, in place."""
    said = torch.full((4 + groups,), -1, dtype=torch.int64)
    said[-1] = int(found is None)
    if found is not None:
        said[0] = int(found.applied)
        said[1], said[2] = sum(1 << g for g in found.members), found.generation
        for g, first in found.since.items():
            said[3 + g] = first
    all_reduce(said)
    applied, members, generation, *since, missed = (int(one) for one in said)
    if applied < 0:
        return None, False
    if found is not None:  # which has all that the store has
        return found, not missed
    came = {g: first for g, first in enumerate(since) if first >= 0}
    taking_part = tuple(g for g in range(groups) if members >> g & 1)
    return Record(bool(applied), taking_part, generation, came), not missed
