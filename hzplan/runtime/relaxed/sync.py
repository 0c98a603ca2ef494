"""One rank's part in a relaxed tier: what its updates send to other groups, and what they take from them.

Everything happens in the tasks that update units, after the update and before parameters are gathered, so
that a group's step is the one that was planned. What travels does so on a thread (``link``).
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hzplan.core.relaxed import RULES, Policy
from hzplan.errors import JobFailed, UserError, one_line
from hzplan.runtime.bucket import Bucket
from hzplan.runtime.relaxed.link import Link, Round, agreed
from hzplan.runtime.relaxed.places import Means, Place, everywhere, places_of, replicas_of
from hzplan.runtime.relaxed.roll import Begin, Mark, Record, Roll
from hzplan.runtime.relaxed.rules import Slice
from hzplan.runtime.world import MAX, World

OUTER = "outer"
"""How the keys of what checkpoints have of a relaxed tier begin."""
COUNT = "outer_updates"
"""The key of the number of updates among them."""
LOOK_S = 1.0
"""How long ranks of a group that comes wait before they look whether each of them is done."""
NUMBERS = (COUNT, "outer_round", "outer_rule", "outer_kind")
"""And those of the first round that was under way, or would be the next; of the rule; and of what rounds are
about."""
RETRY_S = 30.0
"""Seconds between two tries to reach the others."""


@dataclass(frozen=True)
class Groups:
    """Where a rank's group stands: its number, who it is to others, and how to reach them.

    ``connect``: a store that all groups see; ``weight``: how many sequences this group trains on in a step;
    ``patience_s``: how long a result that is due is waited for; ``transfer_s``: how long one takes besides.
    """

    group: int
    connect: Callable[[], Any]
    weight: float = 1.0
    patience_s: float = 120.0
    transfer_s: float = 0.0

    @property
    def most_s(self) -> float:
        """How long a result that is due is waited for at most: of one that began late."""
        return 2 * self.patience_s + self.transfer_s


class GroupSync:
    """The state and the timetable of a rank's slices. ``entered``: whether the group has come in; ``came``:
    to others that trained already.

    Updates are counted from those that ``base`` says were done before this process's first.
    ``applied``, ``missed``: rounds; ``waited_s``: seconds that results which were due were waited for.
    """

    def __init__(
        self, policy: Policy, groups: Groups, units: Mapping[str, Sequence[Bucket]], control: World
    ) -> None:
        """``units``: their trained buckets; ``control``: the group's ranks, with messages of their own."""
        policy.check()
        trained = sum(map(bool, units.values()))
        if policy.rule == "periodic" and policy.timetable.parts > trained:
            raise UserError(
                f"{policy.timetable.parts} parts, but {trained} units are trained, and each part "
                "has one at least; solve with fewer fragments"
            )
        self.policy, self._groups, self._control = policy, groups, control
        self._buckets = [bucket for buckets in units.values() for bucket in buckets]
        self._slices = {id(bucket): Slice(policy, bucket.master) for bucket in self._buckets}
        self._parts = places_of(policy, units, control.rank)
        self._replicas = replicas_of(self._parts, control)
        self._place_of = [{id(place.bucket): place for place in part} for part in self._parts]
        self.entered, self.came, self.base = False, False, 0
        self._out_since: int | None = None  # the update after which others went on without this group
        self._why = ""
        self._tried_s, self._answers = 0.0, False
        self._probe: threading.Thread | None = None
        self._loaded: Callable[[], Sequence[Tensor]] | None = None
        self._link: Link | None = None
        self._sending: tuple[Round, set[int]] | None = None
        self._in_flight: dict[int, Round] = {}
        self._means: dict[int, Means] = {}  # of rounds that are due
        self.applied = self.missed = 0  # rounds
        self.waited_s = 0.0

    @property
    def group(self) -> int:
        """This group's number."""
        return self._groups.group

    # Coming in.

    def enter(self, done: int, refresh: Callable[[], None]) -> None:
        """Come in; every rank of the group calls it, between steps. ``done``: how many updates the group has
        done where no checkpoint of a relaxed run says so; ``refresh``: gathers parameters from what was
        written to master weights. UserError where others do not answer, or do not fit.
        """
        self.entered = True
        table = self.policy.timetable
        found = torch.full((len(NUMBERS),), -1, dtype=torch.int64)
        if self._loaded is not None:
            found = torch.tensor([int(number) for number in self._loaded()], dtype=torch.int64)
        self._most(found)  # a rank may have no piece of anything
        count, sent, rule, kind = (int(number) for number in found)
        self.base = done if count < 0 else count
        if count < 0 or rule != RULES.index(self.policy.rule):
            for bucket in self._buckets:
                if (outer := self._slices[id(bucket)].kept.get("outer")) is not None:
                    outer.copy_(bucket.master)
        in_flight = table.in_flight(self.base) if count >= 0 and kind == self._kind() else range(0)
        in_flight = in_flight[max(0, sent - in_flight.start) :]  # those that were really sent
        first = in_flight.start if in_flight else self.base // table.every
        while True:
            begin = self._asked(first)
            if begin is None:
                raise UserError(f"group {self.group}: {self._why or 'a rank did not reach the others'}")
            if table.delay == 0 and (begin.comes or len(begin.record.members) < self.policy.groups):
                raise JobFailed("without a delay all groups begin together, and not all have come")
            if not begin.comes:
                break
            if self._come(begin, 0, refresh):
                self.came = True
                return
        assert self._link is not None
        for number in in_flight:  # as they were sent before
            one = self._round(number)
            for place in self._parts[table.part(number)]:
                low, high = place.pieces[place.own]
                place.of(one.values).copy_(self._slices[id(place.bucket)].kept["outer_sent"][low:high])
            self._in_flight[number] = one
            self._link.send(one)

    def _asked(self, first: int) -> Begin | None:
        """What the group's first rank is told when it asks to be let in, on all ranks; None where one of them
        does not reach the others, and ``_why`` says why."""
        self._why = ""
        begin: Begin | None = None
        try:
            policy, control, groups = self.policy, self._control, self._groups
            store = groups.connect()
            roll = Roll(
                *(groups.connect, groups.group, policy.groups, control.size),
                turn=policy.timetable.parts,
                weight=groups.weight,
                speaks=control.rank == 0,
                patience_s=groups.patience_s,
            )
            reached = 0
        except (RuntimeError, OSError) as error:
            self._why, reached = f"the meeting place does not answer ({one_line(error)}); see --meet", 1
        failed = torch.tensor([reached], dtype=torch.int64)
        self._most(failed)
        if int(failed):
            return None
        mark = self._mark()
        if self._link is not None:  # this group begins anew, and gives no signs of life before
            self._link.abandon()
            self._link = None
        found = self._patiently(lambda: roll.enter(first, mark))
        if isinstance(found, Exception):
            self._why = one_line(found)
        begin = found if isinstance(found, Begin) else None
        failed = torch.tensor([int(isinstance(found, Exception))], dtype=torch.int64)
        self._most(failed)
        if int(failed):
            return None
        record, _ = agreed(None if begin is None else begin.record, policy.groups, self._most)
        numbers = torch.tensor(
            [-1, -1, -1] if begin is None else [begin.first, begin.comes, roll.epoch], dtype=torch.int64
        )
        self._most(numbers)
        assert record is not None
        roll.epoch = int(numbers[2])
        self._link = Link(store, roll, policy, control.rank, groups.patience_s + groups.transfer_s)
        self._link.begin_with(record)
        return Begin(int(numbers[0]), record, comes=bool(numbers[1]))

    def _patiently(self, work: Callable[[], Begin]) -> Begin | Exception | None:
        """What the group's first rank does, however long that takes: the others are told that it lives. On
        those None."""
        found: list[Begin | Exception] = []

        def do() -> None:
            try:
                found.append(work())
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=do, daemon=True)
        if self._control.rank == 0:
            thread.start()
        waits = True
        while waits:
            if self._control.rank == 0:
                thread.join(timeout=LOOK_S)
            busy = torch.tensor([int(self._control.rank == 0 and thread.is_alive())], dtype=torch.int64)
            self._most(busy)
            waits = bool(int(busy))
        return found[0] if found else None

    def _mark(self) -> Mark:
        """What groups compare: of all ranks of this one. Where copies lie is each group's own affair."""
        places = [[p.pieces, p.bucket.layout.tensors[0].name] for part in self._parts for p in part]
        dtype, policy = str(self._buckets[0].master.dtype), self.policy._replace(copies="device")
        said = [*policy, self._control.size, dtype, places]
        kind = hashlib.sha256(repr(said).encode()).digest()
        state = hashlib.sha256()
        for bucket in self._buckets:
            for name in ("outer", "outer_momentum"):
                if (values := self._slices[id(bucket)].kept.get(name)) is not None:
                    state.update(values.cpu().view(torch.uint8).numpy().tobytes())
        own = [int.from_bytes(of[:7], "big") for of in (kind, state.digest())]
        every = torch.zeros(self._control.size, 2, dtype=torch.int64)
        every[self._control.rank] = torch.tensor(own, dtype=torch.int64)
        self._most(every)
        kinds, states = (hashlib.sha256(repr(of).encode()).hexdigest() for of in every.t().tolist())
        return Mark(kinds, states)

    def _come(self, begin: Begin, done: int, refresh: Callable[[], None]) -> bool:
        """Receive each part's state, one round after the other, and begin with it; False where that did not
        succeed. ``done``: updates of this process."""
        table, link = self.policy.timetable, self._link
        assert link is not None
        last = begin.first + table.parts - 1
        for number in range(begin.first, last + 1):
            one = self._round(number)
            link.send(one)
            record, all_know = self._settled(one, forever=True)
            if record is None or not all_know or not record.applied:
                return False
            places = self._parts[table.part(number)]
            if self.policy.rule == "periodic":
                assert one.arrived is not None
                arrived = one.arrived.view(1 + bool(self.policy.momentum), -1)
                self._take(places, arrived[0], "outer", None)
                if self.policy.momentum:
                    self._take(places, arrived[1], "outer_momentum")
            else:
                self._take(places, one.values, None)
                for place in places if self.policy.rule == "ema" else ():
                    for low, high in place.pieces:
                        self._slices[id(place.bucket)].kept["outer_drift"][low:high] = 0
        self._in_flight, self._sending, self._means = {}, None, {}
        self.base, self._out_since = table.sent_after(last) - done, None
        refresh()
        return True

    def _take(self, places: Sequence[Place], flat: Tensor, *names: str | None) -> None:
        """What has arrived of a part, into what is kept by these names; None: into parameters."""
        means = everywhere(places, flat, self._replicas)
        for place, name in itertools.product(places, names):
            bucket = place.bucket
            into = bucket.master if name is None else self._slices[id(bucket)].kept[name]
            for low, high, values in means[id(bucket)]:
                into[low:high] = values

    def after_step(self, done: int, synchronize: Callable[[], None], refresh: Callable[[], None]) -> None:
        """Come in again where the others have gone on without this group; every rank calls it after a step,
        the ``done``-th, whose updates may be under way. Those of the step before are not: ranks know alike
        what came of them."""
        if self._out_since is None or self._out_since >= self.base + done:
            return
        if self._link is not None:
            self._link.abandon()
            self._link = None
        reached = torch.tensor([int(self._reaches())], dtype=torch.int64)
        self._most(reached)
        if int(reached):
            synchronize()
            begin = self._asked((self.base + done) // self.policy.timetable.every)
            if begin is None:
                return
            if begin.comes:
                self._come(begin, done, refresh)
            else:  # nobody was left, and all that asked have begun anew
                self._in_flight, self._sending, self._out_since, self._means = {}, None, None, {}
                self.base = begin.first * self.policy.timetable.every - done

    def _reaches(self) -> bool:
        """Whether the meeting place answers, which a thread of its own finds out."""
        if self._control.rank:
            return False
        probe = self._probe
        if probe is not None and probe.is_alive():
            return False
        if self._answers:
            self._answers = False
            return True
        if probe is None or time.monotonic() - self._tried_s > RETRY_S:
            self._tried_s = time.monotonic()
            self._probe = threading.Thread(target=self._try, daemon=True)
            self._probe.start()
        return False

    def _try(self) -> None:
        try:
            self._groups.connect().check([OUTER])
            self._answers = True
        except (RuntimeError, OSError):
            self._answers = False
        self._tried_s = time.monotonic()

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
        sent = [self._slices[id(bucket)].send(values, low, high) for low, high in place.pieces]
        place.of(one.values).copy_(sent[place.own])
        filled.add(id(bucket))
        if len(filled) == len(self._parts[part]):
            self._in_flight[number], self._sending = one, None
            assert self._link is not None
            self._link.send(one)

    def _apply(self, bucket: Bucket, values: Tensor, number: int, updates: int) -> None:
        table = self.policy.timetable
        if id(bucket) not in self._place_of[table.part(number)]:
            return
        one = self._in_flight[number]
        if not one.settled:
            one.settled, (one.record, all_know) = True, self._settled(one)
            if one.record is None or not all_know or self._groups.group not in one.record.members:
                self._out_since = updates
            if one.record is not None and one.record.applied:
                self.applied += 1
            else:
                self.missed += 1
        if one.record is not None and one.record.applied:
            if number not in self._means:
                self._means[number] = everywhere(self._parts[table.part(number)], one.values, self._replicas)
            for low, high, mean in self._means[number][id(bucket)]:
                self._slices[id(bucket)].apply(values, mean, low, high)
        one.left -= 1
        if not one.left:
            del self._in_flight[number]
            self._means.pop(number, None)

    def _at_once(self, bucket: Bucket, values: Tensor, number: int | None) -> None:
        if number is None:
            return
        if (place := self._place_of[self.policy.timetable.part(number)].get(id(bucket))) is None:
            return
        state = self._slices[id(bucket)]
        sent = [state.send(values, low, high) for low, high in place.pieces]
        mean = sent[place.own].cpu().clone()
        assert self._link is not None
        why = "a rank of this group did not get it"
        failed = torch.zeros(1, dtype=torch.int64)
        try:
            self._link.now(Round(number, mean))
        except (RuntimeError, OSError) as error:
            why, failed[0] = one_line(error), 1
        self._most(failed)
        if int(failed):
            raise JobFailed(f"without a delay groups wait for round {number}, which did not come: {why}")
        for low, high, of in everywhere([replace(place, start=0)], mean, self._replicas)[id(bucket)]:
            state.apply(values, of, low, high)

    def _settled(self, one: Round, *, forever: bool = False) -> tuple[Record | None, bool]:
        """What became of a round, and whether all ranks of the group know it themselves. ``forever``: the
        others take their time until they send it; the ranks of this one say now and then that they wait."""
        began = time.perf_counter()
        while forever:
            done = torch.tensor([-int(one.done.wait(timeout=LOOK_S))], dtype=torch.int64)
            self._most(done)
            forever = bool(int(done) == 0)
        one.done.wait(timeout=self._groups.most_s)
        found = agreed(one.record if one.done.is_set() else None, self.policy.groups, self._most)
        self.waited_s += time.perf_counter() - began
        return found

    def _round(self, number: int) -> Round:
        part = self.policy.timetable.part(number)
        places = self._parts[part]
        values = torch.zeros(places[-1].end, dtype=places[0].bucket.master.dtype)

        def advanced(mean: Tensor) -> Tensor:
            """Outer weights of all places, then their momentum."""
            found = []
            for p in places:
                state = self._slices[id(p.bucket)]
                of = state.advanced(p.of(mean).to(p.bucket.master.device), *p.pieces[p.own])
                found.append([one.cpu() for one in of.values()])
            return torch.cat([one for kind in zip(*found, strict=True) for one in kind])

        return Round(number, values, advanced, left=len(places))

    def _most(self, values: Tensor) -> None:
        if self._control.size > 1:
            self._control.all_reduce(values, MAX)

    @property
    def on_host(self) -> list[Tensor]:
        """What lies in the host's memory; on a CPU too, apart from what the plan counts as the device's."""
        if self.policy.copies == "device":
            return []
        return [kept for of in self._slices.values() for kept in of.kept.values()]

    # For checkpoints.

    def state_of(self, bucket: Bucket, low: int, high: int, done: int) -> dict[str, Tensor]:
        """A piece's state by key, after ``done`` updates of this process; ``low`` and ``high``: elements of
        the whole buffer."""
        start = bucket.bounds(bucket.layout.levels.optim)[0]
        kept = self._slices[id(bucket)].kept
        found = {name: kept[name][low - start : high - start] for name in self.policy.kept()}
        number = min(self._in_flight, default=(self.base + done) // self.policy.timetable.every)
        numbers = self.base + done, number, RULES.index(self.policy.rule), self._kind()
        return found | {
            name: torch.tensor(float(of), dtype=torch.float64)
            for name, of in zip(NUMBERS, numbers, strict=True)
        }

    def _kind(self) -> int:
        """Of what a round is about: the same numbers are about the same under plans and timetables of one
        kind."""
        said: list[object] = [self.policy.rule, self.policy.timetable]
        for places in self._parts:
            if self.policy.rule == "periodic":
                said.append(sorted(t.name for place in places for t in place.bucket.layout.tensors))
            else:  # shares of slices
                said += [(p.bucket.layout.offsets, p.bucket.layout.numel, len(p.pieces)) for p in places]
        return int.from_bytes(hashlib.sha256(repr(said).encode()).digest()[:6], "big")

    def load(self, numbers: Callable[[], Sequence[Tensor]]) -> None:
        """What ``state_of`` gives is being filled from a checkpoint; ``numbers``: those of NUMBERS, when that
        is done. UserError once the group has come in."""
        if self.entered:
            raise UserError(
                "a checkpoint is loaded while the group trains with others: load it before the first step"
            )
        self._loaded = numbers

    def close(self) -> None:
        """Be gone."""
        if self._link is not None:
            self._link.close()
