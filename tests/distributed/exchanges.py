"""Collectives on real groups, against sums and concatenations made by hand."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hzplan.runtime.backends.base import Buffers, Group
from hzplan.runtime.backends.exchange import GlooGroup
from hzplan.runtime.backends.nccl import NcclGroup
from hzplan.runtime.backends.packing import Cast, form_of

LENGTH = 1003


def values(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """A rank's buffer; whole numbers, so that sums are exact."""
    return torch.arange(size * LENGTH, dtype=dtype).remainder_(7).add_(10 * rank)


def check(payload: Any) -> list[str]:
    """Every way to call them; what came out wrong, by name. One rank is late each time."""
    me, world = dist.get_rank(), dist.get_world_size()
    wrong: list[str] = []
    orders = [list(range(world)), list(reversed(range(world))), [1, 0] if me < 2 else [2, 3]]
    for late, order in enumerate(orders):
        handle = dist.new_group(order, sort_ranks=False, use_local_synchronization=True)
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
