"""The ranks that train together, as the runtime sees them: torch.distributed's, or a back end's own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hzplan.core.hierarchy import Mesh, Stage
from hzplan.errors import JobFailed
from hzplan.runtime.backends.base import Group
from hzplan.runtime.backends.groups import ProcessGroup, job_timeout, on_device, process_group
from hzplan.runtime.faults import Transfer, wait
from hzplan.runtime.hang_report import meet

SUM, MIN, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX

MOST_TOLD, MOST_BYTES = 8, 1 << 14
"""Up to so many ranks, and bytes of each, a sum goes straight from each rank to each: a connection for each
pair, of which more ranks would need too many."""
HASHED_BYTES = 1 << 20
"""From here on a tensor's hash is compared before it is sent: a second hashes a GB or so."""
TELL_TAG = 0x687A706C
"""Tag of these messages: none that a user's own would have."""


class World(Protocol):
    """One rank's view of all of them. Every rank calls the methods, in the same order."""

    rank: int
    size: int

    @property
    def is_part(self) -> bool:
        """Whether the job has other ranks too, whom tensor parallelism joins with these."""

    def meets(self, ranks: Iterable[int]) -> bool:
        """Whether more than one of the job's ranks given are of this world."""

    def new_group(self, mesh: Mesh, kind: str, stage: Stage, device: torch.device) -> Group:
        """This rank's group in a stage, for a kind of stream and tensors on ``device``; members call it."""

    def meet(self, what: str) -> None:
        """Return when every rank has come here for the same thing. JobFailed names who has not, in time."""

    def apart(self) -> World:
        """The same ranks, with messages of their own, of what lies in the host's memory."""

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's values on every rank, in place."""

    def all_reduce(self, tensor: Tensor, operation: Any = SUM) -> None:
        """The sum, or what ``operation`` is, of all ranks' values on every rank, in place."""


class ProcessWorld:
    """The ranks of torch.distributed's default group, or of one of its groups; alone where there is none."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        ctas: Sequence[int] | None = None,
        streams: int | None = None,
    ) -> None:
        """``group``: who trains together, in the order of the plan's mesh; ``ctas``: the plan's, by tier;
        ``streams``: how many of its streams a tier has."""
        self._group, self._ctas, self._streams = group, ctas, streams
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

    def new_group(self, mesh: Mesh, kind: str, stage: Stage, device: torch.device) -> ProcessGroup:
        """See World."""
        made = process_group(mesh, kind, stage, self.rank, self._ranks, device, self._ctas, self._streams)
        return on_device(made, device)

    def apart(self) -> ProcessWorld:
        """See World."""
        if self.size == 1:
            return self
        made = dist.new_group(
            self._ranks,
            backend="gloo",
            timeout=job_timeout(),
            use_local_synchronization=True,
            group_desc="hzplan apart",
        )
        return ProcessWorld(made)

    def meet(self, what: str) -> None:
        """See World."""
        timeout = job_timeout()
        if self.size == 1 or timeout is None:
            return
        scope = f"{what} of {self._ranks[0]}" if self.is_part else what
        if missing := meet(scope, self.rank, self.size, timeout):
            listed = f"rank{'s' * (len(missing) > 1)} {', '.join(str(self._ranks[one]) for one in missing)}"
            raise JobFailed(f"{what}: {listed} did not come within {timeout.total_seconds():.0f} s")

    def broadcast(self, tensor: Tensor) -> None:
        """See World. Models that every rank has made under one seed are equal already: of large tensors in
        the host's memory a hash is sent first."""
        if self.size > 1 and not self._all_equal(tensor):
            dist.broadcast(tensor, src=self._ranks[0], group=self._group)

    def _all_equal(self, tensor: Tensor) -> bool:
        """Whether all ranks surely have the same bytes; False too where finding out takes longer than
        sending."""
        if tensor.nbytes < HASHED_BYTES or tensor.is_cuda or not tensor.is_contiguous():
            return False
        content: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
        own = torch.tensor([*hashlib.sha256(content).digest()], dtype=torch.uint8)
        first = own.clone()
        dist.broadcast(first, src=self._ranks[0], group=self._group)
        equal = torch.tensor(float(torch.equal(own, first)), dtype=torch.float64)
        self.all_reduce(equal, MIN)
        return bool(equal)

    def all_reduce(self, tensor: Tensor, operation: Any = SUM) -> None:
        """See World. Few numbers of few ranks go straight to each: the library's ring is 2·(n − 1) messages
        one after the other, each of which waits until a busy processor gets to it."""
        if self.size == 1:
            return
        small = self.size <= MOST_TOLD and tensor.nbytes <= MOST_BYTES
        if operation == SUM and small and not tensor.is_cuda and self._by_messages:
            self._tell(tensor)
        else:
            dist.all_reduce(tensor, op=operation, group=self._group)

    @cached_property
    def _by_messages(self) -> bool:
        """Whether what lies in the host's memory travels over gloo, which has messages between two ranks."""
        return str(self._process_group._get_backend(torch.device("cpu")).name()) == "gloo"

    @property
    def _process_group(self) -> dist.ProcessGroup:
        group = self._group or dist.group.WORLD
        assert group is not None
        return group

    def _tell(self, tensor: Tensor) -> None:
        """Send this rank's values to all others, and add up everybody's in the order of ranks: the same sum,
        to the last bit, on all of them."""
        group, own = self._process_group, tensor.detach().reshape(1, -1)
        told = own.new_empty(self.size, own.shape[1])
        told[self.rank] = own[0]
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        under_way = [Transfer(group.recv([told[one]], one, TELL_TAG), self._ranks[one]) for one in others]
        under_way += [Transfer(group.send([own], one, TELL_TAG), self._ranks[one]) for one in others]
        wait(under_way)
        tensor.copy_(told.sum(0).view(tensor.shape))
