"""Collectives that torch's backend runs itself: NCCL, or any other one for an accelerator."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from hzplan.runtime.backends.native import NativeGroup
from hzplan.runtime.faults import Work

# torch renamed both; the older names remain for the older versions that the package admits.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NcclGroup(NativeGroup):
    """Collectives of one process group. ``handle``: torch's group."""

    needs_scratch = False

    def __init__(self, handle: dist.ProcessGroup) -> None:
        super().__init__(dist.get_process_group_ranks(handle), handle.rank())
        self.handle = handle

    def issue_all_gather(self, whole: Tensor, part: Tensor) -> Work | None:
        """See NativeGroup. On the current stream, which is the launcher's and has priority: ``async_op=True``
        would move it to a stream of torch's own, which has none."""
        _all_gather(whole, part, group=self.handle)
        return None

    def issue_reduce_scatter(self, part: Tensor, whole: Tensor) -> None:
        """See NativeGroup."""
        _reduce_scatter(part, whole, group=self.handle)
