"""Interference measured with threads: each of both lasts for as long as the other needs."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from hzplan.profiler.network import interference
from hzplan.profiler.session.ranks import Ranks
from hzplan.profiler.session.rounds import QUICK, THOROUGH, Effort

ALONE = Ranks(0, 1, "none", torch.device("cpu"))


def test_short_calls_of_both_are_beside_each_other_for_a_while() -> None:
    computing, communicating = [], []

    def compute() -> None:
        computing.append(time.sleep(0.001))

    def communicate() -> None:
        communicating.append(time.sleep(0.001))

    interference._together(ALONE, compute, communicate, 10, THOROUGH)
    least = interference.TOGETHER_S / 0.001 / 20  # a sleep takes longer than asked
    assert min(len(computing), len(communicating)) > least


@pytest.mark.parametrize("effort", [THOROUGH, QUICK])
def test_long_calls_of_compute_have_communication_beside_them(
    monkeypatch: pytest.MonkeyPatch, effort: Effort
) -> None:
    """Calls that take as long as communication does altogether are measured, and one is enough."""
    monkeypatch.setattr(interference, "TOGETHER_S", 0.01)
    monkeypatch.setattr(interference, "LONG_TOGETHER_S", 0.02)
    monkeypatch.setattr(interference, "BATCH_S", 0.01)
    communicated = threading.Event()
    calls: list[bool] = []

    def compute() -> None:
        time.sleep(0.05)
        calls.append(communicated.is_set())
        communicated.clear()

    def communicate() -> None:
        communicated.set()
        time.sleep(0.002)

    computed, each = interference._together(ALONE, compute, communicate, 1, effort)
    assert len(calls) <= 3 and calls[0]
    assert computed >= 0.05 and 0.002 <= each < 0.05


def test_a_failure_of_communication_is_raised() -> None:
    def fail() -> None:
        raise RuntimeError("no link")

    with pytest.raises(RuntimeError, match="no link"):
        interference._together(ALONE, lambda: time.sleep(0.001), fail, 1, THOROUGH)


def test_a_rank_whose_compute_fails_does_not_keep_the_others() -> None:
    def compute() -> None:
        raise RuntimeError("no memory")

    before = threading.active_count()
    with pytest.raises(RuntimeError, match="no memory"):
        interference._together(ALONE, compute, lambda: time.sleep(0.001), 1, THOROUGH)
    time.sleep(interference.BATCH_S * 3)
    assert threading.active_count() == before
