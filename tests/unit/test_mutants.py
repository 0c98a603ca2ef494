"""The mutants of ``make mutants`` can still be made: each changes one place, and the file still compiles."""

from __future__ import annotations

import re

from tests.mutants.__main__ import ROOT, mutants, problems


def test_every_mutant_can_be_made() -> None:
    some = mutants()
    assert len({mutant.name for mutant in some}) == len(some) >= 25
    assert problems(some) == []


def test_every_hint_names_a_test() -> None:
    for mutant in mutants():
        for hint in mutant.tests:
            path, _, name = hint.partition("::")
            wanted = f"{re.escape(name.partition('[')[0])}\\(" if name else "test_"
            text = (ROOT / path).read_text(encoding="utf-8")
            assert re.search(f"^def {wanted}", text, re.MULTILINE), hint
