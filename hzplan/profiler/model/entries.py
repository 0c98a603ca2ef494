"""A model's entries in a profile: itself, its units, and small units that travel with a neighbour."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import get_args

from hzplan.core.layout import Dtype
from hzplan.core.matrices import Shape, newton_schulz_flops
from hzplan.core.schedule import Use
from hzplan.errors import UserError
from hzplan.formats.profile import ModelEntry, TensorEntry, UnitEntry, UseEntry, signature
from hzplan.models.units import Unit
from hzplan.models.workload import Workload

SMALL = 16
"""A unit is small beside a neighbour of at least so many times its bytes: messages hardly get longer."""


def as_dtype(name: str) -> Dtype:
    """A dtype by torch's name; UserError for one that cannot be planned for."""
    for known in get_args(Dtype):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise UserError(f"dtype {name} cannot be profiled; use one of {', '.join(get_args(Dtype))}")


def model_entry(workload: Workload, units: Sequence[UnitEntry], dtype: Dtype) -> ModelEntry:
    """The model, computing in ``dtype``."""
    tensors = [tensor.spec for unit in units for tensor in unit.tensors]
    return ModelEntry(
        name=workload.name,
        parameters=sum(tensor.numel for tensor in tensors),
        signature=signature(tensors),
        dtype=dtype,
        seq_len=workload.seq_len,
    )


def largest_elements(units: Sequence[UnitEntry]) -> int:
    """Elements of the largest unit's parameters."""
    return max(sum(tensor.spec.numel for tensor in unit.tensors) for unit in units)


def trained_elements(units: Iterable[UnitEntry]) -> int:
    """Elements of all gradients."""
    return sum(tensor.spec.numel for unit in units for tensor in unit.tensors if tensor.spec.trainable)


def matrix_shapes(units: Iterable[UnitEntry]) -> list[tuple[int, int]]:
    """The different shapes of matrices to a matrix optimizer, those with the least work first."""
    shapes = (Shape.of(tensor.shape) for unit in units for tensor in unit.tensors if tensor.matrix)
    return sorted({(one.rows, one.columns) for one in shapes}, key=lambda sides: newton_schulz_flops(*sides))


def unit_entry(unit: Unit, matrices: Collection[str] = ()) -> UnitEntry:
    """A unit as found in the model; ``matrices``: the names of those to a matrix optimizer."""
    return UnitEntry(
        name=unit.name,
        module=type(unit.module).__name__,
        tensors=tuple(
            TensorEntry(
                name=tensor.name,
                shape=tensor.shape,
                dtype=as_dtype(tensor.dtype),
                trainable=tensor.trainable,
                matrix=True if tensor.name in matrices else None,
            )
            for tensor in unit.tensors
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


def joined(
    requires: Mapping[str, tuple[str, ...]], nbytes: Mapping[str, int], uses: Sequence[Use]
) -> dict[str, tuple[str, ...]]:
    """What each unit's uses need whole when small units go with the neighbour of all their uses.

    Units that go together need each other: they are then gathered and reduced in one task. Only those are
    joined that no other unit's needs tie already, and that are used as often as the neighbour, next to it.
    Of two neighbours it is the one nearer to an end of the model, so that repeated blocks stay alike.
    """
    positions: dict[str, list[int]] = {}
    for index, use in enumerate(uses):
        positions.setdefault(use.unit, []).append(index)
    free = {
        unit
        for unit in positions
        if requires[unit] == (unit,) and not any(unit in needs for u, needs in requires.items() if u != unit)
    }
    middle = sum(use.phase == "forward" for use in uses) / 2
    carrier: dict[str, str] = {}
    for unit in free:
        beside = [
            {uses[i].unit for i in (position - 1, position + 1) if 0 <= i < len(uses)}
            for position in positions[unit]
        ]
        candidates = [
            other
            for other in set.intersection(*beside) & free
            if nbytes[unit] * SMALL <= nbytes[other] and len(positions[other]) == len(positions[unit])
        ]
        if candidates:
            carrier[unit] = max(candidates, key=lambda other: (abs(positions[other][0] - middle), other))
    together: dict[str, list[str]] = {}
    for unit in requires:
        if unit in carrier and carrier[unit] not in carrier:  # nobody is carried by what is carried itself
            together.setdefault(carrier[unit], [carrier[unit]]).append(unit)
    found = dict(requires)
    for members in together.values():
        for unit in members:
            found[unit] = (unit, *(other for other in members if other != unit))
    return found
