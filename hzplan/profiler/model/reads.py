"""Which backward uses read no parameter: an embedding's gradient needs the tokens, not the table.

Nothing has to be gathered for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from hzplan.core.schedule import Use
from hzplan.models.units import Unit
from hzplan.profiler.model.calls import RecordedCalls, Step
from hzplan.profiler.session.clock import Probe

Saved = tuple[Tensor, str | None]


def unread_uses(calls: RecordedCalls, units: Sequence[Unit], step: Step) -> frozenset[int]:
    """The indices of backward uses in which none of the parameters that the unit may need are read.

    Found by watching which saved tensors autograd takes back; then proven, because saving can be hidden
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
            read.add((calls.index, unit))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        uses = calls.run(step)
    requires = {unit.name: unit.requires for unit in units}
    unread = frozenset(
        index
        for index, use in enumerate(uses)
        if use.phase == "backward" and not any((index, unit) in read for unit in requires[use.unit])
    )
    if not unread:
        return unread
    parameters = {unit.name: [p for _, p in unit.parameters] for unit in units}
    hiding = _NotANumber(
        {index: [p for unit in requires[uses[index].unit] for p in parameters[unit]] for index in unread}
    )
    as_before: Sequence[Use] = ()
    try:
        with suppress(Exception):  # the user's model may raise anything about NaN
            as_before = calls.run(step, hiding)
    finally:
        hiding.restore()
    return unread if as_before == uses and hiding.finite else frozenset()


class _NotANumber(Probe):
    """Makes parameters NaN during calls, and sees whether gradients stay ``finite``."""

    def __init__(self, parameters: Mapping[int, Sequence[nn.Parameter]]) -> None:
        """``parameters``: to be hidden, by the position of the call."""
        self._parameters = parameters
        self._values: Mapping[nn.Parameter, Tensor] = {}
        self._index = -1
        self.finite = True

    def cut(self) -> None:
        self.restore()
        self._index += 1
        self._values = {p: p.detach().clone() for p in self._parameters.get(self._index, ())}
        for parameter in self._values:
            parameter.data.fill_(torch.nan)

    def gradient(self, gradient: Tensor) -> None:
        self.finite &= bool(gradient.isfinite().all())

    def restore(self) -> None:
        """Give parameters their values back."""
        for parameter, values in self._values.items():
            parameter.data.copy_(values)
        self._values = {}
