"""Which parameters a matrix optimizer updates as matrices: a rule, and what a user says otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from hzplan.errors import UserError
from hzplan.models.units import Unit


@dataclass(frozen=True)
class MatrixRule:
    """Hidden matrices: trained parameters of two dimensions, or stacks of such, in modules inside of repeated
    blocks. Embeddings, heads, norms, biases and convolutions are not among them.

    ``more`` and ``without``: names, with wildcards, that are matrices beside those, and that are not.
    """

    more: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def of(self, unit: Unit) -> frozenset[str]:
        """The names of a unit's parameters that are matrices. UserError for one that a user names and that
        can be none."""
        modules = {
            f"{prefix}.{name}" if prefix else name: module
            for prefix, module in unit.module.named_modules(prefix=unit.name)
            for name, _ in module.named_parameters(recurse=False)
        }
        found = set()
        for name, parameter in unit.parameters:
            dimensions = parameter.ndim if parameter.requires_grad else 0
            if any(fnmatchcase(name, pattern) for pattern in self.more):
                if not 2 <= dimensions <= 3:
                    raise UserError(
                        f"{name} is named as a matrix, and has the shape {tuple(parameter.shape)}"
                        f"{'' if parameter.requires_grad else ' and is not trained'}; a matrix has two "
                        "dimensions, a stack of them three, and is trained"
                    )
                found.add(name)
            elif dimensions in (2, 3) and _is_hidden(name, unit.name, modules.get(name)):
                found.add(name)
        return frozenset(n for n in found if not any(fnmatchcase(n, pattern) for pattern in self.without))


def named(rule: MatrixRule, units: Iterable[Unit]) -> frozenset[str]:
    """The names of all units' parameters that a rule says are matrices."""
    return frozenset[str]().union(*(rule.of(unit) for unit in units))


def _is_hidden(name: str, unit: str, module: nn.Module | None) -> bool:
    """Whether a parameter's module is inside of its unit, and multiplies by it."""
    inside = name.removeprefix(f"{unit}.").count(".") > 0
    return inside and not isinstance(module, nn.Embedding) and not hasattr(module, "kernel_size")


def check_rule(
    rule: MatrixRule, names: set[str], said: tuple[str, str] = ("--matrix ", "--no-matrix ")
) -> None:
    """UserError for a pattern that no parameter has; ``said``: how users say both kinds."""
    for option, patterns in zip(said, (rule.more, rule.without), strict=True):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UserError(f"{option}{pattern}: no parameter is called so; one is {min(names)}")
