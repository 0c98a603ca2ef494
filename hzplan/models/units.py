"""Finding the units of a model: the modules that are unsharded, computed and released as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from hzplan.core.layout import ITEM_BYTES, MASTER_DTYPE, TensorSpec
from hzplan.errors import UserError
from hzplan.models.local import local


@dataclass(frozen=True)
class Unit:
    """A module, the parameters that it owns, and the units that a use of it needs whole.

    A parameter belongs to the first unit that holds it; a unit that holds another's parameter (tied weights)
    requires that unit. A unit inside another one requires the outer one.
    """

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]
    requires: tuple[str, ...]

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The owned parameters as the arithmetic of layouts sees them."""
        return tuple(tensor_spec(name, parameter) for name, parameter in self.parameters)

    def computed_in(self, dtype: str | None) -> tuple[TensorSpec, ...]:
        """``tensors`` as a plan that computes in ``dtype``, torch's name, shards them; None: as they are."""
        return tuple(t if dtype is None else t.computed_in(dtype) for t in self.tensors)


def tensor_spec(name: str, parameter: nn.Parameter) -> TensorSpec:
    """Name, this rank's shape, and dtype of a parameter; UserError for a dtype that cannot be sharded."""
    dtype = dtype_name(parameter.dtype)
    if dtype not in ITEM_BYTES:
        raise UserError(f"parameter {name} has dtype {dtype}; supported are {', '.join(ITEM_BYTES)}")
    return TensorSpec(name, tuple(local(parameter).shape), dtype, parameter.requires_grad)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as layouts and files name it: without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def master_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a model that computes in ``dtype`` is built, and its master weights are kept."""
    found: torch.dtype = getattr(torch, MASTER_DTYPE[dtype_name(dtype)])
    return found


def find_units(model: nn.Module, blocks: Iterable[str] | None = None) -> tuple[Unit, ...]:
    """Repeated blocks are a unit each; every other module with parameters of its own is one too.

    Repeated blocks are the children of a ModuleList, or of a Sequential in which a class with parameters
    below its own children occurs at least twice; the outermost such container counts, and of lists in a list
    the inner ones. ``blocks``: the names of other modules to take for them (of one inside another the outer
    one counts).
    """
    return _units(model, dict(_blocks(model, "")) if blocks is None else _named(model, blocks))


def blocks_like(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...] | None:
    """The modules with parameters whose class is named, or whose name matches, as in ``encoder.*.layers.*``.

    None without patterns. UserError for a pattern that nothing matches.
    """
    if not patterns:
        return None
    found: list[str] = []
    matched: set[str] = set()
    for name, module in model.named_modules():
        fitting = [
            pattern for pattern in patterns if pattern == type(module).__name__ or fnmatchcase(name, pattern)
        ]
        if fitting and next(module.parameters(), None) is not None:
            found.append(name)
            matched.update(fitting)
    for pattern in patterns:
        if pattern not in matched:
            classes = sorted(
                {
                    type(module).__name__
                    for module in model.modules()
                    if next(module.parameters(), None) is not None
                }
            )
            raise UserError(
                f"--unit {pattern}: no module with parameters has this class or name; classes are "
                + ", ".join(classes)
            )
    return tuple(found)


def blocks_of(units: Collection[str]) -> tuple[str, ...]:
    """Of units' names those that may be blocks: with no other unit inside."""
    return tuple(name for name in units if not any(_inside(other, name) for other in units))


def _inside(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _named(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    wanted, there = set(names), dict(model.named_modules())
    for name in sorted(wanted - there.keys()):
        raise UserError(f"the plan names unit {name}, which the model does not have; profile and solve again")
    return {
        name: module
        for name, module in there.items()
        if name in wanted and not any(_inside(name, other) for other in wanted)
    }


def _units(model: nn.Module, blocks: Mapping[str, nn.Module]) -> tuple[Unit, ...]:
    owners: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = next((block for block in blocks if name == block or _inside(name, block)), None)
        if inside is not None:
            owners.setdefault(inside, blocks[inside])
        elif next(module.parameters(recurse=False), None) is not None:
            owners[name] = module
    held = {
        name: tuple(module.named_parameters(prefix=name, recurse=name in blocks))
        for name, module in owners.items()
    }
    owner_of: dict[int, str] = {}
    for name, parameters in held.items():
        for _, parameter in parameters:
            owner_of.setdefault(id(parameter), name)
    return tuple(
        Unit(
            name=name,
            module=owners[name],
            parameters=tuple(
                (path, parameter) for path, parameter in parameters if owner_of[id(parameter)] == name
            ),
            requires=_requires(name, parameters, owner_of, owners),
        )
        for name, parameters in held.items()
    )


def _requires(
    name: str,
    parameters: tuple[tuple[str, nn.Parameter], ...],
    owner_of: dict[int, str],
    owners: dict[str, nn.Module],
) -> tuple[str, ...]:
    around = [other for other in owners if _inside(name, other)]
    tied = [owner_of[id(parameter)] for _, parameter in parameters]
    return tuple(dict.fromkeys([name, *around, *tied]))


def _blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if _repeats(child):
            yield from _members(child, path)
        else:
            yield from _blocks(child, f"{path}.")


def _members(container: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The blocks of a container; of containers in it, which nobody calls, their own."""
    for index, block in container.named_children():
        if isinstance(block, nn.ModuleList | nn.ModuleDict):
            yield from _members(block, f"{path}.{index}")
        elif next(block.parameters(), None) is not None:
            yield f"{path}.{index}", block


def _repeats(container: nn.Module) -> bool:
    if isinstance(container, nn.ModuleList):
        return True
    if not isinstance(container, nn.Sequential):
        return False
    composite = Counter(
        type(child)
        for child in container.children()
        if next(child.children(), None) is not None and next(child.parameters(), None) is not None
    )
    return any(count >= 2 for count in composite.values())
