"""Loops that users write and no schedule foresees, against plain torch in float64; and those refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hzplan.core.hierarchy import Levels
from hzplan.core.schedule import Use
from hzplan.errors import UserError
from hzplan.formats.plan import Plan
from hzplan.models.workload import load
from hzplan.runtime.apply import Choice, apply
from hzplan.runtime.backends.threads import Post, ThreadWorld
from hzplan.runtime.optimizer import ShardedOptimizer
from tests.plans import make_plan
from tests.unit.test_abandoned_steps import (
    LARGE,
    LARGEST,
    PLACES,
    SMALL,
    Block,
    Net,
    choice_of,
    end_step,
    failing,
    fresh,
    on_ranks,
)

Place = tuple[str, tuple[int, int, int]]
WHOLE = [place for place in PLACES if place[1] == (0, 0, 0)]


def _in_parts(block: Block, x: Tensor) -> Tensor:
    hidden = block.first(x).tanh()
    parts = [checkpoint(block.second, part, use_reentrant=True) for part in hidden.chunk(3)]
    return x + torch.cat(parts)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("width", [SMALL, LARGE, LARGEST])
def test_a_gradient_that_comes_in_parts(place: Place, clip: bool, accumulation: int, width: int) -> None:
    """A backward inside of the backward, of each reentrant checkpoint, adds to the same weights' gradient."""

    def loop(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
        for block in model.blocks:
            block.forward = partial(_in_parts, block)  # type: ignore[arg-type, assignment]
        for step in range(3):
            for number in range(accumulation):
                model(batch(10 * step + number)).square().mean().backward()
            end_step(optimizer)

    on_ranks(loop, choice_of(*place, clip=clip, accumulation=accumulation), width)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("width", [SMALL, LARGE, LARGEST])
def test_gradients_that_a_loop_takes_away_before_backward(place: Place, to_none: bool, width: int) -> None:
    """Of this step there are none yet; later in it, too, ``model.zero_grad()`` takes no sum away."""

    def loop(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
        for step in range(3):
            for number in range(3):
                loss = model(batch(10 * step + number)).square().mean()
                if number == 0 or (to_none and isinstance(optimizer, ShardedOptimizer)):
                    model.zero_grad(set_to_none=to_none)
                loss.backward()
            end_step(optimizer)

    on_ranks(loop, choice_of(*place, clip=True, accumulation=3), width)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("width", [SMALL, LARGE, LARGEST])
def test_a_backward_that_is_to_be_differentiated(place: Place, width: int) -> None:
    """It adds up in new tensors, with what is there already."""

    def loop(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
        for step in range(3):
            for number in range(3):
                loss = model(batch(10 * step + number)).square().mean()
                loss.backward(create_graph=(step + number) % 2 == 0)
            end_step(optimizer)

    on_ranks(loop, choice_of(*place, clip=True, accumulation=3), width)


@pytest.mark.filterwarnings("ignore:step.. after 2 backward passes")
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("micro_batches", [2, 3])
@pytest.mark.parametrize("width", [SMALL, LARGE, LARGEST])
def test_a_loss_inside_of_the_model(place: Place, odd: int, micro_batches: int, width: int) -> None:
    """Of one micro-batch, whose backward begins at no output that anybody looks at."""

    def loop(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
        for step in range(3):
            for number in range(micro_batches):
                x = batch(10 * step + number)
                outputs = [x := block(x) for block in model.blocks]
                outputs[1 if number == odd else -1].square().mean().backward()
            end_step(optimizer)

    on_ranks(loop, choice_of(*place, clip=True, accumulation=3), width)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("then", ["forward", "step", "zero_grad"])
@pytest.mark.parametrize("place", WHOLE, ids=str)
def test_what_a_backward_left_that_nobody_saw(place: Place, then: str, number: int) -> None:
    """It raised between uses that have turns: no part of it is in a gradient."""

    def loop(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
        for step in range(3):
            for earlier in range(number if step == 1 else 0):
                model(batch(100 + earlier)).square().mean().backward()
            if step == 1:
                x = batch(200)
                outputs = [x := block(x) for block in model.blocks]
                with failing(model.blocks[1]):
                    outputs[2].square().mean().backward()
                if isinstance(optimizer, ShardedOptimizer) and then == "forward":
                    with pytest.raises(RuntimeError, match="left of a backward that raised"):
                        model(batch(201))
                if isinstance(optimizer, ShardedOptimizer) and then == "step":
                    with pytest.raises(RuntimeError, match="left of a backward that raised"):
                        optimizer.step()
                optimizer.zero_grad()
            for later in range(3):
                model(batch(10 * step + later)).square().mean().backward()
            end_step(optimizer)

    on_ranks(loop, choice_of(*place, clip=True, accumulation=3), SMALL)


@pytest.mark.filterwarnings("ignore:step.. after 2 backward passes")
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_two_backwards_of_one_forward(place: Place) -> None:
    """The second, of an inner output, is one more micro-batch."""

    def loop(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
        for step in range(3):
            x = batch(step)
            outputs = [x := block(x) for block in model.blocks]
            x.square().mean().backward(retain_graph=True)
            outputs[1].square().mean().backward()
            end_step(optimizer)

    on_ranks(loop, choice_of(*place, clip=True, accumulation=3), SMALL)


@pytest.mark.parametrize("place", WHOLE, ids=str)
def test_an_inner_output_of_a_forward_before_the_step_is_refused(place: Place) -> None:
    def loop(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
        x = batch(0)
        outputs = [x := block(x) for block in model.blocks]
        x.square().mean().backward(retain_graph=True)
        end_step(optimizer)
        if isinstance(optimizer, ShardedOptimizer):
            with pytest.raises(RuntimeError, match=r"a forward from before optimizer.step\(\)"):
                outputs[1].square().mean().backward()

    on_ranks(loop, choice_of(*place, clip=True, accumulation=1), SMALL)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_all_uses_are_followed_after_a_step_outside_of_the_schedule(place: Place, accumulation: int) -> None:
    """As a trace begins near the end of a run."""

    def loop(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
        for step in range(6):
            if isinstance(optimizer, ShardedOptimizer) and step == 4:
                optimizer.engine.follow_every_use()
            for number in range(accumulation):
                x = batch(10 * step + number)
                for block in reversed(model.blocks) if step == 1 else model.blocks:
                    x = block(x)
                x.square().mean().backward()
            end_step(optimizer)

    on_ranks(loop, choice_of(*place, clip=True, accumulation=accumulation), SMALL)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("width", [SMALL, LARGE, LARGEST])
def test_a_backward_of_parameters_alone_is_refused(place: Place, name: str, width: int) -> None:
    """Its gradients would wait for the next step, or be in what is being sent."""

    def loop(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
        model(batch(0)).square().mean().backward()
        if isinstance(optimizer, ShardedOptimizer):
            with pytest.raises(RuntimeError, match="through no output of the model"):
                model.blocks[0].first.get_parameter(name).square().sum().backward()
                end_step(optimizer)

    on_ranks(loop, choice_of(*place, clip=True, accumulation=1), width)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_unit_without_gradients_in_the_middle_follows_the_schedule(place: Place) -> None:
    """As a frozen tower is called under ``no_grad``."""
    choice = choice_of(*place, clip=True, accumulation=1)
    uses = tuple(Use(f"blocks.{number}", "forward") for number in range(4))
    uses += tuple(Use(f"blocks.{number}", "backward") for number in (3, 2, 0))

    def forward(model: Net, x: Tensor) -> Tensor:
        first, frozen, *others = model.blocks
        x = first(x)
        with torch.no_grad():
            beside = frozen(x)
        for block in others:
            x = block(x + beside)
        return x

    def loop(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
        for step in range(3):
            forward(model, batch(step)).square().mean().backward()
            if isinstance(optimizer, ShardedOptimizer):
                assert optimizer.engine.step_state.scheduled
            end_step(optimizer)

    on_ranks(loop, replace(choice, uses=uses), SMALL)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("place", [place for place in PLACES if place[1][0] == 0], ids=str)
def test_a_rank_may_look_at_whole_parameters_in_the_middle_of_a_step(place: Place, ordered: bool) -> None:
    """By itself, between a forward and its backward; the step stays in the schedule."""

    def loop(model: Net, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor]) -> None:
        for step in range(3):
            loss = model(batch(step)).square().mean()
            if isinstance(optimizer, ShardedOptimizer) and optimizer.engine.world.rank == 0:
                with torch.no_grad():
                    model(batch(step))
            loss.backward()
            end_step(optimizer)

    on_ranks(loop, choice_of(*place, clip=True, accumulation=1, ordered=ordered), SMALL)


def test_steps_that_follow_nothing_are_said() -> None:
    """Where the first unit is called without gradients, nothing tells a step from an evaluation."""
    model, optimizer = _alone()
    x = torch.ones(3, LARGE, dtype=torch.float64)
    first, *others = model.blocks

    def step() -> None:
        with torch.no_grad():
            hidden = first(x)
        for block in others:
            hidden = block(hidden)
        hidden.mean().backward()
        optimizer.step()

    step()
    step()
    with pytest.warns(UserWarning, match="3 steps followed nothing of the plan's schedule"):
        step()
    optimizer.engine.close()


def _alone(model: nn.Module | None = None) -> tuple[Net, ShardedOptimizer]:
    choice = choice_of("1", (0, 0, 0), clip=False, accumulation=1)
    made, optimizer = apply(
        model or fresh(LARGE), choice, torch.optim.SGD, world=ThreadWorld(Post(1), 0), lr=0.1
    )
    assert isinstance(made, Net)
    return made, optimizer


def test_a_backward_of_a_forward_before_the_step_is_refused() -> None:
    """As torch refuses it: what is saved in the graph is no longer what parameters are."""
    model, optimizer = _alone()
    out = model(torch.ones(3, LARGE, dtype=torch.float64))
    out.mean().backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"a forward from before optimizer.step\(\)"):
        out.square().mean().backward()
    optimizer.engine.close()


def test_what_was_frozen_is_not_trained_silently() -> None:
    model = fresh(LARGE)
    weight = model.blocks[1].second.weight  # type: ignore[union-attr]
    assert isinstance(weight, nn.Parameter)
    weight.requires_grad_(False)
    _, optimizer = _alone(model)
    weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"blocks.1.second.weight has a gradient, and was frozen when"):
        model(torch.ones(3, LARGE, dtype=torch.float64)).mean().backward()
    optimizer.engine.close()


def test_a_model_in_shards_is_not_cut_again() -> None:
    model, optimizer = _alone()
    with pytest.raises(UserError, match="the model is in shards already; go on with the optimizer"):
        _alone(model)
    optimizer.engine.close()
    _, again = _alone(model)  # whose parameters are whole
    again.engine.close()
    sharded = choice_of("2", (1, 1, 1), clip=False, accumulation=1)
    in_shards, post = [fresh(LARGE) for _ in range(2)], Post(2)

    def cut(rank: int) -> None:
        world = ThreadWorld(post, rank)
        apply(in_shards[rank], sharded, torch.optim.SGD, world=world, lr=0.1)[1].engine.close()

    threads = [threading.Thread(target=cut, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with pytest.raises(UserError, match="the model is in shards already"):
        _alone(in_shards[0])


def test_scaled_gradients_are_refused() -> None:
    model, optimizer = _alone()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(3, LARGE, dtype=torch.float64)).mean()).backward()
    with pytest.raises(UserError, match=r"torch.amp.GradScaler scales what a plan has reduced"):
        scaler.step(optimizer)
    optimizer.engine.close()


def test_only_frozen_tensors_may_be_in_shards_where_each_rank_takes_the_norm() -> None:
    """As adapters beside a large model: the plan does not say who is frozen, the model does."""
    workload = load("gpt:nano")
    whole = make_plan(workload, mesh="2", levels=Levels(0, 0, 0), clip=True).model_dump(exclude_none=True)
    unit = whole["units"][1]
    unit["buckets"] = [
        {"shards": {"param": 2, "grad": 2, "optim": 2}, "tensors": bucket["tensors"]}
        for bucket in unit["buckets"]
    ]
    plan = Plan.model_validate(whole | {"local_norm": True})
    with pytest.raises(UserError, match=r"field local_norm: .* is trained, and its gradient or optimizer"):
        apply(workload.build(), Choice.of(plan), world=ThreadWorld(Post(2), 0))
    unit["buckets"][0]["shards"]["param"] = 1
    with pytest.raises(ValueError, match="local_norm: only with clip"):
        Plan.model_validate(whole | {"local_norm": True})
