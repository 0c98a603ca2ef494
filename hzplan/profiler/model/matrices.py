"""Cost of updates of matrices: the halves that work element by element, and the products between."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, inf
from typing import Any, NamedTuple

import torch
from torch import nn

from hzplan.formats.profile import MatrixEntry, MatrixPoint
from hzplan.models.matrices import MatrixRule
from hzplan.models.units import master_dtype_of
from hzplan.models.workload import Workload
from hzplan.profiler.model.optimizer import (
    BUDGET_S,
    FACTOR,
    FIRST_ELEMENTS,
    LAST_ELEMENTS,
    MAX_REPEATS,
    MIN_REPEATS,
    OPTIMIZERS,
    points_of,
    seconds_of,
)
from hzplan.profiler.session.ranks import Ranks
from hzplan.profiler.session.rounds import rounds
from hzplan.profiler.session.statistics import nanoseconds, sizes, spread
from hzplan.runtime.muon import Muon, orthogonalized

LASTING_S = 0.01
"""Seconds of a sample of calls that are shorter."""


def for_optimizer(workload: Workload, name: str) -> Workload:
    """The workload, with the rule of what is a matrix where the optimizer is one for matrices."""
    if OPTIMIZERS[name].func is not Muon:
        return replace(workload, matrices=None)
    return workload if workload.matrices is not None else replace(workload, matrices=MatrixRule())


def measure_matrices(
    ranks: Ranks,
    name: str,
    dtype: torch.dtype,
    shapes: Sequence[tuple[int, int]],
    compute: Callable[[], None],
    progress: Callable[[float], None],
) -> MatrixEntry:
    """An optimizer's updates of matrices in parts, on all ranks at once: what is element by element on one
    flat tensor of up to the largest matrix, and Newton–Schulz by shape.

    Of shapes whose work would take longer than ``BUDGET_S`` only the first is measured; the others follow
    from their work.
    """
    group = Muon([nn.Parameter(torch.zeros(1, 1))], **OPTIMIZERS[name].keywords).param_groups[0]
    largest = max(rows * columns for rows, columns in shapes)
    wanted = sizes(FIRST_ELEMENTS, min(largest, LAST_ELEMENTS), FACTOR, 1)
    slices = [_Slice(group, elements, dtype, ranks.device) for elements in wanted]
    matrices = [torch.randn(shape, device=ranks.device).to(_dtype_of(group)) for shape in shapes]
    products = [partial(orthogonalized, one, group) for one in matrices]
    halves = [*(one.begin for one in slices), *(one.finish for one in slices)]
    calls = [*_lasting(ranks, halves), *_lasting(ranks, products, budget_s=BUDGET_S)]

    def once() -> list[float]:
        compute()
        slices[0].begin()
        return [seconds_of(ranks, call.run) / call.times for call in calls]

    [result] = rounds(
        ranks, [once], at_least=MIN_REPEATS, at_most=MAX_REPEATS, budget_s=BUDGET_S, progress=progress
    )
    samples = [*zip(*(seconds for by_rank in result for seconds in by_rank), strict=True)]
    return MatrixEntry(
        state_per_element=1,
        begin=points_of(wanted, samples[: len(wanted)]),
        finish=points_of(wanted, samples[len(wanted) : 2 * len(wanted)]),
        products=tuple(
            MatrixPoint(
                rows=rows,
                columns=columns,
                seconds=nanoseconds(statistics.median(seconds)),
                spread=spread(seconds),
            )
            for (rows, columns), seconds in zip(shapes, samples[2 * len(wanted) :], strict=False)
        ),
    )


class _Lasting(NamedTuple):
    """A call, as many times in a row as make it last."""

    call: Callable[[], Any]
    times: int

    def run(self) -> None:
        for _ in range(self.times):
            self.call()


def _lasting(ranks: Ranks, calls: Sequence[Callable[[], Any]], *, budget_s: float = inf) -> list[_Lasting]:
    """The first calls, as many as one after the other take ``budget_s`` at most, and one at least, each as
    often as takes ``LASTING_S``: ranks leave a barrier one after the other, and who is soon done was alone.
    Every rank keeps the same."""
    kept, took = list[_Lasting](), 0.0
    for call in calls:
        call()
        each = max(ranks.gather(seconds_of(ranks, call)))
        took += each
        if kept and took > budget_s:
            break
        kept.append(_Lasting(call, max(1, ceil(LASTING_S / each))))
    return kept


def _dtype_of(group: Mapping[str, Any]) -> torch.dtype:
    found: torch.dtype = getattr(torch, group["ns_dtype"])
    return found


class _Slice:
    """A slice of a matrix whose whole is computed elsewhere: the two halves of its step."""

    def __init__(
        self, group: Mapping[str, Any], elements: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        master_dtype = master_dtype_of(dtype)
        master = nn.Parameter(torch.ones(elements, dtype=master_dtype, device=device))
        master.grad = torch.full_like(master, 1e-3)
        options = {key: value for key, value in group.items() if key != "params"}
        self._muon, self._master = Muon([{**options, "params": [master]}]), master
        self._muon.places[master] = [(0, torch.empty(elements, dtype=_dtype_of(group), device=device))]
        self._muon.shapes[master] = (1, elements)
        self._published = master.detach().to(dtype) if dtype != master_dtype else None
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Momentum, after the gradient is scaled as under clipping."""
        assert self._master.grad is not None
        torch._foreach_mul_([self._master.grad], 1.0)
        self._muon.step()

    @torch.no_grad()
    def finish(self) -> None:
        """The step, and the cast of masters."""
        self._muon.begun.add(self._master)
        self._muon.finish()
        if self._published is not None:
            self._published.copy_(self._master)
