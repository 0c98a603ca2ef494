"""Who is to blame in the end, by what ranks have written."""

from __future__ import annotations

import time

import pytest

from hzplan.runtime import hang_report
from hzplan.runtime.hang_report import Blame, follow

LATE, LOST = True, False


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_report, "POLL_S", 0.001)


def found(mine: Blame, written: dict[int, Blame]) -> Blame:
    return follow(mine, 0, written.get, time.monotonic() + 0.02)


def test_the_silent_rank_at_the_end_of_a_chain() -> None:
    written = {1: (LATE, frozenset({2})), 2: (LATE, frozenset({3}))}
    assert found((LATE, frozenset({1})), written) == (LATE, {3})


def test_a_broken_connection_to_a_rank_that_waited_in_vain() -> None:
    assert found((LOST, frozenset({1})), {1: (LATE, frozenset({2}))}) == (LATE, {2})


def test_a_dead_rank_is_lost_for_those_behind_it() -> None:
    assert found((LOST, frozenset({1})), {1: (LOST, frozenset({2}))}) == (LOST, {2})


def test_the_late_go_before_the_lost() -> None:
    assert found((LATE, frozenset({1, 3})), {1: (LOST, frozenset({2}))}) == (LATE, {3})


def test_a_circle_leaves_what_was_seen() -> None:
    written = {1: (LATE, frozenset({2})), 2: (LATE, frozenset({0}))}
    assert found((LATE, frozenset({1})), written) == (LATE, {1})


def test_a_rank_that_writes_later_is_waited_for() -> None:
    calls: list[int] = []

    def read(rank: int) -> Blame | None:
        calls.append(rank)
        return (LATE, frozenset({2})) if rank == 1 and len(calls) > 3 else None

    assert follow((LATE, frozenset({1})), 0, read, time.monotonic() + 0.1) == (LATE, {2})
