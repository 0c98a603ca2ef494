"""A plan's ranks as threads of the test's own process."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from hzplan.formats.plan import Plan
from hzplan.runtime.apply import Choice, apply
from hzplan.runtime.backends.threads import Post, ThreadWorld
from hzplan.runtime.optimizer import ShardedOptimizer

T = TypeVar("T")


def in_threads(
    plan: Plan,
    initial: nn.Module,
    rank: Callable[[int, nn.Module, ShardedOptimizer], T],
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD,
    **arguments: Any,
) -> list[T]:
    """What ``rank(number, model, optimizer)`` returns for every rank, each with a copy of ``initial``."""
    post = Post(plan.mesh.world)
    found: dict[int, T] = {}

    def one(number: int) -> None:
        model, optimizer = apply(
            copy.deepcopy(initial),
            Choice.of(plan),
            optimizer_class,
            world=ThreadWorld(post, number),
            **{"lr": 0.1, **arguments},
        )
        found[number] = rank(number, model, optimizer)
        optimizer.engine.close()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(plan.mesh.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(found) == [*range(plan.mesh.world)], "a rank failed; its traceback is above"
    return [found[number] for number in range(plan.mesh.world)]
