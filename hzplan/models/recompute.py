"""Recomputation (activation checkpointing) of units: forward keeps what went in, and is computed again.

The wrapper lies inside of a unit's hooks: what they hear is the same with it and without, so the recorded
uses are, and the second forward happens within the unit's turn of backward, when its parameters are whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hzplan.models.units import Unit


def leaves(units: Iterable[Unit]) -> frozenset[str]:
    """The units that have no other unit inside, whose turn a second forward of theirs would begin."""
    listed = list(units)
    modules = {id(unit.module) for unit in listed}
    return frozenset(
        unit.name
        for unit in listed
        if not any(id(module) in modules for module in unit.module.modules() if module is not unit.module)
    )


def recompute(
    module: nn.Module, wanted: Callable[[], bool] = lambda: True, *, keep_random_state: bool = True
) -> Callable[[], None]:
    """Let a module compute its forward again in backward, where that is ``wanted`` when forward begins; the
    function returned undoes it. ``keep_random_state``: dropout is the same both times."""
    forward = module.forward
    own = module.__dict__.get("forward")

    @functools.wraps(forward)
    def again(*arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled() or not wanted():
            return forward(*arguments, **keywords)
        return checkpoint(
            forward,
            *arguments,
            use_reentrant=False,
            preserve_rng_state=keep_random_state,
            **keywords,
        )

    module.forward = again

    def undo() -> None:
        if own is None:
            del module.forward
        else:
            module.forward = own

    return undo


class Switch:
    """Whether forwards that begin now are to be computed again in backward."""

    def __init__(self) -> None:
        self.on = False

    def around(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """The step with the switch on."""

        def run() -> Tensor:
            self.on = True
            try:
                return step()
            finally:
                self.on = False

        return run


@contextmanager
def switched(units: Iterable[Unit], *, keep_random_state: bool = True) -> Iterator[Switch]:
    """All units that can be recomputed, under one switch."""
    listed, switch = list(units), Switch()
    able = leaves(listed)
    undo = [
        recompute(unit.module, lambda: switch.on, keep_random_state=keep_random_state)
        for unit in listed
        if unit.name in able
    ]
    try:
        yield switch
    finally:
        for one in reversed(undo):
            one()
