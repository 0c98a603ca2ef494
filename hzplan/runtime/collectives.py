"""Collectives as stateless functions: buffers and a group in, nothing kept. All block until done.

Buffers nest: the smaller one is a rank's slice of the larger one, so gathers and scatters run in place.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

# torch renamed both; the older names remain for the older versions that the package admits.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def scatters_by_exchange(group: dist.ProcessGroup | None = None) -> bool:
    """Whether reduce_scatter goes as an all-to-all and a local sum on this backend.

    gloo's own reduce-scatter moves as many bytes as an all-reduce; the exchange moves half.
    """
    return str(dist.get_backend(group)) == "gloo"


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """Gather every rank's ``part`` [n] into ``whole`` [group size × n], in group order.

    ``part`` may be this rank's slice of ``whole``.
    """
    _all_gather(whole, part, group=group)


def reduce_scatter(
    part: Tensor, whole: Tensor, group: dist.ProcessGroup, scratch: Tensor, *, accumulate: bool = False
) -> None:
    """Sum all ranks' ``whole`` [group size × n] and leave (or add) this rank's slice in ``part`` [n].

    ``part`` may be this rank's slice of ``whole``. Sums run in group order on every rank, so results do not
    depend on timing. ``scratch`` [≥ group size × n] receives the exchange, where there is one.
    """
    if not scatters_by_exchange(group):
        if accumulate:
            received = scratch[: part.numel()]
            _reduce_scatter(received, whole, group=group)
            part.add_(received)
        else:
            _reduce_scatter(part, whole, group=group)
        return
    received = scratch[: whole.numel()]
    dist.all_to_all_single(received, whole, group=group)
    first, *others = received.view(-1, part.numel()).unbind(0)
    if accumulate:
        part.add_(first)
    elif others:
        torch.add(first, others.pop(0), out=part)
    else:
        part.copy_(first)
    for other in others:
        part.add_(other)
