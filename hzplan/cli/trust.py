"""Checks before a plan's model is built: a factory that a plan names runs only when the user names it too."""

from __future__ import annotations

from pathlib import Path

from hzplan.errors import UserError
from hzplan.formats.plan import Plan


def check_alone(path: Path, plan: Plan, command: str) -> None:
    """UserError for a plan of one rank's share of a model, which the models we know are not."""
    if plan.parallel is not None:
        raise UserError(
            f"{path}: field parallel: the plan is beside {plan.parallel}, which hzplan {command} does not "
            "set up; beside tensor parallelism use hzplan.parallelize(mesh=…) in the loop that does"
        )


def check_named(path: Path, plan: Plan, model: str | None, command: str) -> None:
    """UserError for a plan of a factory when the user names no ``model``; ``command`` as typed."""
    from hzplan.models.workload import BUILT_IN

    if model is None and not plan.model.name.startswith(BUILT_IN):
        raise UserError(
            f"{path}: field model.name: {plan.model.name} is a Python factory, which is never run because a "
            f"plan says so; if you trust it: hzplan {command} {path} {plan.model.name}"
        )
