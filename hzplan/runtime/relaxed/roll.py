"""Who is there: the groups that take part in a round, and what became of it, agreed on in a store.

For every round there is one record, which the first group that knows writes and all others read. It says
whether the round is applied, and who takes part in the round ``ahead`` after it, so that nobody begins a
round without knowing with whom. A record follows from the one before, what ranks have reported of the round,
who shows signs of life, and who wants to come in.

A group that comes (back) takes part for one turn of all parts, sends nothing, and receives each part's state;
for another turn it trains without weight.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

PREFIX = "hzplan/relaxed"
LOOK_S = 0.02
"""Seconds between two looks into the store."""
BEAT_S = 0.5
"""Seconds between two signs of life."""
SILENT_S = 4.0
"""A group that gives none for so long, after a round has failed, is taken for lost."""


@dataclass(frozen=True)
class Record:
    """What became of a round, and who takes part in the one ``ahead`` after it: ``members``, in
    ``generation``, the connections' number. ``since``: by group the first round of one that came later;
    ``answered``: by group the question that it has been let in for."""

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

    def weighs(self, group: int, number: int, parts: int) -> bool:
        """Whether what a group sends in a round counts."""
        return group not in self.since or number >= self.since[group] + 2 * parts


@dataclass(frozen=True)
class Begin:
    """What a group begins with. ``first``: the first round that it takes part in; ``record``: who does then;
    ``comes``: it comes to others that train already."""

    first: int
    record: Record
    comes: bool


class Roll:
    """One rank's view of the store. ``speaks``: whether it is the group's first rank, which does the
    group's part; ``weight``: how many sequences the group trains on in a step."""

    def __init__(
        self,
        store: Any,
        group: int,
        groups: int,
        ranks: int,
        *,
        ahead: int,
        weight: float,
        speaks: bool,
        patience_s: float,
    ) -> None:
        self._store, self.group, self.groups, self._ranks = store, group, groups, ranks
        self._ahead, self._weight, self._speaks, self.patience_s = ahead, weight, speaks, patience_s
        self._weights: dict[int, float] = {}
        self._ended = threading.Event()

    # The group's first rank.

    def enter(self, first: int) -> Begin:
        """Come in with everybody at the begin, or to those who train already. ``first``: the round that this
        group would take part in first. Groups that are behind the others come in later."""
        threading.Thread(target=self._beat, daemon=True).start()
        self._set(f"weight/{self.group}", repr(self._weight))
        if self._check("begin"):
            return self.come()
        self._set(f"came/{self.group}", str(first))
        until = time.monotonic() + self.patience_s
        while not self._check("begin"):
            came = [one for one in range(self.groups) if self._check(f"came/{one}")]
            if len(came) == self.groups or time.monotonic() > until:
                firsts = {one: int(self._get(f"came/{one}")) for one in came}
                latest = max(firsts.values())
                members = tuple(one for one, of in sorted(firsts.items()) if of == latest)
                self._agree("begin", json.dumps([latest, Record(True, members, latest).text()]))
            time.sleep(LOOK_S)
        number, text = json.loads(self._get("begin"))
        record = Record.of(text)
        if self.group in record.members and first == number and self._get(f"came/{self.group}") == str(first):
            return Begin(number, record, comes=False)
        return self.come()

    def come(self) -> Begin:
        """Ask to be let in, and wait until a record does."""
        number = int(self._get("head")) if self._check("head") else json.loads(self._get("begin"))[0] - 1
        question = uuid.uuid4().hex
        self._set(f"wants/{self.group}", question)
        while True:
            number += 1
            while not self._check(f"outcome/{number}"):
                time.sleep(LOOK_S)
            record = Record.of(self._get(f"outcome/{number}"))
            if record.answered.get(self.group) == question:
                return Begin(record.since[self.group], record, comes=True)

    def leave(self) -> None:
        """Give no more signs of life."""
        self._ended.set()

    def _beat(self) -> None:
        while not self._ended.is_set():
            with suppress(RuntimeError):
                self._store.add(f"{PREFIX}/beat/{self.group}", 1)
            self._ended.wait(BEAT_S)

    # Every rank.

    def weight(self, group: int) -> float:
        """Of what a group sends."""
        if group not in self._weights:
            self._weights[group] = float(self._get(f"weight/{group}"))
        return self._weights[group]

    def report(self, number: int, *, well: bool) -> None:
        """Say that this rank has what the others sent in a round, or will not have it."""
        self._store.add(f"{PREFIX}/{'well' if well else 'ill'}/{number}/{self.group}", 1)

    def outcome(self, number: int, members: tuple[int, ...], generation: int, before: Record) -> Record:
        """What became of a round, when that is decided. ``before``: the record of the round before."""
        began = time.monotonic()
        while not self._check(f"outcome/{number}"):
            late = time.monotonic() - began > self.patience_s
            well, ill = ({one: self._reports(how, number, one) for one in members} for how in ("well", "ill"))
            applied = all(count == self._ranks for count in well.values())
            if self._speaks and (late or applied or any(ill.values())):
                alive = {*members} if applied else self._alive(members)
                if late and not applied:  # some are not even there
                    alive &= {one for one in members if well[one] + ill[one] == self._ranks} | {self.group}
                record = following(
                    *(before, number + self._ahead, applied),
                    broken=not applied and generation == before.generation,
                    lost={*members} - alive,
                    questions=self._questions(),
                )
                self._agree(f"outcome/{number}", record.text())
                self._set("head", str(number))
            else:
                time.sleep(LOOK_S)
        return Record.of(self._get(f"outcome/{number}"))

    def _reports(self, how: str, number: int, group: int) -> int:
        return int(self._store.add(f"{PREFIX}/{how}/{number}/{group}", 0))

    def _alive(self, members: tuple[int, ...]) -> set[int]:
        """Of the members those that give signs of life."""
        before = {one: self._beats(one) for one in members}
        found = {self.group}
        until = time.monotonic() + SILENT_S
        while time.monotonic() < until and len(found) < len(members):
            time.sleep(BEAT_S / 2)
            found |= {one for one, beats in before.items() if self._beats(one) > beats}
        return found

    def _beats(self, group: int) -> int:
        return int(self._store.add(f"{PREFIX}/beat/{group}", 0))

    def _questions(self) -> dict[int, str]:
        """Of the groups that have asked to be let in what they asked last."""
        return {one: self._get(f"wants/{one}") for one in range(self.groups) if self._check(f"wants/{one}")}

    # The store.

    def _check(self, key: str) -> bool:
        return bool(self._store.check([f"{PREFIX}/{key}"]))

    def _get(self, key: str) -> str:
        return str(self._store.get(f"{PREFIX}/{key}").decode())

    def _set(self, key: str, value: str) -> None:
        self._store.set(f"{PREFIX}/{key}", value)

    def _agree(self, key: str, value: str) -> None:
        """Set a key that nobody has set."""
        self._store.compare_set(f"{PREFIX}/{key}", "", value)


def following(
    before: Record, number: int, applied: bool, broken: bool, lost: Set[int], questions: Mapping[int, str]
) -> Record:
    """The record about who takes part in round ``number``. ``broken``: the connections of the newest
    generation are; ``lost``: groups that are gone; ``questions``: see ``Record.answered``."""
    new = {group: asked for group, asked in questions.items() if before.answered.get(group) != asked}
    members = tuple(sorted(({*before.members} - lost) | {*new}))
    changed = broken or bool(new) or members != before.members
    return Record(
        applied,
        members,
        number if changed else before.generation,
        {**before.since, **dict.fromkeys(new, number)},
        {**before.answered, **new},
    )
