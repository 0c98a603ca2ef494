"""Equal layers in one row: names that count up or down become ``layers.0–31``. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from hzplan.show.report import Tensor


@dataclass(frozen=True)
class LayerRow:
    """A row of the shards: one layer, or a run of equal ones, whose tensors carry the run's name.

    ``tensors``: by column, a tensor's name inside its layer.
    """

    name: str
    layers: int
    tensors: tuple[tuple[str, Tensor], ...]


def place(tensor: str) -> tuple[str, str]:
    """Layer and column of a tensor: its name up to the first number, and the rest."""
    parts = tensor.split(".")
    number = next((index for index, part in enumerate(parts[:-1]) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: number + 1]) or tensor, ".".join(parts[number + 1 :])


def layer_rows(tensors: Sequence[Tensor]) -> list[LayerRow]:
    """The tensors by layer, neighbouring layers that differ in their number alone as one row."""
    layers: dict[str, list[tuple[str, Tensor]]] = {}
    for tensor in tensors:
        layer, column = place(tensor.name)
        layers.setdefault(layer, []).append((column, tensor))
    names = list(layers)
    content = [
        tuple((column, t.nbytes, t.shards, _inside(t.unit, name)) for column, t in layers[name])
        for name in names
    ]
    rows = []
    for run in runs(names, content):
        first, label = names[run[0]], joined([names[at] for at in run])
        listed = layers[first]
        if len(run) > 1:
            listed = [(column, _renamed(tensor, first, label, column)) for column, tensor in listed]
        rows.append(LayerRow(label, len(run), tuple(listed)))
    return rows


def runs(names: Sequence[str], content: Sequence[Hashable]) -> Iterator[range]:
    """Indices of neighbours with equal content whose names end in numbers that count up, or down, by one."""
    start = 0
    while start < len(names):
        end, step = start + 1, 0
        while end < len(names) and content[end] == content[start]:
            between = _distance(names[end - 1], names[end])
            if between is None or step not in (0, between):
                break
            end, step = end + 1, between
        yield range(start, end)
        start = end


def joined(run: Sequence[str]) -> str:
    """The name of a run as ``runs`` finds it: ``layers.0–31``."""
    return run[0] if len(run) == 1 else f"{run[0]}–{run[-1].rpartition('.')[2]}"


def folded(names: Sequence[str]) -> str:
    """Names in a row, those that count as runs: ``embed, layers.0–31``."""
    found = runs(names, [None] * len(names))
    return ", ".join(joined([names[at] for at in run]) for run in found)


def _distance(one: str, other: str) -> int | None:
    """By how much the numbers that end two names differ, 1 or -1; None where anything else differs."""
    before, _, number = one.rpartition(".")
    after, _, next_number = other.rpartition(".")
    if before != after or not (number.isdecimal() and next_number.isdecimal()):
        return None
    between = int(next_number) - int(number)
    return between if abs(between) == 1 else None


def _inside(unit: str, layer: str) -> tuple[bool, str]:
    """Whether a unit is a layer or within it, and the rest of its name."""
    if unit == layer or unit.startswith(f"{layer}."):
        return True, unit.removeprefix(layer)
    return False, unit


def _renamed(tensor: Tensor, layer: str, label: str, column: str) -> Tensor:
    inside, rest = _inside(tensor.unit, layer)
    return replace(tensor, name=f"{label}.{column}", unit=label + rest if inside else tensor.unit)
