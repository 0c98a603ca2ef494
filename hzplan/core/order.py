"""Message order: one message at a time on each tier, in an order that is fixed before the step begins. Pure.

Without it a tier's all-gathers and reduce-scatters are two streams that share its link, so that both end
later than the first of them had to. In order, the link is one stream: all of its rate goes to the message
that compute will wait for first. All-gathers of results (``gather.<t>``) stay a stream of their own, because
they go on while the next step begins.

An order is one number per tier: before the gradients of a use are reduced on that tier, the parameters of so
many later uses are unsharded on it. 0 sends gradients as soon as they are there; prefetch + 1 is the order of
launches, and what is beyond it would not have been launched. All-gathers go from the slowest tier to the
fastest, reduce-scatters the other way, so a slower tier's number is no smaller: else a use's gradients would
wait on the fast tier for parameters that wait on the slow one for these gradients.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import replace

from hzplan.core.schedule import Kind, Schedule, Task

MessageOrder = tuple[int, ...]
"""By tier, fastest first: how many later uses' parameters go before a use's gradients."""

LINK_STREAM = "link"
"""First word of the name of a tier's only stream of all-gathers and reduce-scatters, ``link.<t>``."""

_ORDERED = (Kind.UNSHARD, Kind.REDUCE, Kind.FINAL_REDUCE)


def faults(order: MessageOrder, tiers: int, prefetch: int) -> str | None:
    """What is wrong with an order for a step, in words; None: nothing."""
    if len(order) == tiers and [0, *order, prefetch + 1] == sorted([0, *order, prefetch + 1]):
        return None
    return f"{tiers} numbers from 0 to {prefetch + 1} needed, one per tier, none smaller than the one before"


def in_order(schedule: Schedule, order: MessageOrder | None) -> Schedule:
    """The same step with one message at a time on each tier; with ``None`` the schedule itself.

    Data dependencies and the order within each kind stay. ValueError where ``faults`` finds one.
    """
    if order is None:
        return schedule
    if fault := faults(order, schedule.tiers, schedule.prefetch):
        raise ValueError(fault)
    streams = [
        f"{LINK_STREAM}.{task.tier}" if task.kind in _ORDERED else task.stream for task in schedule.tasks
    ]
    chains: dict[str, list[int]] = {}
    for task in schedule.tasks:
        chains.setdefault(streams[task.index], []).append(task.index)
    for stream, chain in chains.items():
        if stream.startswith(LINK_STREAM):
            chain.sort(key=lambda index: (_place(schedule.tasks[index], order), index))
    edges = [{*task.needs} for task in schedule.tasks]
    for chain in chains.values():
        for first, second in itertools.pairwise(chain):
            edges[second].add(first)
    place = {index: number for number, index in enumerate(_topological(edges))}

    def moved(indices: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(place[index] for index in indices))

    tasks: dict[int, Task] = {}
    for task, stream in zip(schedule.tasks, streams, strict=True):
        chain = chains[stream]
        wraps = {*task.needs_previous} | ({chain[-1]} if task.index == chain[0] else set())
        tasks[place[task.index]] = replace(
            task,
            index=place[task.index],
            stream=stream,
            after=moved([*edges[task.index]]),
            after_previous=moved([*wraps]),
            needs=moved(task.needs),
            needs_previous=moved(task.needs_previous),
        )
    return replace(
        schedule,
        tasks=tuple(tasks[number] for number in range(len(tasks))),
        options_read=None if schedule.options_read is None else place[schedule.options_read],
        order=order,
        shared=schedule,
    )


def _place(task: Task, order: MessageOrder) -> tuple[int, int]:
    """Where a message belongs on its tier: positions of unshards, to which those of reduces are brought."""
    return (task.position, 0) if task.kind is Kind.UNSHARD else (task.position + order[task.tier], 1)


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
    assert len(found) == len(edges), "an order within the prefetch has no circle"
    return found
