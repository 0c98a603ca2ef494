"""A run of FSDP2's goes on under hzplan, and back, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.taken_over import BEFORE, taken_over


@pytest.mark.parametrize(
    ("dims", "mesh", "levels", "flat"),
    [
        ((4,), "2", (1, 1, 1), False),
        pytest.param((2, 2), "2|2", (1, 0, 2), True, marks=pytest.mark.long),
    ],
)
def test_there_and_back(
    dims: tuple[int, ...], mesh: str, levels: tuple[int, ...], flat: bool, tmp_path: Path
) -> None:
    found = taken_over(tmp_path, dims, mesh, levels, flat)
    assert found["take_over"]["step"] == BEFORE
    assert found["give_back"]["differ"] == [] and found["give_back"]["tensors"] > 50
    assert found["give_back"]["losses"] == found["begin"]
    assert found["take_over"]["losses"] == pytest.approx(found["begin"], rel=1e-5)
