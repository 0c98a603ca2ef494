"""Order, timing, mutations that must fail, and steps that leave the schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.schedule import Kind, Task, Use
from hzplan.errors import StreamError
from hzplan.runtime.apply import Choice, apply
from hzplan.runtime.tasks import Tasks
from tests.distributed.ranks import on_ranks

pytestmark = pytest.mark.distributed
MODULE = "tests.distributed.behaviour"


def test_launch_order_is_the_schedules(tmp_path: Path) -> None:
    for found in on_ranks(4, f"{MODULE}:launch_order", None, tmp_path).values():
        assert found["scheduled"]
        for launched in found["launched"]:  # of every rank
            assert launched == found["scheduled"]
        assert found["ran_by_stream"] == found["scheduled_by_stream"]


@pytest.mark.parametrize("number", [4, pytest.param(25, marks=pytest.mark.long)])
def test_nothing_depends_on_timing(number: int, tmp_path: Path) -> None:
    found = on_ranks(4, f"{MODULE}:random_delays", number, tmp_path)
    assert len(found) == 2  # with clipping and without
    for first, *others in found.values():
        assert len(others) == number
        assert all(losses == first for losses in others)  # bit for bit


def test_communication_allocates_nothing(tmp_path: Path) -> None:
    """After the second step: no new storage in any operation of a communication task, on any stream."""
    found = on_ranks(4, f"{MODULE}:allocations", None, tmp_path)
    assert len(found) == 5
    for name, counts in found.items():
        assert counts["operations"] > 100, name
        assert counts["nbytes"] == 0, name
        assert not counts["moved"], name


@pytest.mark.long
def test_mutants_are_caught(tmp_path: Path) -> None:
    found = on_ranks(4, f"{MODULE}:mutations", None, tmp_path)
    mutants = {name: max(errors) for name, errors in found.items() if not name.startswith("unmutated")}
    sound = {name: max(errors) for name, errors in found.items() if name.startswith("unmutated")}
    assert len(mutants) == 4 and len(sound) == 4
    assert all(error <= 1e-9 for error in sound.values()), sound
    assert all(error > 1e-6 for error in mutants.values()), mutants


def test_steps_outside_the_schedule_are_correct(tmp_path: Path) -> None:
    found = on_ranks(4, f"{MODULE}:unscheduled", None, tmp_path)
    assert len(found) == 14
    for name, values in found.items():
        if name.endswith("scheduled"):
            #        plain skip plain twice evaluate plain inside skip plain unlike plain
            assert values == [1, 0, 1, 0, 1, 1, 1, 0, 1, 0, 1], name
        else:
            assert max(values) <= 1e-9, name


def test_misuse_is_loud(tmp_path: Path) -> None:
    found = on_ranks(4, f"{MODULE}:misuse", None, tmp_path)
    assert "without a backward pass" in found["step too early"]
    assert found["outside its turn"] == "True"


def test_an_error_on_a_stream_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    uses = (Use("0", "forward"), Use("1", "forward"), Use("1", "backward"), Use("0", "backward"))
    levels = {name: Levels(0, 0, 0) for name, _ in model.named_parameters()}
    run = Tasks.run

    def broken(self: Tasks, task: Task, scratch: int = 0) -> None:
        if task.kind is Kind.UPDATE:
            raise ValueError("no more room")
        run(self, task, scratch)

    monkeypatch.setattr(Tasks, "run", broken)
    model, optimizer = apply(
        model, Choice(Mesh.parse("1"), levels, uses, 1, 1, False), torch.optim.SGD, lr=0.1
    )
    with pytest.raises(
        StreamError, match=r"^stream optim, task update@\d 1: ValueError: no more room$"
    ) as raised:
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    assert isinstance(raised.value.__cause__, ValueError)
