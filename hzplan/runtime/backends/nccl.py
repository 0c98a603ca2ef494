"""Collectives that torch's backend runs itself: NCCL, or any other one for an accelerator."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hzplan.errors import JobFailed, UserError, one_line
from hzplan.runtime.backends.base import Group, Split
from hzplan.runtime.backends.native import NativeGroup, Pair
from hzplan.runtime.faults import Work

# torch renamed both; the older names remain for the older versions that the package admits.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_reduce = dist.all_reduce
_all_to_all = dist.all_to_all_single
_coalescing: Any = getattr(dist, "_coalescing_manager")  # noqa: B009 - torch does not export it

LEAST_NCCL, IN_ORDER = (2, 26), "NCCL_LAUNCH_ORDER_IMPLICIT"
REGISTER = "HZPLAN_NCCL_REGISTER"
"""Variable that is 1 where long-lived buffers are to be registered with NCCL."""


def check_order(version: Sequence[int], env: Mapping[str, str]) -> None:
    """JobFailed where NCCL does not order the kernels of several communicators as they were launched.

    From 2.26 on it does, where a variable says so. Else communicators that are used at once may wait for each
    other for ever (NCCL's user guide, *Using multiple NCCL communicators concurrently*).
    """
    if (*version,) < LEAST_NCCL:
        found, least = (".".join(map(str, one)) for one in (version, LEAST_NCCL))
        raise JobFailed(
            f"NCCL {found}: communicators of several tiers need {least} or later; install a newer torch, or "
            "set HZPLAN_BACKEND=gloo to train on processors"
        )
    if env.get(IN_ORDER) != "1":
        raise JobFailed(
            f"{IN_ORDER} is {env.get(IN_ORDER, 'not set')}: kernels of several communicators could wait for "
            "each other for ever; import hzplan before NCCL begins, or set it to 1"
        )


def max_ctas(wanted: Sequence[int], tier: int, streams: int, sms: int) -> int:
    """Thread blocks (CTAs) that a collective's kernel on a tier may take; ``wanted``: by tier.

    A kernel runs when its blocks do, on every rank, and a block hardly shares an SM. So that one kernel of
    every stream, of ``streams`` on each tier, finds room, their blocks are no more than the device's ``sms``
    in sum: where they would be, every tier gets less in proportion. One SM is left for the job's own group,
    whose messages are single numbers.
    """
    return max(1, min(wanted[tier], wanted[tier] * (sms - 1) // (streams * sum(wanted))))


def options(timeout: timedelta | None, ctas: int) -> Any:
    """Options of a communicator whose kernels have priority over compute, and ``ctas`` blocks at most."""
    found = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    found.config.max_ctas = ctas
    if timeout is not None:
        found._timeout = timeout
    return found


class NcclGroup(NativeGroup):
    """Collectives of one process group, on the current stream, which is the launcher's and has priority:
    ``async_op=True`` would move them to a stream of torch's own, which has none. ``handle``: torch's group.

    Several at once are one launch, as NCCL groups them.
    """

    needs_scratch = False

    def __init__(self, handle: dist.ProcessGroup) -> None:
        super().__init__(dist.get_process_group_ranks(handle), handle.rank())
        self.handle = handle

    def issue_all_gathers(self, pairs: Sequence[Pair]) -> Work | None:
        """See NativeGroup."""
        with self._together(pairs):
            for whole, part in pairs:
                _all_gather(whole, part, group=self.handle)
        return None

    def issue_reduce_scatters(self, pairs: Sequence[Pair]) -> None:
        """See NativeGroup."""
        with self._together(pairs):
            for whole, part in pairs:
                _reduce_scatter(part, whole, group=self.handle)

    def issue_all_reduces(self, wholes: Sequence[Tensor]) -> Work | None:
        """See NativeGroup."""
        with self._together(wholes):
            for whole in wholes:
                _all_reduce(whole, group=self.handle)
        return None

    def issue_all_to_all(self, pairs: Sequence[tuple[Split, Split]]) -> Work | None:
        """See NativeGroup. One after the other: torch does not launch several together."""
        for sent, received in pairs:
            _all_to_all(*(received.values, sent.values, [*received.sizes], [*sent.sizes]), group=self.handle)
        return None

    def _together(self, several: Sequence[object]) -> Any:
        return _coalescing(self.handle) if len(several) > 1 else nullcontext()


@contextmanager
def registered(groups: Iterable[Group], device: torch.device) -> Iterator[object]:
    """Buffers allocated inside are NCCL's memory and at the end registered with every group's communicator,
    where ``HZPLAN_NCCL_REGISTER=1`` asks for it. UserError where NCCL refuses; it never agreed yet.

    Collectives on registered buffers send from where values lie, without NCCL's own buffers between, and need
    fewer SMs (NCCL's user guide, *User Buffer Registration*). Keep what this gives, the pool of the memory
    (None where there is none), for as long as the buffers. Communicators must have begun, as they do where
    the job was begun with its device.
    """
    asked = os.environ.get(REGISTER) == "1"
    handles = dict.fromkeys(group.handle for group in groups if asked and isinstance(group, NcclGroup))
    if not handles:
        yield None
        return
    backends: list[Any] = [handle._get_backend(device) for handle in handles]
    try:
        allocator = backends[0].mem_allocator
    except RuntimeError as error:
        raise UserError(
            f"{REGISTER}=1: this GPU, or its driver, lets NCCL allocate no memory ({one_line(error)}); leave "
            "the variable unset"
        ) from error
    pool = torch.cuda.MemPool(allocator)
    with torch.cuda.use_mem_pool(pool, device):
        yield pool
    for backend in backends:
        backend.register_mem_pool(pool)
