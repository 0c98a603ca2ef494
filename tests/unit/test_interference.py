"""Interference measured with threads, where communication and compute are over too soon for each other."""

from __future__ import annotations

import pytest

from hzplan.profiler.network import interference


def test_communication_that_is_over_before_compute_begins_is_beside_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = interference._Together(lambda: None, 1)
    begin = together.start

    def start() -> None:
        begin()
        together.join()

    monkeypatch.setattr(together, "start", start)
    calls: list[int] = []
    assert together.run(lambda: calls.append(1)) >= 0
    assert calls == [1]
