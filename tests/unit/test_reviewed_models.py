"""Models that a review found to go wrong: random buffers, units that return leaves, evaluation mode."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.schedule import Use
from hzplan.cost.model import CostModel
from hzplan.errors import UserError
from hzplan.formats.profile import Profile, RecomputeCost
from hzplan.models.hooks import attach
from hzplan.models.recompute import _Policy, recompute
from hzplan.models.units import find_units
from hzplan.models.workload import for_training
from hzplan.runtime.apply import Choice, apply
from hzplan.runtime.backends.threads import Post, ThreadWorld
from tests.cli.command import ROOT
from tests.unit.test_hooks import Told


class Fourier(nn.Module):
    """Random features: a buffer that every rank draws."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(3, 5, dtype=torch.float64))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("phase", torch.randn((), dtype=torch.cfloat))
        self.register_buffer("wide", torch.randn(1, 3).expand(4, 3))
        self.head = nn.Linear(5, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head((x @ self.directions).sin().masked_fill(self.mask, 0.0))
        return found


def test_every_rank_has_the_buffers_of_rank_0() -> None:
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(Fourier())
    expected = {name: buffer.clone() for name, buffer in models[0].named_buffers()}
    assert not torch.equal(models[1].directions, expected["directions"])  # type: ignore[arg-type]
    uses = (Use("head", "forward"), Use("head", "backward"))
    levels = {name: Levels(1, 1, 1) for name, _ in models[0].named_parameters()}
    choice, post = Choice(Mesh.parse("2"), levels, uses, 1, 1, clip=False, dtype="float64"), Post(2)
    done: list[int] = []

    def run(rank: int) -> None:
        _, optimizer = apply(models[rank], choice, torch.optim.SGD, world=ThreadWorld(post, rank), lr=0.1)
        optimizer.engine.close()
        done.append(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == [0, 1]
    for model in models:
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, expected[name]), name


class Queries(nn.Module):
    """Learned queries: what it returns is its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))

    def forward(self) -> Tensor:
        return self.weight


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.layer = Queries(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(self.queries() + x)
        return found


def test_a_unit_that_returns_its_parameter_is_entered_once_in_every_pass() -> None:
    model, listener = Asks(), Told()
    detach = attach(find_units(model), listener)
    passes = []
    for _ in range(3):
        listener.calls.clear()
        model(torch.ones(2, 3)).sum().backward()
        passes.append([call for call in listener.calls if call.startswith("queries")])
    assert passes == 3 * [["queries forward", "queries backward"]]
    detach()
    listener.calls.clear()
    model(torch.ones(2, 3)).sum().backward()
    assert not listener.calls and not hasattr(model.queries.weight, "_hzplan_begins")


def test_attention_with_dropout_is_computed_again() -> None:
    """It draws random numbers: left out of the second run, what comes after it would draw others."""
    attention: Any = torch.ops.aten._scaled_dot_product_flash_attention.default
    policy = _Policy("elementwise")
    for dropout, kept in ((0.0, True), (0.1, False)):
        context: Any = type("Context", (), {"is_recompute": False})()
        found = policy(context, attention, *(torch.ones(1),) * 3, dropout)
        assert (found.name == "MUST_SAVE") is kept
        by_name = policy(context, attention, *(torch.ones(1),) * 3, dropout_p=dropout)
        assert (by_name.name == "MUST_SAVE") is kept


def test_what_is_given_by_name_is_looked_after_like_the_rest() -> None:
    """torch refuses a checkpoint whose input was changed in place; of names it would not know."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, *, x: Tensor) -> Tensor:
            x += self.layer(x.double().float()).tanh()
            return x

    block = Block()
    undo = recompute(block)
    start = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        block(x=start * 1.0).sum().backward()
    undo()


def test_models_come_for_training() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
    assert for_training(model) is model and model[1].training
    kept = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    kept[0].eval()
    assert not for_training(kept)[0].training  # type: ignore[index]
    model.register_parameter("w", nn.Parameter(torch.ones(2, dtype=torch.cfloat)))
    with pytest.raises(UserError, match="parameter w has dtype complex64; plans are of real numbers"):
        for_training(model)


def test_a_loss_in_chunks_is_of_a_head_that_nothing_follows() -> None:
    """Its parameters are read when the loss is computed: after another unit's turn they are shards."""
    model = CostModel(Profile.load(ROOT / "plans" / "profiles" / "llama3-8b-h100-8.json"))
    forwards = [use.unit for use in model.profile.uses if use.phase == "forward"]
    assert model._stays_to_the_end(forwards[-1])
    assert not model._stays_to_the_end(forwards[0]) and not model._stays_to_the_end(forwards[1])
    partial = {"chunks": RecomputeCost(seconds=1e-3, retained_bytes=0, peak_bytes=0)}
    uses = [
        use.model_copy(update={"costs": [cost.model_copy(update={"partial": partial}) for cost in use.costs]})
        for use in model.profile.uses
    ]
    ways = CostModel(model.profile.model_copy(update={"uses": uses})).ways
    assert ways.keys() == {*forwards[-2:]}, "the last norm travels with the head"
