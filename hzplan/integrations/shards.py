"""What trainers of others need to be told of a model and an optimizer that a plan has cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hzplan.checkpoint.entries import aliases, buffers
from hzplan.formats.checkpoint import MODEL
from hzplan.runtime.apply import full_parameters
from hzplan.runtime.optimizer import ShardedOptimizer


def whole_weights(model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """A state dict of the model as before it was cut, on rank 0, with parameters in the host's memory; empty
    on others. Every rank calls it."""
    weights = full_parameters(optimizer, rank0_only=True)
    if not weights:
        return {}
    for alias, first in aliases(model).items():
        weights[alias.removeprefix(MODEL)] = weights[first.removeprefix(MODEL)]
    return {entry.name.removeprefix(MODEL): entry.values for entry in buffers(model)} | weights


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """An optimizer's groups with their options, for another of the same class."""
    return [
        {name: value for name, value in group.items() if value is not None}
        for group in optimizer.param_groups
    ]


def hand_over(scheduler: Any, optimizer: ShardedOptimizer) -> None:
    """Have a scheduler, and those in it, set another optimizer's rates."""
    scheduler.optimizer = optimizer
    for inner in getattr(scheduler, "_schedulers", ()):
        hand_over(inner, optimizer)
    step: Callable[..., Any] = optimizer.step
    if not hasattr(step, "_wrapped_by_lr_sched"):  # by which schedulers see whether there were steps

        def counted(*arguments: Any, **keywords: Any) -> Any:
            optimizer._opt_called = True  # type: ignore[attr-defined]
            return step(*arguments, **keywords)

        counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = counted  # type: ignore[method-assign]
