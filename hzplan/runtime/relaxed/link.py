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
from hzplan.runtime.backends.exchange import ExchangeGroup
from hzplan.runtime.backends.packing import form_of
from hzplan.runtime.faults import Work
from hzplan.runtime.relaxed.roll import PREFIX, Record, Roll

STATE_TAG = 1 << 20
"""Tag of the messages with outer state, to a group that comes."""


class SiteGroup(ExchangeGroup):
    """Exchanges over a gloo process group that no other one knows of. ``ranks``: groups."""

    def __init__(self, handle: Any, members: tuple[int, ...], place: int) -> None:
        super().__init__(members, place)
        self.handle = handle

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

    def __init__(self, store: Any, roll: Roll, policy: Policy, place: int, state_copies: int) -> None:
        """``state_copies``: how many times as long as a part its outer state is."""
        self._store, self.roll, self._policy, self._place = store, roll, policy, place
        self._state_copies = state_copies
        self._records: dict[int, Record] = {}
        self._groups: dict[tuple[int, tuple[int, ...]], SiteGroup] = {}
        self._broken: set[int] = set()  # generations
        self._jobs: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin_with(self, first: int, record: Record) -> None:
        """Of the rounds from ``first`` on the record of who takes part in the first ``ahead`` of them."""
        ahead = self._policy.timetable.ahead
        self._records |= {number - ahead: record for number in range(first, first + ahead)}

    def members(self, number: int) -> Record:
        """Who takes part in a round."""
        return self._records[number - self._policy.timetable.ahead]

    def learn(self, number: int, record: Record) -> None:
        """What became of a round, from another rank of the group."""
        self._records[number] = record

    def now(self, one: Round) -> None:
        """A round that is waited for, and that no group may be missing from: RuntimeError where one is."""
        self._exchange(one, self._records[min(self._records)])

    def send(self, one: Round) -> None:
        """Put a round under way."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="hzplan link", daemon=True)
            self._thread.start()
        self._jobs.put(one)

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
                one.record = self._run(one)
                self.learn(one.number, one.record)
            except (RuntimeError, KeyError):  # the store is gone, or this group is not of the round
                one.record = None
            one.done.set()

    def _run(self, one: Round) -> Record:
        record = self.members(one.number)
        well = self.roll.group in record.members
        if well:
            try:
                self._exchange(one, record)
            except (RuntimeError, OSError):
                self._broken.add(record.generation)
                well = False
        self.roll.report(one.number, well=well)
        before = self._records.get(one.number - 1, record)
        return self.roll.outcome(one.number, record.members, record.generation, before)

    @torch.no_grad()
    def _exchange(self, one: Round, record: Record) -> None:
        """Make ``values`` the weighted mean, the same to the bit in all groups."""
        parts, own, number = self._policy.timetable.parts, self.roll.group, one.number
        weights = {g: self.roll.weight(g) for g in record.members if record.weighs(g, number, parts)}
        coming = [g for g in record.members if record.receives(g, number, parts)]
        values = one.values
        if own in weights:
            values.mul_(weights[own] / sum(weights.values()))
        else:
            values.zero_()
        if len(record.members) == 1:
            return
        if record.generation in self._broken:
            raise RuntimeError("the connections of this generation broke")
        group = self._group(record)
        exact = self._policy.wire == "exact"
        form = None if exact else form_of(self._policy.wire, dithered=self._policy.rule == "periodic")
        share = -(-len(values) // (BLOCK * group.size)) * BLOCK
        whole = values.new_zeros(share * group.size)
        whole[: len(values)] = values
        part = whole[group.place * share : (group.place + 1) * share]
        group.all_reduce([Buffers(whole, part, form)], whole.new_empty(share)).run()
        values.copy_(whole[: len(values)])
        self._hand_on(one, group, [g for g in weights if g in record.members], coming)

    def _hand_on(self, one: Round, group: SiteGroup, sources: list[int], coming: list[int]) -> None:
        """The outer state after the round, from the first group that has it to those that come."""
        if not self._state_copies or not coming or not sources:
            return
        places, own = {g: place for place, g in enumerate(group.ranks)}, self.roll.group
        if own == sources[0]:
            state = one.advanced(one.values)
            for work in [group.send([state], places[g], STATE_TAG) for g in coming]:
                work.wait()
        elif own in coming:
            one.arrived = one.values.new_empty(self._state_copies * len(one.values))
            group.recv([one.arrived], places[sources[0]], STATE_TAG).wait()

    def _group(self, record: Record) -> SiteGroup:
        key = record.generation, record.members
        if key not in self._groups:
            self._groups = {of: g for of, g in self._groups.items() if of[0] + 8 > record.generation}
            name = f"{PREFIX}/groups/{record.generation}/{self._place}"
            place = record.members.index(self.roll.group)
            handle = ProcessGroupGloo(
                PrefixStore(name, self._store),
                *(place, len(record.members), timedelta(seconds=self.roll.patience_s)),
            )
            self._groups[key] = SiteGroup(handle, record.members, place)
        return self._groups[key]


def agreed(found: Record | None, groups: int, all_reduce: Callable[[Tensor], None]) -> Record | None:
    """A record on all ranks of a group, where any of them has it. ``all_reduce``: the largest numbers of all
    ranks, in place."""
    said = torch.full((3 + groups,), -1, dtype=torch.int64)
    if found is not None:
        said[0] = int(found.applied)
        said[1], said[2] = sum(1 << g for g in found.members), found.generation
        for g, first in found.since.items():
            said[3 + g] = first
    all_reduce(said)
    applied, members, generation, *since = (int(one) for one in said)
    if applied < 0:
        return None
    if found is not None:  # which has all that the store has
        return found
    came = {g: first for g, first in enumerate(since) if first >= 0}
    return Record(bool(applied), tuple(g for g in range(groups) if members >> g & 1), generation, came)
