"""Floating-point operations of a model's calls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.utils.flop_counter import FlopCounterMode, bmm_flop
from torch.utils.module_tracker import ModuleTracker

from hzplan.profiler.session.clock import Probe


class FlopProbe(Probe):
    """Counts the FLOPs of matrix products and convolutions, a multiply-add as two.

    Attention's backward counts its four products: what a fused kernel computes again is no progress.
    """

    def __init__(self) -> None:
        self.counter = FlopCounterMode(display=False, custom_mapping=_formulas())
        self.counter.mod_tracker = cast(ModuleTracker, _WholeModel())
        self._totals: list[int] = []

    def cut(self) -> None:
        self._totals.append(self.counter.get_total_flops())

    end = cut

    def flops(self) -> list[int]:
        """The FLOPs of every call."""
        return [end - start for start, end in itertools.pairwise(self._totals)]


class _WholeModel:
    """In place of torch's tracker of modules, whose hooks keep what a forward that is computed again makes
    alive until the end, and take time."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *failure: object) -> None:
        pass


def _formulas() -> dict[Any, Any]:
    """torch has none for attention on CPU and for grouped products, 2.11's refuse grouped queries, and
    recomputation counts elsewhere."""
    forward = (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    backward = (
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention_backward",
    )
    aten = torch.ops.aten
    return {
        **{getattr(aten, name): _attention_flops for name in forward if hasattr(aten, name)},
        **{getattr(aten, name): _attention_backward_flops for name in backward if hasattr(aten, name)},
        **{getattr(aten, name): _grouped_flops for name in ("_grouped_mm",) if hasattr(aten, name)},
    }


def _grouped_flops(first: Sequence[int], second: Sequence[int], *_: object, **__: object) -> int:
    """Products of groups of rows (or columns) with a matrix each: every row is multiplied once.

    [rows, inner] × [groups, inner, columns]; in backward also [columns, rows] × [rows, inner], rows grouped.
    """
    return 2 * first[-2] * first[-1] * second[-1]


def _attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object
) -> int:
    """Scores and mixing, over every pair of positions; shapes [batch, heads, length, width]."""
    heads = query[0] * query[1]
    scores = bmm_flop((heads, query[2], query[3]), (heads, query[3], key[2]))
    return int(scores + bmm_flop((heads, query[2], key[2]), (heads, key[2], value[3])))


def _attention_backward_flops(
    gradient: Sequence[int],
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    *_: object,
    **__: object,
) -> int:
    return 2 * _attention_flops(query, key, value)
