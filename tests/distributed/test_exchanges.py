"""The collectives, on groups of two and of four, in order and not, with a rank that is late."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import on_ranks


@pytest.mark.distributed
def test_gathers_and_sums_are_those_made_by_hand(tmp_path: Path) -> None:
    assert on_ranks(4, "tests.distributed.exchanges:check", None, tmp_path) == []


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4])
def test_those_of_the_library_are_those_made_by_hand(world: int, tmp_path: Path) -> None:
    assert on_ranks(world, "tests.distributed.exchanges:check_library", "cpu", tmp_path) == []
