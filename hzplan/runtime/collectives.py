"""Collectives as stateless functions: buffers and a group in, nothing kept. ``begin_gather`` apart,
all block until done.

Buffers nest: the smaller one is a rank's slice of the larger one, so gathers and scatters run in place.

On gloo both are exchanges, point to point, every receive posted before the first send. gloo sends only what
a receiver has announced to want, and the announcement travels behind the data that the receiver sends
itself: a rank that sends first and is late gets its peers' data only when its own have gone, one direction
after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hzplan.runtime.faults import Transfer, wait

# torch renamed both; the older names remain for the older versions that the package admits.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def exchanges(device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Whether a group's collectives on a device's tensors go point to point: on gloo.

    Its own reduce-scatter moves as many bytes as an all-reduce, an exchange and a local sum half of that.
    The backend is asked, not its name in the job's start, which may leave the choice to torch.
    """
    group = group or dist.group.WORLD
    assert group is not None
    return str(group._get_backend(device).name()) == "gloo"


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """Gather every rank's ``part`` [n] into ``whole`` [group size × n], in group order.

    ``part`` may be this rank's slice of ``whole``.
    """
    wait(begin_gather(whole, part, group))


def begin_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup, tag: int = 0) -> list[Transfer]:
    """``all_gather`` under way; ``wait`` for what it returns.

    ``tag``: exchanges of one tag on a group are in the same order on every rank; others need not be.
    """
    if not exchanges(whole.device, group):
        return [Transfer(_all_gather(whole, part, group=group, async_op=True))]
    slices, place = whole.view(group.size(), -1), group.rank()
    others = _others(group)
    receives = [_receive(slices[peer], peer, group, tag) for peer in reversed(others)]
    sends = [_send(part, peer, group, tag) for peer in others]
    if slices[place].data_ptr() != part.data_ptr():
        slices[place].copy_(part)
    return [*receives, *sends]


def reduce_scatter(
    part: Tensor,
    whole: Tensor,
    group: dist.ProcessGroup,
    scratch: Tensor,
    *,
    accumulate: bool = False,
    tag: int = 0,
) -> None:
    """Sum all ranks' ``whole`` [group size × n] and leave (or add) this rank's slice in ``part`` [n].

    ``part`` may be this rank's slice of ``whole``, unless it is added to; the rest of ``whole`` is not kept.
    Exchanges sum in group order on every rank, so results do not depend on timing. Their ``scratch`` is for
    what others send: of every one of them n elements, or where it is smaller (at least 2 × (group size − 1)
    elements) as many as fit twice, so that one portion is summed while the next one travels. ``tag``: as for
    ``begin_gather``.
    """
    size, place = group.size(), group.rank()
    slices, others = whole.view(size, -1), _others(group)
    if not exchanges(whole.device, group):
        target = slices[place] if accumulate else part  # in place: what was there has been summed
        _reduce_scatter(target, whole, group=group)
        if accumulate:
            part.add_(target)
        return
    length, fits = part.numel(), scratch.numel() // (size - 1)
    portion = length if fits >= length else fits // 2
    bounds = [(start, min(start + portion, length)) for start in range(0, length, portion)]
    halves = scratch[: min(2, len(bounds)) * (size - 1) * portion].view(-1, size - 1, portion)

    def room(index: int) -> dict[int, Tensor]:
        """By rank: where its share of a portion goes."""
        start, end = bounds[index]
        return {peer: halves[index % 2][row, : end - start] for row, peer in enumerate(sorted(others))}

    def receive(index: int) -> list[Transfer]:
        target = room(index)
        return [_receive(target[peer], peer, group, tag) for peer in reversed(others)]

    def send(index: int) -> list[Transfer]:
        start, end = bounds[index]
        return [_send(slices[peer][start:end], peer, group, tag) for peer in others]

    receives = [receive(index) for index in range(len(halves))]
    sends = [work for index in range(len(halves)) for work in send(index)]
    for index, (start, end) in enumerate(bounds):
        wait(receives[index])
        received, own = room(index), slices[place][start:end]
        terms = [received[member] if member != place else own for member in range(size)]
        if accumulate:
            for term in terms:
                part[start:end].add_(term)
        else:
            _sum(terms, place, part[start:end])
        if index + 2 < len(bounds):
            receives.append(receive(index + 2))
            sends += send(index + 2)
    wait(sends)


def _sum(terms: Sequence[Tensor], place: int, out: Tensor) -> None:
    """Add up in order; ``out`` may be the memory of ``terms[place]``: what comes before goes elsewhere."""
    total = terms[0]
    for index, term in enumerate(terms[1:], start=1):
        total = torch.add(total, term, out=terms[0] if index < place else out)


def _others(group: dist.ProcessGroup) -> list[int]:
    """The other ranks of a group, the next one first, so that no two ranks begin with the same."""
    size, place = group.size(), group.rank()
    return [(place + step) % size for step in range(1, size)]


def _receive(into: Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> Transfer:
    """``peer``: its rank in the group."""
    work = dist.irecv(into, group=group, group_src=peer, tag=tag)
    return Transfer(work, dist.get_global_rank(group, peer))


def _send(part: Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> Transfer:
    work = dist.isend(part, group=group, group_dst=peer, tag=tag)
    return Transfer(work, dist.get_global_rank(group, peer))
