"""Models whose values wait: the same as models that are made at once, and nowhere whole."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hzplan
from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.schedule import Use
from hzplan.errors import UserError
from hzplan.models.deferred import deferred_if_possible, deferred_init, stand_in
from hzplan.models.units import find_units
from hzplan.models.workload import load
from hzplan.runtime.apply import Choice, apply, full_parameters
from hzplan.runtime.backends.rate_limited import RateLimitedWorld
from hzplan.training.measure import alive_bytes, peak_memory_bytes
from tests.unit.test_architectures import ARCHITECTURES


class Odd(nn.Module):
    """What constructors do: start over, look at values, copy, tie, slice, scale, mark, write twice."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(8, 8)
        nn.init.orthogonal_(self.square.weight)
        self.conv = nn.Conv1d(4, 4, 3)
        nn.init.trunc_normal_(self.conv.weight, std=1.0, a=-0.5, b=0.5)  # draws until all are within
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.table = nn.Embedding(10, 4, padding_idx=0)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight
        self.copies = nn.ModuleList(copy.deepcopy(self.square) for _ in range(2))
        self.mixed = nn.Parameter(torch.empty(6))
        nn.init.normal_(self.mixed)
        self.mixed.decays = False
        self.recurrent = nn.LSTM(4, 4)
        self.rates = [float(rate) for rate in torch.linspace(0, 0.1, 3)]
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)), persistent=False)
        self.register_buffer("angles", 1 / 10_000 ** (torch.arange(0, 8, 2) / 8))
        self.register_buffer("noise", nn.functional.rrelu(torch.randn(3), training=True) + torch.rand(3))
        constants = torch.tensor([1.0, 2.0])
        with torch.no_grad():
            self.square.weight[0] = 1
            self.table.weight.mul_(2)
            self.square.bias[:2] = constants
            constants.zero_()
            for parameter in self.copies.parameters():
                parameter.normal_(std=0.02)
            torch.as_strided(self.mixed, (2, 2), (1, 1)).fill_(5)
            self.order = nn.Parameter(torch.randperm(6) * torch.bernoulli(torch.full((6,), 0.5)))


def of_transformers(kind: str, folder: Path) -> Callable[[], nn.Module]:
    (folder / "config.json").write_text(json.dumps({"model_type": kind} | ARCHITECTURES[kind]))
    return load(f"hf:{folder / 'config.json'}", seq_len=16).build


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def check_the_same(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(7)
    made, stands = build(), torch.get_rng_state()
    torch.manual_seed(7)
    model = deferred_init(build)
    waiting = stand_in(model)
    found = {name: values.clone() for name, values in waiting.values()}
    assert torch.equal(torch.get_rng_state(), stands)
    now = tensors(model)
    for name, values in tensors(made).items():
        assert vars(now[name]).keys() >= vars(values).keys()
    assert now.keys() == tensors(made).keys()
    for name, values in tensors(made).items():
        assert (now[name].shape, now[name].dtype) == (values.shape, values.dtype)
        assert now[name].requires_grad == values.requires_grad
        torch.testing.assert_close(found.get(name, now[name]), values, rtol=0, atol=0, equal_nan=True)
    assert waiting.parameters == dict(made.named_parameters()).keys()


@pytest.mark.parametrize("name", ["gpt:nano", "moe:nano"])
def test_a_built_in_model_has_the_values_of_ordinary_construction(name: str) -> None:
    check_the_same(load(name).build)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_model_of_transformers_has_the_values_of_ordinary_construction(kind: str, tmp_path: Path) -> None:
    check_the_same(of_transformers(kind, tmp_path))


def test_constructors_may_do_many_things() -> None:
    check_the_same(Odd)
    check_the_same(lambda: Odd().to(torch.float64))
    check_the_same(lambda: nn.Transformer(8, 2, 1, 1, 16))


def test_numbers_drawn_since_are_not_drawn_again() -> None:
    torch.manual_seed(0)
    model = deferred_init(nn.Linear, 4, 4)
    torch.rand(3)
    drawn = torch.get_rng_state()
    list(stand_in(model).values())
    assert torch.equal(torch.get_rng_state(), drawn)


class Layers(nn.Module):
    """Layers, all of them scaled at the end or not."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(count))
        for layer in self.layers:
            nn.init.normal_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_no_more_than_a_tensor_is_there_at_once() -> None:
    waiting = stand_in(deferred_init(Layers))
    kept: list[weakref.ref[torch.UntypedStorage]] = []
    most = 0
    for _, values in waiting.values():
        kept.append(weakref.ref(values.untyped_storage()))
        most = max(most, sum(storage() is not None for storage in kept))
    assert len(kept) == 16
    assert most <= 2  # the one before is still the loop's


def test_no_rank_ever_holds_the_model() -> None:
    mesh, device = Mesh.parse("8"), torch.device("cpu")
    with torch.device("meta"):
        units = [unit.name for unit in find_units(Layers())]
        levels = {name: Levels(1, 1, 1) for name, _ in Layers().named_parameters()}
    uses = [Use(unit, "forward") for unit in units] + [Use(unit, "backward") for unit in reversed(units)]
    choice = Choice(mesh, levels, tuple(uses), prefetch=1, accumulation=1, clip=True)
    kept = []

    def make() -> None:
        world = RateLimitedWorld(mesh, 3, lambda *_: 0.0, exchanges=True)
        kept.append(apply(deferred_init(Layers), choice, torch.optim.SGD, world=world, lr=0.1))

    peak = peak_memory_bytes(make, device)
    kept[0][1].engine.close()
    lasts, tensor, model = alive_bytes(device), 64 * 64 * 4, 8 * (64 * 64 + 64) * 4
    assert lasts - model < peak <= lasts + 2 * tensor < lasts + model / 2


def test_what_no_record_knows_is_named() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(UserError, match=r"^weight has no values.*hzplan\.deferred_init"):
        stand_in(model)


class Does(nn.Linear):
    """A layer whose constructor does something else besides."""

    def __init__(self, deed: Callable[[Any], object]) -> None:
        super().__init__(4, 4)
        deed(self)
        nn.init.normal_(self.weight)


DEEDS: dict[str, Callable[[Any], object]] = {
    "seeds": lambda layer: torch.manual_seed(1),
    "seeds the generator": lambda layer: torch.default_generator.manual_seed(1),
    "forks": lambda layer: torch.random.fork_rng([]).__enter__(),
    "own generator": lambda layer: layer.weight.normal_(generator=torch.Generator()),
    "an attribute": lambda layer: setattr(layer, "scale", torch.ones(1)),
    "a list": lambda layer: setattr(layer, "masks", [torch.ones(1)]),
    "a hook": lambda layer: layer.weight.register_hook(lambda grad: grad * 0),
    "a conjugate": lambda layer: torch.zeros(3, dtype=torch.complex64).conj().mul(2),
    "an array": lambda layer: layer.weight.detach().numpy(),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_what_would_not_be_repeated_is_refused(deed: str) -> None:
    before = torch.get_rng_state()
    with torch.no_grad(), pytest.raises(UserError, match="Does cannot be made without values"):
        deferred_init(Does, DEEDS[deed])
    torch.set_rng_state(before)


def test_what_is_done_in_between_is_refused() -> None:
    model = deferred_init(nn.Linear, 4, 4)
    with torch.no_grad():
        nn.init.zeros_(model.weight)
    with pytest.raises(UserError, match=r"weight was written to after"):
        stand_in(model)
    model = deferred_init(nn.Linear, 4, 4)
    with pytest.raises(UserError, match="waits to draw the numbers"):
        deferred_init(nn.Linear, 4, 4)
    with pytest.raises(Exception, match=r"(?i)fake"):
        model.load_state_dict(nn.Linear(4, 4).state_dict())


def test_recurrent_modules_are_what_is_trained() -> None:
    def build() -> nn.Module:
        return nn.ModuleDict({"r": nn.LSTM(4, 4), "o": nn.Linear(4, 4)})

    torch.manual_seed(0)
    made = build()
    torch.manual_seed(0)
    model = deferred_init(build)
    uses = tuple(Use(unit, phase) for phase in ("forward", "backward") for unit in ("r", "o"))
    levels = {name: Levels(0, 0, 0) for name, _ in made.named_parameters()}
    choice = Choice(Mesh.parse("1"), levels, uses, prefetch=1, accumulation=1, clip=False)
    model, optimizer = apply(model, choice, torch.optim.SGD, params=[*model.parameters()], lr=0.1)
    for name, values in full_parameters(optimizer).items():
        assert torch.equal(values, made.get_parameter(name)), name
    optimizer.engine.close()


def test_a_constructor_that_needs_values_is_told_apart() -> None:
    class Looks(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.first = self.weight.detach().numpy()[0, 0]

    with pytest.raises(UserError, match="Looks cannot be made without values"):
        deferred_init(Looks)
    torch.manual_seed(0)
    made = deferred_if_possible(Looks)
    torch.manual_seed(0)
    assert torch.equal(made.weight, Looks().weight)
    assert hzplan.deferred_init is deferred_init
