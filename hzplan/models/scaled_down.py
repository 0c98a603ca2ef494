"""Scaled-down models: fewer of the layers that repeat, but every pair of neighbours that differs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

from torch import nn


def scale_down(
    model: nn.Module, units: Collection[str], kind: Callable[[str], Hashable], at_least: int = 2
) -> Callable[[str], str | None]:
    """Take layers out of a model's lists of units, in place; returns a function from a module's name before
    to its name now, None where it was taken out.

    ``kind``: equal for layers, by name, that are alike. Of layers in a row that are of the same kinds as
    others before them one pair remains, and the first and last layer of every list; ``at_least``: layers
    that remain in any case.
    """
    remaining: dict[str, dict[int, int]] = {}  # by list: a layer's index now, by its index before
    for path, layers in _lists(model, units):
        chosen = neighbourhoods([kind(f"{path}.{index}") for index in range(len(layers))], at_least)
        remaining[path] = {before: now for now, before in enumerate(chosen)}
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, nn.ModuleList(layers[index] for index in chosen))

    def renamed(name: str) -> str | None:
        for path, indices in remaining.items():
            if name.startswith(f"{path}."):
                index, _, rest = name.removeprefix(f"{path}.").partition(".")
                if int(index) not in indices:
                    return None
                return ".".join(filter(None, (path, str(indices[int(index)]), rest)))
        return name

    return renamed


def neighbourhoods(kinds: Sequence[Hashable], at_least: int = 2) -> list[int]:
    """Indices of both layers of the first pair of every two kinds, of the first and the last layer; then of
    the first others, until there are ``at_least`` so many."""
    chosen = {0, len(kinds) - 1} if kinds else set()
    seen: set[tuple[Hashable, Hashable]] = set()
    for index in range(1, len(kinds)):
        pair = kinds[index - 1], kinds[index]
        if pair not in seen:
            seen.add(pair)
            chosen |= {index - 1, index}
    left_out = [index for index in range(len(kinds)) if index not in chosen]
    chosen.update(left_out[: max(0, at_least - len(chosen))])
    return sorted(chosen)


def _lists(model: nn.Module, units: Collection[str]) -> Iterator[tuple[str, nn.ModuleList]]:
    """The outermost lists whose members are units or hold units."""
    outer: list[str] = []
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{other}.") for other in outer):
            outer.append(path)
            prefix = f"{path}."
            inside = {
                unit.removeprefix(prefix).partition(".")[0] for unit in units if unit.startswith(prefix)
            }
            if inside >= {str(index) for index in range(len(module))}:
                yield path, module
