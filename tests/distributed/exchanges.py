"""Collectives on real groups, against sums and concatenations made by hand."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hzplan.runtime.backends.base import Buffers, Group, Split
from hzplan.runtime.backends.exchange import GlooGroup
from hzplan.runtime.backends.groups import in_order
from hzplan.runtime.backends.nccl import NcclGroup
from hzplan.runtime.backends.packing import Cast, form_of

LENGTH = 1003
BLOCKS = 1024


def values(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """A rank's buffer; whole numbers, so that sums are exact."""
    return torch.arange(size * LENGTH, dtype=dtype).remainder_(7).add_(10 * rank)


def check(payload: Any) -> list[str]:
    """Every way to call them; what came out wrong, by name. One rank is late each time."""
    me, world = dist.get_rank(), dist.get_world_size()
    wrong: list[str] = []
    orders = [list(range(world)), list(reversed(range(world))), [1, 0] if me < 2 else [2, 3]]
    for late, order in enumerate(orders):
        ranks, kept = in_order(tuple(order))
        handle = dist.new_group(ranks, use_local_synchronization=True, **kept)
        assert handle is not None
        group = GlooGroup(handle)
        place = order.index(me)
        for dtype in (torch.float32, torch.float64):
            for in_place in (True, False):
                time.sleep(0.02 if me == late else 0)
                wrong += _gather(group, order, place, dtype, in_place)
                wrong += _scatter(group, order, place, dtype, in_place)
            time.sleep(0.02 if me == late else 0)
            wrong += _sum(group, order, place, dtype)
            wrong += _narrow(group, order, place, dtype)
            wrong += _blocks(group, order, place, dtype)
    found: list[list[str] | None] = [None] * world
    dist.all_gather_object(found, wrong)
    return [f"rank {rank}: {name}" for rank, names in enumerate(found) for name in names or ()]


def check_library(where: str) -> list[str]:
    """The library's own on a device, that of NCCL on a GPU: ranks in order, several buckets in one launch."""
    me, world = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    group, device = NcclGroup(dist.group.WORLD), torch.device(where)
    forms = (None, Cast(torch.bfloat16), form_of("int8"))
    assert group.place == me
    wrong: list[str] = []
    for dtype, narrow in itertools.product((torch.float32, torch.float64), forms):
        parts = [_blocks_of(rank, 1, dtype, device) for rank in range(world)]
        wholes = [torch.full((world, BLOCKS), -1, dtype=dtype, device=device) for _ in range(3)]
        for whole in wholes:
            whole[me].copy_(parts[me])
        group.all_gather([Buffers(whole.view(-1), whole[me], narrow) for whole in wholes]).run()
        if not all(torch.equal(whole, torch.stack(parts)) for whole in wholes):
            wrong.append(f"all_gather {dtype} {narrow}")
        total = sum(_blocks_of(rank, world, dtype, device) for rank in range(world))
        assert isinstance(total, Tensor)
        mine = total.view(world, BLOCKS)[me]
        scratch = torch.full((600,), -1, dtype=dtype, device=device)
        for accumulate, in_place in ((False, True), (False, False), (True, False)):
            wholes = [_blocks_of(me, world, dtype, device) for _ in range(3)]
            ones = [torch.ones(BLOCKS, dtype=dtype, device=device) for _ in range(3)]
            into = [whole.view(world, BLOCKS)[me] for whole in wholes] if in_place else ones
            buffers = [Buffers(whole, part, narrow) for whole, part in zip(wholes, into, strict=True)]
            group.reduce_scatter(buffers, scratch).run(accumulate=accumulate)
            if not all(torch.equal(part, mine + accumulate) for part in into):
                wrong.append(f"reduce_scatter {dtype} {narrow} {accumulate} {in_place}")
        wholes = [_blocks_of(me, world, dtype, device) for _ in range(3)]
        slices = [whole.view(world, BLOCKS)[me] for whole in wholes]
        pairs = zip(wholes, slices, strict=True)
        group.all_reduce([Buffers(whole, part, narrow) for whole, part in pairs], scratch).run()
        most = 0.5 / 127 + 1e-6 if narrow else 0.0  # the sum is rounded once more
        if any(float((whole - total).abs().max() / total.abs().max()) > most for whole in wholes):
            wrong.append(f"all_reduce {dtype} {narrow}")
    sizes = [rank + 1 for rank in range(world)]
    sent = torch.cat([torch.full((size,), 10.0 * me + to, device=device) for to, size in enumerate(sizes)])
    received = torch.empty(world * (me + 1), device=device)
    group.all_to_all(Split(sent, sizes), Split(received, [me + 1] * world)).run()
    expected = torch.cat([torch.full((me + 1,), 10.0 * rank + me, device=device) for rank in range(world)])
    if not torch.equal(received, expected):
        wrong.append(f"all_to_all {received.tolist()} for {expected.tolist()}")
    found: list[list[str] | None] = [None] * world
    dist.all_gather_object(found, wrong)
    return [f"rank {rank}: {name}" for rank, names in enumerate(found) for name in names or ()]


def _blocks_of(rank: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A rank's buffer, which bfloat16 and blocks of int8 hold exactly: whole numbers, 127 in every block."""
    found = torch.arange(size * BLOCKS, dtype=dtype, device=device).remainder_(97).add_(rank)
    found[::128] = 127
    return found


def _narrow(group: GlooGroup, order: list[int], place: int, dtype: torch.dtype) -> list[str]:
    """In bfloat16, which holds the values of these buffers exactly: by exchange and by the backend's own."""
    size, wrong = len(order), []
    parts = [values(rank, 1, dtype) for rank in order]
    for by in (group, NcclGroup(group.handle)):
        whole = torch.full((size, LENGTH), -1, dtype=dtype)
        whole[place].copy_(parts[place])
        by.all_gather([Buffers(whole.view(-1), whole[place], Cast(torch.bfloat16))]).run()
        if not torch.equal(whole, torch.stack(parts)):
            wrong.append(f"{type(by).__name__} all_gather {order} {dtype} in bfloat16")
    total = sum(values(rank, size, dtype) for rank in order)
    assert isinstance(total, Tensor)
    expected = total.view(size, LENGTH)[place]
    for by in (group, NcclGroup(group.handle)):
        scratch = torch.full((101,), -1, dtype=dtype)
        for accumulate, sums in itertools.product((False, True), repeat=2):
            for in_place in (True, False)[accumulate:]:
                whole = values(order[place], size, dtype).view(size, LENGTH)
                part = whole[place] if in_place else torch.ones(LENGTH, dtype=dtype)
                buffers = Buffers(whole.view(-1), part, Cast(torch.bfloat16, sums=sums))
                by.reduce_scatter([buffers], scratch).run(accumulate=accumulate)
                if not torch.equal(part, expected + accumulate):
                    name = f"{type(by).__name__} {accumulate} {in_place} {sums}"
                    wrong.append(f"reduce_scatter {order} {dtype} bfloat16 {name}")
    return wrong


def _blocks(group: GlooGroup, order: list[int], place: int, dtype: torch.dtype) -> list[str]:
    """In int8, which holds whole numbers up to 127 exactly where the largest of every block is that."""
    size, length, wrong, form = len(order), 512, [], form_of("int8")

    def whole_numbers(rank: int, count: int) -> Tensor:
        found = torch.arange(count * length, dtype=dtype).remainder_(97).add_(rank)
        found[::128] = 127
        return found

    parts, scratch = [whole_numbers(rank, 1) for rank in order], torch.full((600,), -1, dtype=dtype)
    total = sum(whole_numbers(rank, size) for rank in order)
    assert isinstance(total, Tensor)
    for by in (group, NcclGroup(group.handle)):
        whole = torch.full((size, length), -1, dtype=dtype)
        by.all_gather([Buffers(whole.view(-1), parts[place].clone(), form)]).run()
        if not torch.equal(whole, torch.stack(parts)):
            wrong.append(f"{type(by).__name__} all_gather {order} {dtype} in int8")
        for accumulate, in_place in ((False, True), (False, False), (True, False)):
            whole = whole_numbers(order[place], size).view(size, length)
            part = whole[place] if in_place else torch.ones(length, dtype=dtype)
            by.reduce_scatter([Buffers(whole.view(-1), part, form)], scratch).run(accumulate=accumulate)
            if not torch.equal(part, total.view(size, length)[place] + accumulate):
                wrong.append(f"{type(by).__name__} reduce_scatter {order} {dtype} {accumulate} int8")
        whole = whole_numbers(order[place], size)
        by.all_reduce([Buffers(whole, whole.view(size, -1)[place], form)], scratch).run()
        error = float((whole - total).abs().max() / total.abs().max())
        if error > 0.5 / 127 + 1e-6:  # the sum is rounded once more
            wrong.append(f"{type(by).__name__} all_reduce {order} {dtype} int8 {error}")
    return wrong


def _sum(group: GlooGroup, order: list[int], place: int, dtype: torch.dtype) -> list[str]:
    """Several at once; in bfloat16 too, in the library's own way and by halves."""
    size, wrong = len(order), []
    expected = sum(values(rank, size, dtype) for rank in order)
    for by in (group, NcclGroup(group.handle)):
        for narrow in (None, Cast(torch.bfloat16), Cast(torch.bfloat16, sums=True)):
            several = [values(order[place], size, dtype) for _ in range(3)]
            slices = [one.view(size, LENGTH)[place] for one in several]
            buffers = [Buffers(one, part, narrow) for one, part in zip(several, slices, strict=True)]
            by.all_reduce(buffers, torch.full((101,), -1, dtype=dtype)).run()
            if not all(torch.equal(one, expected) for one in several):
                wrong.append(f"{type(by).__name__} all_reduce {order} {dtype} {narrow}")
    return wrong


def _gather(group: Group, order: list[int], place: int, dtype: torch.dtype, in_place: bool) -> list[str]:
    parts = [values(rank, 1, dtype) for rank in order]
    whole = torch.full((len(order), LENGTH), -1, dtype=dtype)
    part = whole[place] if in_place else torch.empty(LENGTH, dtype=dtype)
    part.copy_(parts[place])
    group.all_gather([Buffers(whole.view(-1), part)]).run()
    return [] if torch.equal(whole, torch.stack(parts)) else [f"all_gather {order} {dtype} {in_place}"]


def _scatter(group: Group, order: list[int], place: int, dtype: torch.dtype, in_place: bool) -> list[str]:
    size, wrong = len(order), []
    expected = sum(values(rank, size, dtype) for rank in order)
    assert isinstance(expected, Tensor)
    expected = expected.view(size, LENGTH)[place]
    # Room for everything, and for portions of 50 and of 26 elements.
    for room in (LENGTH, 101, 2 * (1 + LENGTH // 40)):
        scratch = torch.full((room,), -1, dtype=dtype)
        whole = values(order[place], size, dtype)
        part = whole.view(size, LENGTH)[place] if in_place else torch.empty(LENGTH, dtype=dtype)
        group.reduce_scatter([Buffers(whole, part)], scratch).run()
        if not torch.equal(part, expected):
            wrong.append(f"reduce_scatter {order} {dtype} {in_place} {room}")
        added = torch.ones(LENGTH, dtype=dtype)
        buffers = Buffers(values(order[place], size, dtype), added)
        group.reduce_scatter([buffers], scratch).run(accumulate=True)
        if not torch.equal(added, expected + 1):
            wrong.append(f"reduce_scatter {order} {dtype} accumulate {room}")
    return wrong
