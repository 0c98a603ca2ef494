"""Which backward uses read no parameter: an embedding's gradient needs the tokens, not the table.

Nothing has to be gathered for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from hzplan.core.schedule import Use
from hzplan.models.units import Unit
from hzplan.profiler.model.calls import Turns

Saved = tuple[Tensor, str | None]


def unread_uses(turns: Turns, units: Sequence[Unit], step: Callable[[], Tensor]) -> frozenset[int]:
    """The indices of backward uses in which none of the parameters that the unit may need are read.

    Found by watching what autograd takes back of what it saved; then proven, because saving can be hidden
    (recomputation, functions that keep tensors themselves): in one more pass the parameters are NaN during
    those uses, and every gradient must still be finite.
    """
    owner = {p.untyped_storage().data_ptr(): unit.name for unit in units for _, p in unit.parameters}
    read: set[tuple[int, str]] = set()

    def pack(tensor: Tensor) -> Saved:
        return tensor, owner.get(tensor.untyped_storage().data_ptr())

    def unpack(saved: Saved) -> Tensor:
        tensor, unit = saved
        if unit is not None:
            read.add((turns.turn, unit))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        uses = turns.run(step)
    requires = {unit.name: unit.requires for unit in units}
    unread = frozenset(
        index
        for index, use in enumerate(uses)
        if use.phase == "backward" and not any((index, unit) in read for unit in requires[use.unit])
    )
    return unread if _finite_without(turns, units, uses, unread, step) else frozenset()


def _finite_without(
    turns: Turns,
    units: Sequence[Unit],
    uses: Sequence[Use],
    unread: frozenset[int],
    step: Callable[[], Tensor],
) -> bool:
    """Whether gradients are finite when parameters are NaN in the uses that are said not to read them."""
    if not unread:
        return True
    parameters = {unit.name: [p for _, p in unit.parameters] for unit in units}
    requires = {unit.name: unit.requires for unit in units}
    hidden: Mapping[nn.Parameter, Tensor] = {}

    def on_turn(index: int) -> None:
        nonlocal hidden
        _restore(hidden)
        hidden = {}
        if index in unread:
            concerned = [p for unit in requires[uses[index].unit] for p in parameters[unit]]
            hidden = {p: p.detach().clone() for p in concerned}
            for parameter in concerned:
                parameter.data.fill_(torch.nan)

    finite = True

    def on_gradient(gradient: Tensor) -> None:
        nonlocal finite
        finite &= bool(gradient.isfinite().all())

    try:
        with suppress(Exception):  # the user's model may raise anything about NaN
            return turns.run(step, on_turn=on_turn, on_gradient=on_gradient) == tuple(uses) and finite
        return False
    finally:
        _restore(hidden)


def _restore(hidden: Mapping[nn.Parameter, Tensor]) -> None:
    for parameter, values in hidden.items():
        parameter.data.copy_(values)
