"""A part of a flat tensor as boxes of its shape: what a rank holds is a range, what others read is a shape.

Standard library only.
"""

from __future__ import annotations

from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, one of each per dimension."""


def boxes(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """Elements ``[start, end)`` of a row-major tensor as few boxes, in order, each of them contiguous.

    At most ``2 * dimensions - 1``: the first row's rest, whole rows, the last row's beginning; and so on
    inside of those rows.
    """
    if start >= end:
        return []
    if not shape:
        return [((), ())]
    inner = shape[1:]
    row = prod(inner)
    first, last = -(-start // row), end // row  # whole rows
    if first > last:
        return _in_row(inner, last, start - last * row, end - last * row)
    found = _in_row(inner, first - 1, start - (first - 1) * row, row) if start < first * row else []
    if first < last:
        found.append(((first, *(0 for _ in inner)), (last - first, *inner)))
    return found + _in_row(inner, last, 0, end - last * row)


def _in_row(inner: tuple[int, ...], row: int, start: int, end: int) -> list[Box]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes(inner, start, end)]
