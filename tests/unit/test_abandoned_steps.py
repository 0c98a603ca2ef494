"""Steps that a loop throws away, and evaluations inside of a step, against plain torch in float64."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.recompute import Recomputed
from hzplan.core.schedule import MessageOrder, Use
from hzplan.errors import UserError
from hzplan.models.hooks import SMALL_ELEMENTS
from hzplan.runtime.apply import Choice, apply, full_parameters
from hzplan.runtime.backends.threads import Post, ThreadWorld
from hzplan.runtime.bucket import CHUNK_ELEMENTS
from hzplan.runtime.optimizer import ShardedOptimizer

BLOCKS = 4
SMALL, LARGE, LARGEST = 6, 130, 260
assert SMALL**2 < SMALL_ELEMENTS <= LARGE**2 <= CHUNK_ELEMENTS < LARGEST**2
PLACES = [("1", (0, 0, 0)), ("2", (0, 0, 0)), ("2", (0, 0, 1)), ("2", (0, 1, 1)), ("2", (1, 1, 1))]
"""Mesh and levels: gradients that are sharded, and that are not; on one rank and on two."""


class Fault(torch.autograd.Function):
    """The identity, whose backward raises where it is asked to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.block = block
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.block.fails:
            raise ValueError("in backward")
        return gradients[0], None


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.fails = nn.Linear(width, width), nn.Linear(width, width), False

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(Fault.apply(self.first(x).tanh(), self))  # type: ignore[no-untyped-call]


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def fresh(width: int) -> Net:
    torch.manual_seed(0)
    return Net(width).double()


def choice_of(
    mesh: str, levels: tuple[int, int, int], *, clip: bool, accumulation: int, ordered: bool = False
) -> Choice:
    names = [f"blocks.{index}" for index in range(BLOCKS)]
    uses = [Use(name, "forward") for name in names] + [Use(name, "backward") for name in reversed(names)]
    tensors = {name: Levels(*levels) for name, _ in fresh(SMALL).named_parameters()}
    ahead = (0,) * (len(Mesh.parse(mesh).tiers) - 1) + (2,)
    order = MessageOrder(tuple((name, ahead) for name in names), 1) if ordered else None
    several = 3 * 8 * sum(p.numel() for p in fresh(SMALL).blocks[0].parameters()) * (sum(levels) % 2)
    return Choice(
        *(Mesh.parse(mesh), tensors, tuple(uses), 1, accumulation, clip, "float64"),
        message_bytes=several,
        message_order=order,
    )


Loop = Callable[[Net, torch.optim.Optimizer, Callable[[int], Tensor]], None]


def on_ranks(loop: Loop, choice: Choice, width: int) -> None:
    """Run a loop on every rank, a thread each, and in plain torch with all batches; compare weights."""
    post, size = Post(choice.mesh.world), choice.mesh.world
    models = [fresh(width) for _ in range(size)]  # here: all threads share one generator
    weights: dict[int, dict[str, Tensor]] = {}

    def batch(number: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * number + rank)
        return torch.randn(3, width, generator=generator, dtype=torch.float64)

    def run(rank: int) -> None:
        model, optimizer = apply(
            models[rank], choice, torch.optim.SGD, world=ThreadWorld(post, rank), lr=0.05, momentum=0.5
        )
        assert isinstance(model, Net)
        loop(model, optimizer, lambda number: batch(number, rank))
        weights[rank] = {} if optimizer.engine.step_state.open else full_parameters(optimizer)
        optimizer.engine.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(weights) == [*range(size)], "a rank failed; its traceback is above"
    single = fresh(width)
    plain = torch.optim.SGD(single.parameters(), lr=0.05, momentum=0.5)
    loop(single, plain, lambda number: torch.cat([batch(number, rank) for rank in range(size)]))
    exact = dict(single.named_parameters())
    for of_rank in weights.values():
        for name, value in of_rank.items():
            torch.testing.assert_close(value, exact[name].detach(), rtol=1e-12, atol=1e-12)


def end_step(optimizer: torch.optim.Optimizer) -> None:
    """Clip (far above the norm) where the plan does; torch's optimizer then forgets its gradients."""
    if isinstance(optimizer, ShardedOptimizer) and optimizer.updates.clip:
        optimizer.clip_grad_norm_(1e9)
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def failing(block: nn.Module) -> Iterator[None]:
    block.fails = True  # type: ignore[assignment]
    try:
        with pytest.raises(ValueError, match="in backward"):
            yield
    finally:
        block.fails = False  # type: ignore[assignment]


def thrown_away(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
    """Steps of two micro-batches; of the second step the first one is thrown away, and done again."""
    for step in range(3):
        if step == 1:
            (100 * model(batch(99)).square().mean()).backward()
            optimizer.zero_grad()
        for micro_batch in range(2):
            model(batch(10 * step + micro_batch)).square().mean().backward()
        end_step(optimizer)


def plain_steps(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
    """Three of two micro-batches."""
    for step in range(3):
        for micro_batch in range(2):
            model(batch(10 * step + micro_batch)).square().mean().backward()
        end_step(optimizer)


@pytest.mark.parametrize("message_bytes", [0, 1 << 30])
def test_units_reduced_together_may_mix_levels(message_bytes: int) -> None:
    """Sums over all ranks with a reduction to slices between them; four ranks, whose messages of one tag
    could be mistaken for each other's."""
    choice = choice_of("4", (0, 0, 0), clip=True, accumulation=2)
    sliced = Levels(1, 1, 1)
    levels = {name: sliced if "second" in name else of for name, of in choice.levels.items()}
    on_ranks(plain_steps, replace(choice, levels=levels, message_bytes=message_bytes), SMALL)


def failed(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
    """In the second step a backward raises in its middle; the loop goes on with the next batch."""
    for step in range(3):
        if step == 1:
            with failing(model.blocks[1]):
                model(batch(99)).square().mean().backward()
            optimizer.zero_grad()
        for micro_batch in range(2):
            model(batch(10 * step + micro_batch)).square().mean().backward()
        end_step(optimizer)


def called_late(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
    """``zero_grad()`` after the forward, where many loops have it."""
    for step in range(3):
        for micro_batch in range(2):
            loss = model(batch(10 * step + micro_batch)).square().mean()
            if not micro_batch:
                optimizer.zero_grad()
            loss.backward()
        assert not isinstance(optimizer, ShardedOptimizer) or optimizer.engine.step_state.scheduled
        end_step(optimizer)


def evaluated(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
    """An evaluation before the second of three micro-batches; in the second step the third too."""
    for step in range(3):
        for micro_batch in range(3):
            if micro_batch == 1 or (micro_batch == 2 and step == 1):
                with torch.no_grad():
                    model(batch(77))
            model(batch(10 * step + micro_batch)).square().mean().backward()
            assert not isinstance(optimizer, ShardedOptimizer) or optimizer.engine.step_state.scheduled
        end_step(optimizer)


@pytest.mark.parametrize("width", [SMALL, LARGE])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("loop", [thrown_away, failed, called_late])
def test_gradients_that_are_thrown_away_are_in_no_update(
    loop: Loop, place: tuple[str, tuple[int, int, int]], clip: bool, width: int
) -> None:
    on_ranks(loop, choice_of(*place, clip=clip, accumulation=2, ordered=width == SMALL), width)


def kept(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
    """A loss of an earlier step is kept with its graph, and one has two backwards."""
    losses = []
    for step in range(3):
        losses.append(model(batch(20 + step)).square().mean())
        losses[-1].backward(retain_graph=True)
        model(batch(10 * step)).square().mean().backward()
        end_step(optimizer)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("loop", [plain_steps, thrown_away, failed, called_late, evaluated, kept])
def test_activations_on_the_host_are_those_of_their_forward(
    loop: Loop, place: tuple[str, tuple[int, int, int]], clip: bool
) -> None:
    """Also outside of the schedule, where nothing is copied in time."""
    choice = choice_of(*place, clip=clip, accumulation=3 if loop is evaluated else 2)
    everywhere = Recomputed.of([f"blocks.{index}" for index in range(BLOCKS)], "host")
    on_ranks(loop, replace(choice, recompute=everywhere), LARGE)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_micro_batch_after_an_evaluation_is_scheduled(
    place: tuple[str, tuple[int, int, int]], clip: bool, ordered: bool
) -> None:
    on_ranks(evaluated, choice_of(*place, clip=clip, accumulation=3, ordered=ordered), SMALL)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_an_evaluation_between_steps_sees_the_last_update(
    place: tuple[str, tuple[int, int, int]], ordered: bool
) -> None:
    """Also where the next step would gather what it has updated; and so does what is read after it."""
    seen: dict[bool, list[Tensor]] = {True: [], False: []}

    def loop(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
        for step in range(3):
            model(batch(step)).square().mean().backward()
            end_step(optimizer)
            with torch.no_grad():
                found = model(torch.ones(1, SMALL, dtype=torch.float64))
            seen[isinstance(optimizer, ShardedOptimizer)].append(found)

    choice = choice_of(*place, clip=True, accumulation=1, ordered=ordered)
    on_ranks(loop, choice, SMALL)
    exact = torch.cat(seen[False])
    for one in exact:
        near = sum(torch.allclose(one, other[0], rtol=1e-12, atol=1e-12) for other in seen[True])
        assert near == choice.mesh.world


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_an_evaluation_inside_a_step_leaves_unsharded_gradients_as_few(
    place: tuple[str, tuple[int, int, int]],
) -> None:
    most: dict[bool, int] = {}

    def loop(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
        for evaluates in (False, True):
            model(batch(0)).square().mean().backward()
            if evaluates:
                with torch.no_grad():
                    model(batch(1))
            counted = [0]

            def count(*_: object, counted: list[int] = counted) -> None:
                found = [p.grad for p in model.parameters() if p.grad is not None]
                # Those with memory of their own, not in a sum that is there anyway.
                counted.append(sum(g.untyped_storage().nbytes() == g.nbytes for g in found))

            handles = [block.register_full_backward_pre_hook(count) for block in model.blocks]
            model(batch(2)).square().mean().backward()
            for handle in handles:
                handle.remove()
            if isinstance(optimizer, ShardedOptimizer):
                most[evaluates] = max(counted)
            end_step(optimizer)

    on_ranks(loop, choice_of(*place, clip=True, accumulation=2), LARGE)
    assert most[True] <= most[False] <= 4  # those of one block, of four


def test_a_forward_after_a_failed_backward_drops_the_step() -> None:
    def loop(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
        with failing(model.blocks[1]):
            model(batch(99)).square().mean().backward()
        if not isinstance(optimizer, ShardedOptimizer):
            optimizer.zero_grad()
        else:
            with pytest.raises(RuntimeError, match="did not end; call optimizer"):
                optimizer.step()
        for micro_batch in range(2):
            model(batch(micro_batch)).square().mean().backward()
        end_step(optimizer)

    with pytest.warns(UserWarning, match="a backward pass did not end"):
        on_ranks(loop, choice_of("1", (0, 0, 0), clip=True, accumulation=2), LARGE)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_units_that_were_updated_in_backward_are_not_taken_back(
    place: tuple[str, tuple[int, int, int]],
) -> None:
    def loop(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
        with failing(model.blocks[0]):
            model(batch(0)).square().mean().backward()
        if isinstance(optimizer, ShardedOptimizer):
            with pytest.raises(UserError, match="start again from a checkpoint, or solve with --clip"):
                optimizer.zero_grad()

    on_ranks(loop, choice_of(*place, clip=False, accumulation=1), SMALL)


def test_clipping_of_a_step_that_is_thrown_away_is_forgotten() -> None:
    def loop(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
        model(batch(0)).square().mean().backward()
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.clip_grad_norm_(1e-6)
        optimizer.zero_grad()
        model(batch(1)).square().mean().backward()
        end_step(optimizer)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks(loop, choice_of("2", (1, 1, 1), clip=True, accumulation=1), SMALL)
