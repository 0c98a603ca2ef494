"""A slowest tier that nobody waits for: when which part of the parameters is sent, and when it is due. Pure.

The ranks are in *groups* (sites, nodes) that train by themselves, each under a plan of its own mesh. In
*rounds* groups exchange a part of the parameters: a round is sent after an update and its result is applied
``delay`` updates later. Groups wait only for a result that is due and not there.

*periodic* (DiLoCo, arXiv 2311.08105; in fragments, with a delay: Streaming DiLoCo, arXiv 2501.18512). Every
group keeps the outer weights O. A round sends O − θ, and with the mean Δ of all groups, weighted by the
sequences that they train on::

    v ← μ·v + Δ        O ← O − η·(Δ + μ·v)        θ ← (1 − mixing)·O + mixing·θ

*plain*, *delta*, *ema* (SPARTA; AsyncMesh, arXiv 2601.22442). A round sends θ as it is, and with
the mean w and what was sent, s::

    plain   θ ← w
    delta   θ ← θ + (w − s)
    ema     e ← β·e + (1 − β)·(θ − s), the first time e ← θ − s        θ ← w + e
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from hzplan.core.wire import Format

Rule = Literal["periodic", "plain", "delta", "ema"]
RULES: tuple[Rule, ...] = get_args(Rule)
Place = Literal["device", "host"]
PLACES: tuple[Place, ...] = get_args(Place)

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
"""η and μ of DiLoCo's outer Nesterov step (arXiv 2311.08105)."""
MIXING = 0.5
"""What a group keeps of its own weights when outer ones arrive late (arXiv 2501.18512)."""
DECAY = 0.5
"""β of *ema*, as AsyncMesh begins with."""


class Timetable(NamedTuple):
    """Rounds by the number of updates that a group has done: one every ``every`` of them, of ``parts`` in
    turn, due ``delay`` later."""

    every: int
    parts: int
    delay: int

    def sent(self, updates: int) -> int | None:
        """The round that is sent after so many updates."""
        return updates // self.every - 1 if updates and updates % self.every == 0 else None

    def due(self, updates: int) -> int | None:
        """The round whose result is applied after so many updates."""
        return None if updates <= self.delay else self.sent(updates - self.delay)

    def sent_after(self, number: int) -> int:
        """How many updates a round is sent after."""
        return (number + 1) * self.every

    def part(self, number: int) -> int:
        """What a round is about."""
        return number % self.parts

    def in_flight(self, updates: int) -> range:
        """The rounds that were sent by then and are not applied yet."""
        return range(max(0, (updates - self.delay) // self.every), updates // self.every)


class Policy(NamedTuple):
    """How groups stay together without waiting. ``wire``: what travels between them; ``copies``: whose memory
    what is kept of the others lies in."""

    rule: Rule
    groups: int
    timetable: Timetable
    wire: Format = "exact"
    mixing: float = MIXING
    outer_lr: float = OUTER_LR
    momentum: float = OUTER_MOMENTUM
    decay: float = DECAY
    copies: Place = "device"

    @property
    def interval(self) -> int:
        """Updates between two rounds about the same parameter."""
        return self.timetable.every * self.timetable.parts

    def check(self) -> None:
        """ValueError of one line for what makes no sense."""
        every, parts, delay = self.timetable
        if self.rule not in RULES:
            raise ValueError(f"rule: {self.rule} is not one of {', '.join(RULES)}")
        if self.copies not in PLACES:
            raise ValueError(f"copies: {self.copies} is not one of {', '.join(PLACES)}")
        if self.groups < 2:
            raise ValueError(f"groups: {self.groups}: with one group there is nobody to be late for")
        if min(every, parts) < 1 or delay < 0:
            raise ValueError("every and parts are at least 1, delay at least 0")
        if delay > self.interval:
            raise ValueError(
                f"delay: {delay} steps, but the same part is sent again after {self.interval}; at most that"
            )
        if self.rule == "delta" and delay >= self.interval:
            raise ValueError(
                f"delay: {delay} steps: under delta a difference must be mended before it is sent again, "
                f"after {self.interval}"
            )
        if not (
            0 <= self.mixing < 1 and 0 <= self.momentum < 1 and 0 <= self.decay < 1 and self.outer_lr > 0
        ):
            raise ValueError("mixing, momentum and decay are from 0 to below 1, outer_lr is above 0")

    def kept(self) -> tuple[str, ...]:
        """What a rank keeps of the size of its slice of the parameters, by name."""
        sent = ("outer_sent",) if self.timetable.delay else ()
        if self.rule == "periodic":
            return ("outer", *(("outer_momentum",) if self.momentum else ()), *sent)
        return ("outer_drift", *sent) if self.rule == "ema" else sent


def parts_of_units(sizes: Mapping[str, int], parts: int) -> dict[str, int]:
    """By unit the part that it is of: the largest unit first, each into the part with the least. Equal layers
    come out dealt in turn, as Streaming DiLoCo's strided fragments."""
    order = {unit: place for place, unit in enumerate(sizes)}
    loads = [0] * parts
    found = {}
    for unit in sorted(sizes, key=lambda one: (-sizes[one], order[one])):
        found[unit] = loads.index(min(loads))
        loads[found[unit]] += sizes[unit]
    return found


def part_bounds(elements: int, part: int, parts: int) -> tuple[int, int]:
    """Where a part begins and ends in a slice of which every part has a share."""
    return elements * part // parts, elements * (part + 1) // parts
