"""Forwards without gradients prefetch as a step does; those that are not as recorded are right too."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.schedule import Kind, MessageOrder, Use
from hzplan.runtime.apply import Choice, apply, full_parameters
from hzplan.runtime.backends.threads import Post, ThreadWorld
from hzplan.runtime.optimizer import ShardedOptimizer

BLOCKS, WIDTH = 5, 6
Run = Callable[["Chain", ShardedOptimizer, Callable[[], None]], list[Tensor]]


class Chain(nn.Module):
    """``path``: the blocks that are called, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
        self.path: tuple[int, ...] = tuple(range(BLOCKS))
        self.fails_at = -1

    def forward(self, x: Tensor) -> Tensor:
        for number in self.path:
            if number == self.fails_at:
                raise ValueError("a bad batch")
            x = x + self.blocks[number](x)
        return x


def fresh() -> Chain:
    torch.manual_seed(0)
    return Chain().double()


def on_ranks(
    run: Run,
    levels: tuple[int, int, int] = (2, 2, 2),
    *,
    clip: bool = True,
    ordered: bool = False,
    prefetch: int = 2,
) -> list[list[Tensor]]:
    """What ``run`` returns on four ranks; its third argument trains for a micro-batch of a step of two."""
    mesh = Mesh.parse("2|2")
    names = [f"blocks.{index}" for index in range(BLOCKS)]
    uses = [Use(name, "forward") for name in names] + [Use(name, "backward") for name in reversed(names)]
    order = MessageOrder(tuple((name, (2, 2)) for name in names), 1) if ordered else None
    tensors = {name: Levels(*levels) for name, _ in fresh().named_parameters()}
    choice = Choice(mesh, tensors, tuple(uses), prefetch, 2, clip, "float64", message_order=order)
    post, models = Post(4), [fresh() for _ in range(4)]
    found: dict[int, list[Tensor]] = {}

    def of_rank(rank: int) -> None:
        model, optimizer = apply(
            models[rank], choice, torch.optim.AdamW, world=ThreadWorld(post, rank), lr=0.1
        )
        assert isinstance(model, Chain) and isinstance(optimizer, ShardedOptimizer)
        generator = torch.Generator().manual_seed(rank)

        def micro_batch() -> None:
            model(torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)).square().mean().backward()

        found[rank] = run(model, optimizer, micro_batch)
        optimizer.engine.close()

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(found) == [*range(4)], "a rank failed; its traceback is above"
    return [found[rank] for rank in range(4)]


def batch() -> Tensor:
    return torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float64).view(2, WIDTH)


def evaluated(model: Chain, path: tuple[int, ...] = tuple(range(BLOCKS))) -> Tensor:
    model.path = path
    try:
        with torch.no_grad():
            found: Tensor = model(batch())
            return found
    finally:
        model.path = tuple(range(BLOCKS))


def plainly(optimizer: ShardedOptimizer, path: tuple[int, ...] = tuple(range(BLOCKS))) -> Tensor:
    """The same with whole parameters; between steps."""
    single = fresh()
    single.load_state_dict(full_parameters(optimizer))
    return evaluated(single, path)


LEVELS = [(2, 2, 2), (1, 2, 2), (0, 1, 2)]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("levels", LEVELS)
def test_an_evaluation_anywhere(levels: tuple[int, int, int], clip: bool, ordered: bool) -> None:
    """Between steps and inside of one, passes that end early, skip a block, go back, or raise."""
    paths = [tuple(range(BLOCKS)), (0, 1), (0, 2, 3), (3, 1, 4), (0, 1, 1, 2, 3, 4), (4,), (0,)]

    def run(model: Chain, optimizer: ShardedOptimizer, micro_batch: Callable[[], None]) -> list[Tensor]:
        before = plainly(optimizer)
        torch.testing.assert_close(evaluated(model), before, rtol=0, atol=0)
        for _ in range(3):
            micro_batch()
            torch.testing.assert_close(evaluated(model), before, rtol=0, atol=0)
            model.fails_at = 3
            with pytest.raises(ValueError):
                evaluated(model)
            model.fails_at = -1
            micro_batch()
            optimizer.step()
            for path in paths:
                there = evaluated(model, path)
                torch.testing.assert_close(there, plainly(optimizer, path), rtol=0, atol=0)
            before = evaluated(model)
        return [*full_parameters(optimizer).values()]

    def plain_run(model: Chain, optimizer: ShardedOptimizer, micro_batch: Callable[[], None]) -> list[Tensor]:
        for _ in range(3):
            micro_batch()
            micro_batch()
            optimizer.step()
        return [*full_parameters(optimizer).values()]

    with_evaluations = on_ranks(run, levels, clip=clip, ordered=ordered)
    without = on_ranks(plain_run, levels, clip=clip, ordered=ordered)
    for one, other in zip(with_evaluations, without, strict=True):
        for here, there in zip(one, other, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-11, atol=1e-11)


def test_parameters_are_prefetched() -> None:
    """While a block computes, those within the prefetch are under way."""

    def run(model: Chain, optimizer: ShardedOptimizer, micro_batch: Callable[[], None]) -> list[Tensor]:
        evaluated(model)
        evaluation = optimizer.engine._evaluation
        assert evaluation is not None and evaluation.position == BLOCKS - 1
        tasks, record = evaluation.schedule.tasks, evaluation.executor.record
        begin_of = {task.units[0]: record.start_s[task.index] for task in evaluation.schedule.compute}
        launched = [tasks[index] for index in record.launched]
        assert {task.kind for task in launched} == {Kind.UNSHARD} and len(launched) == 2 * BLOCKS
        order = [(task.units[0], task.position) for task in launched[::2]]
        assert order == [(f"blocks.{number}", number) for number in range(BLOCKS)]
        for number in range(BLOCKS - 3):  # two ahead of compute: launched when a block has ended
            assert record.start_s[launched[2 * number + 6].index] >= begin_of[f"blocks.{number}"]
            assert record.start_s[launched[2 * number + 6].index] < begin_of[f"blocks.{number + 3}"]
        return []

    on_ranks(run)


def test_replicas_may_evaluate_alone_where_parameters_are_whole() -> None:
    def run(model: Chain, optimizer: ShardedOptimizer, micro_batch: Callable[[], None]) -> list[Tensor]:
        for _ in range(2):
            micro_batch()
            micro_batch()
            optimizer.step()
            if optimizer.engine.world.rank == 0:
                evaluated(model)
        return [evaluated(model)]

    first, *others = on_ranks(run, (0, 1, 2))  # not in a message order: the first use gathers what is new
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)
