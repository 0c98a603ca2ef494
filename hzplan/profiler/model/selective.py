"""The cost of recomputing part of a unit: its attention, or what is cheap to compute again.

``full`` recomputes a unit from its inputs, and is traced. ``attention`` recomputes attention's core alone
(Korthikanti et al. 2022, §5). ``operations`` keeps the results of attention and of every other matrix
product, and recomputes the rest (torchtitan's selective checkpointing by operation).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from hzplan.core.schedule import Use
from hzplan.formats.profile import RecomputeCost, UseCost
from hzplan.profiler.model.operations import Attention, Operated, Operation, Operations, Product
from hzplan.profiler.session.statistics import nanoseconds

Recompute = Literal["full", "attention", "operations"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)

AGAIN_SHARE, KEPT_SHARE = 0.37, 0.55
"""Of every two matrix products the second is computed again. Of a Llama block's seven (q, k, v, out, gate,
up, down) those are k, out and up: shares of the FLOPs that run again, and of the results that are kept."""


def selective(
    kind: Recompute,
    uses: Sequence[Use],
    costs: Sequence[UseCost],
    whole: Sequence[RecomputeCost],
    operations: Sequence[Operated],
    item_bytes: int,
    seconds: Callable[[Operations], float],
) -> list[RecomputeCost]:
    """The cost of every use where units recompute part of their forward, from that of recomputing ``whole``
    units. A backward computes again for the forward that it belongs to, the last one first."""
    forwards: dict[str, list[tuple[float, int]]] = defaultdict(list)
    found = []
    for use, cost, full, operated in zip(uses, costs, whole, operations, strict=True):
        if use.phase == "forward":
            longer, kept = _again(kind, operated.eager, item_bytes, seconds)
            retained = cost.retained_bytes if kind == "attention" else full.retained_bytes + kept
            retained = min(retained, cost.retained_bytes)
            forwards[use.unit].append((longer, retained - full.retained_bytes))
            less = cost.retained_bytes - retained
            found.append(_cost(0.0, retained, max(full.peak_bytes, cost.peak_bytes - less)))
            continue
        longer, held = forwards[use.unit].pop() if forwards[use.unit] else (0.0, 0)
        found.append(_cost(longer, full.retained_bytes - held, max(0, full.peak_bytes - held)))
    return found


def _cost(seconds: float, retained: int, peak: int) -> RecomputeCost:
    return RecomputeCost(seconds=nanoseconds(seconds), retained_bytes=retained, peak_bytes=peak)


def _again(
    kind: Recompute, forward: Operations, item_bytes: int, seconds: Callable[[Operations], float]
) -> tuple[float, int]:
    """Seconds of what a forward computes again, and bytes of results that are kept for it."""
    attention: dict[Operation, int] = {}
    products: dict[Operation, int] = {}
    again: dict[Operation, int] = {}
    kept = 0.0
    for one, count in forward.items():
        if isinstance(one, Attention):
            attention[one] = count
            kept += count * one.sequences * one.queries * one.width
        elif isinstance(one, Product):
            products[one] = count
            kept += KEPT_SHARE * count * one.batch * one.m * one.n
        else:
            again[one] = count
    if kind == "attention":
        return seconds(attention), 0
    return seconds(again) + AGAIN_SHARE * seconds(products), int(kept) * item_bytes
