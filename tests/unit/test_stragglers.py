"""Who is named as slow, from times made by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hzplan.profiler.network.stragglers import SHIFTS, SLOW, slow_ends, slower_than_others


def transfers(size: int, slow: set[int], times: float, wobble: list[float]) -> dict[tuple[int, int], float]:
    """Everyone sends to the next few; messages of a slow rank take ``times`` as long."""
    pairs = [(r, (r + shift) % size) for shift in range(1, min(size - 1, SHIFTS) + 1) for r in range(size)]
    noise = itertools.cycle(wobble)
    return {pair: (times if slow & {*pair} else 1.0) * next(noise) for pair in pairs}


@given(
    st.integers(4, 12).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1))),
    st.floats(2, 50),
    st.lists(st.floats(0.95, 1.05), min_size=1, max_size=7),
)
def test_the_rank_behind_a_slow_link_is_named_and_no_other(
    where: tuple[int, int], times: float, wobble: list[float]
) -> None:
    size, slow = where
    found = slow_ends(transfers(size, {slow}, times, wobble), size, lambda _: range(size))
    assert found.keys() == {slow}
    assert found[slow] == pytest.approx(times, rel=0.15)


@given(st.integers(3, 12), st.lists(st.floats(0.9, 1.1), min_size=1, max_size=7))
def test_nobody_is_named_for_noise(size: int, wobble: list[float]) -> None:
    assert slow_ends(transfers(size, set(), 1.0, wobble), size, lambda _: range(size)) == {}


def test_groups_are_compared_within_themselves() -> None:
    """Two groups of a tier: that one is slower as a whole blames none of its ranks."""
    group_of = {rank: (rank % 2, rank % 2 + 2, rank % 2 + 4) for rank in range(6)}
    seconds = {(a, b): 1.0 + 9.0 * (a % 2) for a in range(6) for b in group_of[a] if a != b}
    assert slow_ends(seconds, 6, lambda rank: group_of[rank]) == {}


def test_compute_is_compared_with_the_others() -> None:
    assert [times > SLOW for times in slower_than_others([1.0, 1.1, 2.0, 1.0])] == [False, False, True, False]
    assert slower_than_others([3.0]) == [1.0]
