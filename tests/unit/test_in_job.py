"""A plan that was made in a job is kept where it is surely faster than torch's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hzplan import in_job
from hzplan.core.hierarchy import Levels
from hzplan.in_job import Rival
from hzplan.models.workload import load
from hzplan.peers.paired import Ratio
from tests.plans import make_plan

PLAN = make_plan("gpt:nano", mesh="2", levels=Levels(1, 1, 1))
DDP = Rival("DDP", make_plan("gpt:nano", mesh="2", levels=Levels(0, 0, 0)))


@pytest.mark.parametrize(
    ("ratio", "absent", "kept", "said"),
    [
        (Ratio(1.2, 1.1, 1.3), "", PLAN, "torch's ddp takes 1.20 (1.10 to 1.30) of its time"),
        (Ratio(1.02, 0.98, 1.06), "", DDP.plan, "of its time: DDP it is, as a plan"),
        (Ratio(0.9, 0.8, 0.97), "", DDP.plan, "as a plan; torch's own is faster here"),
        (Ratio(0.9, 0.8, 0.97), "no room", PLAN, "torch's ddp did not train: no room"),
    ],
)
def test_what_is_not_surely_faster_is_the_known_scheme(
    ratio: Ratio, absent: str, kept: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compared(makers: Any, *, rounds: int, steps_per_round: int) -> Any:
        assert [*makers] == ["hzplan", "ddp"] and rounds >= 6 and steps_per_round == 1
        return SimpleNamespace(
            absent={"ddp": absent} if absent else {},
            ratio=lambda slower, faster: {("ddp", "hzplan"): ratio}[slower, faster],
        )

    monkeypatch.setattr("hzplan.peers.compare.compare", compared)
    told: list[str] = []
    assert in_job._gauged(load("gpt:nano"), PLAN, DDP, 1e9, told.append) is kept
    assert said in told[-1] and len(told) == 2


def test_a_comparison_that_takes_too_long_is_left_out() -> None:
    told: list[str] = []
    assert in_job._gauged(load("gpt:nano"), PLAN, DDP, 0.0, told.append) is PLAN
    assert len(told) == 1 and "not trained beside torch's ddp" in told[0]
