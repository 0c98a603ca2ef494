"""Measuring several things in turns, so that a disturbance spoils a sample of each and all of none."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from hzplan.profiler.session.ranks import Ranks

Result = TypeVar("Result")


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
    cases: Sequence[Callable[[], Result]],
    *,
    at_least: int,
    at_most: int,
    budget_s: float,
    progress: Callable[[float], None],
    enough: Callable[[list[list[list[Result]]]], bool] = lambda results: False,
) -> list[list[list[Result]]]:
    """Run every case once a round; the results by case, round and rank, the same on every rank.

    All ranks run a case at the same time; it begins with a barrier of its own. After ``at_least`` rounds it
    ends when ``enough`` says so of the results so far, or when another round would exceed the budget.
    """
    results: list[list[list[Result]]] = [[] for _ in cases]
    started = time.perf_counter()
    with no_garbage_collection():
        for done in range(1, at_most + 1):
            mine = []
            for index, case in enumerate(cases):
                mine.append(case())
                share = (done - 1 + (index + 1) / len(cases)) / at_most
                progress(max(share, min(1.0, (time.perf_counter() - started) / budget_s)))
            gathered = ranks.gather((mine, time.perf_counter() - started))
            for index, result in enumerate(results):
                result.append([rank[index] for rank, _ in gathered])
            elapsed = max(spent for _, spent in gathered)
            if done >= at_least and (elapsed * (done + 1) / done > budget_s or enough(results)):
                break
    return results
