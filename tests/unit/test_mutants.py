"""The mutants of ``make mutants`` can still be made: each changes one place, and the file still compiles."""

from __future__ import annotations

from tests.mutants.__main__ import mutants, problems


def test_every_mutant_can_be_made() -> None:
    some = mutants()
    assert len({mutant.name for mutant in some}) == len(some) >= 25
    assert problems(some) == []
