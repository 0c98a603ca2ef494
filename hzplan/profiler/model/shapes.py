"""A model's forward and backward in shapes only: its units, their uses, FLOPs and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hzplan.core.schedule import Use
from hzplan.errors import UserError, one_line
from hzplan.formats.profile import UnitEntry
from hzplan.models.recompute import Switch, leaves, switched
from hzplan.models.units import Unit
from hzplan.models.workload import Workload
from hzplan.profiler.model.entries import unit_entry
from hzplan.profiler.model.fake import FakeTurn, FakeTurns, Ledger, Rates, fake_model


@dataclass(frozen=True)
class Shapes:
    """What is known without values. ``turns``: what every use would take, by micro-batch size; ``again``: and
    where all units that can compute their forward again, empty where that is not possible.

    ``leaves``: units that can, for all that their modules say; ``looked_up``: units whose backward surely
    reads no parameter.
    """

    entries: tuple[UnitEntry, ...]
    uses: tuple[Use, ...]
    turns: Mapping[int, Sequence[FakeTurn]]
    again: Mapping[int, Sequence[FakeTurn]]
    looked_up: frozenset[str]
    leaves: frozenset[str]

    def reads(self, use: Use) -> bool:
        """Whether a use may read parameters."""
        return use.phase == "forward" or use.unit not in self.looked_up


def in_shapes(
    workload: Workload,
    dtype: str,
    sizes: Sequence[int],
    rates: Rates,
    world: int,
    progress: Callable[[str, float], None] = lambda text, fraction: None,
) -> Shapes:
    """Run a workload without memory at every micro-batch size, computing in ``dtype`` (torch's name).

    Raises UserError for a model that cannot run so, as one whose forward looks at values.
    """
    with fake_model(workload.build, getattr(torch, dtype)) as model:
        units = workload.units_of(model)
        if not any(parameter.requires_grad for unit in units for _, parameter in unit.parameters):
            raise UserError(f"{workload.name}: no parameter is trained, so there is nothing to plan")
        uses: set[tuple[Use, ...]] = set()
        turns: dict[int, Sequence[FakeTurn]] = {}
        again: dict[int, Sequence[FakeTurn]] = {}
        for number, size in enumerate(sizes):
            progress(f"forward and backward in shapes, micro-batch {size}", number / len(sizes))
            found, turns[size] = _pass(workload, model, units, size, rates, world)
            uses.add(found)
            progress(f"recomputation in shapes, micro-batch {size}", (number + 0.5) / len(sizes))
            with suppress(UserError), switched(units, keep_random_state=False) as switch:
                more, then = _pass(workload, model, units, size, rates, world, switch)
                if more == found:
                    again[size] = then
        if len(uses) > 1:
            raise UserError(
                f"{workload.name}: the order in which modules are used depends on the micro-batch size"
            )
        return Shapes(
            tuple(unit_entry(unit) for unit in units),
            uses.pop(),
            turns,
            again if len(again) == len(turns) else {},
            frozenset(unit.name for unit in units if _looks_up(unit.module)),
            leaves(units),
        )


def _pass(
    workload: Workload,
    model: nn.Module,
    units: Sequence[Unit],
    size: int,
    rates: Rates,
    world: int,
    switch: Switch | None = None,
) -> tuple[tuple[Use, ...], list[FakeTurn]]:
    """The uses of a forward and backward, and what each would cost."""
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        real = workload.batch(size, torch.Generator().manual_seed(0))
    batch = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), real)
    turns = FakeTurns(units, world)
    there = [*model.parameters(), *model.buffers(), *(t for t in tree_leaves(batch) if isinstance(t, Tensor))]
    ledger = Ledger(rates, there)
    turns.ledger = ledger
    try:
        with workload.in_shapes(), ledger:
            step = partial(workload.loss, model, batch)
            uses = turns.run(step if switch is None else switch.around(step), ledger)
            found = ledger.turns()
    except Exception as error:  # the user's model, which may raise anything
        raise UserError(
            f"{workload.name}: a forward and backward without values failed: {one_line(error)}; where the "
            "model looks at values, profile it on a device instead"
        ) from error
    finally:
        turns.detach()
    if not uses:
        raise UserError(f"{workload.name}: its loss uses no module that has parameters")
    return uses, found


def _looks_up(module: nn.Module) -> bool:
    """Whether a module's backward surely reads no parameter."""
    return type(module) is nn.Embedding and module.max_norm is None
