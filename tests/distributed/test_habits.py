"""What people's loops do besides the textbook."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import on_ranks

pytestmark = pytest.mark.distributed
MODULE = "tests.distributed.habits"


def test_what_is_made_without_memory_is_what_it_would_have_been(tmp_path: Path) -> None:
    found = on_ranks(4, f"{MODULE}:deferred", None, tmp_path)
    assert len(found) == 8
    assert not any(found.values()), found


@pytest.mark.launch
def test_ragged_and_uneven_batches_count_by_their_tokens(tmp_path: Path) -> None:
    found = on_ranks(4, f"{MODULE}:ragged", None, tmp_path)
    assert len(found) == 8
    assert all(error < 1e-9 for error in found.values()), found
