"""Ranks that meet in a store, a thread each: restarts, ranks that are missing, operations per rank."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta

import pytest
import torch.distributed as dist

from hzplan.errors import JobFailed
from hzplan.launch import meeting
from hzplan.launch.meeting import meet


class Counted:
    """One rank's view of a store. ``counts``: operations by name."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.counts = store, Counter[str]()

    def add(self, key: str, amount: int, /) -> int:
        self.counts["add"] += 1
        return self.store.add(key, amount)

    def set(self, key: str, value: str, /) -> None:
        self.counts["set"] += 1
        self.store.set(key, value)

    def get(self, key: str, /) -> bytes:
        self.counts["get"] += 1
        return self.store.get(key)

    def check(self, keys: list[str], /) -> bool:
        self.counts["check"] += 1
        return self.store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        self.counts["wait"] += 1
        self.store.wait(keys, timeout)


def gather(
    store: dist.Store, world: int, *, missing: frozenset[int] = frozenset(), timeout_s: float = 30.0
) -> tuple[dict[int, int | str], dict[int, Counter[str]]]:
    """What every rank that is there learns, or fails with; and its operations."""
    found: dict[int, int | str] = {}
    views = {rank: Counted(store) for rank in range(world)}

    def run(rank: int) -> None:
        try:
            found[rank] = meet(views[rank], rank, world, timeout_s)
        except JobFailed as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world) if rank not in missing]
    for thread in reversed(threads):  # the first rank last
        thread.start()
    for thread in threads:
        thread.join(60)
    return found, {rank: view.counts for rank, view in views.items()}


def test_operations_do_not_grow_with_the_world() -> None:
    most = {}
    for world in (1, 2, 16, 256):
        found, counts = gather(dist.HashStore(), world)
        assert found == dict.fromkeys(range(world), 1)
        most[world] = max(count.total() for count in counts.values())
    assert most[256] <= most[16] + 4 <= 32


def test_every_start_has_its_own_number() -> None:
    store = dist.HashStore()
    for start in range(1, 4):
        assert gather(store, 12)[0] == dict.fromkeys(range(12), start)


@pytest.mark.parametrize("missing", [{1}, {5}, {3, 4}, {1, 7}], ids=str)
def test_who_does_not_come_is_named(missing: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an earlier start to which all came; ranks that only wait for the missing ones are not."""
    monkeypatch.setattr(meeting, "ORPHANS", 2.0)
    store = dist.HashStore()
    gather(store, 12)
    found, _ = gather(store, 12, missing=frozenset(missing), timeout_s=1.0)
    names = ", ".join(map(str, sorted(missing)))
    assert found[0] == f"rank{'s' * (len(missing) > 1)} {names} did not come within 1 s"
    assert all(isinstance(found[rank], (int, str)) for rank in range(12) if rank not in missing)


def test_a_rank_that_was_killed_before_its_news_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LOOK_S", 0.1)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=3))
    store.add("hzplan/news/1", 1)
    found, _ = gather(store, 7, missing=frozenset({1}), timeout_s=3.0)
    assert found[0] == "rank 1 did not come within 3 s"


def test_a_rank_that_was_killed_between_two_operations_is_looked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "LOOK_S", 0.1)
    store = dist.HashStore()
    store.add("hzplan/news/2", 1)  # and the news were never written
    assert gather(store, 4)[0] == dict.fromkeys(range(4), 1)
