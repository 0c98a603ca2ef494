"""Gradients that lie side by side: one message for what adjoins, and the sums of each."""

from __future__ import annotations

import threading

import torch

from hzplan.core.hierarchy import Mesh, Stage
from hzplan.runtime.backends.base import Buffers
from hzplan.runtime.backends.packing import Cast
from hzplan.runtime.backends.threads import Post, ThreadWorld
from hzplan.runtime.joined import joined


def buffers(values: torch.Tensor, place: int, dtype: torch.dtype | None = None) -> Buffers:
    return Buffers(values, values.view(2, -1)[place], dtype and Cast(dtype))


def test_only_neighbours_of_one_dtype_are_joined() -> None:
    flat = torch.arange(16.0)
    first, second, third = flat[:4], flat[4:12], flat[14:16]
    found = joined([buffers(one, 1) for one in (first, second, third)], 1, 2)
    assert [one.whole.tolist() for one in found] == [flat[:12].tolist(), [14.0, 15.0]]
    assert found[0].part.tolist() == flat[6:12].tolist()
    assert found[0].whole.data_ptr() == flat.data_ptr()
    apart = [buffers(second, 0), buffers(first, 0)]
    assert len(joined(apart, 0, 2)) == 2  # in the other order
    narrow = [buffers(first, 0), buffers(second, 0, torch.bfloat16)]
    assert len(joined(narrow, 0, 2)) == 2
    assert len(joined([buffers(torch.ones(4), 0), buffers(torch.ones(4), 0)], 0, 2)) == 2


def test_sums_are_those_of_each() -> None:
    post, mesh = Post(2), Mesh.parse("2")
    flats = [torch.arange(12.0) + 100 * rank for rank in range(2)]

    def run(rank: int) -> None:
        group = ThreadWorld(post, rank).new_group(mesh, "reduce", Stage(0, 1), torch.device("cpu"))
        each = joined([buffers(one, rank) for one in flats[rank].split([4, 8])], rank, 2)
        assert len(each) == 1
        group.all_reduce(each, torch.zeros(4)).run()

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(timeout=30)
    assert all(flat.tolist() == [2.0 * value + 100 for value in range(12)] for flat in flats)
