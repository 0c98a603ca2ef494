"""Paired ratios: known critical values, and coverage on noise that is known."""

from __future__ import annotations

import random
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hzplan.peers.paired import MIN_ROUNDS, _cut, paired_ratio

seconds = st.floats(1e-4, 1e4)


@pytest.mark.parametrize(
    ("rounds", "critical"), [(6, 0), (7, 2), (8, 3), (9, 5), (10, 8), (12, 13), (15, 25), (20, 52)]
)
def test_critical_values_are_those_of_the_tables_of_wilcoxons_test(rounds: int, critical: int) -> None:
    assert _cut(rounds) == critical


def test_fewer_rounds_than_give_an_interval_span_the_extremes() -> None:
    assert all(_cut(rounds) == 0 for rounds in range(1, MIN_ROUNDS + 1))
    ratio = paired_ratio([1.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    assert (ratio.low, ratio.high) == (pytest.approx(1.0), pytest.approx(4.0))


@given(st.lists(seconds, min_size=1, max_size=12), st.floats(0.1, 10))
def test_a_constant_factor_is_found_exactly(times: list[float], factor: float) -> None:
    ratio = paired_ratio([factor * t for t in times], times)
    assert ratio.value == pytest.approx(factor)
    assert ratio.low == pytest.approx(factor) and ratio.high == pytest.approx(factor)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=12))
def test_the_other_way_round_is_the_inverse(pairs: list[tuple[float, float]]) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    one, other = paired_ratio(first, second), paired_ratio(second, first)
    assert one.low <= one.value <= one.high
    assert one.value == pytest.approx(1 / other.value) and one.low == pytest.approx(1 / other.high)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    noise = random.Random(1)
    covered = 0
    for _ in range(1000):
        machine = [noise.uniform(1, 3) for _ in range(8)]  # the same for both in a round
        slower = [1.2 * speed * exp(noise.gauss(0, 0.05)) for speed in machine]
        faster = [speed * exp(noise.gauss(0, 0.05)) for speed in machine]
        ratio = paired_ratio(slower, faster)
        covered += ratio.low <= 1.2 <= ratio.high
    assert 0.94 <= covered / 1000 <= 0.985  # exact: 96.1%


def test_one_spoilt_round_moves_little() -> None:
    fine = [1.30, 1.31, 1.29, 1.30, 1.32, 1.28, 1.30]
    spoilt = [*fine[:-1], 9.0]
    base = [1.0] * 7
    assert paired_ratio(spoilt, base).value == pytest.approx(paired_ratio(fine, base).value, rel=0.02)


def test_no_rounds_and_unequal_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="no round"):
        paired_ratio([], [])
    with pytest.raises(ValueError, match="argument"):
        paired_ratio([1.0], [])


def test_losses_that_are_no_numbers_agree_with_nothing() -> None:
    from hzplan.peers.compare import _deviation

    assert _deviation([1.0, 2.0], [1.0, 2.02]) == pytest.approx(0.02 / 2.02)
    assert _deviation([1.0, float("nan")], [1.0, 2.0]) == float("inf")
    assert _deviation([1.0, 2.0], [float("nan"), 2.0]) == float("inf")
