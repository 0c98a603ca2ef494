"""Parameters read outside of their module's forward are whole there, and trained as in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hzplan.core.hierarchy import Mesh
from hzplan.errors import UserError
from hzplan.formats.cluster import find_cluster
from hzplan.formats.profile import Profile
from hzplan.models.units import find_units
from hzplan.models.workload import load
from hzplan.profiler import measure
from hzplan.profiler.analytic import analyse
from hzplan.profiler.model.outside import OutsideReads
from hzplan.solver.emit import emit
from hzplan.solver.solve import Request, Solved, solve
from hzplan.training.verify import verify
from tests.long import shorter

WIDTH, VOCAB, LENGTH = 32, 64, 8


class Block(nn.Module):
    """``shared``: a module of somebody else's whose weight it multiplies with."""

    def __init__(self, shared: nn.Linear | None) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.shared = (shared,)

    def forward(self, x: Tensor) -> Tensor:
        (shared,) = self.shared
        found = self.inner(x).tanh()
        return x + (found if shared is None else F.linear(found, shared.weight))


class Net(nn.Module):
    """A small language model that reads parameters in one of several ``ways``."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
        blocks = 8 if way in ("shared by blocks", "one of many") else 2
        self.blocks = nn.ModuleList(
            Block(self.shared if way == "shared by blocks" else None) for _ in range(blocks)
        )
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        early = self.way == "too early"
        x = F.embedding(tokens, self.table.weight) if early else self.table(tokens)
        if self.way == "in place":
            added = self.shared(x)
            x = self.entry(x)
            x += added
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.way == "between blocks" or (self.way == "one of many" and index == 3):
                x = x + F.linear(x, self.shared.weight).tanh()
        if self.way == "attention":
            x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.norm(x)
        if self.way == "table":
            return F.linear(x, self.table.weight)
        if self.way == "head":
            return F.linear(x, self.head.weight, self.head.bias)
        logits: Tensor = self.head(x)
        return logits


class Theirs:
    seq_len = LENGTH
    vocab = VOCAB

    def __init__(self, way: str) -> None:
        self.model = Net(way)
        for name, module in self.model.named_children():  # what takes no part is not trained
            used = {
                "shared": way not in ("table", "head", "attention", "too early"),
                "head": way != "table",
            }
            used |= {"attention": way == "attention", "entry": way == "in place"}
            module.requires_grad_(used.get(name, True))

    def batch(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(VOCAB, (count, LENGTH + 1), generator=generator)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def named(way: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The model as the command line names it."""
    module = ModuleType("their_code")
    factory: Callable[[], Theirs] = lambda: Theirs(way)  # noqa: E731 an attribute
    module.factory = factory  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_code", module)
    return "their_code:factory"


def modelled(name: str) -> Profile:
    data, device = find_cluster("h100-8x400g")
    mesh = Mesh.parse("2|2")
    return analyse(load(name), data, device, mesh=mesh, micro_batches=[1], dtype="float32", optimizer="adamw")


READ = {
    "table": {"norm": {"table"}},
    "head": {"norm": {"head"}},
    "attention": {"attention": {"attention.out_proj"}},
    "between blocks": {"blocks.0": {"shared"}, "blocks.1": {"shared"}, "norm": {"shared"}},
    "one of many": {"blocks.3": {"shared"}, "blocks.4": {"shared"}},
    "in place": {},
    "shared by blocks": {f"blocks.{index}": {"shared"} for index in range(8)},
}
"""By way, what each unit's calls read of others: after a block's forward, and before its backward. What adds
to a linear layer's output in place takes nothing away from the layer's own call."""


@pytest.mark.parametrize("way", shorter([*READ], without={"head", "between blocks"}))
def test_modelled_needs_are_those_of_the_calls_and_training_is_that_of_one_process(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = named(way, monkeypatch)
    profile = modelled(name)
    for unit in profile.units:
        assert READ[way].get(unit.name, set()) <= set(unit.requires)
    if way == "in place":
        assert [use.phase for use in profile.uses if use.unit == "entry"] == ["forward", "backward"]
    request = Request(1 << 34, 8, gap=0.05, time_limit_s=5)
    solved = solve(profile, request)
    assert isinstance(solved, Solved)
    plan = emit(profile, request, solved, profile_path=tmp_path / "p.json", plan_path=tmp_path / "plan.json")
    assert verify(plan, name).ok


@pytest.mark.parametrize("way", shorter([*READ], without=READ.keys() - {"table", "attention"}))
def test_measured_needs_are_the_modelled_ones(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for constant, value in (("time.MAX_BLOCKS", 1), ("optimizer.MAX_REPEATS", 1)):
        monkeypatch.setattr(f"hzplan.profiler.model.{constant}", value)
    name = named(way, monkeypatch)
    measured = measure(
        load(name),
        mesh=Mesh.parse("1"),
        tier_names=("node",),
        micro_batches=[1],
        dtype="float32",
        optimizer="adamw",
        progress=lambda text, fraction: None,
    )
    assert measured.units == modelled(name).units


def test_what_is_read_before_any_call_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^their_code:factory: the parameter table\.weight is read before"):
        modelled(named("too early", monkeypatch))


def test_numbers_and_operations_with_functions_are_reads() -> None:
    """A number is no tensor, and ``torch.cond`` no operation with a schema."""
    first, second, third = (nn.Linear(2, 2) for _ in range(3))
    units = find_units(nn.ModuleDict({"first": first, "second": second, "third": third}))
    reads = OutsideReads(units, lambda: "first")
    with reads:
        x = first(torch.ones(1, 2)) * second.bias[0].item()
        torch.cond(x.sum() > 0, lambda t: t @ t.T, lambda t: t @ t, (third.weight,))
    assert reads.found == {"first": ("second", "third")}


def test_a_gradient_comes_to_whoever_is_there() -> None:
    """A table's gradient needs no table, but somebody must wait for it."""
    table, block = nn.Embedding(4, 2), nn.Linear(2, 2)
    units, current = find_units(nn.ModuleDict({"table": table, "block": block})), "table"
    reads = OutsideReads(units, lambda: current)
    with reads:
        x = F.embedding(torch.tensor([1]), table.weight)
        current = "block"
        block(x).sum().backward()
    assert reads.found == {"block": ("table",)}
