"""Parameters that are read outside of their own module's forward: by a head that multiplies with an
embedding's table without calling it, by an attention that multiplies with its output projection's weight.

They must be whole in the call during which they are read, whichever unit's that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hzplan.errors import UserError
from hzplan.models.local import local
from hzplan.models.units import Unit

Outside = Mapping[str, tuple[str, ...]]
"""By unit, the others whose parameters are read during its calls though they are not known to be needed."""


class OutsideReads(TorchDispatchMode):
    """Sees what operations read, in every call, and whose gradients come. A view reads nothing: what is done
    with it does. A gradient may need no parameter, but comes to whoever is there for it."""

    supports_higher_order_operators = True

    def __init__(self, units: Sequence[Unit], current_unit: Callable[[], str | None]) -> None:
        """``current_unit``: whose call it is; None before the first. ``met``: the units of which anything was
        read, or had a gradient."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._current_unit = current_unit
        self._parameters = [(unit.name, name, p) for unit in units for name, p in unit.parameters]
        self._owners = {_storage(p): (unit, name) for unit, name, p in self._parameters}
        self._requires = {unit.name: {*unit.requires} for unit in units}
        self._found: dict[str, dict[str, None]] = {}
        self._too_early = ""
        self.met: set[str] = set()

    def __enter__(self) -> OutsideReads:
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._note_gradient, unit, name))
            for unit, name, p in self._parameters
            if p.requires_grad
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def _note_gradient(self, owner: str, parameter: str, tensor: Tensor) -> None:
        self._note(owner, parameter)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        read, made = _storages((args, kwargs)), _storages(result)
        schema = getattr(func, "_schema", None)  # operations that take functions have none
        if schema is None or schema.is_mutable or not made or not made <= read:
            for storage in read & self._owners.keys():
                self._note(*self._owners[storage])
        return result

    def _note(self, owner: str, parameter: str) -> None:
        unit = self._current_unit()
        self.met.add(owner)
        if unit is None:
            self._too_early = parameter
        elif owner not in self._requires[unit]:
            self._found.setdefault(unit, {})[owner] = None

    @property
    def found(self) -> Outside:
        """What was read so far. UserError where that was before the first call, when nothing is whole."""
        if self._too_early:
            raise UserError(
                f"the parameter {self._too_early} is read before the forward of any module that has "
                "parameters; read it in its module's forward"
            )
        return {unit: tuple(sorted(owners)) for unit, owners in self._found.items()}


def merged(found: Iterable[Outside]) -> Outside:
    """Everything that was read in any pass, or on any rank."""
    owners: dict[str, set[str]] = {}
    for one in found:
        for unit, read in one.items():
            owners.setdefault(unit, set()).update(read)
    return {unit: tuple(sorted(read)) for unit, read in sorted(owners.items())}


def requiring(units: Iterable[Unit], outside: Outside) -> tuple[Unit, ...]:
    """The units, which require also what is read during their calls."""
    return tuple(
        replace(unit, requires=tuple(dict.fromkeys([*unit.requires, *outside.get(unit.name, ())])))
        for unit in units
    )


def _storages(values: Any) -> set[int]:
    return {_storage(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}


def _storage(tensor: Tensor) -> int:
    """What tells a tensor's memory from others', of tensors without values too."""
    try:
        return int(local(tensor).untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a kind of tensor that has none, as sparse ones
        return id(tensor)
