"""Parameters without a gradient: what no rank used is left alone, as plain torch leaves it, in float64."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.schedule import MessageOrder, Use
from hzplan.runtime import unit
from hzplan.runtime.apply import Choice, apply, full_parameters
from hzplan.runtime.backends.threads import Post, ThreadWorld
from hzplan.runtime.optimizer import ShardedOptimizer

BLOCKS, STEPS = 4, 4
SMALL, LARGE, LARGEST = 6, 130, 260
Used = Callable[[int, int, int, int], bool]
"""Whether a part is used: (step, micro-batch, rank, block)."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.gate = nn.Linear(width, width), nn.Linear(width, width), True

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x).tanh()
        return x + (self.second(found) if self.gate else found)


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.dropped: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number not in self.dropped:
                x = block(x)
        return x


def fresh(width: int) -> Net:
    torch.manual_seed(0)
    return Net(width).double()


def set_used(model: Net, used: Used, at: tuple[int, int, int], *, whole_blocks: bool) -> None:
    unused = {block for block in range(BLOCKS) if not used(*at, block)}
    model.dropped = unused if whole_blocks else set()
    for number, block in enumerate(model.blocks):
        block.gate = number not in unused  # type: ignore[assignment]


def batch(at: tuple[int, int, int], width: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash(at) % 2**31)
    return torch.randn(3, width, generator=generator, dtype=torch.float64)


def compare(
    used: Used,
    mesh: str,
    levels: tuple[int, int, int],
    accumulation: int,
    *,
    width: int = SMALL,
    whole_blocks: bool = False,
    clips: bool = True,
    clip: bool = True,
    dtype: str = "float64",
    ordered: bool = False,
    freeze_at: int | None = None,
    local_norm: bool = False,
) -> None:
    """AdamW with much decay, on every rank and in plain torch with all ranks' batches.

    ``clip``, ``local_norm``: of the plan; ``clips``: whether the loop does.
    """
    parsed = Mesh.parse(mesh)
    names = [f"blocks.{index}" for index in range(BLOCKS)]
    uses = [Use(name, "forward") for name in names] + [Use(name, "backward") for name in reversed(names)]
    tensors = {name: Levels(*levels) for name, _ in fresh(SMALL).named_parameters()}
    order = MessageOrder(tuple((name, (2,) * len(parsed.tiers)) for name in names), 1) if ordered else None
    choice = Choice(
        *(parsed, tensors, tuple(uses), 1, accumulation, clip, dtype),
        message_order=order,
        local_norm=local_norm,
    )
    made = getattr(torch, dtype)
    world, post = parsed.world, Post(parsed.world)
    # Adam divides by the gradient's size: with its usual epsilon the rounding of tiny ones would be compared.
    options = {"lr": 0.05, "weight_decay": 0.3, "eps": 1e-4}
    models = [fresh(width).to(made) for _ in range(world)]
    found: dict[int, dict[str, Tensor]] = {}

    def freeze(model: Net) -> None:
        for parameter in model.blocks[1].parameters():
            parameter.requires_grad_(False)

    def run(rank: int) -> None:
        model, optimizer = apply(
            models[rank], choice, torch.optim.AdamW, world=ThreadWorld(post, rank), **options
        )
        assert isinstance(model, Net) and isinstance(optimizer, ShardedOptimizer)
        for step in range(STEPS):
            if step == freeze_at:
                freeze(model)
            for micro_batch in range(accumulation):
                at = step, micro_batch, rank
                set_used(model, used, at, whole_blocks=whole_blocks)
                model(batch(at, width).to(made)).square().mean().backward()
            if clips:
                optimizer.clip_grad_norm_(0.5)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
        found[rank] = full_parameters(optimizer)
        optimizer.engine.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(found) == [*range(world)], "a rank failed; its traceback is above"
    single = fresh(width).to(made)
    plain = torch.optim.AdamW(single.parameters(), **options)
    for step in range(STEPS):
        if step == freeze_at:
            freeze(single)
        for micro_batch in range(accumulation):
            for rank in range(world):
                at = step, micro_batch, rank
                set_used(single, used, at, whole_blocks=whole_blocks)
                (single(batch(at, width).to(made)).square().mean() / world).backward()
        if clips:
            nn.utils.clip_grad_norm_(single.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
    tolerance = 1e-11 if dtype == "float64" else 1e-6
    for of_rank in found.values():
        for name, exact in single.named_parameters():
            torch.testing.assert_close(of_rank[name], exact.detach(), rtol=tolerance, atol=tolerance)


PLACES = [
    ("1", (0, 0, 0)),
    ("2", (0, 0, 0)),
    ("2", (0, 0, 1)),
    ("2", (1, 1, 1)),
    ("2|2", (0, 1, 2)),
    ("2|2", (1, 2, 2)),
    ("4", (1, 1, 1)),
]


def on_one_rank_only(step: int, micro_batch: int, rank: int, block: int) -> bool:
    """Block 0 on rank 0 alone, block 2 nowhere in odd steps, block 3 in the first micro-batch of a step."""
    return (
        not (block == 0 and rank)
        and not (block == 2 and step % 2)
        and not (block == 3 and (micro_batch or step < 2))
    )


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("whole_blocks", [False, True])
def test_what_no_rank_used_is_left_alone(
    place: tuple[str, tuple[int, int, int]], accumulation: int, whole_blocks: bool
) -> None:
    """Parts of a unit, which stay on schedule, and whole units, which leave it."""
    compare(on_one_rank_only, *place, accumulation, whole_blocks=whole_blocks and place[0] == "1")


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("width", [SMALL, LARGE, LARGEST])
def test_large_gradients_and_messages_in_order(width: int, ordered: bool) -> None:
    compare(on_one_rank_only, "2", (1, 1, 1), 2, width=width, ordered=ordered)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_steps_that_are_not_clipped(place: tuple[str, tuple[int, int, int]]) -> None:
    compare(on_one_rank_only, *place, 2, clips=False)


def everything(step: int, micro_batch: int, rank: int, block: int) -> bool:
    return True


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_unit_that_is_frozen_late(place: tuple[str, tuple[int, int, int]]) -> None:
    compare(everything, *place, 1, freeze_at=2)


def layer_drop(step: int, micro_batch: int, rank: int, block: int) -> bool:
    """The same on every rank, as collectives need it."""
    return (step + micro_batch + block) % 3 != 0


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_layer_drop(place: tuple[str, tuple[int, int, int]], accumulation: int) -> None:
    compare(layer_drop, *place, accumulation, whole_blocks=True)


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("width", [SMALL, LARGE, LARGEST])
def test_updates_in_backward_leave_it_alone_too(
    place: tuple[str, tuple[int, int, int]], accumulation: int, width: int
) -> None:
    """The reduced gradient says that there was none, staged or not."""
    compare(on_one_rank_only, *place, accumulation, width=width, clips=False, clip=False)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_updates_in_backward_under_layer_drop(place: tuple[str, tuple[int, int, int]]) -> None:
    compare(layer_drop, *place, 2, whole_blocks=True, clips=False, clip=False)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("mesh", ["1", "2", "2|2"])
def test_replicas_that_take_the_norm_by_themselves(mesh: str, clips: bool, accumulation: int) -> None:
    """No message says who had a gradient: what was reduced does."""
    compare(on_one_rank_only, mesh, (0, 0, 0), accumulation, clips=clips, local_norm=True)


@pytest.mark.parametrize("clip", [False, True])
def test_unused_parameters_in_float32(clip: bool) -> None:
    compare(on_one_rank_only, "2|2", (1, 2, 2), 2, clip=clip, clips=clip, dtype="float32")


def test_a_model_that_ran_in_shapes_leaves_nothing_behind_for_one_that_trains() -> None:
    with FakeTensorMode():
        unit.deliver(torch.ones(3), torch.zeros(3), 0.5, accumulate=False)
    target = torch.zeros(3)
    unit.deliver(torch.ones(3), target, 0.5, accumulate=False)
    assert target.tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_gradient_of_zero_is_one(dtype: torch.dtype, accumulate: bool) -> None:
    """Also one of negative zeros; what adds nothing to an absent one leaves it absent."""
    for deliver in (
        unit.deliver,
        lambda g, t, s, accumulate: unit.deliver_all([g], [t], s, accumulate=accumulate),
    ):
        target = torch.full(
            (5,), unit.ABSENT, dtype=torch.float64 if dtype == torch.float64 else torch.float32
        )
        assert unit.is_absent(target) and unit.is_absent(target + target) and unit.is_absent(target * 0.25)
        deliver(torch.zeros(5, dtype=dtype), target, 0.25, accumulate=accumulate)
        assert not unit.is_absent(target)
        if not accumulate:
            deliver(torch.full((5,), -0.0, dtype=dtype), target, 0.25, accumulate=False)
            assert not unit.is_absent(target)
            deliver(torch.arange(5.0).to(dtype), target, 0.25, accumulate=False)
            assert target.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
