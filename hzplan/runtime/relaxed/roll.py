"""Who is there: the groups that take part in a round, and what became of it, agreed on in a store.

For every round there is one record, which the first group that knows writes and all others read. It says
whether the round is applied, and who takes part in the next one, so that nobody begins a round without
knowing with whom. A record follows from the one before, what ranks have reported of the round, who shows
signs of life, and who wants to come in.

A group that comes (back) takes part for one turn of all parts, sends nothing, and receives each part's state;
for another turn it trains without weight. Where nobody is left to let it in, those who ask begin anew: an
*epoch*, under keys of its own.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hzplan.errors import UserError

PREFIX = "hzplan/relaxed"
FIRST_LOOK_S, LOOK_S = 0.001, 0.02
"""Seconds between two looks into the store: between the first ones, for most of what is waited for is about
to come, and at most."""
BEAT_S = 0.5
"""Seconds between two signs of life."""
SILENT_S = 4.0
"""A group that gives none for so long, after a round has failed, is taken for lost."""
KEPT_ROUNDS = 16
"""Rounds whose keys stay in the store."""


@dataclass(frozen=True)
class Record:
    """What became of a round, and who takes part in the next one: ``members``, in ``generation``, the
    connections' number. ``since``: by group the first round of one that came later; ``answered``: by group
    the question that it has been let in for."""

    applied: bool
    members: tuple[int, ...]
    generation: int
    since: Mapping[int, int] = field(default_factory=dict)
    answered: Mapping[int, str] = field(default_factory=dict)

    def text(self) -> str:
        """As the store has it."""
        return json.dumps(
            [self.applied, self.members, self.generation, [*self.since.items()], [*self.answered.items()]]
        )

    @classmethod
    def of(cls, text: str) -> Record:
        """The inverse."""
        applied, members, generation, since, answered = json.loads(text)
        return cls(applied, tuple(members), generation, dict(since), dict(answered))

    def receives(self, group: int, number: int, parts: int) -> bool:
        """Whether a group only receives in a round, for it has not trained yet."""
        return group in self.since and number < self.since[group] + parts

    def weighs(self, number: int, parts: int) -> tuple[int, ...]:
        """The groups whose values count in a round: those that have trained a turn of all parts; where there
        are none, those that train at all."""
        train = tuple(g for g in self.members if not self.receives(g, number, parts))
        long = tuple(g for g in train if g not in self.since or number >= self.since[g] + 2 * parts)
        return long or train


@dataclass(frozen=True)
class Begin:
    """What a group begins with. ``first``: the first round that it takes part in; ``record``: who does then;
    ``comes``: it comes to others that train already."""

    first: int
    record: Record
    comes: bool


@dataclass(frozen=True)
class Mark:
    """What groups compare before they begin. ``kind``: of plan and shapes, the same everywhere; ``state``: of
    what groups have in common, the same in all that begin in one round."""

    kind: str
    state: str


class Roll:
    """One rank's view of the store. ``speaks``: whether it is the group's first rank, which does the
    group's part; ``weight``: how many sequences the group trains on in a step."""

    def __init__(
        self,
        connect: Callable[[], Any],
        group: int,
        groups: int,
        ranks: int,
        *,
        turn: int,
        weight: float,
        speaks: bool,
        patience_s: float,
    ) -> None:
        """``connect``: to the store; ``turn``: rounds until a part's turn comes again."""
        self._connect, self._store, self._turn = connect, connect(), turn
        self.group, self.groups, self._ranks = group, groups, ranks
        self._beaten_s = 0.0
        self._old: deque[str] = deque()  # keys that nobody reads any more
        self._given_up: set[tuple[int, str]] = set()  # questions whose askers have ended
        self._weight, self._speaks, self.patience_s = weight, speaks, patience_s
        self.epoch = 0
        self._weights: dict[int, float] = {}
        self._ended = threading.Event()

    # The group's first rank.

    def enter(self, first: int, mark: Mark) -> Begin:
        """Come in with everybody at the begin, or to those who train already. ``first``: the round that this
        group would take part in first. Groups that are behind the others come in later.

        UserError where groups do not fit each other.
        """
        while True:
            self.epoch = self._now()
            begin = self._join(first, mark) if self._check("begin") else self._begin(first, mark)
            if begin is not None:
                self._start()
                return begin
            # Nobody is left to let this group in: whoever asks begins anew.
            expected = str(self.epoch) if self.epoch else ""
            self._store.compare_set(f"{PREFIX}/epoch", expected, str(self.epoch + 1))

    def _now(self) -> int:
        """The newest epoch."""
        key = f"{PREFIX}/epoch"
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _begin(self, first: int, mark: Mark) -> Begin | None:
        """Begin together with all that come in time; of those that are behind, later."""
        mine = json.dumps([first, mark.kind, mark.state])
        self._set(f"came/{self.group}", mine)
        until = time.monotonic() + self.patience_s
        while not self._check("begin"):
            self._beat(f"here/{self.group}")
            came = [one for one in range(self.groups) if self._check(f"came/{one}")]
            all_came = len(came) == self.groups
            if all_came or time.monotonic() > until:
                came = sorted(self._alive(tuple(came), key="here"))
            if len(came) == self.groups or time.monotonic() > until:
                self._agree("begin", self._beginning({one: self._get(f"came/{one}") for one in came}))
            time.sleep(LOOK_S)
        number, text, kind = json.loads(self._get("begin"))
        if kind != mark.kind:
            raise UserError(
                f"group {self.group}: another model, plan or number of ranks than the other groups have; "
                "start all of them with the same plan file"
            )
        record = Record.of(text)
        if self.group in record.members and self._get(f"came/{self.group}") == mine:
            return Begin(number, record, comes=False)
        return self._join(first, mark)

    @staticmethod
    def _beginning(came: Mapping[int, str]) -> str:
        """The first round, who takes part in it, and what kind all are of: of the groups that are furthest
        those that have the same as the first of them."""
        said = {group: json.loads(text) for group, text in came.items()}
        latest = max(first for first, _, _ in said.values())
        ahead = [group for group in sorted(said) if said[group][0] == latest]
        members = tuple(group for group in ahead if said[group] == said[ahead[0]])
        return json.dumps([latest, Record(True, members, latest).text(), said[ahead[0]][1]])

    def _join(self, first: int, mark: Mark) -> Begin | None:
        """Ask to be let in, and wait until a record does; None where nobody is left to write one, or this
        group is far ahead of those that are there: then it is they who have to take what it has."""
        number, text, kind = json.loads(self._get("begin"))
        head = int(self._get("head")) if self._check("head") else number
        if first > head + 2 * self._turn:
            return None
        if kind != mark.kind:
            raise UserError(
                f"group {self.group}: another model, plan or number of ranks than the other groups have; "
                "start all of them with the same plan file, and another hzplan meet for another run"
            )
        members = Record.of(text).members
        number = head if self._check("head") else number - 1
        question = uuid.uuid4().hex
        self._set(f"wants/{self.group}", question)
        while True:
            number += 1
            heard = looked = time.monotonic()
            while not self._check(f"outcome/{number}"):
                self._beat(f"asks/{self.group}")
                if time.monotonic() - looked > SILENT_S:
                    if self._check("head") and int(self._get("head")) > number:  # and its keys are gone
                        number = int(self._get("head"))
                    if self._alive(members, own=False):
                        heard = time.monotonic()
                    elif time.monotonic() - heard > max(SILENT_S, self.patience_s / 4):
                        return None
                    looked = time.monotonic()
                time.sleep(LOOK_S)
            record = Record.of(self._get(f"outcome/{number}"))
            members = tuple(g for g in record.members if g != self.group) or record.members
            if record.answered.get(self.group) == question:
                if record.since[self.group] == number + 1:
                    return Begin(number + 1, record, comes=True)
                question = uuid.uuid4().hex  # too late for that answer
                self._set(f"wants/{self.group}", question)

    def _start(self) -> None:
        """From now on this group takes part: it gives signs of life."""
        self._set(f"weight/{self.group}", repr(self._weight))
        threading.Thread(target=self._live, args=(self._key(f"beat/{self.group}"),), daemon=True).start()

    def leave(self) -> None:
        """Give no more signs of life, and end whatever is waited for."""
        self._ended.set()

    def _live(self, key: str) -> None:
        """Over a connection of its own: one that somebody waits on answers nobody else. Also tidies up, for
        which nobody has to wait."""
        while not self._ended.is_set():
            with suppress(RuntimeError, OSError):
                store = self._connect()
                while not self._ended.is_set():
                    store.add(key, 1)
                    while self._old:
                        store.delete_key(self._old.popleft())
                    self._ended.wait(BEAT_S)
            self._ended.wait(BEAT_S)

    def _beat(self, key: str) -> None:
        """A sign of life of who waits, at most every so often."""
        if time.monotonic() - self._beaten_s > BEAT_S:
            self._beaten_s = time.monotonic()
            self._add(key, 1)

    # Every rank.

    def weight(self, group: int) -> float:
        """Of what a group sends."""
        if group not in self._weights:
            self._weights[group] = float(self._get(f"weight/{group}"))
        return self._weights[group]

    def forget_weights(self) -> None:
        """Groups have come or gone."""
        self._weights.clear()

    def await_connections(
        self, generation: int, place: int, members: tuple[int, ...], allow_s: float
    ) -> None:
        """Return when the rank at this place of every member is about to connect; RuntimeError where one's
        group shows no sign of life, or it does not come in time. Connecting itself would wait that long for
        one that was killed just now."""
        began = looked = time.monotonic()
        pauses = _pauses()
        missing = [one for one in members if one != self.group]
        self._set(f"ready/{generation}/{place}/{self.group}", "")
        while missing := [one for one in missing if not self._check(f"ready/{generation}/{place}/{one}")]:
            now = time.monotonic()
            if self._ended.is_set() or now - began > allow_s:
                raise RuntimeError(f"groups {missing} did not connect")
            if now - looked > SILENT_S:
                if gone := {*missing} - self._alive(tuple(missing), own=False):
                    raise RuntimeError(f"groups {sorted(gone)} have ended")
                looked = time.monotonic()
            next(pauses)

    def sends(self, number: int) -> None:
        """Say that this group's values of a round are there."""
        if self._speaks:
            self._set(f"sent/{number}", "")

    def await_others(self, number: int, members: tuple[int, ...]) -> None:
        """Return when others send in a round; RuntimeError where none of them is alive any more."""
        looked = time.monotonic()
        while not self._check(f"sent/{number}"):
            if self._ended.is_set():
                raise RuntimeError("this group has ended")
            if time.monotonic() - looked > SILENT_S:
                if not self._alive(members, own=False):
                    raise RuntimeError("nobody sends any more")
                looked = time.monotonic()
            time.sleep(LOOK_S)

    def report(self, number: int, *, well: bool) -> None:
        """Say that this rank has what the others sent in a round, or will not have it."""
        self._add(f"{'well' if well else 'ill'}/{number}/{self.group}", 1)

    def outcome(self, number: int, before: Record) -> Record:
        """What became of a round, when that is decided. ``before``: the record of the round before."""
        began = looked = time.monotonic()
        pauses = _pauses()
        while not self._check(f"outcome/{number}"):
            if self._ended.is_set() or time.monotonic() - looked > SILENT_S:
                self._check_place(number)
                looked = time.monotonic()
            if self._speaks and self._decide(number, before, late=time.monotonic() - began > self.patience_s):
                break
            next(pauses)
        return Record.of(self._get(f"outcome/{number}"))

    def _check_place(self, number: int) -> None:
        """RuntimeError where others have gone on without this group, or it has ended itself."""
        if self._ended.is_set() or self._now() != self.epoch:
            raise RuntimeError("others have begun anew without this group")
        head = int(self._get("head")) if self._check("head") else -1
        if head >= number and not self._check(f"outcome/{number}"):
            raise RuntimeError(f"others have gone on to round {head} without this group")

    def _decide(self, number: int, before: Record, *, late: bool) -> bool:
        """Write a round's record where enough is known; whether there is one now."""
        members = before.members
        well = {one: self._add(f"well/{number}/{one}", 0) for one in members}
        applied = all(count == self._ranks for count in well.values())
        ill = {one: 0 if applied else self._add(f"ill/{number}/{one}", 0) for one in members}
        if not (late or applied or any(ill.values())):
            return False
        if not applied:
            self._check_place(number)
        alive = {*members} if applied else self._alive(members) | {self.group}
        if late and not applied:  # some are not even there
            alive &= {one for one in members if well[one] + ill[one] == self._ranks} | {self.group}
        lost = {*members} - alive
        record = following(before, number + 1, applied=applied, lost=lost, questions=self._questions(before))
        self._agree(f"outcome/{number}", record.text())
        self._set("head", str(number))
        old = number - KEPT_ROUNDS
        keys = [f"{how}/{old}/{one}" for how in ("well", "ill") for one in range(self.groups)]
        self._old.extend(map(self._key, (*keys, f"outcome/{old}", f"sent/{old}")))
        return True

    def _alive(self, members: tuple[int, ...], *, own: bool = True, key: str = "beat") -> set[int]:
        """Of the members those that give signs of life; ``own``: this one does. ``key``: of the signs."""
        before = {one: self._add(f"{key}/{one}", 0) for one in members if one != self.group}
        found = {self.group} if own else set()
        until = time.monotonic() + SILENT_S
        while time.monotonic() < until and not found >= before.keys():
            time.sleep(BEAT_S / 2)
            if key != "beat":
                self._beat(f"{key}/{self.group}")
            found |= {one for one, beats in before.items() if self._add(f"{key}/{one}", 0) > beats}
        return found

    def _questions(self, before: Record) -> dict[int, str]:
        """Of the groups that ask to be let in what they asked last; those that have ended do not ask any
        more."""
        asked = {one: self._get(f"wants/{one}") for one in range(self.groups) if self._check(f"wants/{one}")}
        known = {*before.answered.items(), *self._given_up}
        new = {one: question for one, question in asked.items() if (one, question) not in known}
        if not new:
            return {}
        living = self._alive(tuple(new), own=False, key="asks")
        self._given_up |= {(one, question) for one, question in new.items() if one not in living}
        return {one: question for one, question in new.items() if one in living}

    # The store.

    def _key(self, key: str) -> str:
        return f"{PREFIX}/{self.epoch}/{key}"

    def _check(self, key: str) -> bool:
        return bool(self._store.check([self._key(key)]))

    def _get(self, key: str) -> str:
        return str(self._store.get(self._key(key)).decode())

    def _set(self, key: str, value: str) -> None:
        self._store.set(self._key(key), value)

    def _add(self, key: str, count: int) -> int:
        return int(self._store.add(self._key(key), count))

    def _agree(self, key: str, value: str) -> None:
        """Set a key that nobody has set."""
        self._store.compare_set(self._key(key), "", value)


def _pauses() -> Iterator[None]:
    """Sleeps between looks, one each time that it is asked."""
    pause_s = FIRST_LOOK_S
    while True:
        time.sleep(pause_s)
        yield
        pause_s = min(LOOK_S, 2 * pause_s)


def following(
    before: Record, number: int, *, applied: bool, lost: Set[int], questions: Mapping[int, str]
) -> Record:
    """The record about who takes part in round ``number``. ``lost``: groups that are gone; ``questions``: see
    ``Record.answered``. A group that asks has begun anew: it is let in as one that comes."""
    new = {group: asked for group, asked in questions.items() if before.answered.get(group) != asked}
    members = tuple(sorted(({*before.members} - lost) | {*new}))
    changed = not applied or bool(new) or members != before.members
    return Record(
        applied,
        members,
        number if changed else before.generation,
        {**before.since, **dict.fromkeys(new, number)},
        {**before.answered, **new},
    )
