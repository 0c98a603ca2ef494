"""The events of a step as a graph, and its cycles: what a step takes at least. Pure.

An edge says that one event ends before another begins, so a step takes at least the length of any cycle over
the number of steps that it passes through (max-plus algebra: Baccelli et al. 1992, *Synchronization and
Linearity*, §3.2.4). Two things that slow a real step are edges too:

- *Late ranks.* Compute of each of a few ranks (``lateness``) is a chain of its own. What is sent waits for
  all of them. Where ranks change places from step to step the graph has as many steps as they take to repeat.
- *Interference.* Between the end of compute a and the begin of compute b lie all compute between them and
  every message that waits for a and that b waits for. A stream's messages are in order, so those are an
  interval of it. Together they take at least u · compute + Σ v · loads (``Interference.energies``). Such a
  *window* is an edge from a to b; likewise between messages, and between the two. All windows would be many:
  they begin at compute that their end waits for, or that is earlier by growing steps, and at few messages.

Where ranks are late, a message is slowed by the share of them that compute; of that one rank's compute only
says that it is 1 / ranks or more. So there is one more chain, the mean of all: its compute is the mean of
theirs, its times are the means of theirs. Messages begin after it, and it waits for them, as every rank does.
In its windows messages are slowed in full. For let I be the time between the last rank's end of a and the
first one's begin of b, in which all messages are, and o a rank's time outside of I. As energies hold for any
share of ranks that compute, I ≥ u · (mean compute − mean o) + Σ v · loads; with u ≤ 1 the mean time from a to
b, I + mean o, is at least u · mean compute + Σ v · loads.

Lengths are linear in the lengths of events, so every cycle is a linear row.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hzplan.core.schedule import COMPUTE_STREAM, Schedule, Task
from hzplan.cost.interference import Interference
from hzplan.cost.lateness import RANKS, Late, late_in

MAX_PASSES = 12
"""Cycles of steps through which longest paths are followed at most, in search of a periodic state."""
SAME = 1e-9
"""Relative difference below which two periods count as equal."""
NEAR = (0, 2, 8)
"""Messages that windows begin at, counted back from the last that their end waits for."""
LOOKED_BACK = 4
"""Steps after which what an event waits for has repeated."""

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]


class Event(NamedTuple):
    """An event of one step; in a sequence of events, predecessors of the same step come first.

    ``stream``: events of one stream follow each other; ``tier``: whose link it takes, below 0 for none.
    ``after``: indices of predecessors in the same step, ``after_previous`` in the step before. ``late``: of
    compute, by step of a cycle and rank, by how much it exceeds the event's length.
    """

    stream: str
    tier: int
    after: tuple[int, ...]
    after_previous: tuple[int, ...]
    late: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class _Stream:
    """The events of a stream in order; positions count on through all steps."""

    events: Ints

    def load(self, lengths: Floats, first: Ints, last: Ints) -> Floats:
        """The summed length of positions ``first`` to ``last``, which count through all steps."""
        ends = np.concatenate([[0.0], np.cumsum(lengths[self.events])])
        size = len(self.events)

        def until(position: Ints) -> Floats:
            return np.asarray(ends[position % size] + position // size * ends[-1])

        return np.where(last >= first, until(last + 1) - until(first), 0.0)

    def counted(self, counts: Floats, first: int, last: int, weight: float) -> None:
        """Add ``weight`` to the counts of the events in an interval."""
        positions = np.arange(first, last + 1) % len(self.events)
        np.add.at(counts, self.events[positions], weight)


class Cycle(NamedTuple):
    """A cycle's length is ``counts`` · lengths of events + ``late``, by step. ``walk``: from node to
    predecessor, an index below 0 for a predecessor in the cycle of steps before (its own less the number of
    nodes)."""

    counts: Floats
    late: float
    walk: tuple[int, ...]

    def at(self, lengths: Floats) -> float:
        """Its length over the number of steps that it takes."""
        return float(self.counts @ lengths) + self.late


class EventGraph:
    """The graph of a cycle of steps. ``steps``: how many those are, one where no rank is late.

    ``longest``: the number of uses that a window passes at most. ``merged``: events that stand for many,
    which are in no window, so that a shortened step's windows are the whole one's as well.
    """

    def __init__(
        self,
        events: Sequence[Event],
        tiers: int,
        interference: Interference,
        longest: int,
        merged: Collection[int] = (),
    ) -> None:
        self.events, self.tiers, self.longest, self.merged = events, tiers, longest, merged
        self.steps = max((len(event.late) for event in events), default=1) or 1
        self.is_compute = [event.stream == COMPUTE_STREAM for event in events]
        self.is_late = any(event.late for event in events)
        self.chains = RANKS + 1 if self.is_late else 1
        nodes, late, self._first = list[int](), list[float](), list[list[int]]()
        for step in range(self.steps):
            self._first.append([])
            for number, event in enumerate(events):
                self._first[step].append(len(nodes))
                if self.is_compute[number] and self.is_late:
                    of_ranks = event.late[step] if event.late else (0.0,) * RANKS
                    late += [*of_ranks, sum(of_ranks) / RANKS]
                else:
                    late.append(0.0)
                nodes += [number] * (len(late) - len(nodes))
        self.event_of, self.late = np.array(nodes), np.array(late)
        self.nodes = len(nodes)  # windows not counted
        self.before = self._edges()
        """By node, its predecessors; below 0, less the number of nodes, in the cycle before."""
        self.begin = self._first[0][0]
        last = {event.stream: number for number, event in enumerate(events)}
        self.tails = [self.begin, *(self._first[-1][number] for number in last.values())]
        slow = tuple(1 + (one - 1) / RANKS for one in interference.communication_slowdown)
        of_rank = replace(interference, communication_slowdown=slow).energies if self.is_late else ()
        self.energies = np.array([(one.compute, *one.loads) for one in (*of_rank, *interference.energies)])
        self.of_rank = len(of_rank)  # energies of one rank among several; the others are of all
        disturbs = any(interference.compute_loss) or any(s > 1 for s in interference.communication_slowdown)
        self.windows = self._windows() if self._streams and disturbs else _NONE
        self.numbered = self.nodes + len(self.windows.end) * len(self.energies)
        """Nodes, and windows with each of the energies: what walks count with."""

    @property
    def plain(self) -> bool:
        """Whether nothing slows a step but its edges."""
        return not self.is_late and not len(self.windows.end)

    def node(self, step: int, event: int, rank: int) -> int:
        """The node of an event; of compute that of a rank, or of their mean, which is the last."""
        return self._first[step][event] + (rank if self.is_compute[event] else 0)

    def _edges(self) -> list[list[int]]:
        found: list[list[int]] = []
        size = len(self.event_of)
        for step in range(self.steps):
            earlier = (step - 1) % self.steps
            for number, event in enumerate(self.events):
                for rank in range(self.chains if self.is_compute[number] else 1):
                    edges: list[int] = []
                    for at, some, shift in (
                        (step, event.after, 0),
                        (earlier, event.after_previous, 0 if step else -size),
                    ):
                        for u in some:
                            own = self.is_compute[u] and self.is_compute[number]
                            ranks = range(self.chains) if self.is_compute[u] and not own else [rank]
                            edges += [self.node(at, u, one) + shift for one in ranks]
                    found.append(edges)
        return found

    @cached_property
    def _streams(self) -> list[tuple[int, _Stream]]:
        """Every stream of messages with its tier."""
        found: dict[str, list[int]] = {}
        for number, event in enumerate(self.events):
            if event.tier >= 0:
                found.setdefault(event.stream, []).append(number)
        return [(self.events[of[0]].tier, _Stream(np.array(of))) for of in found.values()]

    @cached_property
    def _chain(self) -> _Stream:
        return _Stream(np.array([number for number, compute in enumerate(self.is_compute) if compute]))

    def _awaited(self) -> Ints:
        """By event and stream, the last position of the stream that the event waits for; positions count from
        this step's first. The first stream is that of compute."""
        streams = [self._chain, *(stream for _, stream in self._streams)]
        position = {
            int(event): (number, place)
            for number, stream in enumerate(streams)
            for place, event in enumerate(stream.events)
        }
        sizes = [len(stream.events) for stream in streams]
        nothing = [-LOOKED_BACK * size for size in sizes]
        before: list[list[int]] = []
        for _ in range(LOOKED_BACK):
            now: list[list[int]] = []
            for event in self.events:
                last = list(nothing)
                for some, of, back in ((now, event.after, 0), (before, event.after_previous, 1)):
                    for u in of if some else ():
                        reached = some[u]
                        if u in position:
                            stream, place = position[u]
                            reached = [*reached]
                            reached[stream] = max(reached[stream], place)
                        for number, value in enumerate(reached):
                            value -= back * sizes[number]
                            if value > last[number]:
                                last[number] = value
                now.append(last)
            before = now
        return np.array(before, dtype=np.int64)

    def _windows(self) -> _Windows:
        """From every stream's events to every stream's, with some compute and some message inside."""
        streams = [self._chain, *(stream for _, stream in self._streams)]
        awaited = self._awaited()
        steps = np.arange(-LOOKED_BACK, LOOKED_BACK)[:, None]
        sizes = np.array([len(stream.events) for stream in streams])
        ends = np.concatenate([stream.events for stream in streams])
        merged = [np.isin(stream.events, list(self.merged)).astype(float) for stream in streams]
        found = []
        for number, begun in enumerate(streams):
            size = len(begun.events)
            farther = _lengths(min(size, self.longest)) if number == 0 else [b for b in NEAR if b < size]
            back = np.array(farther, dtype=np.int64)
            begins = (awaited[ends, number][:, None] - back).ravel()
            some_ends = np.repeat(ends, len(back))
            inside = np.zeros((len(streams), 2, len(begins)), dtype=np.int64)
            whole = np.ones(len(begins), dtype=bool)
            for other, stream in enumerate(streams):
                many = len(stream.events)
                # What an event of a stream waits for only grows along it.
                behind = np.maximum.accumulate((steps * size + awaited[stream.events, number]).ravel())
                first = np.searchsorted(behind, begins) - LOOKED_BACK * many
                last = awaited[some_ends, other]
                inside[other] = first, np.maximum(last, first - 1)
                whole &= _Stream(np.arange(many)).load(merged[other], *inside[other]) == 0
            some = inside[:, 1] >= inside[:, 0]
            kept = np.flatnonzero((begins >= -size) & some[0] & some[1:].any(axis=0) & whole)
            begin = begun.events[begins[kept] % size]
            found.append((begin, begins[kept] // size, some_ends[kept], inside[:, :, kept]))
        begin, before, end, inside = (np.concatenate(of, axis=-1) for of in zip(*found, strict=True))
        first = np.array(self._first)
        of_compute = np.array(self.is_compute).astype(int)
        parts = []
        for step, rank in itertools.product(range(self.steps), range(self.chains)):
            earlier = step + before
            begin_nodes = first[earlier % self.steps, begin] + of_compute[begin] * rank
            parts.append(
                _Windows(
                    end=first[step, end] + of_compute[end] * rank,
                    begin=np.where(earlier < 0, begin_nodes - self.nodes, begin_nodes),
                    rank=np.full(len(end), rank),
                    compute=inside[0] + step * sizes[0],
                    sent=inside[1:],
                )
            )
        return _Windows(*(np.concatenate(of, axis=-1) for of in zip(*parts, strict=True)))

    def long_windows(self, lengths: Floats) -> tuple[Ints, Floats, Ints]:
        """Windows that take longer than each of their streams alone: which, how long, and by which energy."""
        chain, windows = self._chain.events, self.windows
        load = np.zeros((1 + self.tiers, len(windows.end)))
        for rank in range(self.chains):
            nodes = (np.array(self._first)[:, chain] + rank).ravel()
            own = windows.rank == rank
            of_nodes = _Stream(np.arange(len(nodes)))
            load[0, own] = of_nodes.load(
                lengths[self.event_of[nodes]] + self.late[nodes], *windows.compute[:, own]
            )
        alone = load[0].copy()
        for (tier, stream), (first, last) in zip(self._streams, windows.sent, strict=True):
            of_stream = stream.load(lengths, first, last)
            load[1 + tier] += of_stream
            np.maximum(alone, of_stream, out=alone)
        of_energies = self.energies @ load
        mean = windows.rank == self.chains - 1
        of_energies[: self.of_rank, mean] = 0.0
        of_energies[self.of_rank :, ~mean] = 0.0
        best = of_energies.argmax(axis=0)
        taken = of_energies[best, np.arange(len(best))]
        long = np.flatnonzero(taken > alone * (1 + SAME))
        return long, taken[long], best[long]

    def cycles(self, lengths: Floats, *, windows: bool = True) -> list[Cycle]:
        """The critical cycle, and the cycle that binds each stream's end, the longest first, for these
        lengths of events. ``windows``: whether through windows as well, which takes longer."""
        found: dict[tuple[int, ...], Cycle] = {}
        before = self._passes(lengths, windows=windows)
        for tail in self.tails:
            walk = self._closed(before, tail)
            if walk is not None:
                found.setdefault(tuple(sorted(node % self.numbered for node in walk)), self._cycle(walk))
        return sorted(found.values(), key=lambda cycle: -cycle.at(lengths))

    def period(self, lengths: Floats) -> float:
        """The least time of a step for these lengths of events."""
        return max((cycle.at(lengths) for cycle in self.cycles(lengths)), default=0.0)

    def _passes(self, lengths: Floats, *, windows: bool) -> list[list[int]]:
        """Longest paths, cycle after cycle, until what binds repeats; ``[cycle][node]`` is what binds.

        A node without a predecessor is its own.
        """
        nodes, numbered = self.nodes, self.numbered
        shift = nodes - numbered
        by_end: list[list[tuple[int, float, int]]] = [[] for _ in range(nodes)]
        if windows and len(self.windows.end):
            long, taken, best = self.long_windows(lengths)
            names = nodes + long * len(self.energies) + best
            of_end, of_begin = self.windows.end[long].tolist(), self.windows.begin[long].tolist()
            for end, *window in zip(of_end, of_begin, taken.tolist(), names.tolist(), strict=True):
                by_end[end].append(tuple(window))
        own = (lengths[self.event_of] + self.late).tolist()
        previous: list[float] = []
        begun: list[float] = []
        found: list[list[int]] = []
        for _ in range(MAX_PASSES):
            ends: list[float] = []
            binding: list[int] = []
            for node, edges in enumerate(self.before):
                start, bound = 0.0, node
                for u in edges:
                    if u >= 0:
                        if ends[u] >= start:
                            start, bound = ends[u], u
                    elif previous and previous[u] >= start:  # counted from the end
                        start, bound = previous[u], u + shift
                for u, length, name in by_end[node]:
                    end = ends[u] if u >= 0 else previous[u] if previous else -1.0
                    if end >= 0.0 and end + length > start:
                        start, bound = end + length, name
                ends.append(start + own[node])
                binding.append(bound)
            found.append(binding)
            begun.append(ends[self.begin])
            previous = ends
            if _repeats(begun) and self._closed(found, self.begin) is not None:
                break
        return found

    def _behind(self, name: int) -> int:
        """What a window begins behind; below 0 in the cycle before."""
        begin = int(self.windows.begin[(name - self.nodes) // len(self.energies)])
        return begin if begin >= 0 else begin + self.nodes - self.numbered

    def _closed(self, before: Sequence[Sequence[int]], node: int) -> list[int] | None:
        """The cycle that is reached from a node of the last step along binding predecessors.

        None where the first step is reached before a cycle closes.
        """
        step, nodes, numbered = len(before) - 1, self.nodes, self.numbered
        walk: list[int] = [node]
        entered: dict[int, int] = {}  # where steps were entered -> how long the walk was
        while True:
            binding = before[step][node] if node < nodes else self._behind(node)
            if binding == node:
                return None
            if binding < 0:
                if binding in entered:
                    return walk[entered[binding] :]
                entered[binding] = len(walk)
                step -= 1
            walk.append(binding)
            node = binding % numbered
            if step < 0:
                return None

    def _cycle(self, walk: Sequence[int]) -> Cycle:
        counts, late = np.zeros(len(self.events)), 0.0
        for at in walk:
            node = at % self.numbered
            if node < self.nodes:
                counts[self.event_of[node]] += 1.0
                late += float(self.late[node])
            else:
                late += self._count_window(node, counts)
        steps = self.steps * sum(node < 0 for node in walk)
        return Cycle(counts / steps, late / steps, tuple(walk))

    def _count_window(self, name: int, counts: Floats) -> float:
        """Add a window's weights to the counts of events; what its lateness comes to."""
        window, energy = divmod(name - self.nodes, len(self.energies))
        of_compute, *of_tiers = self.energies[energy].tolist()
        first, last = self.windows.compute[:, window].tolist()
        rank, chain, late = int(self.windows.rank[window]), self._chain.events, 0.0
        for position in range(first, last + 1):
            step, place = divmod(position % (self.steps * len(chain)), len(chain))
            node = self.node(step, int(chain[place]), rank)
            counts[self.event_of[node]] += of_compute
            late += of_compute * float(self.late[node])
        for (tier, stream), (low, high) in zip(self._streams, self.windows.sent[:, :, window], strict=True):
            if high >= low:
                stream.counted(counts, int(low), int(high), of_tiers[tier])
        return late

    def checked(self, walk: Sequence[int]) -> Cycle:
        """A cycle from outside; ValueError where it is none of this graph."""
        size, shift = self.numbered, self.nodes - self.numbered
        if not walk or not all(-size <= node < size for node in walk) or min(walk) >= 0:
            raise ValueError("it is no cycle of this event graph")
        for at, before in zip(walk, (*walk[1:], walk[0]), strict=True):
            node = at % size
            if node >= self.nodes:
                window, energy = divmod(node - self.nodes, len(self.energies))
                of_all = int(self.windows.rank[window]) == self.chains - 1
                ok = before == self._behind(node) and (energy >= self.of_rank) == of_all
            elif before % size >= self.nodes:
                window = (before - self.nodes) // len(self.energies) if before >= 0 else -1
                ok = window >= 0 and int(self.windows.end[window]) == node
            else:
                ok = (before if before >= 0 else before - shift) in self.before[node]
            if not ok:
                raise ValueError(f"node {node} does not wait for node {before % size}")
        return self._cycle(walk)


def event_graph(
    schedule: Schedule, interference: Interference, late: Sequence[Late] | None = None
) -> EventGraph:
    """The events of a schedule's tasks; ``late`` by task, as ``replay_shared`` has it."""

    def of(task: Task) -> tuple[tuple[float, ...], ...]:
        if late is None or task.stream != COMPUTE_STREAM:
            return ()
        micro_batch, use = divmod(task.position, len(schedule.uses))
        return late_in(schedule.accumulation, [(use, micro_batch, late[task.index])])

    events = [Event(t.stream, t.tier, t.after, t.after_previous, of(t)) for t in schedule.tasks]
    return EventGraph(events, schedule.tiers, interference, len(schedule.uses))


class _Windows(NamedTuple):
    """Windows, each an edge to the node ``end`` from the node ``begin`` (below 0 in the cycle before).

    ``rank``: whose compute, a rank's or the mean; ``compute``: first and last position of its chain, through
    all steps of a cycle [2, windows]; ``sent``: likewise of every stream of messages [streams, 2, windows].
    """

    end: Ints
    begin: Ints
    rank: Ints
    compute: Ints
    sent: Ints


_EMPTY = np.zeros(0, dtype=np.int64)
_NONE = _Windows(_EMPTY, _EMPTY, _EMPTY, _EMPTY.reshape(2, 0), _EMPTY.reshape(0, 2, 0))


def _lengths(size: int) -> list[int]:
    """From the last event that a window's end waits for, and earlier ones, each at most half as far again."""
    found, length = [0], 1
    while length < size:
        found.append(length)
        length += max(1, length // 2)
    return found


def _repeats(begins: Sequence[float]) -> bool:
    """Whether the last steps repeat with a cycle of one to four steps."""
    periods = [b - a for a, b in itertools.pairwise(begins)]
    return any(
        len(periods) >= 2 * cycle + 1
        and all(
            abs(periods[-i] - periods[-i - cycle]) <= SAME * abs(periods[-i]) for i in range(1, cycle + 1)
        )
        for cycle in range(1, 5)
    )
