"""One forward and backward, cut into turns as the runtime will cut it."""

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
from hzplan.profiler.session.probe import Probe, Silence
from hzplan.runtime.unit import deliver


class Turns:
    """Hears of the uses of a model's units, tells a probe, and takes gradients away as the runtime does.

    A turn lasts from its use's enter to the next one's. The first begins with the forward; the last unit of
    the forward is charged with the loss; the last turn ends with the backward.
    """

    def __init__(self, units: Sequence[Unit], world: int) -> None:
        self._slots = _gradient_slots(units)
        self._scale = 1.0 / world
        self._small = {
            unit.name: [p for _, p in unit.parameters if p.requires_grad and is_small(p)] for unit in units
        }
        self._uses: list[Use] = []
        self._probe: Probe = Silence()
        self._on_turn: Callable[[int], None] | None = None
        self._on_gradient: Callable[[Tensor], None] | None = None
        self.detach = attach(units, self)

    @property
    def turn(self) -> int:
        """The index of the use whose turn it is."""
        return len(self._uses) - 1

    @property
    def unit(self) -> str | None:
        """Whose turn it is; None before the first."""
        return self._uses[-1].unit if self._uses else None

    def run(
        self,
        step: Callable[[], Tensor],
        probe: Probe | None = None,
        *,
        on_turn: Callable[[int], None] | None = None,
        on_gradient: Callable[[Tensor], None] | None = None,
    ) -> tuple[Use, ...]:
        """One pass; ``step`` computes the loss. Returns the uses in order, with nothing of it kept.

        ``on_turn`` hears of every turn as it begins, ``on_gradient`` of every gradient.
        """
        self._probe, self._uses = probe or Silence(), []
        self._on_turn, self._on_gradient = on_turn, on_gradient
        self._probe.cut()
        loss = step()
        loss.backward()
        del loss
        self._probe, self._on_turn, self._on_gradient = Silence(), None, None
        return tuple(self._uses)

    def enter(self, unit: str, phase: Literal["forward", "backward"]) -> None:
        """A unit's turn begins."""
        if self._uses:
            self._take_small(self._uses[-1].unit)
            self._probe.cut()
        self._uses.append(Use(unit, phase))
        if self._on_turn is not None:
            self._on_turn(self.turn)

    @torch.no_grad()
    def gradient(self, parameter: nn.Parameter) -> None:
        """The runtime's one copy: scaled, into a buffer that is there already."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if self._on_gradient is not None:
            self._on_gradient(gradient)
        deliver(gradient, self._slots[id(parameter)], self._scale, accumulate=False)

    def backward_end(self) -> None:
        """The last turn ends."""
        for unit in self._small:
            self._take_small(unit)
        self._probe.end()

    def _take_small(self, unit: str) -> None:
        """Of a unit whose turn ends."""
        for parameter in self._small[unit]:
            if parameter.grad is not None:
                self.gradient(parameter)


def _gradient_slots(units: Sequence[Unit]) -> dict[int, Tensor]:
    """A place for every trained parameter's gradient, in one buffer that all units use in turn.

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
