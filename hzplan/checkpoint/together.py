"""What every rank reads by itself, and none alone fails in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from hzplan.errors import UserError
from hzplan.runtime.engine import Engine
from hzplan.runtime.world import MIN

MOST_BYTES = 512
"""Of a message to the other ranks."""
WHAT = "reading a checkpoint"

T = TypeVar("T")


def together(engine: Engine, work: Callable[[], T]) -> T:
    """What ``work`` gives. Where it raises a UserError on any rank, the first such rank's, by its number, is
    raised on all of them: what nobody else has seen, rank 0 prints."""
    world, problem, found = engine.world, None, list[T]()
    try:
        found.append(work())
    except UserError as error:
        problem = error
    first = torch.tensor(world.size if problem is None else world.rank, dtype=torch.float64)
    first = first.to(engine.device)
    engine.all_reduce(first, WHAT, MIN)
    if int(first) == world.size:
        return found[0]
    if world.size == 1 and problem is not None:
        raise problem
    said = torch.zeros(MOST_BYTES, dtype=torch.float64)
    if world.rank == int(first):
        own = str(problem).encode()[:MOST_BYTES]
        said[: len(own)] = torch.tensor([*own], dtype=torch.float64)
    said = said.to(engine.device)
    engine.all_reduce(said, WHAT)
    text = bytes(int(one) for one in said.tolist() if one).decode(errors="replace")
    raise UserError(f"rank {int(first)}: {text}") from problem
