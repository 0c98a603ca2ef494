"""A model larger than the device: of its units only the distinct ones are there.

Units of one class with equal shapes share one storage for their parameters, and one for what autograd saves
of them: every unit computes for real, with the first one's values. Results are wrong and times are right.
What memory the whole model would take is known from its shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hzplan.models.units import Unit, master_dtype_of
from hzplan.models.workload import Workload

SHARE = 0.5
"""Of a rank's memory: a model whose weights alone take more is folded."""

DEVIATION = 0.02
"""Of random weights: as models are initialised."""

Kind = tuple[object, ...]
Kept = tuple[Kind, int]


def is_too_large(workload: Workload, dtype: torch.dtype, memory_bytes: int) -> bool:
    """Whether a workload's weights, as built and as computed with, leave too little room on a rank."""
    try:
        with torch.device("meta"):
            model = workload.build()
    except Exception:  # the user's model, which may need values to be built
        return False
    itemsize = dtype.itemsize + (master_dtype_of(dtype).itemsize if dtype != master_dtype_of(dtype) else 0)
    return sum(parameter.numel() for parameter in model.parameters()) * itemsize > SHARE * memory_bytes


@dataclass
class Folded:
    """A model of which only distinct units are there, and what runs a step of it."""

    model: nn.Module
    units: tuple[Unit, ...]
    kinds: dict[str, Kind]
    _saved: dict[Kept, Tensor] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def step(self, loss: Callable[[], Tensor], current: Callable[[], str | None]) -> Tensor:
        """A forward; ``current`` names the unit whose turn it is, if any is.

        What a unit saves for backward is dropped where the first of its kind has saved the like.
        """
        self._saved.clear()
        self._counts.clear()
        first: dict[Kind, str] = {}

        def pack(tensor: Tensor) -> Tensor | Kept:
            unit = current() or ""
            kind = self.kinds.get(unit, (unit,))
            place = self._counts[unit] = self._counts.get(unit, -1) + 1
            if first.setdefault(kind, unit) == unit:
                self._saved[kind, place] = tensor
                return tensor
            like = self._saved.get((kind, place))
            return (kind, place) if like is not None and _alike(like, tensor) else tensor

        def unpack(kept: Tensor | Kept) -> Tensor:
            return kept if isinstance(kept, Tensor) else self._saved[kept]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return loss()


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.stride(), one.device) == (
        other.shape,
        other.dtype,
        other.stride(),
        other.device,
    )


def fold(workload: Workload, dtype: torch.dtype, device: torch.device, seed: int) -> Folded:
    """Build a workload's model on torch's meta device and put distinct units on ``device``.

    Parameters get random values in ``dtype``, buffers zeros in their own.
    """
    with torch.device("meta"):
        model = workload.build().to(master_dtype_of(dtype))
    generator = torch.Generator(device).manual_seed(seed)
    values: dict[tuple[Kind, int], Tensor] = {}
    real: dict[int, nn.Parameter] = {}
    kinds = {}
    for unit in workload.units_of(model):
        kinds[unit.name] = kind = _kind(unit)
        for place, (_, parameter) in enumerate(unit.parameters):
            if (kind, place) not in values:
                empty = torch.empty(parameter.shape, dtype=dtype, device=device)
                values[kind, place] = empty.normal_(std=DEVIATION, generator=generator)
            # A leaf of its own, in memory that others have too.
            real[id(parameter)] = nn.Parameter(
                values[kind, place].detach(), requires_grad=parameter.requires_grad
            )
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            setattr(module, name, real[id(parameter)])  # which modules such as LSTM listen to
        for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            kept = name not in module._non_persistent_buffers_set
            zeros = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
            module.register_buffer(name, zeros, persistent=kept)
    return Folded(model, workload.units_of(model), kinds)


def _kind(unit: Unit) -> Kind:
    """Equal for units that compute alike: class, shapes, what is trained; a tied unit is like no other."""
    shapes = tuple((tuple(p.shape), p.requires_grad) for _, p in unit.parameters)
    return (type(unit.module), shapes, unit.name if not shapes else "")
