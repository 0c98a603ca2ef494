"""A model to measure, as it is or with weights that equal units share.

A model larger than the device is measured weight-shared: units of one class with equal shapes have one
storage for their parameters, and one for the tensors that autograd saves of them. Every unit computes for
real, with the first one's values: results are wrong and times are right. The whole model's memory is known
from its shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hzplan.errors import UserError
from hzplan.formats.profile import UnitEntry
from hzplan.models.units import Unit, master_dtype_of
from hzplan.models.workload import Workload, for_training
from hzplan.profiler.model.calls import RecordedCalls, Step
from hzplan.profiler.model.entries import unit_entry
from hzplan.profiler.model.outside import Outside, requiring
from hzplan.profiler.model.shapes import (
    Shapes,
    model_on_meta,
    replace_tensors,
    trace_shapes,
)
from hzplan.profiler.session.ranks import Ranks

MAX_WEIGHTS_SHARE = 0.5
"""Share of a rank's memory that weights may take; gradients, activations and buffers need the rest. A model
with more is measured weight-shared."""

DEVIATION = 0.02
"""Standard deviation of random weights, as GPT-2's are initialised."""

UnitKind = tuple[object, ...]
SavedPlace = tuple[UnitKind, int]


@dataclass(frozen=True)
class RunnableModel:
    """A model on this rank's device, its units and their calls.

    ``entries``: the units as in a profile; ``steps``: by micro-batch size, smallest first, on this rank's
    data; ``shapes``: the model without values, where it is weight-shared or they were asked for.
    """

    name: str
    units: tuple[Unit, ...]
    entries: tuple[UnitEntry, ...]
    calls: RecordedCalls
    steps: Mapping[int, Step]
    shapes: Shapes | None
    weight_shared: bool

    def reading(self, outside: Outside) -> RunnableModel:
        """The model, whose units require also what is read during their calls."""
        units = requiring(self.units, outside)
        requires = {unit.name: unit.requires for unit in units}
        entries = tuple(one.model_copy(update={"requires": requires[one.name]}) for one in self.entries)
        return replace(self, units=units, entries=entries)

    def run_smallest(self) -> None:
        """A forward and backward of the smallest micro-batch."""
        self.calls.run(self.steps[min(self.steps)])


def build_model(
    ranks: Ranks,
    workload: Workload,
    dtype: str,
    micro_batches: Sequence[int],
    seed: int,
    memory_bytes: int,
    *,
    trace: bool,
    message: Callable[[str], None],
) -> RunnableModel:
    """Build a workload's model, computing in ``dtype`` (torch's name), find its units, and make a batch of
    every size; weights are the same on every rank, data are not.

    ``trace``: whether its shapes are wanted; ``message`` is told where they cannot be had. UserError where no
    parameter is trained, or a model that must be weight-shared cannot run without values.
    """
    torch_dtype: torch.dtype = getattr(torch, dtype)
    too_large_here = weights_exceed(workload, torch_dtype, memory_bytes)
    too_large = any(ranks.gather(too_large_here))
    shapes: Shapes | None = None
    if too_large or trace:
        try:
            shapes = trace_shapes(workload, torch_dtype, micro_batches, ranks.size)
        except UserError as error:
            if too_large:
                raise
            message(f"--known: all is measured: {error}")
    shared = share_weights(workload, torch_dtype, ranks.device, seed) if too_large else None
    model = shared.model if shared else _whole(workload, torch_dtype, ranks.device, seed)
    units = workload.units_of(model)
    calls = RecordedCalls(units, ranks.size)
    generator = torch.Generator().manual_seed(seed * ranks.size + ranks.rank)
    steps: dict[int, Step] = {}
    for size in micro_batches:
        batch = tree_map_only(Tensor, lambda t: t.to(ranks.device), workload.batch(size, generator))
        loss = partial(workload.loss, model, batch)
        steps[size] = partial(shared.forward, loss, lambda: calls.current_unit) if shared else loss
    entries = tuple(unit_entry(unit, workload.matrices_of(unit)) for unit in units)
    return RunnableModel(workload.name, units, entries, calls, steps, shapes, too_large)


def _whole(workload: Workload, dtype: torch.dtype, device: torch.device, seed: int) -> nn.Module:
    """The model as it is. As in the runtime, buffers keep the master dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = for_training(workload.build()).to(device=device, dtype=master_dtype_of(dtype))
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


def weights_exceed(workload: Workload, dtype: torch.dtype, memory_bytes: int) -> bool:
    """Whether a workload's weights, as built and as computed with, leave too little of a rank's memory."""
    try:
        with torch.device("meta"):
            model = workload.build()
    except Exception:  # the user's model, which may need values to be built
        return False
    itemsize = dtype.itemsize + (master_dtype_of(dtype).itemsize if dtype != master_dtype_of(dtype) else 0)
    return sum(parameter.numel() for parameter in model.parameters()) * itemsize > (
        MAX_WEIGHTS_SHARE * memory_bytes
    )


@dataclass
class WeightSharedModel:
    """A model whose equal units share weights and saved tensors."""

    model: nn.Module
    kinds: Mapping[str, UnitKind]
    _saved: dict[SavedPlace, Tensor] = field(default_factory=dict)

    def forward(self, loss: Step, current_unit: Callable[[], str | None]) -> Tensor:
        """Compute the loss. A tensor that a unit saves for backward is dropped where the first unit of its
        kind has saved one like it."""
        self._saved.clear()
        counts: dict[str, int] = {}
        first: dict[UnitKind, str] = {}

        def pack(tensor: Tensor) -> Tensor | SavedPlace:
            unit = current_unit() or ""
            kind = self.kinds.get(unit, (unit,))
            place = kind, counts.setdefault(unit, 0)
            counts[unit] += 1
            if first.setdefault(kind, unit) == unit:
                self._saved[place] = tensor
                return tensor
            like = self._saved.get(place)
            return place if like is not None and _layout(like) == _layout(tensor) else tensor

        def unpack(saved: Tensor | SavedPlace) -> Tensor:
            return saved if isinstance(saved, Tensor) else self._saved[saved]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return loss()


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.device


def share_weights(
    workload: Workload, dtype: torch.dtype, device: torch.device, seed: int
) -> WeightSharedModel:
    """Build a workload's model with one storage for the weights of equal units, on ``device``.

    Parameters get random values in ``dtype``, buffers zeros in their own.
    """
    model = model_on_meta(workload, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    values: dict[SavedPlace, Tensor] = {}
    values_of: dict[int, Tensor] = {}
    kinds: dict[str, UnitKind] = {}
    for unit in workload.units_of(model):
        kinds[unit.name] = kind = _kind(unit)
        for number, (_, parameter) in enumerate(unit.parameters):
            place = kind, number
            if place not in values:
                empty = torch.empty(parameter.shape, dtype=dtype, device=device)
                values[place] = empty.normal_(std=DEVIATION, generator=generator)
            values_of[id(parameter)] = values[place]
    # Each parameter is a leaf of its own, in memory that others have too.
    replace_tensors(
        model, lambda parameter: values_of[id(parameter)].detach(), partial(torch.zeros, device=device)
    )
    return WeightSharedModel(model, kinds)


def _kind(unit: Unit) -> UnitKind:
    """Equal for units that compute alike: class, shapes, which are trained; a tied unit is like no other."""
    shapes = tuple((tuple(parameter.shape), parameter.requires_grad) for _, parameter in unit.parameters)
    return (type(unit.module), shapes, unit.name if not shapes else "")
