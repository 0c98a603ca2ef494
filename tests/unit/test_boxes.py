"""Ranges of flat tensors as boxes."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from hzplan.core.layout import boxes

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shapes, st.data())
def test_boxes_are_the_range_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = prod(shape)
    start = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(start, numel))
    found = boxes(shape, start, end)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    tensor = torch.arange(numel).view(shape)
    elements: list[int] = []
    for offsets, sizes in found:
        assert all(sizes)
        box = tensor
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            box = box.narrow(dim, offset, size)
        part = box.flatten().tolist()
        assert part == list(range(part[0], part[0] + len(part)))  # contiguous
        elements += part
    assert elements == list(range(start, end))


def test_of_nothing_there_are_none() -> None:
    assert boxes((3, 0), 0, 0) == []
    assert boxes((), 0, 1) == [((), ())]
