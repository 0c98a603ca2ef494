"""The ranks that train together, as the runtime sees them: torch.distributed's, or threads of a process."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hzplan.core.hierarchy import Mesh, Stage
from hzplan.runtime.groups import Communicators

SUM, MIN, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX

Groups = Mapping[tuple[str, Stage], Any]
"""Communicators by (stream kind, stage)."""


class World(Protocol):
    """One rank's view of all of them. Every rank calls the methods, in the same order."""

    rank: int
    size: int

    @property
    def is_part(self) -> bool:
        """Whether the job has other ranks too, whom tensor parallelism joins with these."""

    def meets(self, ranks: Iterable[int]) -> bool:
        """Whether more than one of the job's ranks given are of this world."""

    def groups(self, mesh: Mesh, wanted: Iterable[tuple[str, Stage]]) -> Groups:
        """Communicators for the stages of a plan."""

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's values on every rank, in place."""

    def all_reduce(self, tensor: Tensor, operation: Any = SUM) -> None:
        """The sum, or what ``operation`` is, of all ranks' values on every rank, in place."""


class Job:
    """The ranks of torch.distributed's default group, or of one of its groups; alone where there is none."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """``group``: who trains together, in the order of the plan's mesh."""
        self._group = group
        self.size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if self.size > 1 else 0
        self._ranks = dist.get_process_group_ranks(group) if self.size > 1 else [0]

    @property
    def is_part(self) -> bool:
        """Whether the job has other ranks too."""
        return self._group is not None and self.size < dist.get_world_size()

    def meets(self, ranks: Iterable[int]) -> bool:
        """See World."""
        return len({*ranks} & {*self._ranks}) > 1

    def groups(self, mesh: Mesh, wanted: Iterable[tuple[str, Stage]]) -> Groups:
        """See World."""
        return Communicators(mesh, wanted, self.rank, self._ranks).groups

    def broadcast(self, tensor: Tensor) -> None:
        """See World."""
        if self.size > 1:
            dist.broadcast(tensor, src=self._ranks[0], group=self._group)

    def all_reduce(self, tensor: Tensor, operation: Any = SUM) -> None:
        """See World."""
        if self.size > 1:
            dist.all_reduce(tensor, op=operation, group=self._group)


Address = tuple[object, int, int, int]
"""The group, sender and receiver in the world, and the tag."""

PATIENCE_S = 120.0
LOOK_S = 0.2
"""How often one who waits looks whether somebody has failed."""


@dataclass
class Post:
    """What the threads of one process send each other."""

    size: int
    boxes: dict[Address, queue.SimpleQueue[list[Tensor]]] = field(
        default_factory=lambda: defaultdict(queue.SimpleQueue)
    )
    failed: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def box(self, address: Address) -> queue.SimpleQueue[list[Tensor]]:
        """The queue between two ranks."""
        with self.lock:
            return self.boxes[address]


class ThreadWorld:
    """A rank that is a thread: what it sends is copied, and taken from a queue by who receives it."""

    is_part = False

    def meets(self, ranks: Iterable[int]) -> bool:
        """See World."""
        return len({*ranks}) > 1

    def __init__(self, post: Post, rank: int) -> None:
        self.post, self.rank, self.size = post, rank, post.size
        self._everyone = ThreadGroup(self, "world", range(post.size))

    def groups(self, mesh: Mesh, wanted: Iterable[tuple[str, Stage]]) -> Groups:
        """See World."""
        return {
            (kind, stage): ThreadGroup(self, (kind, stage), mesh.group(self.rank, stage))
            for kind, stage in wanted
        }

    def broadcast(self, tensor: Tensor) -> None:
        """See World."""
        if self.rank == 0:
            for peer in range(1, self.size):
                self._everyone.send([tensor], peer, 0)
        else:
            self._everyone.recv([tensor], 0, 0).wait()

    def all_reduce(self, tensor: Tensor, operation: Any = SUM) -> None:
        """See World. Rank 0 combines in the order of ranks."""
        by_operation: dict[Any, Any] = {SUM: torch.add, MIN: torch.minimum, MAX: torch.maximum}
        combine = by_operation[operation]
        if self.rank == 0:
            for peer in range(1, self.size):
                arrived = torch.empty_like(tensor)
                self._everyone.recv([arrived], peer, 1).wait()
                combine(tensor, arrived, out=tensor)
        else:
            self._everyone.send([tensor], 0, 1)
        self.broadcast(tensor)


class ThreadGroup:
    """What the runtime uses of a process group, between threads. ``ranks``: its members in the world."""

    def __init__(self, world: ThreadWorld, name: object, ranks: Sequence[int]) -> None:
        self._world, self._name, self.ranks = world, name, tuple(ranks)

    def rank(self) -> int:
        """This thread's place in the group."""
        return self.ranks.index(self._world.rank)

    def size(self) -> int:
        """How many threads it has."""
        return len(self.ranks)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Sent:
        """Over at once."""
        mine, theirs = self._world.rank, self.ranks[peer]
        self._world.post.box((self._name, mine, theirs, tag)).put([tensor.clone() for tensor in tensors])
        return Sent()

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Received:
        """What ``wait`` puts into the tensors."""
        box = self._world.post.box((self._name, self.ranks[peer], self._world.rank, tag))
        return Received(self._world.post, box, tensors)


class Sent:
    """A message that is on its way: the sender has nothing to wait for."""

    def wait(self, *_: object) -> bool:
        """Over."""
        return True


@dataclass
class Received:
    """A message that is waited for."""

    post: Post
    box: queue.SimpleQueue[list[Tensor]]
    tensors: Sequence[Tensor]

    def wait(self, *_: object) -> bool:
        """RuntimeError when it does not come, or another thread has failed."""
        for _attempt in range(int(PATIENCE_S / LOOK_S)):
            try:
                arrived = self.box.get(timeout=LOOK_S)
            except queue.Empty:
                if self.post.failed.is_set():
                    raise RuntimeError("gloo: another rank has failed") from None
                continue
            for tensor, value in zip(self.tensors, arrived, strict=True):
                tensor.copy_(value)
            return True
        raise RuntimeError(f"timed out after {PATIENCE_S:.0f} s")
