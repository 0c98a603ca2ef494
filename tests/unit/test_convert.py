"""Conversions inside one piece of memory, against copies made elsewhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hzplan.runtime.backends.convert import Conversion, back, front

PAIRS = [(torch.float32, torch.bfloat16), (torch.float64, torch.float32), (torch.float64, torch.bfloat16)]


@pytest.mark.parametrize(("wide", "narrow"), PAIRS)
@pytest.mark.parametrize("part", [front, back])
@given(n=st.integers(1, 3000))
def test_there_and_back(wide: torch.dtype, narrow: torch.dtype, part, n: int) -> None:  # type: ignore[no-untyped-def]
    values = torch.randn(n, dtype=wide)
    buffer = values.clone()
    travelling = part(buffer, narrow)
    Conversion(buffer, travelling).run()
    assert torch.equal(travelling, values.to(narrow))
    Conversion(travelling, buffer).run()
    assert torch.equal(buffer, values.to(narrow).to(wide))


@pytest.mark.parametrize(("wide", "narrow"), PAIRS)
@given(size=st.integers(1, 8), n=st.integers(1, 500), data=st.data())
def test_one_slice_among_others(
    wide: torch.dtype, narrow: torch.dtype, size: int, n: int, data: st.DataObject
) -> None:
    """As a gather begins (a slice to its place in the back), and as a reduction ends (out of the front)."""
    mine = slice((place := data.draw(st.integers(0, size - 1))) * n, (place + 1) * n)
    values = torch.randn(size * n, dtype=wide)
    buffer = values.clone()
    travelling = back(buffer, narrow)
    Conversion(buffer[mine], travelling[mine]).run()
    assert torch.equal(travelling[mine], values[mine].to(narrow))
    buffer = values.clone()
    travelling = front(buffer, narrow)
    Conversion(buffer, travelling).run()
    Conversion(travelling[mine], buffer[mine]).run()
    assert torch.equal(buffer[mine], values[mine].to(narrow).to(wide))


def test_few_copies_and_none_at_all_of_disjoint_memory() -> None:
    buffer = torch.zeros(1 << 20)
    assert len(Conversion(buffer, front(buffer, torch.bfloat16))._copies) <= 20
    assert len(Conversion(buffer, torch.empty(1 << 20, dtype=torch.bfloat16))._copies) == 1


def test_what_would_be_overwritten_unread_is_refused() -> None:
    buffer = torch.zeros(100)
    with pytest.raises(ValueError, match="overwritten"):
        Conversion(buffer, buffer.view(torch.bfloat16)[50:150])
