"""Finding in a user's module the part that a plan is of."""

from __future__ import annotations

from torch import nn

from hzplan.errors import UserError
from hzplan.formats.plan import Plan


def planned_part(module: nn.Module, plan: Plan) -> tuple[str, nn.Module]:
    """The prefix and the module whose parameters have the names of the plan; UserError without one."""
    planned = {name for unit in plan.units for bucket in unit.buckets for name in bucket.tensors}
    for name, part in module.named_modules():
        if {own for own, _ in part.named_parameters()} == planned:
            return (f"{name}." if name else ""), part
    raise UserError(
        f"{type(module).__name__} has no part with the parameters of the plan ({plan.model.name}); profile "
        "the model that it trains, and solve again"
    )
