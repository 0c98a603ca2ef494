"""Fewer layers of a model that repeats them, such that every pair of neighbours that differs remains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

from torch import nn


def thin(
    model: nn.Module, units: Collection[str], kind: Callable[[str], Hashable], least: int = 2
) -> Callable[[str], str | None]:
    """Take layers out of a model's lists of units, in place; how names of before are called now, if at all.

    ``kind``: what a layer, by its name, is told apart by. Of layers in a row that are of the same kinds as
    others before them, one pair is kept, and the first and last layer of every list, and at least so many.
    """
    kept: dict[str, dict[int, int]] = {}
    for path, layers in _lists(model, units):
        chosen = neighbourhoods([kind(f"{path}.{index}") for index in range(len(layers))], least)
        kept[path] = {index: place for place, index in enumerate(chosen)}
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, nn.ModuleList(layers[index] for index in chosen))

    def renamed(name: str) -> str | None:
        for path, places in kept.items():
            if name.startswith(f"{path}."):
                index, _, rest = name.removeprefix(f"{path}.").partition(".")
                if int(index) not in places:
                    return None
                return ".".join(filter(None, (path, str(places[int(index)]), rest)))
        return name

    return renamed


def neighbourhoods(kinds: Sequence[Hashable], least: int = 2) -> list[int]:
    """Both of the first neighbours of every pair of kinds, and the first and last of all; then the first of
    those left out, until there are ``least``."""
    found = {0, len(kinds) - 1} if kinds else set()
    seen: set[tuple[Hashable, Hashable]] = set()
    for index in range(1, len(kinds)):
        pair = kinds[index - 1], kinds[index]
        if pair not in seen:
            seen.add(pair)
            found |= {index - 1, index}
    left_out = [index for index in range(len(kinds)) if index not in found]
    found.update(left_out[: max(0, least - len(found))])
    return sorted(found)


def _lists(model: nn.Module, units: Collection[str]) -> Iterator[tuple[str, nn.ModuleList]]:
    """The outermost lists whose members are units or hold units."""
    outer: list[str] = []
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{other}.") for other in outer):
            outer.append(path)
            inside = {
                unit.removeprefix(f"{path}.").partition(".")[0]
                for unit in units
                if unit.startswith(f"{path}.")
            }
            if inside >= {str(index) for index in range(len(module))}:
                yield path, module
