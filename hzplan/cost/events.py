"""The events of a step as a graph, and its cycles: what a step takes at least. Pure.

An edge says that one event ends before another begins, so a step takes at least the length of any cycle over
the number of steps that it passes through (max-plus algebra: Baccelli et al. 1992, *Synchronization and
Linearity*, §3.2.4). Two things that slow a real step are edges too:

- *Late ranks.* Compute of each of a few ranks (``lateness``) is a chain of its own. What is sent waits for
  all of them, but a task that sends nothing holds nobody up. So messages, too, are in every chain, and ranks
  meet in those that take time. A cycle that changes chains there is one only of choices that have these
  messages: ``Cycle.parts``. Where ranks change places from step to step the graph has as many steps as they
  take to repeat.
- *Interference.* Between the end of compute a and the begin of compute b lie all compute between them and
  every message that waits for a and that b waits for. A stream's messages are in order, so those are an
  interval of it. Together they take at least u · compute + Σ v · loads (``Interference.energies``). Such a
  *window* is an edge from a to b; likewise between messages, and between the two. All windows would be many:
  they begin at compute that their end waits for, or that is earlier by growing steps, and at few messages.

Where ranks are late, a message is slowed by the share of them that compute; of that one rank's compute only
says that it is 1 / ranks or more. So there is one more chain, the mean of all: its compute is the mean of
theirs, its times are the means of theirs, which are no earlier than the latest mean of what they wait for.
Messages begin after it, and it waits for them, as every rank does. In its windows messages are slowed in
full. For let I be the time between the last rank's end of a and the first one's begin of b, in which all
messages are, and o a rank's time outside of I. As energies hold for any share of ranks that compute,
I ≥ u · (mean compute − mean o) + Σ v · loads; with u ≤ 1 the mean time from a to b, I + mean o, is at least
u · mean compute + Σ v · loads.

Lengths are linear in the lengths of events, so every cycle is a linear row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
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
    ``after``: indices of predecessors in the same step, ``after_previous`` in the step before. ``joint``:
    whether ranks meet in it, as they do in a message; else each passes it by itself. ``late``: of compute, by
    step of a cycle and rank, by how much it exceeds the event's length.
    """

    stream: str
    tier: int
    after: tuple[int, ...]
    after_previous: tuple[int, ...]
    joint: bool = False
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


class Part(NamedTuple):
    """A part of a cycle that is one rank's: by how much that is late, and of the events at its ends those in
    which ranks need not meet.

    Without one of them the part is no longer in a cycle with its neighbours, but the mean of ranks still is,
    which is not early. So of a part's lateness counts what is left when all of it is taken off for each end
    that is missing, if it is late; earliness counts as it is.
    """

    late: float
    ends: tuple[int, ...]


class Cycle(NamedTuple):
    """A cycle's length is ``counts`` · lengths of events + lateness of ``parts``, by step. ``walk``: from
    node to predecessor, an index below 0 for a predecessor in the cycle of steps before (its own less the
    number of nodes)."""

    counts: Floats
    parts: tuple[Part, ...]
    walk: tuple[int, ...]

    def at(self, lengths: Floats) -> float:
        """Its length over the number of steps that it takes, where ranks meet in the ends of all parts."""
        return float(self.counts @ lengths) + sum(part.late for part in self.parts)


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
        self.is_own = [
            self.is_late and (compute or not event.joint)
            for compute, event in zip(self.is_compute, events, strict=True)
        ]
        self.chains = RANKS + 1 if self.is_late else 1
        nodes, late, self._first = list[int](), list[float](), list[list[int]]()
        self._chain_of: list[int] = []  # by node the rank, or the mean of them; -1 where ranks meet
        for step in range(self.steps):
            self._first.append([])
            for number, event in enumerate(events):
                self._first[step].append(len(nodes))
                if self.is_own[number]:
                    of_ranks = event.late[step] if event.late else (0.0,) * RANKS
                    late += [*of_ranks, sum(of_ranks) / RANKS]
                    self._chain_of += range(self.chains)
                else:
                    late.append(0.0)
                    self._chain_of.append(-1)
                nodes += [number] * (len(late) - len(nodes))
        self.event_of, self.late = np.array(nodes), np.array(late)
        self.nodes = len(nodes)  # windows not counted
        self.before = self._edges()
        """By node, its predecessors; below 0, less the number of nodes, in the cycle before."""
        self.begin = self._first[0][0]
        last = {event.stream: number for number, event in enumerate(events)}
        ranks = (self.node(self.steps - 1, last[COMPUTE_STREAM], rank) for rank in range(self.chains))
        self.tails = [self.begin, *ranks, *(self._first[-1][number] for number in last.values())]
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
        """The node of an event; of what ranks pass by themselves that of a rank, or of their mean, which is
        the last."""
        return self._first[step][event] + (rank if self.is_own[event] else 0)

    def _edges(self) -> list[list[int]]:
        found: list[list[int]] = []
        size = len(self.event_of)
        for step in range(self.steps):
            earlier = (step - 1) % self.steps
            for number, event in enumerate(self.events):
                for rank in range(self.chains if self.is_own[number] else 1):
                    edges: list[int] = []
                    for at, some, shift in (
                        (step, event.after, 0),
                        (earlier, event.after_previous, 0 if step else -size),
                    ):
                        for u in some:
                            all_ranks = self.is_own[u] and not self.is_own[number]
                            ranks = range(self.chains) if all_ranks else [rank]
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
    def _computes(self) -> _Stream:
        return _Stream(np.array([number for number, compute in enumerate(self.is_compute) if compute]))

    def _awaited(self) -> Ints:
        """By event and stream, the last position of the stream that the event waits for; positions count from
        this step's first. The first stream is that of compute."""
        streams = [self._computes, *(stream for _, stream in self._streams)]
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
        streams = [self._computes, *(stream for _, stream in self._streams)]
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
        of_own = np.array(self.is_own).astype(int)
        parts = []
        for step, rank in itertools.product(range(self.steps), range(self.chains)):
            earlier = step + before
            begin_nodes = first[earlier % self.steps, begin] + of_own[begin] * rank
            parts.append(
                _Windows(
                    end=first[step, end] + of_own[end] * rank,
                    begin=np.where(earlier < 0, begin_nodes - self.nodes, begin_nodes),
                    rank=np.full(len(end), rank),
                    compute=inside[0] + step * sizes[0],
                    sent=inside[1:],
                )
            )
        return _Windows(*(np.concatenate(of, axis=-1) for of in zip(*parts, strict=True)))

    def long_windows(self, lengths: Floats) -> tuple[Ints, Floats, Ints]:
        """Windows that take longer than each of their streams alone: which, how long, and by which energy."""
        chain, windows = self._computes.events, self.windows
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

    def cycles(
        self, lengths: Floats, *, windows: bool = True, joint: Collection[int] | None = None
    ) -> list[Cycle]:
        """The critical cycle, and the cycle that binds each stream's end, the longest first, for these
        lengths of events. ``windows``: whether through windows as well, which takes longer; ``joint``: the
        messages in which ranks meet, None for all that take time."""
        found: dict[tuple[int, ...], Cycle] = {}
        joint = np.flatnonzero(lengths > 0).tolist() if joint is None else joint
        before = self._passes(lengths, joint, windows=windows)
        for tail in self.tails:
            walk = self._closed(before, tail)
            if walk is not None:
                found.setdefault(tuple(sorted(node % self.numbered for node in walk)), self._cycle(walk))
        return sorted(found.values(), key=lambda cycle: -cycle.at(lengths))

    def period(self, lengths: Floats) -> float:
        """The least time of a step for these lengths of events."""
        return max((cycle.at(lengths) for cycle in self.cycles(lengths)), default=0.0)

    def _passes(self, lengths: Floats, joint: Collection[int], *, windows: bool) -> list[list[int]]:
        """Longest paths, cycle after cycle, until what binds repeats; ``[cycle][node]`` is what binds.

        A node without a predecessor is its own.
        """
        nodes = self.nodes
        by_end: list[Sequence[tuple[int, float, int]]] = [()] * nodes
        if windows and len(self.windows.end):
            long, taken, best = self.long_windows(lengths)
            names = nodes + long * len(self.energies) + best
            of_end, of_begin = self.windows.end[long].tolist(), (nodes + self.windows.begin[long]).tolist()
            for end, *window in zip(of_end, of_begin, taken.tolist(), names.tolist(), strict=True):
                by_end[end] = (*by_end[end], tuple(window))
        own = (lengths[self.event_of] + self.late).tolist()
        meets = {
            of_events[number] + self.chains - 1  # its last node
            for number in joint
            if self.may_meet(number)
            for of_events in self._first
        }
        ends = [-1.0] * nodes  # of the cycle before, then of this one; nothing ended before the first
        begun: list[float] = []
        found: list[list[int]] = []
        for _ in range(MAX_PASSES):
            binding: list[int] = []
            for node, (edges, length, through) in enumerate(zip(self._numbered, own, by_end, strict=True)):
                start, bound = 0.0, node
                for at, name in edges:
                    end = ends[at]
                    if end >= start:
                        start, bound = end, name
                for at, least, name in through:
                    end = ends[at]
                    if end >= 0.0 and end + least > start:
                        start, bound = end + least, name
                ends.append(start + length)
                binding.append(bound)
                if node in meets:
                    latest = max(ends[-self.chains :])
                    by = binding[ends.index(latest, len(ends) - self.chains) - nodes]
                    for one in range(-self.chains, 0):
                        if ends[one] < latest:
                            ends[one], binding[one] = latest, by
            found.append(binding)
            ends = ends[nodes:]
            begun.append(ends[self.begin])
            if _repeats(begun) and self._closed(found, self.begin) is not None:
                break
        return found

    @cached_property
    def _numbered(self) -> list[tuple[tuple[int, int], ...]]:
        """By node, of its predecessors the place in the ends of two cycles, and the name in walks."""
        shift = self.nodes - self.numbered
        return [tuple((self.nodes + u, u if u >= 0 else u + shift) for u in some) for some in self.before]

    def may_meet(self, event: int) -> bool:
        """Whether an event is a message that each rank passes by itself only where it takes no time.

        None that stands for many: whether all of these take time is not told by their sum.
        """
        return self.is_own[event] and self.events[event].tier >= 0 and event not in self.merged

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
        counts, late = np.zeros(len(self.events)), list[float]()
        for at in walk:
            node = at % self.numbered
            if node < self.nodes:
                counts[self.event_of[node]] += 1.0
                late.append(float(self.late[node]))
            else:
                late.append(self._count_window(node, counts))
        steps = self.steps * sum(node < 0 for node in walk)
        parts = (Part(late / steps, ends) for late, ends in self._parts(walk, late))
        return Cycle(counts / steps, tuple(parts), tuple(walk))

    def _parts(self, walk: Sequence[int], late: Sequence[float]) -> Iterator[Part]:
        """A walk's parts that are not of the mean lateness, their lateness not yet by step."""
        chains = [self._chain(at % self.numbered) for at in walk]
        changes = [at for at, chain in enumerate(chains) if chain != chains[(at + 1) % len(walk)]]
        if not changes:
            yield Part(sum(late), ())
            return
        for before, last in zip([changes[-1] - len(walk), *changes], changes, strict=False):
            if own := sum(late[at] for at in range(before + 1, last + 1)):  # below 0: from the end
                ends = [self._meeting(walk, chains, at) for at in (before, last)]
                yield Part(own, tuple(end for end in ends if end is not None))

    def _meeting(self, walk: Sequence[int], chains: Sequence[int], at: int) -> int | None:
        """The event in which a walk changes chains behind a node; None where ranks meet in any case."""
        node = walk[at] % self.numbered
        both = chains[at] >= 0 and chains[(at + 1) % len(walk)] >= 0
        return int(self.event_of[node]) if both else None

    def _chain(self, name: int) -> int:
        """The chain of a node or window."""
        if name < self.nodes:
            return self._chain_of[name]
        return int(self.windows.rank[(name - self.nodes) // len(self.energies)])

    def _count_window(self, name: int, counts: Floats) -> float:
        """Add a window's weights to the counts of events; what its lateness comes to."""
        window, energy = divmod(name - self.nodes, len(self.energies))
        of_compute, *of_tiers = self.energies[energy].tolist()
        first, last = self.windows.compute[:, window].tolist()
        rank, chain, late = int(self.windows.rank[window]), self._computes.events, 0.0
        for position in range(first, last + 1):
            step, place = divmod(position % (self.steps * len(chain)), len(chain))
            node = self.node(step, int(chain[place]), rank)
            counts[self.event_of[node]] += of_compute
            late += of_compute * float(self.late[node])
        for (tier, stream), (low, high) in zip(self._streams, self.windows.sent[:, :, window], strict=True):
            if high >= low:
                stream.counted(counts, int(low), int(high), of_tiers[tier])
        return late

    def _together(self, node: int) -> Sequence[int]:
        """The nodes of an event that a walk may take for each other: all of a message's."""
        first = node - self._chain_of[node]
        may = self.may_meet(int(self.event_of[node]))
        return range(first, first + self.chains) if may else (node,)

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
                ok = window >= 0 and int(self.windows.end[window]) in self._together(node)
            else:
                one = before if before >= 0 else before - shift
                ok = any(one in self.before[of] for of in self._together(node))
            if not ok:
                raise ValueError(f"node {node} does not wait for node {before % size}")
        return self._cycle(walk)


def event_graph(
    schedule: Schedule,
    interference: Interference,
    late: Sequence[Late] | None = None,
    joint: Callable[[Task], bool] = lambda _: False,
) -> EventGraph:
    """The events of a schedule's tasks; ``late`` by task, as ``replay_shared`` has it. ``joint``: of which
    ranks meet in any case; the others may take no time."""

    def of(task: Task) -> tuple[tuple[float, ...], ...]:
        if late is None or task.stream != COMPUTE_STREAM:
            return ()
        micro_batch, use = divmod(task.position, len(schedule.uses))
        return late_in(schedule.accumulation, [(use, micro_batch, late[task.index])])

    events = [Event(t.stream, t.tier, t.after, t.after_previous, joint(t), of(t)) for t in schedule.tasks]
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
