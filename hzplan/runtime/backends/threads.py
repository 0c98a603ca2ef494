"""Ranks that are threads of one process: messages are copied into queues."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hzplan.core.hierarchy import Mesh, Stage
from hzplan.runtime.backends.exchange import ExchangeGroup

Address = tuple[object, int, int, int]
"""The group, sender and receiver in the world, and the tag."""

PATIENCE_S = 120.0
"""Timeout of a receive."""
LOOK_S = 0.2
"""Seconds between two checks for failed ranks while waiting for a message."""


@dataclass
class Post:
    """The messages between the threads of one process."""

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


class ThreadGroup(ExchangeGroup):
    """Threads that exchange messages. ``name``: the same on all of them, and of no other group."""

    def __init__(self, post: Post, name: object, ranks: Sequence[int], rank: int) -> None:
        super().__init__(ranks, tuple(ranks).index(rank))
        self._post, self._name, self._rank = post, name, rank

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Sent:
        """See ExchangeGroup."""
        box = self._post.box((self._name, self._rank, self.ranks[peer], tag))
        box.put([tensor.clone() for tensor in tensors])
        return _Sent()

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _Received:
        """See ExchangeGroup."""
        box = self._post.box((self._name, self.ranks[peer], self._rank, tag))
        return _Received(self._post, box, tensors)


class ThreadWorld:
    """A rank that is a thread. See World."""

    is_part = False

    def __init__(self, post: Post, rank: int, name: str = "world") -> None:
        """``name``: of its own messages."""
        self.post, self.rank, self.size = post, rank, post.size
        self._everyone = ThreadGroup(post, name, range(post.size), rank)

    def meets(self, ranks: Iterable[int]) -> bool:
        """See World."""
        return len({*ranks}) > 1

    def new_group(self, mesh: Mesh, kind: str, stage: Stage, device: torch.device) -> ThreadGroup:
        """See World."""
        return ThreadGroup(self.post, (kind, stage), mesh.group(self.rank, stage), self.rank)

    def apart(self) -> ThreadWorld:
        """See World."""
        return ThreadWorld(self.post, self.rank, "apart")

    def meet(self, what: str) -> None:
        """See World."""
        self.all_reduce(torch.zeros(1))

    def broadcast(self, tensor: Tensor) -> None:
        """See World."""
        if self.rank == 0:
            for peer in range(1, self.size):
                self._everyone.send([tensor], peer, 0)
        else:
            self._everyone.recv([tensor], 0, 0).wait()

    def all_reduce(self, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        """See World. Rank 0 combines in the order of ranks."""
        combine: Any = {
            dist.ReduceOp.SUM: torch.add,
            dist.ReduceOp.MIN: torch.minimum,
            dist.ReduceOp.MAX: torch.maximum,
        }[operation]
        if self.rank == 0:
            for peer in range(1, self.size):
                arrived = torch.empty_like(tensor)
                self._everyone.recv([arrived], peer, 1).wait()
                combine(tensor, arrived, out=tensor)
        else:
            self._everyone.send([tensor], 0, 1)
        self.broadcast(tensor)


class _Sent:
    """A message in the receiver's queue: the sender has nothing to wait for."""

    def wait(self, *_: object) -> bool:
        return True


@dataclass
class _Received:
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
