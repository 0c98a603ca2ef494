"""Whether a checkpoint is of a model: names, shapes, and which of them are one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path

from torch import nn

from hzplan.checkpoint.entries import aliases, buffers
from hzplan.errors import UserError
from hzplan.formats.checkpoint import MODEL, Checkpoint
from hzplan.runtime.relaxed.sync import OUTER

FLOATING = ("float64", "float32", "bfloat16", "float16", "complex128", "complex64")
"""Dtypes that parameters and their optimizer's state may have in a checkpoint."""


def check_optimizer(path: Path, index: Checkpoint, optimizer: str, keys: Mapping[str, Set[str]]) -> None:
    """UserError when another class's state was saved, or without one of the ``keys`` that a parameter with
    state has under this optimizer's options."""
    if index.optimizer != optimizer:
        raise UserError(
            f"{path}: was trained with {index.optimizer}, whose state {optimizer} cannot go on with; use "
            "that, or begin anew from its weights (hzplan weights, then --weights)"
        )
    for parameter, state in index.states.items():
        own = {key for key in state if not key.startswith(OUTER)}
        if own and (missing := keys.get(parameter, frozenset()) - own):
            raise UserError(
                f"{path}: has no {min(missing)} of {parameter}, which {optimizer} keeps with these options; "
                "give those of the run that saved it (amsgrad, momentum, centered; of Muon the same "
                "matrices), or begin anew from its weights (hzplan weights, then --weights)"
            )
        for key, tensor in state.items():
            _check_floating(path, f"{key} of {parameter}", tensor.dtype)


def _check_floating(path: Path, name: str, dtype: str) -> None:
    if dtype not in FLOATING:
        raise UserError(f"{path}: {name} is {dtype}, no dtype of a parameter or its optimizer's state")


def check_fits(path: Path, index: Checkpoint, model: nn.Module) -> None:
    """UserError naming the first tensor that differs; the model may be on the meta device."""
    here = {f"{MODEL}{name}": tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    here |= {entry.name: entry.shape for entry in buffers(model)}
    stored = {name: tensor.shape for name, tensor in index.tensors.items() if name.startswith(MODEL)}
    for name in sorted({*here, *stored}):
        if 0 in here.get(name, ()):
            continue  # without elements there is nothing to save
        if here.get(name) != stored.get(name):
            sizes = f"{_size(stored.get(name))} in the checkpoint and {_size(here.get(name))} in this model"
            raise UserError(
                f"{path}: of another model: {name.removeprefix(MODEL)} is {sizes}; give the model that was "
                "trained, or another folder"
            )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.dtype.is_floating_point and f"{MODEL}{name}" in index.tensors:
            _check_floating(path, name, index.tensors[f"{MODEL}{name}"].dtype)
    also = aliases(model)
    known: dict[str, str] = {}
    for name in (name for name in here if name in index.tensors and name not in also):
        if (other := known.setdefault(index.first_name(name), name)) != name:
            raise UserError(
                f"{path}: of another model: {name.removeprefix(MODEL)} is the same tensor as "
                f"{other.removeprefix(MODEL)} there, and one of its own in this model"
            )
    for alias, name in also.items():
        if index.first_name(alias) != index.first_name(name):
            raise UserError(
                f"{path}: of another model: {alias.removeprefix(MODEL)} is a tensor of its own there, and in "
                f"this model the same as {name.removeprefix(MODEL)}"
            )


def _size(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))
