"""Message order: one message at a time on each tier, in an order that is fixed before the step begins. Pure.

Without it a tier's all-gathers and reduce-scatters are two streams that share its link, so that both end
later than the first of them had to. In order, the link is one stream: all of its rate goes to the message
that compute will wait for first. All-gathers of results (``gather.<t>``) stay a stream of their own, because
they go on while the next step begins.

An order is one number per unit and tier: before a unit's gradients are reduced on that tier, the parameters
of so many later uses are unsharded on it. 0 sends gradients as soon as they are there; prefetch + 1 is the
order of launches. All-gathers go from the slowest tier to the fastest, reduce-scatters the other way, so a
slower tier's number is no smaller: else gradients would wait on the fast tier for parameters that wait on the
slow one for these gradients.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hzplan.core.schedule import Kind, Schedule

Ahead = tuple[int, ...]
"""By tier, fastest first: how many later uses' parameters go before a unit's gradients."""

MessageOrder = tuple[tuple[str, Ahead], ...]
"""The numbers of units; 0 where a unit has none, and of units that are reduced together the larger ones."""

LINK_STREAM = "link"
"""First word of the name of a tier's only stream of all-gathers and reduce-scatters, ``link.<t>``."""

_ORDERED = (Kind.UNSHARD, Kind.REDUCE, Kind.FINAL_REDUCE)


class CircularOrder(ValueError):
    """Messages would wait for each other in a circle."""


def is_ahead(numbers: Ahead, tiers: int) -> bool:
    """Whether there is one number per tier, from 0 on, none smaller than the one before."""
    return len(numbers) == tiers and [0, *numbers] == sorted([0, *numbers])


def within(order: MessageOrder, most: int) -> MessageOrder:
    """The order with no number above ``most``: what a step with another prefetch depth takes of it."""
    return tuple((unit, tuple(min(number, most) for number in ahead)) for unit, ahead in order)


class Arranged(NamedTuple):
    """A step's tasks in a message order, by their indices without it: ``sequence`` is a launch order;
    ``after`` and ``after_previous`` are the predecessors of each task in the same step and the one before."""

    sequence: list[int]
    streams: list[str]
    after: list[set[int]]
    after_previous: list[tuple[int, ...]]


def arranged(schedule: Schedule, order: MessageOrder) -> Arranged:
    """A step with one message at a time on each tier. Data dependencies and the order within each kind stay.

    ``CircularOrder`` where gradients would wait for parameters that are launched after these gradients are
    reduced.
    """
    places = _places(schedule, dict(order))
    streams = [
        f"{LINK_STREAM}.{task.tier}" if task.kind in _ORDERED else task.stream for task in schedule.tasks
    ]
    chains: dict[str, list[int]] = {}
    for task in schedule.tasks:
        chains.setdefault(streams[task.index], []).append(task.index)
    after = [{*task.needs} for task in schedule.tasks]
    after_previous = [task.needs_previous for task in schedule.tasks]
    for stream, chain in chains.items():
        if stream.startswith(LINK_STREAM):
            chain.sort(key=lambda index: (places[index], index))
        for first, second in itertools.pairwise(chain):
            after[second].add(first)
        after_previous[chain[0]] = (*after_previous[chain[0]], chain[-1])
    return Arranged(_topological(after), streams, after, after_previous)


def in_order(schedule: Schedule, order: MessageOrder | None) -> Schedule:
    """The same step as a schedule (``arranged``); with ``None`` the schedule itself."""
    if order is None:
        return schedule
    sequence, streams, after, after_previous = arranged(schedule, order)
    place = {index: number for number, index in enumerate(sequence)}

    def moved(indices: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({place[index] for index in indices}))

    tasks = tuple(
        replace(
            task,
            index=place[task.index],
            stream=streams[task.index],
            after=moved(after[task.index]),
            after_previous=moved(after_previous[task.index]),
            needs=moved(task.needs),
            needs_previous=moved(task.needs_previous),
        )
        for task in (schedule.tasks[index] for index in sequence)
    )
    return replace(
        schedule,
        tasks=tasks,
        options_read=None if schedule.options_read is None else place[schedule.options_read],
        order=order,
        shared=schedule,
    )


def _places(schedule: Schedule, order: Mapping[str, Ahead]) -> dict[int, tuple[int, int]]:
    """By message where it belongs on its tier: positions of unshards, to which those of reduces are brought,
    none before an earlier one's."""
    none = (0,) * schedule.tiers
    places: dict[int, tuple[int, int]] = {}
    reached = [0] * schedule.tiers
    for task in schedule.tasks:
        if task.kind is Kind.UNSHARD:
            places[task.index] = task.position, 0
        elif task.kind in _ORDERED:
            ahead = max(order.get(unit, none)[task.tier] for unit in task.units)
            reached[task.tier] = max(reached[task.tier], task.position + ahead)
            places[task.index] = reached[task.tier], 1
    return places


def _topological(edges: Sequence[set[int]]) -> list[int]:
    """Indices so that each comes after its edges' others, and else in ascending order."""
    waiting = [len(before) for before in edges]
    followers: list[list[int]] = [[] for _ in edges]
    for index, befores in enumerate(edges):
        for before in befores:
            followers[before].append(index)
    ready = [index for index, number in enumerate(waiting) if not number]
    heapq.heapify(ready)
    found = []
    while ready:
        index = heapq.heappop(ready)
        found.append(index)
        for follower in followers[index]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, follower)
    if len(found) < len(edges):
        raise CircularOrder("the message order waits for parameters that are gathered after the gradients")
    return found
