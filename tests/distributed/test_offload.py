"""Optimizer state in the host's memory changes nothing but where it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import on_ranks

pytestmark = pytest.mark.distributed


@pytest.mark.timeout(300)
def test_the_same_to_the_bit(tmp_path: Path) -> None:
    found = on_ranks(2, "tests.distributed.offload:differing", [*range(12)], tmp_path)
    assert found == {str(seed): [] for seed in range(12)}
