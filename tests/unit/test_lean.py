"""What the profiler finds out of a step: uses that read no parameter, small units that travel with others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hzplan.core.schedule import Use
from hzplan.models.units import find_units
from hzplan.profiler.model.calls import RecordedCalls
from hzplan.profiler.model.entries import joined
from hzplan.profiler.model.reads import unread_uses


class Keeps(torch.autograd.Function):
    """A product that keeps its weight where autograd's record of saved tensors does not see it."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight  # type: ignore[attr-defined]
        return x @ weight

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient @ ctx.weight.T, ctx.x.T @ gradient  # type: ignore[attr-defined]


class Hidden(nn.Module):
    """A linear layer of ``Keeps``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Keeps.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


class Model(nn.Module):
    """An embedding, a layer to be tried, and a head."""

    def __init__(self, middle: nn.Module, *, recompute: bool = False) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(5, 4), middle, nn.Linear(4, 3)
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = checkpoint(self.middle, x, use_reentrant=False) if self.recompute else self.middle(x)
        out: Tensor = self.head(x)
        return out


def unread(model: nn.Module) -> list[str]:
    """The uses of a model that read no parameter."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    units = find_units(model)
    calls = RecordedCalls(units, 1)

    def step() -> Tensor:
        loss: Tensor = model(torch.tensor([0, 1, 4])).square().sum()
        return loss

    uses, found = calls.run(step), unread_uses(calls, units, step)
    calls.detach()
    assert all(map(torch.equal, before, model.parameters())), "values are as they were"
    return [str(uses[index]) for index in sorted(found)]


def test_an_embedding_is_not_read_in_backward() -> None:
    assert unread(Model(nn.Linear(4, 4))) == ["B embed"]
    assert unread(Model(nn.LayerNorm(4))) == ["B embed"]


def test_what_is_recomputed_is_read_by_the_forward_inside_backward() -> None:
    """Its backward's turn lasts until that forward begins, which is a use like others and reads."""
    assert unread(Model(nn.Linear(4, 4), recompute=True)) == ["B middle", "B embed"]


def test_what_is_kept_out_of_sight_is_noticed() -> None:
    """Its gradient would be NaN, so nothing at all is taken to be unread."""
    assert unread(Model(Hidden())) == []


def there_and_back(*units: str) -> list[Use]:
    """Forward through the units and back."""
    return [Use(u, "forward") for u in units] + [Use(u, "backward") for u in reversed(units)]


def alone(*units: str) -> dict[str, tuple[str, ...]]:
    """Units that need nobody else."""
    return {unit: (unit,) for unit in units}


def test_a_norm_goes_with_the_head_and_not_with_a_block() -> None:
    units = ("embed", "a", "b", "norm", "head")
    found = joined(
        alone(*units), {"embed": 900, "a": 900, "b": 900, "norm": 9, "head": 900}, there_and_back(*units)
    )
    assert found == alone(*units) | {"norm": ("norm", "head"), "head": ("head", "norm")}


def test_what_is_carried_carries_nobody() -> None:
    units = ("a", "b", "c")
    found = joined(alone(*units), {"a": 1, "b": 16, "c": 256}, there_and_back(*units))
    assert found == alone(*units) | {"b": ("b", "c"), "c": ("c", "b")}


@pytest.mark.parametrize(
    ("requires", "nbytes", "uses"),
    [
        (alone("a", "b"), {"a": 100, "b": 10}, there_and_back("a", "b")),  # not small enough
        ({"a": ("a", "b"), "b": ("b",)}, {"a": 1, "b": 99}, there_and_back("a", "b")),  # tied already
        (alone("a", "b"), {"a": 1, "b": 99}, there_and_back("a", "b", "b")),  # used more often
        (alone("a", "b", "c"), {"a": 1, "b": 2, "c": 99}, there_and_back("a", "b", "c", "a")),  # not beside
    ],
)
def test_others_stay_alone(
    requires: dict[str, tuple[str, ...]], nbytes: dict[str, int], uses: list[Use]
) -> None:
    found = joined(requires, nbytes, uses)
    assert found["a"] == requires["a"]
