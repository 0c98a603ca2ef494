"""Measurements in rounds, a sample of each: a disturbance spoils one sample of each and all of none."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from hzplan.profiler.session.ranks import Ranks

Result = TypeVar("Result")


class Effort(NamedTuple):
    """How often things are measured.

    ``pass_s``: seconds of passes of each kind, after which no other block is begun; ``block``: passes of a
    kind in a row. ``rounds``: in which links disturb compute, ``alone`` and ``beside`` the calls of compute
    in each, without and with communication. ``warm``: whether a pass whose memory is followed was made before
    that; ``host_on_cpu``: whether saving on the host is followed on a CPU, too, which has no other memory.
    ``spare``: recomputation is measured where training without any, and without shards, takes more than this
    share of a rank's memory; ``narrow``: whether links are also tried with what travels rounded.
    """

    pass_s: float
    block: int
    rounds: int
    alone: int
    beside: int
    warm: bool
    host_on_cpu: bool
    spare: float
    narrow: bool


THOROUGH = Effort(
    pass_s=6.0, block=3, rounds=5, alone=3, beside=4, warm=True, host_on_cpu=True, spare=0.0, narrow=True
)
QUICK = Effort(
    pass_s=2.0, block=1, rounds=1, alone=1, beside=1, warm=False, host_on_cpu=False, spare=0.5, narrow=False
)
"""For a job that waits: a pass that takes seconds is its own mean."""


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python's cyclic garbage is collected before, and none inside."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def rounds(
    ranks: Ranks,
    measurements: Sequence[Callable[[], Result]],
    *,
    at_least: int,
    at_most: int,
    budget_s: float,
    progress: Callable[[float], None],
    enough: Callable[[list[list[list[Result]]]], bool] = lambda results: False,
) -> list[list[list[Result]]]:
    """Make every measurement once a round; its results by round and rank, the same on every rank.

    All ranks make a measurement at the same time; it begins with a barrier of its own. Rounds end, after
    ``at_least`` of them, when ``enough`` of the results so far, or when another would exceed the budget.
    """
    results: list[list[list[Result]]] = [[] for _ in measurements]
    started = time.perf_counter()
    with no_garbage_collection():
        for done in range(1, at_most + 1):
            own = []
            for index, measurement in enumerate(measurements):
                own.append(measurement())
                share = (done - 1 + (index + 1) / len(measurements)) / at_most
                progress(max(share, min(1.0, (time.perf_counter() - started) / budget_s)))
            gathered = ranks.gather((own, time.perf_counter() - started))
            for index, result in enumerate(results):
                result.append([rank[index] for rank, _ in gathered])
            elapsed = max(spent for _, spent in gathered)
            if done >= at_least and (elapsed * (done + 1) / done > budget_s or enough(results)):
                break
    return results
