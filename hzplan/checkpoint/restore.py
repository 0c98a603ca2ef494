"""Loading a checkpoint into a sharded model, whatever plan and world it was saved under."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from hzplan.checkpoint.entries import (
    Entry,
    aliases,
    buffers,
    parameters,
    random_state,
    set_random_state,
    state_to_fill,
)
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
    check_fits(found, model, optimizer)
    engine.settle()
    generators = [entry.staged() for entry in random_state(engine.world.rank, engine.device)]
    goes_on = index.world == engine.world.size and all(entry.name in index.tensors for entry in generators)
    wanted = [*parameters(engine, once=False), *buffers(model)]
    wanted += state_to_fill(optimizer, lambda name: _keys(index, name))
    wanted += generators if goes_on else []
    _read(found, wanted)
    if goes_on:
        set_random_state(generators, engine.device)
    engine.adopt()
    return goes_on


def check_fits(found: Found, model: nn.Module, optimizer: ShardedOptimizer) -> None:
    """UserError naming the first tensor that differs between checkpoint and model."""
    here = {
        f"{MODEL}{tensor.name}": tensor.shape
        for unit in optimizer.engine.units.values()
        for bucket in unit.buckets
        for tensor in bucket.layout.tensors
    } | {entry.name: entry.shape for entry in buffers(model)}
    also = aliases(model)
    here |= {alias: here[name] for alias, name in also.items()}
    stored = {name: t.shape for name, t in found.index.tensors.items() if name.startswith(MODEL)}
    for name in sorted({*here, *stored}):
        if here.get(name) != stored.get(name):
            sizes = f"{_size(stored.get(name))} in the checkpoint and {_size(here.get(name))} in this model"
            raise UserError(
                f"{found.path}: of another model: {name.removeprefix(MODEL)} is {sizes}; give the model that "
                "was trained, or another folder"
            )
    for alias, name in also.items():
        if found.index.tensors[alias].chunks != found.index.tensors[name].chunks:
            raise UserError(
                f"{found.path}: of another model: {alias.removeprefix(MODEL)} is a tensor of its own there, "
                f"and in this model the same as {name.removeprefix(MODEL)}"
            )


def _size(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def _keys(index: Checkpoint, parameter: str) -> dict[str, tuple[torch.dtype, bool]]:
    """Of a parameter's state in the checkpoint: dtype, and whether it is one number for all elements."""
    shape = index.tensors[f"{MODEL}{parameter}"].shape
    return {
        key: (getattr(torch, tensor.dtype), tensor.shape == () and (shape != () or key in NUMBERS))
        for key, tensor in index.states.get(parameter, {}).items()
    }


def _read(found: Found, wanted: list[Entry]) -> None:
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load({}, storage_reader=Reader(found.path, found.index), planner=Loading(wanted), no_dist=alone)
        except CheckpointException as error:
            raise UserError(f"{found.path}: {said(error)}") from error
