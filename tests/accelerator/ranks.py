"""Ranks that are threads, with NCCL's collectives as the back end calls them: run at once, and recorded."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hzplan.core.hierarchy import Mesh, Stage
from hzplan.runtime.backends import nccl
from tests.accelerator.recording import Event, Recorder

PATIENCE_S = 10.0


@dataclass
class Meetings:
    """Where the ranks of a group meet, by group."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    barriers: dict[str, threading.Barrier] = field(default_factory=dict)
    given: dict[str, dict[int, tuple[str, Tensor]]] = field(default_factory=dict)

    def at(self, group: str, size: int) -> tuple[threading.Barrier, dict[int, tuple[str, Tensor]]]:
        with self.lock:
            return (
                self.barriers.setdefault(group, threading.Barrier(size)),
                self.given.setdefault(group, {}),
            )

    def abort(self) -> None:
        with self.lock:
            for barrier in self.barriers.values():
                barrier.abort()


INTO_PART = ("reduce_scatter", "all_to_all")
"""The collectives whose result is in ``part``: of an all-to-all as much as in ``whole``."""


def combined(operation: str, given: list[Tensor], place: int, reduce: Any = dist.ReduceOp.SUM) -> Tensor:
    """A collective's result at a place of its group, in the order of ranks."""
    if operation == "all_gather":
        return torch.cat([one.reshape(-1) for one in given])
    if operation == "all_to_all":
        return torch.cat([one.view(len(given), -1)[place] for one in given])
    if operation == "reduce_scatter":
        given = [one.view(len(given), -1)[place] for one in given]
    found = given[0].clone()
    for one in given[1:]:
        if reduce == dist.ReduceOp.MAX:
            found = torch.maximum(found, one)
        elif reduce == dist.ReduceOp.MIN:
            found = torch.minimum(found, one)
        else:
            found += one
    return found


class Group(nccl.NcclGroup):
    """The back end of NCCL over a group that is no process group."""

    def __init__(self, world: World, name: str, ranks: tuple[int, ...]) -> None:
        super(nccl.NcclGroup, self).__init__(ranks, ranks.index(world.rank))
        self.handle = _Handle(world, name, ranks)  # type: ignore[assignment]


@dataclass
class _Handle:
    """What torch's functions are given in place of a process group."""

    world: World
    name: str
    ranks: tuple[int, ...]

    def run(self, operation: str, whole: Tensor, part: Tensor, reduce: Any = dist.ReduceOp.SUM) -> None:
        world = self.world
        if world.recorder is not None:
            world.recorder.collective(self.name, self.ranks, operation, whole, part)
        with _disable_current_modes():
            barrier, given = world.meetings.at(f"{self.name} {self.ranks}", len(self.ranks))
            place = self.ranks.index(world.rank)
            given[place] = operation, part if operation == "all_gather" else whole
            barrier.wait(PATIENCE_S)
            assert len({kind for kind, _ in given.values()}) == 1, f"{self.name}: unlike collectives meet"
            found = combined(operation, [given[one][1] for one in sorted(given)], place, reduce)
            barrier.wait(PATIENCE_S)
            (part if operation in INTO_PART else whole).view(-1).copy_(found.view(-1))
            barrier.wait(PATIENCE_S)


class _Work:
    """What ``async_op=True`` returns: the group's own stream is waited for by the current one."""

    def __init__(self, recorder: Recorder, event: Event) -> None:
        self._recorder, self._event = recorder, event

    def wait(self, *_: object) -> bool:
        self._recorder.wait(self._recorder.stream, self._event.place)
        return True


def _collective(operation: str, whole: Tensor, part: Tensor, handle: Any, *, async_op: bool) -> Any:
    """torch's contract: on the current stream, or on the group's own behind the current one."""
    if not async_op:
        handle.run(operation, whole, part)
        return None
    recorder = handle.world.recorder
    own = f"nccl {handle.name}"
    recorder.wait(own, recorder.record(recorder.stream))
    with recorder.on(own):
        handle.run(operation, whole, part)
    return _Work(recorder, Event(recorder, recorder.record(own)))


@contextmanager
def simulated_nccl() -> Iterator[None]:
    """torch's functions that the back end calls work on simulated groups inside."""

    def all_gather(whole: Tensor, part: Tensor, group: Any = None, async_op: bool = False) -> Any:
        return _collective("all_gather", whole, part, group, async_op=async_op)

    @contextmanager
    def coalescing(group: Any = None) -> Iterator[None]:
        yield

    def reduce_scatter(part: Tensor, whole: Tensor, group: Any = None, async_op: bool = False) -> Any:
        return _collective("reduce_scatter", whole, part, group, async_op=async_op)

    def all_reduce(whole: Tensor, group: Any = None, async_op: bool = False) -> Any:
        return _collective("all_reduce", whole, whole, group, async_op=async_op)

    def all_to_all(
        received: Tensor, sent: Tensor, to_receive: list[int], to_send: list[int], group: Any = None
    ) -> Any:
        assert len({*to_receive, *to_send}) == 1, "alike for all"
        return _collective("all_to_all", sent, received, group, async_op=False)

    names = {
        "_all_to_all": all_to_all,
        "_all_gather": all_gather,
        "_reduce_scatter": reduce_scatter,
        "_all_reduce": all_reduce,
        "_coalescing": coalescing,
    }
    before = {name: getattr(nccl, name) for name in names}
    for name, one in names.items():
        setattr(nccl, name, one)
    yield
    for name, one in before.items():
        setattr(nccl, name, one)


class World:
    """A rank that is a thread. See ``hzplan.runtime.world.World``."""

    is_part = False

    def __init__(self, meetings: Meetings, rank: int, size: int) -> None:
        self.meetings, self.rank, self.size = meetings, rank, size
        self.recorder: Recorder | None = None
        self._everyone = _Handle(self, "world", tuple(range(size)))

    def meets(self, ranks: Iterable[int]) -> bool:
        """See World."""
        return len({*ranks}) > 1

    def new_group(self, mesh: Mesh, kind: str, stage: Stage, device: torch.device) -> Group:
        """See World."""
        return Group(self, f"{kind} {stage.low}-{stage.high}", tuple(mesh.group(self.rank, stage)))

    def meet(self, what: str) -> None:
        """See World."""
        self.meetings.at(f"meet {what}", self.size)[0].wait(PATIENCE_S)

    def broadcast(self, tensor: Tensor) -> None:
        """See World."""
        with self.recorder or nullcontext():
            kept = tensor if self.rank == 0 else torch.zeros_like(tensor)
        self._everyone.run("all_reduce", kept, kept)
        tensor.copy_(kept)

    def all_reduce(self, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        """See World."""
        self._everyone.run("all_reduce", tensor, tensor, operation)
