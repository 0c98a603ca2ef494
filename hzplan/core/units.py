"""How units lie in a model, by their names. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def is_inside(inner: str, outer: str) -> bool:
    """Whether a module is another's, by their paths; the whole model, "", has all others."""
    return outer == "" or inner.startswith(f"{outer}.")


def beside_each_other(requires: Mapping[str, tuple[str, ...]]) -> set[str]:
    """The units that share a tensor without one being inside of the other, such as a head that is tied to the
    embedding. ``requires``: by unit those that it needs the parameters of."""
    return {
        name
        for unit, others in requires.items()
        for other in others
        if other != unit and not is_inside(unit, other) and not is_inside(other, unit)
        for name in (unit, other)
    }
