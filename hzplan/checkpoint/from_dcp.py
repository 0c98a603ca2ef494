"""Checkpoints of torch.distributed.checkpoint, as FSDP2's users have them, into a sharded model: every rank
reads the boxes of its own slices."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from hzplan.checkpoint.dcp_names import Names
from hzplan.checkpoint.dcp_source import Source, Stored, check_shapes, fill, open_source
from hzplan.checkpoint.entries import Entry, buffers, parameters, state_to_fill, whole
from hzplan.checkpoint.restore import NUMBERS
from hzplan.checkpoint.together import together
from hzplan.errors import UserError
from hzplan.formats.checkpoint import MODEL, STATE
from hzplan.runtime.optimizer import ShardedOptimizer


def take_weights(path: str | Path, model: nn.Module, optimizer: ShardedOptimizer) -> list[str]:
    """Give a sharded model the weights of a folder; every rank calls it, and reads its slices alone.

    Returns the names of its weights that the model does not have. UserError when one of the model's is
    missing or has another shape.
    """
    engine = optimizer.engine
    engine.synchronize()

    def taken() -> list[str]:
        source = open_source(path)
        names = Names(source, model)
        found = names.weights()
        fill(source, [(found[e.name.removeprefix(MODEL)], e) for e in _weights(model, optimizer)])
        of_state = [f"state.{name}." for name in names.firsts]
        others = source.tensors.keys() - names.of_weights
        return sorted(name for name in others if not any(part in name for part in of_state))

    unused = together(engine, taken)
    engine.refresh_parameters()
    return unused


def load_dcp(path: str | Path, model: nn.Module, optimizer: ShardedOptimizer) -> int:
    """Give a sharded model and its optimizer what a folder has of them, and return after how many steps it
    was saved, as the optimizer counts them: 0 for one that does not.

    Every rank calls it, and reads its slices alone. UserError, before anything is changed, when something is
    missing or has another shape.
    """
    engine, updates = optimizer.engine, optimizer.updates
    engine.synchronize()
    source, weights, states, wanted = together(engine, lambda: _prepare(path, model, optimizer))
    dtypes = {piece.bucket.layout.tensors[piece.index].name: piece.param.dtype for piece in updates.pieces}
    filled = state_to_fill(updates, lambda name: _keys(weights[name], states[name], dtypes[name]))
    wanted += [(states[owner][key], e) for e in filled for owner, key in [_owner_and_key(e.name)]]
    counted = [of["step"] for of in states.values() if "step" in of]
    steps = [torch.zeros(tuple(of.metadata.size), dtype=torch.float64) for of in counted]
    wanted += [(of, whole(of.name, number)) for of, number in zip(counted, steps, strict=True)]
    together(engine, lambda: fill(source, wanted))
    engine.refresh_parameters()
    return max((int(number.max()) for number in steps), default=0)


class _Prepared(NamedTuple):
    """What is there, checked; ``wanted``: of the weights."""

    source: Source
    weights: dict[str, Stored]
    states: dict[str, dict[str, Stored]]
    wanted: list[tuple[Stored, Entry]]


def _prepare(path: str | Path, model: nn.Module, optimizer: ShardedOptimizer) -> _Prepared:
    source, updates = open_source(path), optimizer.updates
    names = Names(source, model)
    weights = names.weights()
    trained = [name for name in names.firsts if model.get_parameter(name).requires_grad]
    states = names.states(trained, updates.state_keys_of, updates.class_name)
    wanted = [
        (weights[e.name.removeprefix(MODEL)], e) for e in _weights(model, optimizer) if e.values.numel()
    ]
    check_shapes(source, wanted)
    for name in trained:
        for stored in states[name].values():
            if tuple(stored.metadata.size) not in {(), tuple(weights[name].metadata.size)}:
                raise UserError(
                    f"{path}: {stored.name} is {list(stored.metadata.size)}, not as its parameter"
                )
            dtype = stored.metadata.properties.dtype
            if not dtype.is_floating_point:
                raise UserError(f"{path}: {stored.name} is {dtype}, no dtype of an optimizer's state")
    for stored in (*weights.values(), *(of for some in states.values() for of in some.values())):
        if sum(prod(chunk.sizes) for chunk in stored.metadata.chunks) < prod(stored.metadata.size):
            raise UserError(f"{stored.folder}: a part of {stored.name} is not in it")
    return _Prepared(source, weights, states, wanted)


def _weights(model: nn.Module, optimizer: ShardedOptimizer) -> list[Entry]:
    return [*parameters(optimizer.engine.units.values(), once=False), *buffers(model)]


def _owner_and_key(name: str) -> tuple[str, str]:
    owner, _, key = name.removeprefix(STATE).rpartition(".")
    return owner, key


def _keys(
    weight: Stored, state: Mapping[str, Stored], dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, bool]]:
    """Of a parameter's state: dtype, that of what is updated where it is elementwise, and whether it is one
    number for all elements."""
    shape = tuple(weight.metadata.size)
    single = {
        key: tuple(stored.metadata.size) == () and (shape != () or key in NUMBERS)
        for key, stored in state.items()
    }
    return {
        key: (stored.metadata.properties.dtype if single[key] else dtype, single[key])
        for key, stored in state.items()
    }
