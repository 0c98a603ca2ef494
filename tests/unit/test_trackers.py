"""Figures of a run in experiment trackers: stable names, one line where something is missing."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Mapping
from typing import Any

import pytest

from hzplan.errors import UserError
from hzplan.training import trackers
from hzplan.training.run import StepStats
from hzplan.training.trackers import Lasting, check_tracker, open_tracker, values_of
from tests.plans import make_plan

PLAN = make_plan("gpt:nano")
STATS = StepStats(3, 2.5, 0.2, {"node": 0.01}, 400, 1 << 20)
NAMES = {
    "hzplan/loss": 2.5,
    "hzplan/step_s": 0.2,
    "hzplan/tokens_per_s": 2000.0,
    "hzplan/peak_memory_bytes": float(1 << 20),
    "hzplan/skipped": 0.0,
    "hzplan/measured_over_predicted": 2.0,
    "hzplan/exposed_s/node": 0.01,
}


class Calls(list[tuple[Any, ...]]):
    """A package that notes what it is told."""

    def module(self, monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
        made = types.ModuleType(name)
        for function, answer in functions.items():
            setattr(made, function, self.noting(function, answer))
        monkeypatch.setitem(sys.modules, name, made)
        monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: object())

    def noting(self, name: str, answer: Any = None) -> Any:
        def note(*arguments: Any, **keywords: Any) -> Any:
            self.append((name, arguments, keywords))
            return answer

        return note


def test_names_stay() -> None:
    assert values_of(STATS, PLAN) == pytest.approx(NAMES)
    spiked = StepStats(3, math.nan, 0.2, {}, 400, 1 << 20, skipped="layers.0")
    assert "hzplan/loss" not in values_of(spiked, PLAN)
    assert values_of(spiked, PLAN)["hzplan/skipped"] == 1.0


def test_weights_and_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, run = Calls(), types.SimpleNamespace()
    run.log, run.finish = calls.noting("log"), calls.noting("finish")
    calls.module(monkeypatch, "wandb", init=run)
    tracker = open_tracker("wandb:mine", PLAN, 0)
    tracker.log(3, values_of(STATS, PLAN))
    tracker.close()
    assert [name for name, *_ in calls] == ["init", "log", "finish"]
    assert calls[0][2]["project"] == "mine" and calls[0][2]["config"]["hzplan/mesh"] == PLAN.cluster.mesh
    assert calls[1][1:] == ((pytest.approx(NAMES),), {"step": 3})


def test_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    named = ("set_experiment", "start_run", "log_params", "log_metrics", "end_run")
    calls.module(monkeypatch, "mlflow", **dict.fromkeys(named))
    tracker = open_tracker("mlflow:mine", PLAN, 0)
    tracker.log(3, values_of(STATS, PLAN))
    tracker.close()
    assert [name for name, *_ in calls] == list(named)
    assert calls[3][1:] == ((pytest.approx(NAMES),), {"step": 3})


def test_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, writer = Calls(), types.SimpleNamespace()
    for name in ("add_text", "add_scalar", "close"):
        setattr(writer, name, calls.noting(name))
    calls.module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=writer)
    tracker = open_tracker("tensorboard:folder", PLAN, 5)
    tracker.log(5, values_of(STATS, PLAN))
    tracker.close()
    assert calls[0][1:] == (("folder",), {"purge_step": 5})
    scalars = {arguments[0]: arguments[1:] for name, arguments, _ in calls if name == "add_scalar"}
    assert scalars == {name: (pytest.approx(value), 5) for name, value in NAMES.items()}


def test_a_run_outlasts_its_tracker() -> None:
    remarks: list[str] = []
    down = [False]

    class Tracker:
        def log(self, step: int, values: Mapping[str, float]) -> None:
            if down[0]:
                raise ConnectionError("nobody answers")

        def close(self) -> None:
            raise ConnectionError("nobody answers")

    lasting = Lasting("mlflow:mine", Tracker(), remarks.append)
    for step in range(20):
        down[0] = step in (2, 3) or step > 5
        lasting.log(step, {})
    lasting.close()
    assert [one.partition(": ")[2] for one in remarks] == [
        "step 2 is not logged: ConnectionError: nobody answers",
        "step 6 is not logged: ConnectionError: nobody answers",
        "no more is logged from step 10 on",
        "does not end well: ConnectionError: nobody answers",
    ]


@pytest.mark.parametrize("text", ["wandb", "wandb:", "comet:mine", ":"])
def test_what_names_no_tracker_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="write tensorboard:FOLDER"):
        check_tracker(text)


def test_a_package_that_is_missing_or_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install wandb"):
        check_tracker("wandb:mine")
    calls = Calls()
    calls.module(monkeypatch, "mlflow", set_experiment=None)
    with pytest.raises(UserError, match="--log mlflow:mine: ") as raised:
        open_tracker("mlflow:mine", PLAN, 0)
    assert "\n" not in str(raised.value)
