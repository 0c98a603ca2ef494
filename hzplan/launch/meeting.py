"""Ranks that meet in a store: each learns which start of the job it belongs to, and that all others came.

torchrun keeps its store when it restarts a job, and in it the addresses of ranks that are gone, on which gloo
would wait in vain. How often agents have restarted differs between nodes, so the first rank draws a number,
and a tree of ranks hands it on: every rank to two others. A rank takes about ten operations of the store,
however many ranks there are, and waits inside of the store, not by asking again and again.

A rank's news are numbered: ``arrived NAME``, under a name that no earlier start has used, and, once those
below it in the tree are here, ``here NUMBER``. Whatever an earlier start has left is older news.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Protocol

from hzplan.errors import JobFailed

LOOK_S = 5.0
"""How long one wait in the store lasts before the count of news is looked at again."""

ORPHANS = 0.1
"""Share of the time that the first rank waits longer, in the end, for those that nobody has answered."""


class Store(Protocol):
    """What is used of torch's stores."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


def meet(store: Store, rank: int, world: int, timeout_s: float) -> int:
    """The number of this start of the job, when all ranks at and below this one in the tree have come.

    JobFailed names ranks that do not come in time; the first rank names all of them.
    """
    # The first rank gives up first: it knows most. The others are still there when it answers them.
    until = time.monotonic() + (timeout_s if rank == 0 else (1 + ORPHANS) * timeout_s)
    number = store.add("hzplan/number", 1) if rank == 0 else _arrive(store, rank, until, timeout_s)
    for child in _below(rank, world):
        if not _brought(store, child, number, until):
            missing = _missing(store, number, world, ORPHANS * timeout_s) if rank == 0 else [child]
            if missing:
                ranks = ", ".join(map(str, missing))
                raise JobFailed(
                    f"rank{'s' * (len(missing) > 1)} {ranks} did not come within {timeout_s:.0f} s"
                )
    if rank:
        _tell(store, rank, f"here {number}")
    return number


def _below(rank: int, world: int) -> Iterator[int]:
    return (child for child in (2 * rank + 1, 2 * rank + 2) if child < world)


def _tell(store: Store, rank: int, news: str) -> None:
    count = store.add(f"hzplan/news/{rank}", 1)
    store.set(f"hzplan/news/{rank}/{count}", news)


def _arrive(store: Store, rank: int, until: float, timeout_s: float) -> int:
    """Say that a rank is there, and wait for the number."""
    answer = f"hzplan/answer/{(name := uuid.uuid4().hex)}"
    _tell(store, rank, f"arrived {name}")
    if not _waited(store, answer, until - time.monotonic()):
        raise JobFailed(f"rank {rank} had no answer of the ranks before it within {timeout_s:.0f} s")
    number = int(store.get(answer))
    store.set(f"hzplan/{number}/came/{rank}", "")
    return number


def _brought(store: Store, child: int, number: int, until: float) -> bool:
    """Answer a rank until it and those below it are here; False where that takes too long."""
    seen = 0
    while (left := until - time.monotonic()) > 0:
        count = store.add(f"hzplan/news/{child}", 0)
        if count == seen:
            _waited(store, f"hzplan/news/{child}/{seen + 1}", min(left, LOOK_S))
        elif _waited(store, key := f"hzplan/news/{child}/{count}", min(left, LOOK_S)):
            seen = count
            what, _, of = store.get(key).decode().partition(" ")
            if what == "here" and of == str(number):
                return True
            if what == "arrived":
                store.set(f"hzplan/answer/{of}", str(number))
    return False


def _missing(store: Store, number: int, world: int, seconds: float) -> list[int]:
    """The ranks that have not come; those that only wait for one that has not are answered here, and have so
    long to come."""
    until = time.monotonic() + seconds
    came = {rank: f"hzplan/{number}/came/{rank}" for rank in range(1, world)}
    absent = [rank for rank, key in came.items() if not store.check([key])]
    orphans, news = [], {}
    for rank in absent:
        if count := store.add(f"hzplan/news/{rank}", 0):
            news[rank] = f"hzplan/news/{rank}/{count}"
    for rank in sorted(news, key=lambda rank: not store.check([news[rank]])):  # unwritten news are last
        if _waited(store, news[rank], until - time.monotonic()):
            what, _, name = store.get(news[rank]).decode().partition(" ")
            if what == "arrived":
                store.set(f"hzplan/answer/{name}", str(number))
                orphans.append(rank)
    for rank in orphans:
        _waited(store, came[rank], until - time.monotonic())
    # Others than orphans are looked for once more: one may have come between the two looks at it.
    return [rank for rank in absent if not store.check([came[rank]])]


def _waited(store: Store, key: str, seconds: float) -> bool:
    """Whether a key was there in time."""
    try:
        store.wait([key], timedelta(seconds=max(seconds, 1e-3)))
    except RuntimeError as error:
        if "imeout" in str(error) or "imed out" in str(error):
            return False
        raise  # the store is gone
    return True
