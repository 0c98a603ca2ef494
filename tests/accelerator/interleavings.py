"""A program of N ranks on memory of its own, in adversarial orders, with real numbers.

What may begin begins when the adversary lets it: of each stream the next operation, when the events that it
waits for are reached. A collective begins on a rank when its communicator's one before is over there, and
holds a share of the device from then on until every rank of its group has begun it, which is when values
move. With ``implicit order`` (NCCL_LAUNCH_ORDER_IMPLICIT) a rank's collectives begin in the order of their
launches, whatever communicator they are of.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from tests.accelerator.program import ALIGNMENT, POISON, Collective, Operation, Program, View
from tests.accelerator.ranks import INTO_PART, combined


class Found(AssertionError):
    """What an interleaving has shown: a deadlock, or other values."""


@dataclass(frozen=True)
class Rules:
    """``shares``: how many collectives of different communicators a device holds at once."""

    shares: int = 1
    implicit_order: bool = True


class _Step:
    """One operation, ready to be run on the rank's memory; ``given`` and ``found``: a collective's
    tensors."""

    __slots__ = ("collective", "found", "given", "label", "number", "run", "waits")

    def __init__(self, operation: Operation, memory: _Memory) -> None:
        self.label, self.collective = operation.label, operation.collective
        self.number = 0  # of a collective among its rank's
        self.waits: list[tuple[int, int]] = []
        self.run = _runner(operation, memory)
        if (one := operation.collective) is not None:
            self.given = memory.tensor(one.part if one.operation == "all_gather" else one.whole)
            found = memory.tensor(one.part if one.operation in INTO_PART else one.whole)
            self.found = found.view(-1)


class _Memory:
    """A rank's blocks in one buffer, so that one copy brings the beginning back."""

    def __init__(self, program: Program) -> None:
        ends = [0]
        for nbytes in program.blocks:
            ends.append(ends[-1] + -(-nbytes // ALIGNMENT) * ALIGNMENT)
        self._offsets = ends
        self._arena = torch.full((ends[-1] + ALIGNMENT,), POISON, dtype=torch.uint8)
        self._shift = -self._arena.data_ptr() % ALIGNMENT
        for block, values in program.begin.items():
            self.bytes_of(block, values.numel()).copy_(values)
        self._begin = self._arena.clone()

    def restore(self) -> None:
        self._arena.copy_(self._begin)

    def bytes_of(self, block: int, nbytes: int) -> Tensor:
        start = self._shift + self._offsets[block]
        return self._arena[start : start + nbytes]

    def tensor(self, view: View) -> Tensor:
        start = self._shift + self._offsets[view.block]
        found = torch.empty(0, dtype=view.dtype)
        offset = start // view.dtype.itemsize + view.offset
        return found.set_(self._arena.untyped_storage(), offset, view.size, view.stride)  # type: ignore[call-overload]


def _runner(operation: Operation, memory: _Memory) -> Callable[[], Any] | None:
    if operation.function is None:
        return None
    args, kwargs = tree_map_only(View, memory.tensor, operation.arguments)
    function = operation.function
    if operation.outputs is None:
        return lambda: function(*args, **kwargs)
    outputs = tree_flatten(operation.outputs, is_leaf=lambda one: one is None)[0]
    targets = [memory.tensor(view) if isinstance(view, View) else None for view in outputs]
    if isinstance(operation.outputs, View):
        (only,) = [target for target in targets if target is not None]
        return lambda: only.copy_(function(*args, **kwargs))

    def run() -> None:
        found = function(*args, **kwargs)
        for value, target in zip(tree_flatten(found)[0], targets, strict=True):
            if target is not None:
                target.copy_(value)

    return run


class Machine:
    """N ranks' programs, to be run as often as wanted."""

    def __init__(self, programs: Sequence[Program], rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self._programs = programs
        self._memories = [_Memory(program) for program in programs]
        self._streams: list[tuple[int, list[_Step]]] = []  # (rank, steps)
        number_of: dict[tuple[int, str], int] = {}
        for program in programs:
            for stream in program.streams:
                number_of[program.rank, stream] = len(number_of)
        for program, memory in zip(programs, self._memories, strict=True):
            in_order: dict[int, _Step] = {}
            for operations in program.streams.values():
                steps = [_Step(operation, memory) for operation in operations]
                for step, operation in zip(steps, operations, strict=True):
                    step.waits = [(number_of[program.rank, p.stream], p.done) for p in operation.waits]
                    if step.collective is not None:
                        in_order[operation.order] = step
                self._streams.append((program.rank, steps))
            for number, (_, step) in enumerate(sorted(in_order.items())):
                step.number = number

    @property
    def operations(self) -> int:
        """Of all ranks."""
        return sum(len(steps) for _, steps in self._streams)

    def run(self, seed: int) -> None:
        """One interleaving. Raises Found."""
        for memory in self._memories:
            memory.restore()
        run = _Run(self._streams, len(self._programs), self.rules)
        run.all(random.Random(seed))
        if stuck := run.stuck():
            raise Found(f"deadlock, seed {seed}: {'; '.join(stuck[:12])}")
        self._compare(seed)

    def _compare(self, seed: int) -> None:
        for program, memory in zip(self._programs, self._memories, strict=True):
            for block, values in program.end.items():
                if not torch.equal(memory.bytes_of(block, values.numel()), values):
                    raise Found(f"other values, seed {seed}: rank {program.rank}, block {block}")


class _Run:
    """One interleaving: of each stream how much is done, and what the next operation waits for.

    A stream is ready until it is found to wait: for an event, which wakes it, or for collectives, of which
    each that begins or is over wakes the streams of its ranks.
    """

    def __init__(self, streams: Sequence[tuple[int, list[_Step]]], ranks: int, rules: Rules) -> None:
        self._streams, self._rules = streams, rules
        self._done = [0] * len(streams)
        self._begun = [False] * len(streams)  # whether the next one of a stream is a collective under way
        self._ready = [*range(len(streams))]
        # By the stream of an event, a heap of (place, who waits).
        self._for_event: list[list[tuple[int, int]]] = [[] for _ in streams]
        self._for_collective: list[list[int]] = [[] for _ in range(ranks)]
        self._next = [0] * ranks  # number of the collective that a rank launches next
        self._held = [0] * ranks
        self._count: dict[tuple[int, str], int] = defaultdict(int)  # by rank and group: how many have begun
        self._over: dict[tuple[int, str], int] = defaultdict(int)
        self._met: dict[tuple[str, tuple[int, ...], int], dict[int, _Step]] = defaultdict(dict)

    def all(self, rng: random.Random) -> None:
        """Advance until no stream can. Priorities that change at few places find what needs few unlucky
        moments; even chances the rest."""
        kind, chance = rng.randrange(3), rng.random
        most = (sys.maxsize, 1, 4)[kind]
        ranking = [chance() for _ in self._streams]
        ready = self._ready
        while ready:
            if kind == 0:
                stream = min(ready, key=ranking.__getitem__)
                if chance() < 0.2:
                    ranking[int(chance() * len(ranking))] = chance()
            else:
                stream = ready[int(chance() * len(ready))]
            if not self._advance(stream, most):
                ready.remove(stream)

    def stuck(self) -> list[str]:
        """What each stream that is not through waits to do."""
        return [
            f"rank {rank}: {steps[at].label}{' (begun)' if begun else ''}"
            for at, begun, (rank, steps) in zip(self._done, self._begun, self._streams, strict=True)
            if at < len(steps)
        ]

    def _advance(self, stream: int, most: int) -> bool:
        """Do at most so many operations of a stream; whether it is still ready."""
        rank, steps = self._streams[stream]
        done, waiters = self._done, self._for_event[stream]
        first = done[stream]
        for at in range(first, min(first + most, len(steps))):
            step = steps[at]
            if not self._begun[stream]:
                for other, wanted in step.waits:
                    if done[other] < wanted:
                        heapq.heappush(self._for_event[other], (wanted, stream))
                        return False
            if step.collective is not None:
                if not self._is_over(stream, rank, step, step.collective):
                    self._for_collective[rank].append(stream)
                    return False
            elif step.run is not None:
                try:
                    step.run()
                except (RuntimeError, IndexError) as error:
                    raise Found(f"{step.label} on rank {rank}: {error}") from error
            done[stream] = at + 1
            while waiters and waiters[0][0] <= at + 1:
                self._ready.append(heapq.heappop(waiters)[1])
        return done[stream] < len(steps)

    def _is_over(self, stream: int, rank: int, step: _Step, collective: Collective) -> bool:
        """Whether a collective is, which begins if it has not and can; once all ranks' have, values move."""
        own = rank, collective.group
        if not self._begun[stream]:
            number = self._count[own]
            if self._rules.implicit_order and step.number != self._next[rank]:
                return False
            if self._held[rank] >= self._rules.shares or number > self._over[own]:
                return False
            self._begun[stream] = True
            self._count[own] += 1
            self._next[rank] += 1
            self._held[rank] += 1
            met = self._met[collective.group, collective.ranks, number]
            met[collective.ranks.index(rank)] = step
            if len(met) == len(collective.ranks):
                _move([met[place] for place in range(len(met))])
                for member in collective.ranks:
                    self._held[member] -= 1
                    self._over[member, collective.group] += 1
                    self._wake(member)
            self._wake(rank)
        if self._over[own] < self._count[own]:
            return False
        self._begun[stream] = False
        return True

    def _wake(self, rank: int) -> None:
        self._ready += self._for_collective[rank]
        self._for_collective[rank].clear()


def _move(members: Sequence[_Step]) -> None:
    """Values, by place in the group."""
    one, *others = [step.collective for step in members if step.collective is not None]
    if any(other.operation != one.operation or other.whole.size != one.whole.size for other in others):
        raise Found(f"unlike collectives meet in {one.group}")
    given = [step.given for step in members]
    found = [combined(one.operation, given, place) for place in range(len(members))]
    for step, value in zip(members, found, strict=True):
        step.found.copy_(value.view(-1))
