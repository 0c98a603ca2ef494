"""One forward and backward, cut into calls of units as the runtime will cut it.

The begin of a call, told by ``models.hooks``, ends the one before. The first begins with the forward, the
last ends with the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from hzplan.core.layout import ALIGNMENT_BYTES, MASTER_DTYPE, TensorSpec
from hzplan.core.schedule import Use
from hzplan.models.hooks import attach, is_small
from hzplan.models.units import Unit
from hzplan.profiler.session.clock import Probe
from hzplan.runtime.unit import deliver

Step = Callable[[], Tensor]
"""Computes the loss of one micro-batch."""


class RecordedCalls:
    """Records the calls of a model's units, tells a probe, and takes gradients away as the runtime does.

    A call lasts from its unit's forward or backward to the next call. The first begins with the forward; the
    last unit of the forward is charged with the loss; the last call ends with the backward.
    """

    def __init__(self, units: Sequence[Unit], world: int, *, copy_gradients: bool = True) -> None:
        """``world``: ranks over which gradients are averaged; ``copy_gradients``: whether they are copied
        into a buffer, as the runtime does; else only the probe is told of them."""
        self._slots = _gradient_slots(units) if copy_gradients else {}
        self._scale = 1.0 / world
        self._small = {
            unit.name: [p for _, p in unit.parameters if p.requires_grad and is_small(p)] for unit in units
        }
        self._uses: list[Use] = []
        self._probe = Probe()
        self.detach = attach(units, self)

    @property
    def index(self) -> int:
        """The position of the current call; -1 before the first."""
        return len(self._uses) - 1

    @property
    def current_unit(self) -> str | None:
        """The unit of the current call; None before the first."""
        return self._uses[-1].unit if self._uses else None

    def run(self, step: Step, probe: Probe | None = None) -> tuple[Use, ...]:
        """Run one forward and backward; the units' uses, in order. Nothing of it stays in memory."""
        self._probe, self._uses = probe or Probe(), []
        self._probe.cut()
        loss = step()
        loss.backward()
        del loss
        self._probe = Probe()
        return tuple(self._uses)

    def enter(self, unit: str, phase: Literal["forward", "backward"]) -> None:
        """A unit's call begins."""
        if self._uses:
            self._take_small(self._uses[-1].unit)
            self._probe.cut()
        self._uses.append(Use(unit, phase))

    @torch.no_grad()
    def gradient(self, parameter: nn.Parameter) -> None:
        """The runtime's one copy: scaled, into a buffer that is there already.

        (Small whole ones autograd adds up itself, on a CPU: what that costs instead is not measured.)
        """
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self._probe.gradient(gradient)
        if self._slots:
            deliver(gradient, self._slots[id(parameter)], self._scale, accumulate=False)

    def backward_end(self) -> None:
        """The last call ends."""
        for unit in self._small:
            self._take_small(unit)
        self._probe.end()

    def _take_small(self, unit: str) -> None:
        """Take the small gradients of a unit whose call ends."""
        for parameter in self._small[unit]:
            if parameter.grad is not None:
                self.gradient(parameter)


def _gradient_slots(units: Sequence[Unit]) -> dict[int, Tensor]:
    """A place for every trained parameter's gradient, in one buffer that all units share.

    As in the runtime, in the dtype of the master weights.
    """
    places: list[tuple[nn.Parameter, TensorSpec, int]] = []
    largest = 0
    for unit in units:
        at = 0
        for (_, parameter), tensor in zip(unit.parameters, unit.tensors, strict=True):
            if tensor.trainable:
                gradient = replace(tensor, dtype=MASTER_DTYPE[tensor.dtype])
                places.append((parameter, gradient, at))
                at += -(-gradient.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        largest = max(largest, at)
    device = places[0][0].device if places else torch.device("cpu")
    buffer = torch.zeros(largest, dtype=torch.uint8, device=device)
    return {
        id(parameter): buffer[at : at + gradient.nbytes]
        .view(getattr(torch, gradient.dtype))
        .view(gradient.shape)
        for parameter, gradient, at in places
    }
