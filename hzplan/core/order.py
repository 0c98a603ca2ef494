"""Message order: one message at a time on each tier, in an order that is fixed before the step begins. Pure.

Without it a tier's all-gathers and reduce-scatters are streams that share its link, so that all end later
than the first of them had to. In order, the link is one stream: all of its rate goes to the message that
compute will wait for first.

An order is one number per unit and tier: before a unit's gradients are reduced on that tier, the parameters
of so many later uses are unsharded on it. 0 sends gradients as soon as they are there; prefetch + 1 is the
order of launches. All-gathers go from the slowest tier to the fastest, reduce-scatters the other way, so a
slower tier's number is no smaller: else gradients would wait on the fast tier for parameters that wait on the
slow one for these gradients. Reduced gradients are gathered back to replicas where they are reduced on the
slowest tier.

The parameters that a step has updated are gathered as the next one begins, among its first messages: each
unit's before the parameters are unsharded that are used a number of uses before it (``sync``).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from hzplan.core.schedule import Ahead, Kind, MessageOrder, Schedule

LINK_STREAM = "link"
"""First word of the name of a tier's only stream of all-gathers and reduce-scatters, ``link.<t>``."""

_PLACES = {
    Kind.PARAM_GATHER: 0,
    Kind.UNSHARD: 1,
    Kind.REDUCE: 2,
    Kind.FINAL_REDUCE: 2,
    Kind.GRAD_GATHER: 3,
}
"""The kinds of messages, and which goes first at one place."""


class CircularOrder(ValueError):
    """Messages would wait for each other in a circle."""


def is_ahead(numbers: Ahead, tiers: int) -> bool:
    """Whether there is one number per tier, from 0 on, none smaller than the one before."""
    return len(numbers) == tiers and [0, *numbers] == sorted([0, *numbers])


def within(order: MessageOrder, most: int) -> MessageOrder:
    """The order with no number above ``most``: what a step with another prefetch depth takes of it."""
    numbers = tuple((unit, tuple(min(number, most) for number in ahead)) for unit, ahead in order.ahead)
    return MessageOrder(numbers, order.sync)


class Arranged(NamedTuple):
    """A step's tasks in a message order, by their indices without it: ``sequence`` is a launch order; by task
    the stream, and the predecessors (see ``Task``)."""

    sequence: list[int]
    streams: list[str]
    after: list[set[int]]
    after_previous: list[set[int]]
    needs: list[set[int]]
    needs_previous: list[set[int]]


def arranged(schedule: Schedule, order: MessageOrder) -> Arranged:
    """A step with one message at a time on each tier. Data dependencies and the order within each kind stay.

    ``CircularOrder`` where gradients would wait for parameters that are launched after these gradients are
    reduced.
    """
    needs, needs_previous = _with_gathers_first(schedule)
    places = _places(schedule, order)
    tasks = schedule.tasks
    streams = [f"{LINK_STREAM}.{task.tier}" if task.index in places else task.stream for task in tasks]
    chains: dict[str, list[int]] = {}
    for task in tasks:
        chains.setdefault(streams[task.index], []).append(task.index)
    after = [{*needed} for needed in needs]
    after_previous = [{*needed} for needed in needs_previous]
    for stream, chain in chains.items():
        if stream.startswith(LINK_STREAM):
            chain.sort(key=lambda index: (places[index], index))
        for first, second in itertools.pairwise(chain):
            after[second].add(first)
        after_previous[chain[0]].add(chain[-1])
    gathers = {task.index for task in tasks if task.kind is Kind.PARAM_GATHER}
    return Arranged(_topological(after, gathers), streams, after, after_previous, needs, needs_previous)


def _with_gathers_first(schedule: Schedule) -> tuple[list[set[int]], list[set[int]]]:
    """Data dependencies where the gathers of updated parameters are a part of the step that follows: its
    begin launches them, they need the step before, and this step's tasks need them."""
    tasks, begin = schedule.tasks, schedule.tasks[0].index
    gathers = {task.index for task in tasks if task.kind is Kind.PARAM_GATHER}
    needs, previous = [], []
    for task in tasks:
        own, before = {*task.needs}, {*task.needs_previous}
        if task.index in gathers:
            updates = {u for u in own - gathers if tasks[u].kind is not Kind.STEP}
            own, before = (own & gathers) or {begin}, before | updates
        else:
            own, before = own | (before & gathers), before - gathers
        needs.append(own)
        previous.append(before)
    return needs, previous


def in_order(schedule: Schedule, order: MessageOrder | None) -> Schedule:
    """The same step as a schedule (``arranged``); with ``None`` the schedule itself."""
    if order is None:
        return schedule
    found = arranged(schedule, order)
    place = {index: number for number, index in enumerate(found.sequence)}

    def moved(indices: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(place[index] for index in indices))

    tasks = tuple(
        replace(
            schedule.tasks[index],
            index=number,
            stream=found.streams[index],
            after=moved(found.after[index]),
            after_previous=moved(found.after_previous[index]),
            needs=moved(found.needs[index]),
            needs_previous=moved(found.needs_previous[index]),
        )
        for number, index in enumerate(found.sequence)
    )
    return replace(
        schedule,
        tasks=tasks,
        options_read=None if schedule.options_read is None else place[schedule.options_read],
        order=order,
        shared=schedule,
    )


def _places(schedule: Schedule, order: MessageOrder) -> dict[int, tuple[int, int]]:
    """By message where it belongs on its tier: positions of unshards, to which those of reduces are brought,
    none before an earlier one's."""
    ahead, none = dict(order.ahead), (0,) * schedule.tiers
    places: dict[int, int] = {}
    reached = [0] * schedule.tiers
    first: dict[str, int] = {}
    for task in schedule.tasks:
        if task.kind is Kind.UNSHARD:
            places[task.index] = task.position
            for unit in task.units:
                first.setdefault(unit, task.position)
        elif task.kind is Kind.PARAM_GATHER:
            places[task.index] = min(first[unit] for unit in task.units) - order.sync
        elif task.kind is Kind.GRAD_GATHER:
            places[task.index] = reached[-1]
        elif task.kind in _PLACES:
            number = max(ahead.get(unit, none)[task.tier] for unit in task.units)
            reached[task.tier] = max(reached[task.tier], task.position + number)
            places[task.index] = reached[task.tier]
    return {index: (place, _PLACES[schedule.tasks[index].kind]) for index, place in places.items()}


def _topological(edges: Sequence[set[int]], early: Collection[int]) -> list[int]:
    """Indices so that each comes after its edges' others, and else in ascending order, but ``early`` ones as
    soon as they can."""
    waiting = [len(before) for before in edges]
    followers: list[list[int]] = [[] for _ in edges]
    for index, befores in enumerate(edges):
        for before in befores:
            followers[before].append(index)
    ready = [(index not in early, index) for index, number in enumerate(waiting) if not number]
    heapq.heapify(ready)
    found = []
    while ready:
        _, index = heapq.heappop(ready)
        found.append(index)
        for follower in followers[index]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (follower not in early, follower))
    if len(found) < len(edges):
        raise CircularOrder("the message order waits for parameters that are gathered after the gradients")
    return found
