"""Parameter groups of the optimizer: their options, out of it when it is saved, and back."""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch

from hzplan.formats.checkpoint import Checkpoint, StoredGroup
from hzplan.runtime.optimizer import ShardedOptimizer

OF_KERNELS = ("foreach", "fused", "capturable", "differentiable")
"""Options of torch's optimizers that say how they compute, not what."""


def groups_of(optimizer: ShardedOptimizer) -> tuple[StoredGroup, ...]:
    """The user's parameter groups as they are now; a rank that updates nothing does not have them all."""
    if not optimizer.updates.pieces:
        return ()
    return tuple(
        StoredGroup(
            names=tuple(names),
            options={
                key: said
                for key, value in group.items()
                if key != "params" and (said := _simple(value)) is not _UNSAID
            },
        )
        for names, group in zip(optimizer.updates.group_names, optimizer.param_groups, strict=False)
    )


_UNSAID = object()


def _simple(value: Any) -> Any:
    """A number, a text, nothing, or a list of them, as JSON has it; _UNSAID for anything else."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, float) and not isfinite(value):
        return _UNSAID
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list) and all(_simple(part) is not _UNSAID for part in value):
        return [_simple(part) for part in value]
    return _UNSAID


def restore_options(index: Checkpoint, optimizer: ShardedOptimizer) -> None:
    """As torch's optimizers load them: rates and the like as they were when saved, which schedulers that
    multiply them go on from; left as they are where parameters are in other groups."""
    here = [set(names) for names in optimizer.updates.group_names]
    if here != [set(group.names) for group in index.groups]:
        return
    for group, saved in zip(optimizer.param_groups, index.groups, strict=False):
        for name, value in saved.options.items():
            if name not in group or name in (*OF_KERNELS, "params"):
                continue
            if isinstance(group[name], torch.Tensor):
                group[name].fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) else value
