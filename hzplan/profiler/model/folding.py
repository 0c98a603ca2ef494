"""Repeated blocks are traced once: of a long list of like blocks a pass in shapes runs four.

The first two and the last two run; the blocks between are taken to be like the second, which is checked
against the third that ran. What is found is then said of every block, as if all had run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import nn

from hzplan.core.schedule import Use

KEPT = 4
"""Blocks that run: the first two and the last two."""
LEAST = KEPT + 2
"""Blocks from which on a list is folded."""
OWN = ("layer_idx", "layer_id", "layer_number", "idx")
"""Names of a block's own number, in which blocks that are alike differ."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Fold:
    """A list of ``count`` like blocks, at ``path`` in the model."""

    path: str
    count: int

    def index(self, unit: str) -> int | None:
        """The number of the block that a unit is, or lies in; None outside of blocks."""
        found = re.match(rf"{re.escape(self.path)}\.(\d+)(\.|$)", unit)
        return int(found.group(1)) if found else None

    def renamed(self, unit: str, index: int) -> str:
        """The unit in another block."""
        return re.sub(rf"^{re.escape(self.path)}\.\d+", f"{self.path}.{index}", unit)

    def unfolded(
        self, uses: Sequence[Use], results: Sequence[Result]
    ) -> tuple[tuple[Use, ...], list[Result]] | None:
        """The uses of all blocks, and the result of each; None where the middle blocks are not alike."""
        runs = self._runs(uses)
        seen: dict[tuple[int, str], list[int]] = {}
        for index, positions in runs:
            if index is not None:
                key = index, uses[positions[0]].phase
                if key in seen:  # a block that is used twice in a pass
                    return None
                seen[key] = positions
        for (index, phase), positions in seen.items():
            if index == 1 and not self._alike(uses, positions, seen.get((2, phase), []), results):
                return None
        order: list[tuple[Use, int]] = []
        between = range(2, self.count - 2)
        for index, positions in runs:
            copies = [index]
            if index is not None and index >= 2:
                copies = [self.count - KEPT + index]
            elif index == 1 and uses[positions[0]].phase == "forward":
                copies = [1, *between]
            elif index == 1:
                copies = [*reversed(between), 1]
            for copy in copies:
                for position in positions:
                    use = uses[position]
                    name = use.unit if copy is None else self.renamed(use.unit, copy)
                    order.append((replace(use, unit=name), position))
        return tuple(use for use, _ in order), [results[position] for _, position in order]

    def _runs(self, uses: Sequence[Use]) -> list[tuple[int | None, list[int]]]:
        """Positions of uses, those of one block in one phase together."""
        runs: list[tuple[int | None, list[int]]] = []
        for position, use in enumerate(uses):
            index = self.index(use.unit)
            same = runs and index is not None and runs[-1][0] == index
            if same and uses[runs[-1][1][0]].phase == use.phase:
                runs[-1][1].append(position)
            else:
                runs.append((index, [position]))
        return runs

    def _alike(
        self,
        uses: Sequence[Use],
        second: Sequence[int],
        third: Sequence[int],
        results: Sequence[object],
    ) -> bool:
        if [self.renamed(uses[at].unit, 0) for at in second] != [
            self.renamed(uses[at].unit, 0) for at in third
        ]:
            return False
        return all(results[a] == results[b] for a, b in zip(second, third, strict=True))


def fold(model: nn.Module) -> Fold | None:
    """Shorten a model's longest list of like blocks, in place; None where it has none that is long enough."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) >= LEAST and _all_alike(module)
    ]
    if not lists:
        return None
    path, blocks = max(lists, key=lambda one: len(one[1]))
    parent_path, _, name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    tied = {id(parameter) for parameter in blocks[KEPT:].parameters()}
    for other_name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in tied and not other_name.startswith(f"{path}."):
            return None  # weights that others share
    setattr(parent, name, blocks[:KEPT])
    return Fold(path, len(blocks))


def _all_alike(blocks: nn.ModuleList) -> bool:
    first = _look(blocks[0])
    return all(_look(block) == first for block in blocks)


def _look(block: nn.Module) -> list[object]:
    """All that tells blocks apart: modules, their plain attributes, and the shapes of their tensors."""
    return [
        (
            name,
            type(module),
            sorted(
                (key, value)
                for key, value in vars(module).items()
                if key not in OWN and isinstance(value, bool | int | float | str)
            ),
            [(key, tuple(p.shape), p.dtype) for key, p in module.named_parameters(recurse=False)],
        )
        for name, module in block.named_modules()
    ]
