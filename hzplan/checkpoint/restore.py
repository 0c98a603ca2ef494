"""Loading a checkpoint into a sharded model, whatever plan and world it was saved under."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from hzplan.checkpoint.entries import (
    Entry,
    buffers,
    parameters,
    random_state,
    set_random_state,
    state_to_fill,
)
from hzplan.checkpoint.fits import check_fits, check_optimizer
from hzplan.checkpoint.folder import Found
from hzplan.checkpoint.planners import Loading
from hzplan.checkpoint.save import said
from hzplan.checkpoint.storage import Reader
from hzplan.errors import UserError
from hzplan.formats.checkpoint import MODEL, Checkpoint
from hzplan.runtime.optimizer import ShardedOptimizer

NUMBERS = ("step", "eta", "mu", "mu_product")
"""State of torch's optimizers that is one number for a whole tensor, even if that has one element only."""


def restore(found: Found, model: nn.Module, optimizer: ShardedOptimizer) -> bool:
    """Give a model and its optimizer the values of a checkpoint; every rank calls it, between steps.

    Returns whether the generators of random numbers go on where they were: not on another world size, where
    they stay as they are. UserError when the checkpoint is of another model, before anything is changed.
    """
    engine, index = optimizer.engine, found.index
    check_fits(found.path, index, model)
    check_optimizer(found.path, index, optimizer.updates.class_name)
    engine.synchronize()
    generators = [entry.staged() for entry in random_state(engine.world.rank, engine.device)]
    goes_on = index.world == engine.world.size and all(entry.name in index.tensors for entry in generators)
    wanted = [*parameters(engine.units.values(), once=False), *buffers(model)]
    wanted += state_to_fill(optimizer.updates, lambda name: _keys(index, name))
    wanted += generators if goes_on else []
    fill(found.path, index, wanted, alone=not dist.is_initialized() or dist.get_world_size() == 1)
    if goes_on:
        set_random_state(generators, engine.device)
    engine.refresh_parameters()
    return goes_on


def _keys(index: Checkpoint, parameter: str) -> dict[str, tuple[torch.dtype, bool]]:
    """Of a parameter's state in the checkpoint: dtype, and whether it is one number for all elements."""
    shape = index.tensors[f"{MODEL}{parameter}"].shape
    return {
        key: (getattr(torch, tensor.dtype), tensor.shape == () and (shape != () or key in NUMBERS))
        for key, tensor in index.states.get(parameter, {}).items()
    }


def fill(path: Path, index: Checkpoint, wanted: list[Entry], *, alone: bool) -> None:
    """Read all entries, on every rank of the job its own; ``alone``: in this process only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load({}, storage_reader=Reader(path, index), planner=Loading(wanted), no_dist=alone)
        except CheckpointException as error:
            raise UserError(f"{path}: {said(error)}") from error
