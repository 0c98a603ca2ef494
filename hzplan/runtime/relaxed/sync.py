"""One rank's part in a relaxed tier: what its updates send to other groups, and what they take from them.

Everything happens in the tasks that update units, after the update and before parameters are gathered, so
that a group's step is the one that was planned. What travels does so on a thread (``link``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hzplan.core.relaxed import Policy, part_bounds, parts_of_units
from hzplan.errors import JobFailed
from hzplan.runtime.bucket import Bucket
from hzplan.runtime.relaxed.link import Link, Round, agreed
from hzplan.runtime.relaxed.roll import Begin, Record, Roll
from hzplan.runtime.relaxed.rules import Slice
from hzplan.runtime.world import MAX, World

OUTER = "outer"
"""How the keys of what checkpoints have of a relaxed tier begin."""
COUNT = "outer_updates"
"""The key of the number of updates among them."""
RETRY_S = 10.0
"""Seconds between two tries to reach the others."""


@dataclass(frozen=True)
class Place:
    """Where elements [low, high) of a bucket's slice lie in what a part sends: from ``start`` on."""

    bucket: Bucket
    low: int
    high: int
    start: int

    def of(self, flat: Tensor) -> Tensor:
        """The place's values in a part's."""
        return flat[self.start : self.start + self.high - self.low]


@dataclass(frozen=True)
class Groups:
    """Where a rank's group stands: its number, who it is to others, and how to reach them.

    ``connect``: a store that all groups see; ``weight``: how many sequences this group trains on in a step;
    ``patience_s``: how long a result that is due is waited for.
    """

    group: int
    connect: Callable[[], Any]
    weight: float = 1.0
    patience_s: float = 120.0


class GroupSync:
    """The state and the timetable of a rank's slices. ``entered``: whether the group has come in.

    Updates are counted from those that ``base`` says were done before this process's first.
    ``applied``, ``missed``: rounds; ``waited_s``: seconds that results which were due were waited for.
    """

    def __init__(
        self, policy: Policy, groups: Groups, units: Mapping[str, Sequence[Bucket]], control: World
    ) -> None:
        """``units``: their trained buckets; ``control``: the group's ranks, with messages of their own."""
        policy.check()
        self.policy, self._groups, self._control = policy, groups, control
        self._buckets = [bucket for buckets in units.values() for bucket in buckets]
        self._slices = {id(bucket): Slice(policy, bucket.master) for bucket in self._buckets}
        self._parts = _places(policy, units)
        self._place_of = [{id(place.bucket): place for place in part} for part in self._parts]
        self.entered, self.base = False, 0
        self._out_since: int | None = None  # the update after which others went on without this group
        self._tried_s = 0.0
        self._loaded: Callable[[], Tensor] | None = None
        self._link: Link | None = None
        self._sending: tuple[Round, set[int]] | None = None
        self._in_flight: dict[int, Round] = {}
        self.applied = self.missed = 0  # rounds
        self.waited_s = 0.0

    @property
    def group(self) -> int:
        """This group's number."""
        return self._groups.group

    # Coming in.

    def enter(self, refresh: Callable[[], None]) -> None:
        """Come in; every rank of the group calls it, between steps. ``refresh``: gathers parameters from what
        was written to master weights."""
        self.entered = True
        table = self.policy.timetable
        if self._loaded is not None:
            self.base = int(self._loaded())
        else:
            for bucket in self._buckets:
                if (outer := self._slices[id(bucket)].kept.get("outer")) is not None:
                    outer.copy_(bucket.master)
        link = self._connected()
        in_flight = table.in_flight(self.base)
        first = in_flight.start if in_flight else self.base // table.every
        begin = self._told(lambda roll: roll.enter(first))
        link.begin_with(begin.first, begin.record)
        if begin.comes:
            self._come(begin, 0, refresh)
            return
        for number in in_flight:  # as they were sent before
            one = self._round(number)
            for place in self._parts[table.part(number)]:
                kept = self._slices[id(place.bucket)].kept["outer_sent"]
                place.of(one.values).copy_(kept[place.low : place.high])
            self._in_flight[number] = one
            link.send(one)

    def _connected(self) -> Link:
        policy, control, groups = self.policy, self._control, self._groups
        store = groups.connect()
        roll = Roll(
            *(store, groups.group, policy.groups, control.size),
            ahead=policy.timetable.ahead,
            weight=groups.weight,
            speaks=control.rank == 0,
            patience_s=groups.patience_s,
        )
        copies = len(policy.kept()) - (policy.timetable.delay > 0) if policy.rule == "periodic" else 0
        self._link = Link(store, roll, policy, control.rank, copies)
        return self._link

    def _told(self, ask: Callable[[Roll], Begin]) -> Begin:
        """What the group's first rank is told, on all its ranks."""
        assert self._link is not None
        begin = ask(self._link.roll) if self._control.rank == 0 else None
        record = agreed(None if begin is None else begin.record, self.policy.groups, self._most)
        numbers = torch.tensor([-1, -1] if begin is None else [begin.first, begin.comes], dtype=torch.int64)
        self._most(numbers)
        assert record is not None
        return Begin(int(numbers[0]), record, comes=bool(numbers[1]))

    def _come(self, begin: Begin, done: int, refresh: Callable[[], None]) -> None:
        """Receive each part's state, one round after the other, and begin with it. ``done``: updates."""
        table, link = self.policy.timetable, self._link
        assert link is not None
        last = begin.first + table.parts - 1
        for number in range(begin.first, last + 1):
            one = self._round(number)
            link.send(one)
            record = self._settled(one)
            if record is None or not record.applied:
                begin = self._told(lambda roll: roll.come())
                link.begin_with(begin.first, begin.record)
                return self._come(begin, done, refresh)
            for place in self._parts[table.part(number)]:
                kept, master = self._slices[id(place.bucket)].kept, place.bucket.master
                if one.arrived is None:
                    master[place.low : place.high] = place.of(one.values)
                    continue
                named = [name for name in ("outer", "outer_momentum") if name in kept]
                for name, flat in zip(named, one.arrived.view(len(named), -1), strict=True):
                    kept[name][place.low : place.high] = place.of(flat)
                master[place.low : place.high] = kept["outer"][place.low : place.high]
        self._in_flight, self._sending = {}, None
        self.base, self._out_since = table.sent_after(last) - done, None
        refresh()

    def after_step(self, done: int, synchronize: Callable[[], None], refresh: Callable[[], None]) -> None:
        """Come in again where the others have gone on without this group; every rank calls it after a step,
        the ``done``-th, whose updates may be under way. Those of the step before are not: ranks know alike
        what came of them."""
        if self._out_since is None or self._out_since >= self.base + done:
            return
        reached = torch.tensor([int(self._reaches())], dtype=torch.int64)
        self._most(reached)
        if reached:
            synchronize()
            if self._link is not None:
                self._link.roll.leave()
            link = self._connected()
            begin = self._told(lambda roll: roll.come())
            link.begin_with(begin.first, begin.record)
            self._come(begin, done, refresh)

    def _reaches(self) -> bool:
        if self._control.rank or time.monotonic() - self._tried_s < RETRY_S:
            return False
        self._tried_s = time.monotonic()
        try:
            self._groups.connect().check([OUTER])
        except (RuntimeError, OSError):
            return False
        return True

    # In the tasks of updates.

    @torch.no_grad()
    def updated(self, bucket: Bucket, values: Tensor, updates: int) -> None:
        """A bucket's slice was updated, in this process the ``updates``-th time. ``values``: its master
        weights."""
        table, updates = self.policy.timetable, self.base + updates
        if self._out_since is not None:
            return
        if table.delay == 0:
            self._at_once(bucket, values, table.sent(updates))
            return
        if (due := table.due(updates)) is not None and due in self._in_flight:
            self._apply(bucket, values, due, updates)
        if (sent := table.sent(updates)) is not None and self._out_since is None:
            self._send(bucket, values, sent)

    def _send(self, bucket: Bucket, values: Tensor, number: int) -> None:
        part = self.policy.timetable.part(number)
        if (place := self._place_of[part].get(id(bucket))) is None:
            return
        if self._sending is None or self._sending[0].number != number:
            self._sending = self._round(number), set()
        one, filled = self._sending
        place.of(one.values).copy_(self._slices[id(bucket)].send(values, place.low, place.high))
        filled.add(id(bucket))
        if len(filled) == len(self._parts[part]):
            self._in_flight[number], self._sending = one, None
            assert self._link is not None
            self._link.send(one)

    def _apply(self, bucket: Bucket, values: Tensor, number: int, updates: int) -> None:
        table = self.policy.timetable
        if (place := self._place_of[table.part(number)].get(id(bucket))) is None:
            return
        one = self._in_flight[number]
        if not one.settled:
            one.settled, one.record = True, self._settled(one)
            if one.record is None or self._groups.group not in one.record.members:
                self._out_since = updates
            if one.record is not None and one.record.applied:
                self.applied += 1
            else:
                self.missed += 1
        if one.record is not None and one.record.applied:
            mean = place.of(one.values).to(values.device)
            self._slices[id(bucket)].apply(values, mean, place.low, place.high, first=number < table.parts)
        one.left -= 1
        if not one.left:
            del self._in_flight[number]

    def _at_once(self, bucket: Bucket, values: Tensor, number: int | None) -> None:
        if number is None:
            return
        if (place := self._place_of[self.policy.timetable.part(number)].get(id(bucket))) is None:
            return
        state, low, high = self._slices[id(bucket)], place.low, place.high
        mean = state.send(values, low, high).cpu().clone()
        assert self._link is not None
        try:
            self._link.now(Round(number, mean))
        except RuntimeError as error:
            raise JobFailed(
                f"a group is gone, and without a delay the others wait for it: {error}"
            ) from error
        first = number < self.policy.timetable.parts
        state.apply(values, mean.to(values.device), low, high, first=first)

    def _settled(self, one: Round) -> Record | None:
        """What became of a round, when all ranks of the group know."""
        assert self._link is not None
        began = time.perf_counter()
        one.done.wait(timeout=2 * self._groups.patience_s)
        record = agreed(one.record if one.done.is_set() else None, self.policy.groups, self._most)
        if record is not None:
            self._link.learn(one.number, record)
        self.waited_s += time.perf_counter() - began
        return record

    def _round(self, number: int) -> Round:
        part = self.policy.timetable.part(number)
        places = self._parts[part]
        length = sum(place.high - place.low for place in places)
        dtype = places[0].bucket.master.dtype
        values = torch.zeros(length, dtype=dtype)

        def advanced(mean: Tensor) -> Tensor:
            """Outer weights of all places, then their momentum."""
            found = [
                [*self._slices[id(p.bucket)].advanced(p.of(mean), p.low, p.high).values()] for p in places
            ]
            return torch.cat([one for kind in zip(*found, strict=True) for one in kind])

        return Round(number, values, advanced, left=len(places))

    def _most(self, values: Tensor) -> None:
        if self._control.size > 1:
            self._control.all_reduce(values, MAX)

    # For checkpoints.

    def state_of(self, bucket: Bucket, low: int, high: int, done: int) -> dict[str, Tensor]:
        """A piece's state by key, after ``done`` updates of this process; ``low`` and ``high``: elements of
        the whole buffer."""
        start = bucket.bounds(bucket.layout.levels.optim)[0]
        kept = self._slices[id(bucket)].kept
        found = {name: kept[name][low - start : high - start] for name in self.policy.kept()}
        return {**found, COUNT: torch.tensor(float(self.base + done), dtype=torch.float64)}

    def load(self, count: Callable[[], Tensor]) -> None:
        """What ``state_of`` gives is being filled from a checkpoint; ``count``: how many updates it had, when
        that is done."""
        self._loaded = count

    def close(self) -> None:
        """Be gone."""
        if self._link is not None:
            self._link.close()


def _places(policy: Policy, units: Mapping[str, Sequence[Bucket]]) -> list[list[Place]]:
    """By part what it takes of every bucket's slice: of *periodic* whole units, else a share of each."""
    parts = policy.timetable.parts
    nbytes = {unit: sum(b.master.nbytes for b in buckets) for unit, buckets in units.items() if buckets}
    part_of = parts_of_units(nbytes, parts) if policy.rule == "periodic" else {}

    def pieces(part: int) -> Iterator[tuple[Bucket, int, int]]:
        for unit, buckets in units.items():
            for bucket in buckets:
                if policy.rule != "periodic":
                    yield bucket, *part_bounds(bucket.master.numel(), part, parts)
                elif part_of[unit] == part:
                    yield bucket, 0, bucket.master.numel()

    found = []
    for part in range(parts):
        start, places = 0, []
        for bucket, low, high in pieces(part):
            places.append(Place(bucket, low, high, start))
            start += high - low
        found.append(places)
    return found
