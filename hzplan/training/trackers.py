"""Experiment trackers: a run's figures in TensorBoard, Weights & Biases or MLflow, under the same names."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from hzplan.errors import UserError, one_line
from hzplan.formats.plan import Plan
from hzplan.training.run import StepStats

PACKAGES = ("tensorboard", "wandb", "mlflow")
"""The trackers, by the packages that they need."""
GRAMMAR = "tensorboard:FOLDER, wandb:PROJECT or mlflow:EXPERIMENT"


HELDOUT = "hzplan/heldout_loss"
"""The name of a held-out loss."""


class Tracker(Protocol):
    """Where figures go, step by step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of a step."""

    def close(self) -> None:
        """No more will come."""


MOST_FAILURES = 5
"""Steps in a row whose figures could not be sent, after which no more are: each may wait for long."""


class Lasting:
    """A tracker that a run outlasts: what it raises is a remark, and after some steps it is left alone."""

    def __init__(self, name: str, tracker: Tracker, remark: Callable[[str], None]) -> None:
        self._name, self._tracker, self._remark = name, tracker, remark
        self._failures = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See Tracker."""
        if self._failures == MOST_FAILURES:
            return
        try:
            self._tracker.log(step, values)
        except Exception as error:
            self._failures += 1
            if self._failures == 1:
                self._remark(f"--log {self._name}: step {step} is not logged: {one_line(error)}")
            elif self._failures == MOST_FAILURES:
                self._remark(f"--log {self._name}: no more is logged from step {step} on")
        else:
            self._failures = 0

    def close(self) -> None:
        """See Tracker."""
        try:
            self._tracker.close()
        except Exception as error:
            self._remark(f"--log {self._name}: does not end well: {one_line(error)}")


def values_of(stats: StepStats, plan: Plan) -> dict[str, float]:
    """A step's figures by their names, which stay: ``hzplan/loss`` (where finite), ``step_s``,
    ``tokens_per_s``, ``peak_memory_bytes``, ``measured_over_predicted`` (of the step's time), ``skipped`` (0
    or 1), of steps that were timed ``exposed_s/<tier>``, and where ranks compared it ``rounding/<tier>``."""
    found = {
        "step_s": stats.step_s,
        "tokens_per_s": stats.tokens / stats.step_s if stats.step_s else 0.0,
        "peak_memory_bytes": float(stats.peak_memory_bytes),
        "skipped": float(bool(stats.skipped)),
    }
    if plan.predicted.step_s:
        found["measured_over_predicted"] = stats.step_s / plan.predicted.step_s
    if math.isfinite(stats.loss):
        found["loss"] = stats.loss
    found |= {f"exposed_s/{tier}": seconds for tier, seconds in stats.exposed_comm_s.items()}
    found |= {f"rounding/{tier}": error for tier, error in stats.rounding.items()}
    return {f"hzplan/{name}": value for name, value in found.items()}


def open_tracker(text: str, plan: Plan, first_step: int) -> Tracker:
    """The tracker of ``tensorboard:FOLDER``, ``wandb:PROJECT`` or ``mlflow:EXPERIMENT``, told the plan's
    settings. UserError where its package is missing, or it does not begin."""
    kind, _, place = text.partition(":")
    check_tracker(text)
    made: dict[str, Callable[..., Tracker]] = {
        "tensorboard": _TensorBoard,
        "wandb": _Wandb,
        "mlflow": _Mlflow,
    }
    try:
        return made[kind](place, settings_of(plan), first_step)
    except Exception as error:  # a service that is not there, a folder that cannot be written
        raise UserError(f"--log {text}: {one_line(error)}") from error


def check_tracker(text: str) -> None:
    """UserError for what names no tracker, or one whose package is not installed."""
    kind, _, place = text.partition(":")
    if kind not in PACKAGES or not place:
        raise UserError(f"--log {text[:60]}: write {GRAMMAR}")
    if importlib.util.find_spec(kind) is None:
        raise UserError(f"--log {text}: needs the package {kind}; pip install {kind}")


def settings_of(plan: Plan) -> dict[str, Any]:
    """What of a plan tells runs apart."""
    return {
        "model": plan.model.name,
        "mesh": plan.cluster.mesh,
        "dtype": plan.model.dtype,
        "global_batch": plan.batch.global_batch,
        "micro_batch": plan.batch.micro_batch,
        "accumulation": plan.batch.accumulation,
        "prefetch": plan.prefetch,
        "predicted_step_s": plan.predicted.step_s,
        "predicted_peak_memory_bytes": plan.predicted.peak_memory_bytes,
        "gap": plan.proof.gap,
        "profile_sha256": plan.source.profile_sha256,
    }


class _TensorBoard:
    def __init__(self, place: str, settings: Mapping[str, Any], first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        again = {"purge_step": first_step} if first_step else {}
        self._writer: Any = SummaryWriter(str(Path(place)), **again)
        self._writer.add_text(
            "hzplan/plan", "\n".join(f"    {k}: {v}" for k, v in settings.items()), first_step
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, place: str, settings: Mapping[str, Any], first_step: int) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(project=place, config={f"hzplan/{k}": v for k, v in settings.items()})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(self, place: str, settings: Mapping[str, Any], first_step: int) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        self._mlflow.set_experiment(place)
        self._mlflow.start_run()
        self._mlflow.log_params({f"hzplan/{k}": v for k, v in settings.items()})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()
