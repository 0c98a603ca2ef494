"""Loading a checkpoint into a sharded model, whatever plan and world it was saved under."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hzplan.checkpoint.data import fill
from hzplan.checkpoint.entries import (
    buffers,
    own_of,
    parameters,
    random_state,
    set_random_state,
    state_to_fill,
    whole,
)
from hzplan.checkpoint.fits import check_fits, check_optimizer
from hzplan.checkpoint.folder import Found
from hzplan.checkpoint.groups import restore_options
from hzplan.formats.checkpoint import MODEL, OWN, Checkpoint
from hzplan.runtime.optimizer import ShardedOptimizer

NUMBERS = ("step", "eta", "mu", "mu_product")
"""State of torch's optimizers that is one number for a whole tensor, even if that has one element only."""


def restore(
    found: Found,
    model: nn.Module,
    optimizer: ShardedOptimizer,
    together: Callable[[Callable[[], None]], Any],
) -> bool:
    """Give a model and its optimizer the values of a checkpoint; every rank calls it, between steps.

    ``together``: does work on every rank, with an error on all of them where it fails on one. Returns whether
    the generators of random numbers go on where they were: not on another world size, where they stay as they
    are. UserError when the checkpoint is of another model, before anything is changed.
    """
    engine, index = optimizer.engine, found.index
    check_fits(found.path, index, model)
    check_optimizer(found.path, index, optimizer.updates.class_name, optimizer.updates.state_keys_of)
    engine.synchronize()
    generators = random_state(engine.world.rank, engine.device)
    goes_on = index.world == engine.world.size and all(entry.name in index.tensors for entry in generators)
    wanted = [*parameters(engine.units.values(), once=False), *buffers(model)]
    wanted += state_to_fill(optimizer.updates, lambda name: _keys(index, name))
    wanted += generators if goes_on else []
    together(lambda: fill(found.path, index, wanted))
    if goes_on:
        set_random_state(generators, engine.device)
    engine.refresh_parameters()
    restore_options(index, optimizer)
    return goes_on


def own_at(path: Path, index: Checkpoint, rank: int) -> dict[str, Any] | None:
    """What a rank's loop kept for itself; None where it kept nothing."""
    stored = index.tensors.get(f"{OWN}{rank}")
    if stored is None:
        return None
    content = torch.zeros(stored.shape, dtype=torch.uint8)
    fill(path, index, [whole(f"{OWN}{rank}", content)])
    return own_of(content.numpy().tobytes())


def _keys(index: Checkpoint, parameter: str) -> dict[str, tuple[torch.dtype, bool]]:
    """Of a parameter's state in the checkpoint: dtype, and whether it is one number for all elements."""
    shape = index.tensors[f"{MODEL}{parameter}"].shape
    return {
        key: (getattr(torch, tensor.dtype), tensor.shape == () and (shape != () or key in NUMBERS))
        for key, tensor in index.states.get(parameter, {}).items()
    }
