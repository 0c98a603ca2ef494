"""A model's side of a profile: what it is, and its units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from hzplan.errors import UserError
from hzplan.formats.profile import ModelEntry, TensorEntry, UnitEntry, UseEntry, signature
from hzplan.layout import Dtype, TensorSpec
from hzplan.models.units import Unit
from hzplan.models.workload import Workload
from hzplan.profiler.joined import joined


def as_dtype(name: str) -> Dtype:
    """A dtype by torch's name; UserError for one that cannot be planned for."""
    for known in get_args(Dtype):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise UserError(f"dtype {name} cannot be profiled; use one of {', '.join(get_args(Dtype))}")


def model_entry(workload: Workload, tensors: Sequence[TensorSpec], dtype: Dtype) -> ModelEntry:
    """The model, computing in ``dtype``."""
    return ModelEntry(
        name=workload.name,
        parameters=sum(tensor.numel for tensor in tensors),
        signature=signature(tensors),
        dtype=dtype,
        seq_len=workload.seq_len,
    )


def unit_entry(unit: Unit) -> UnitEntry:
    """A unit as found in the model."""
    return UnitEntry(
        name=unit.name,
        module=type(unit.module).__name__,
        tensors=tuple(
            TensorEntry(name=t.name, shape=t.shape, dtype=as_dtype(t.dtype), trainable=t.trainable)
            for t in unit.tensors
        ),
        requires=unit.requires,
    )


def joined_units(units: Sequence[UnitEntry], uses: Sequence[UseEntry]) -> tuple[UnitEntry, ...]:
    """The units, small ones with the neighbour that they travel with."""
    requires = joined(
        {unit.name: unit.requires for unit in units},
        {unit.name: sum(tensor.spec.nbytes for tensor in unit.tensors) for unit in units},
        [use.use for use in uses],
    )
    return tuple(unit.model_copy(update={"requires": requires[unit.name]}) for unit in units)
