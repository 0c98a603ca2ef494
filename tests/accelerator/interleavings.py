"""A program of N ranks on memory of its own, in adversarial orders, with real numbers.

What may begin begins when the adversary lets it: of each stream the next operation, when the events that it
waits for are reached. A collective begins on a rank when its communicator's one before is over there, and
holds a share of the device from then on until every rank of its group has begun it, which is when values
move. With ``implicit order`` (NCCL_LAUNCH_ORDER_IMPLICIT) a rank's collectives begin in the order of their
launches, whatever communicator they are of.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from tests.accelerator.program import ALIGNMENT, POISON, Collective, Operation, Program, View
from tests.accelerator.ranks import combined


class Found(AssertionError):
    """What an interleaving has shown: a deadlock, or other values."""


@dataclass(frozen=True)
class Rules:
    """``shares``: how many collectives of different communicators a device holds at once."""

    shares: int = 1
    implicit_order: bool = True


class _Step:
    """One operation, ready to be run on the rank's memory."""

    __slots__ = ("collective", "label", "number", "run", "waits")

    def __init__(self, operation: Operation, memory: _Memory) -> None:
        self.label, self.collective = operation.label, operation.collective
        self.number = 0  # of a collective among its rank's
        self.waits: list[tuple[int, int]] = []
        self.run = _runner(operation, memory)


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
        rng = random.Random(seed)
        for memory in self._memories:
            memory.restore()
        done = [0] * len(self._streams)
        begun = [False] * len(self._streams)  # whether the next one of a stream is a collective under way
        collectives = _UnderWay(self, len(self._programs))
        kind = rng.randrange(3)
        ranking = [rng.random() for _ in self._streams]
        # Priorities that change at few places find what needs few unlucky moments; even chances the rest.
        most = (10**9, 1, 4)[kind]
        while True:
            if kind == 0:
                order = sorted(range(len(done)), key=ranking.__getitem__)
                if rng.random() < 0.2:
                    ranking[rng.randrange(len(ranking))] = rng.random()
            else:
                order = [*range(len(done))]
                rng.shuffle(order)
            moved = False
            for stream in order:
                moved |= self._advance(stream, most, done, begun, collectives)
                if moved and kind == 0:
                    break
            if not moved:
                break
        if any(at < len(steps) for at, (_, steps) in zip(done, self._streams, strict=True)):
            raise Found(f"deadlock, seed {seed}: {self._stuck(done, begun)}")
        self._compare(seed)

    def _advance(
        self, stream: int, most: int, done: list[int], begun: list[bool], collectives: _UnderWay
    ) -> bool:
        rank, steps = self._streams[stream]
        moved = False
        while most and done[stream] < len(steps):
            step = steps[done[stream]]
            if not begun[stream]:
                if any(done[other] < wanted for other, wanted in step.waits):
                    break
                if step.collective is not None:
                    if not collectives.begin(rank, step, self._memories):
                        break
                    begun[stream] = moved = True
                elif step.run is not None:
                    try:
                        step.run()
                    except (RuntimeError, IndexError) as error:
                        raise Found(f"{step.label} on rank {rank}: {error}") from error
            if begun[stream]:
                assert step.collective is not None
                if not collectives.over(rank, step):
                    break
                begun[stream] = False
            done[stream] += 1
            most -= 1
            moved = True
        return moved

    def _stuck(self, done: Sequence[int], begun: Sequence[bool]) -> str:
        found = []
        for at, is_begun, (rank, steps) in zip(done, begun, self._streams, strict=True):
            if at < len(steps):
                found.append(f"rank {rank}: {steps[at].label}{' (begun)' if is_begun else ''}")
        return "; ".join(found[:12])

    def _compare(self, seed: int) -> None:
        for program, memory in zip(self._programs, self._memories, strict=True):
            for block, values in program.end.items():
                if not torch.equal(memory.bytes_of(block, values.numel()), values):
                    raise Found(f"other values, seed {seed}: rank {program.rank}, block {block}")


class _UnderWay:
    """The collectives of one run."""

    def __init__(self, machine: Machine, ranks: int) -> None:
        self._rules = machine.rules
        self._next = [0] * ranks  # number of the collective that a rank launches next
        self._held = [0] * ranks
        self._begun: dict[tuple[int, str], int] = defaultdict(int)  # by rank and group: how many
        self._over: dict[tuple[int, str], int] = defaultdict(int)
        self._met: dict[tuple[str, tuple[int, ...], int], dict[int, Collective]] = defaultdict(dict)

    def begin(self, rank: int, step: _Step, memories: Sequence[_Memory]) -> bool:
        """Whether it can; when all ranks of the group have, values move."""
        collective = step.collective
        assert collective is not None
        own = rank, collective.group
        if self._rules.implicit_order and step.number != self._next[rank]:
            return False
        if self._held[rank] >= self._rules.shares or self._begun[own] > self._over[own]:
            return False
        number = self._begun[own]
        self._begun[own] += 1
        self._next[rank] += 1
        self._held[rank] += 1
        met = self._met[collective.group, collective.ranks, number]
        met[collective.ranks.index(rank)] = collective
        if len(met) == len(collective.ranks):
            _move(met, memories)
            for member in collective.ranks:
                self._held[member] -= 1
                self._over[member, collective.group] += 1
        return True

    def over(self, rank: int, step: _Step) -> bool:
        """Whether a collective that has begun is over."""
        assert step.collective is not None
        own = rank, step.collective.group
        return self._over[own] == self._begun[own]


def _move(met: dict[int, Collective], memories: Sequence[_Memory]) -> None:
    members = [met[place] for place in sorted(met)]
    operation, ranks = members[0].operation, members[0].ranks
    if any(one.operation != operation or one.whole.size != members[0].whole.size for one in members):
        raise Found(f"unlike collectives meet in {members[0].group}")
    given = [
        memories[rank].tensor(one.part if operation == "all_gather" else one.whole)
        for rank, one in zip(ranks, members, strict=True)
    ]
    found = [combined(operation, given, place) for place in range(len(ranks))]
    for rank, one, value in zip(ranks, members, found, strict=True):
        target = memories[rank].tensor(one.part if operation == "reduce_scatter" else one.whole)
        target.view(-1).copy_(value.view(-1))
