"""Recomputation: the same numbers in less memory, and what a profile and a plan say of it."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import random
import types
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hzplan.core.hierarchy import Mesh
from hzplan.core.recompute import WAYS, Recomputed, Way
from hzplan.cost.model import CostModel
from hzplan.errors import UserError
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile
from hzplan.models.gpt import GPT, PRESETS
from hzplan.models.recompute import leaves, recompute, recomputed_modules, switched
from hzplan.models.saved import Saved, unseen_host_buffer
from hzplan.models.units import find_units
from hzplan.models.workload import Workload, load
from hzplan.profiler import measure
from hzplan.profiler.model.calls import RecordedCalls
from hzplan.profiler.model.memory import HostMemory
from hzplan.solver.solve import Infeasible, Request, Solved, solve
from tests.plans import make_plan
from tests.unit.test_analytic import analysed
from tests.unit.test_profiler import workload_of

MODEL = "gpt:tiny"


def measured(workload: Workload, size: int, **short: int) -> Profile:
    """By one process; ``short``: constants of how often things are repeated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hzplan.profiler.model.optimizer.MAX_REPEATS", 3)
        for name, value in short.items():
            patch.setattr(f"hzplan.profiler.model.time.{name}", value)
        return measure(
            workload,
            mesh=Mesh.parse("1"),
            tier_names=("node",),
            micro_batches=[size],
            dtype="float32",
            optimizer="adamw",
            progress=lambda text, fraction: None,
        )


@pytest.fixture(scope="module")
def profile() -> Profile:
    """With all ways, though for so small a model some take longer than recomputing everything."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hzplan.profiler.model.recompute._useful", list)
        return measured(load(MODEL), 2, MAX_BLOCKS=2)


@pytest.mark.long
def test_memory_of_every_choice_is_as_predicted(profile: Profile) -> None:
    """Of each of the 16 sets of layers, and of as many mixtures of ways: run, and followed to the byte."""
    model, rng = CostModel(profile), random.Random(0)
    layers = [unit for unit in model.recomputable if unit.startswith("layers.")]
    assert len(layers) == 4
    sets = [again for count in range(5) for again in itertools.combinations(layers, count)]
    mixtures = [Recomputed({unit: rng.choice(model.ways[unit]) for unit in some}) for some in sets]
    mixtures = [again.with_(["head"], "chunks" if rng.random() < 0.5 else None) for again in mixtures]
    assert len({way for again in mixtures for way in again.values()}) >= 3
    for again in [*map(Recomputed.of, sets), *mixtures]:
        assert model.activations.peak_bytes(2, again) == pytest.approx(_peak(again), rel=0.01)
    assert model.activations.peak_bytes(2, Recomputed.of(layers)) < 0.6 * model.activations.peak_bytes(2)


def _peak(again: Recomputed) -> int:
    workload = load(MODEL)
    model = workload.build()
    units = workload.units_of(model)
    for unit in units:
        recompute(unit.module, partial(again.get, unit.name))
    calls, batch = RecordedCalls(units, 1), workload.batch(2, torch.Generator().manual_seed(0))
    calls.run(lambda: workload.loss(model, batch))
    with HostMemory() as trace:
        calls.run(lambda: workload.loss(model, batch), trace)
    level = peak = 0
    for segment in trace.segments():
        peak = max(peak, level + segment.peak_bytes)
        level += segment.retained_bytes
    return peak


def test_time_is_that_of_a_forward() -> None:
    """As modelled: what a layer's backward takes longer is its forward, less what nobody asks for."""
    model = CostModel(analysed(load(MODEL), 2))
    uses = model.profile.uses
    forward = {use.unit: use.costs[0].seconds for use in uses if use.phase == "forward"}
    for index, use in enumerate(uses):
        again = model.recompute_ns(index, 2, "full") / 1e9
        if use.unit.startswith("layers.") and use.phase == "backward":
            assert 0.5 * forward[use.unit] < again <= 1.01 * forward[use.unit]
        else:
            assert again == 0


def test_modelled_like_measured(profile: Profile) -> None:
    modelled, measured = CostModel(analysed(load(MODEL), 2, dtype="float32")), CostModel(profile)
    assert {*modelled.recomputable} <= {*measured.recomputable}
    for way in WAYS:
        again = Recomputed.of((unit for unit, ways in modelled.ways.items() if way in ways), way)
        theirs = measured.activations.bytes_by_use(2, again)
        assert modelled.activations.bytes_by_use(2, again) == pytest.approx(theirs, rel=0.05, abs=2**16)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.second(torch.dropout(torch.relu(self.first(x)) * scale, 0.5, True))


def test_gradients_are_the_same_bits_also_with_dropout() -> None:
    torch.manual_seed(0)
    module, x = Dropping(), torch.randn(4, 8)

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        found = module(x, scale=2.0).square().sum()
        module.zero_grad()
        found.backward()
        return [p.grad.clone() for p in module.parameters() if p.grad is not None]

    plain = gradients()
    undo = recompute(module)
    again = gradients()
    undo()
    assert "forward" not in module.__dict__
    assert len(plain) == 4 and all(map(torch.equal, plain, again))


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts[str(func.overloadpacket).rpartition(".")[2]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", WAYS)
def test_each_way_computes_again_what_it_says(way: Way) -> None:
    """Of a block with four products and attention; the last product's result is not needed again."""
    torch.manual_seed(0)
    block, x = GPT(PRESETS["nano"]).layers[0], torch.randn(2, 16, PRESETS["nano"].width)

    def backward() -> tuple[Counter[str], list[Tensor]]:
        block.zero_grad()
        found = block(x).square().sum()
        with Counted() as counted:
            found.backward()
        return counted.counts, [parameter.grad.clone() for parameter in block.parameters()]

    plain, gradients = backward()
    undo = recompute(block, lambda: way, saved=Saved(unseen_host_buffer))
    more, again = backward()
    undo()
    assert all(map(torch.equal, gradients, again))
    more.subtract(plain)
    attention = sum(count for name, count in more.items() if "scaled_dot_product" in name)
    products = sum(more[name] for name in ("mm", "addmm"))
    if way in ("host", "chunks"):  # which is for heads
        assert {*+more} <= {"copy_", "empty", "set_", "detach", "slice"}
        return
    expected = {
        "elementwise": (0, 0),
        "operations": (1, 0),
        "attention": (0, 1),
        "products": (3, 0),
        "full": (3, 1),
    }
    assert (products, attention) == expected[way]
    assert more["gelu"] == 1


def test_a_switch_decides_when_forward_begins() -> None:
    workload = load("gpt:nano")
    model = workload.build()
    calls: list[bool] = []
    inner = model.layers[0].mlp if hasattr(model.layers[0], "mlp") else next(model.layers[0].children())
    inner.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    batch = workload.batch(1, torch.Generator().manual_seed(0))
    with switched(workload.units_of(model)) as switch:
        workload.loss(model, batch).backward()
        assert len(calls) == 1
        switch.around(lambda: workload.loss(model, batch))().backward()
        assert len(calls) == 3
        with torch.no_grad():
            switch.around(lambda: workload.loss(model, batch))()
        assert len(calls) == 4
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_only_units_without_units_inside() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model.register_parameter("own", nn.Parameter(torch.ones(1)))
    units = find_units(model)
    names = {unit.name for unit in units}
    assert "" in names and "" not in leaves(units) and leaves(units) == names - {""}
    with pytest.raises(UserError, match="has other units inside"):
        recomputed_modules(units, [""])
    with pytest.raises(UserError, match="which the model does not have"):
        recomputed_modules(units, ["elsewhere"])


def test_a_backward_that_reads_nothing_cannot_compute_again(tmp_path: Path) -> None:
    plan = make_plan("gpt:nano", recompute=["embed"])
    data = json.loads(plan.model_dump_json())
    data["uses"] = [use.replace("B embed", "b embed") for use in data["uses"]]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match="embed is recomputed, but its backward"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.long
def test_less_memory_than_without_and_never_more_than_asked() -> None:
    profile = analysed(load(MODEL), 2)
    batch = 2 * profile.mesh.world

    def least(recompute: str) -> int:
        found = solve(profile, Request(1, batch, recompute=recompute))  # type: ignore[arg-type]
        assert isinstance(found, Infeasible)
        return found.smallest.memory.peak

    free, without, everything = least("choose"), least("none"), least("all")
    assert free <= everything and free < without
    found = solve(profile, Request((free + without) // 2, batch))
    assert isinstance(found, Solved) and found.best.modes.recompute
    loose = solve(profile, Request(2**40, batch))
    assert isinstance(loose, Solved) and not loose.best.modes.recompute


class Odd(nn.Module):
    """Counts, and takes keywords that torch's checkpoint has too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, *, debug: bool = False, early_stop: int = 0, function: int = 1) -> Tensor:
        found: Tensor = self.linear(self.norm(x)) * (2.0 if debug else 1.0) + early_stop
        return found * function


def test_buffers_change_once_and_keywords_arrive() -> None:
    def trained(*, again: bool) -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(0)
        module, x = Odd(), torch.randn(4, 8)
        undo = recompute(module) if again else lambda: None
        out = module(x, debug=True, early_stop=5, function=3)
        out.square().sum().backward()
        undo()
        undo()  # once more does no harm
        return out.detach(), {name: b.clone() for name, b in module.named_buffers()}

    plain, again = trained(again=False), trained(again=True)
    assert torch.equal(plain[0], again[0])
    assert plain[1].keys() == again[1].keys() and plain[1]["norm.num_batches_tracked"] == 1
    assert all(torch.equal(plain[1][name], again[1][name]) for name in plain[1])


def test_a_copy_runs_its_own_forward() -> None:
    module = Odd()
    recompute(module)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.linear.weight.zero_()
        copied.linear.bias.zero_()
    assert copied(torch.randn(4, 8)).abs().max() == 0 and module(torch.randn(4, 8)).abs().max() > 0


def test_what_fails_now_and_then_is_no_choice() -> None:
    """A forward that is not the same twice, seldom: the profile is made, without recomputation."""

    class Seldom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in "12"
            )
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    def odd(self: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        found = nn.Sequential.forward(self, x)
        return found if len(calls) < 40 or len(calls) % 2 else found.sin().sin()

    calls: list[int] = []
    model = Seldom()
    model.layers[0].forward = types.MethodType(odd, model.layers[0])
    workload = workload_of(lambda: model, 16, rows=8)
    found = measured(workload, 1)
    assert CostModel(found).recomputable == () and found.uses


@pytest.mark.parametrize("way", ["elementwise", "operations", "attention"])
def test_a_last_product_that_is_only_added_is_not_kept(way: Way) -> None:
    """Between forward and backward; nothing more is computed again for it. Where something that saves what
    it was given follows, it stays, and a second run in full is right in any case."""

    class Block(nn.Module):
        def __init__(self, *, then: bool) -> None:
            super().__init__()
            self.up, self.down, self.then = nn.Linear(8, 64), nn.Linear(64, 8 * 1024), then

        def forward(self, x: Tensor) -> Tensor:
            found = self.down(torch.sin(self.up(x))).view(-1, 1024, 8) + x.unsqueeze(1)
            return torch.sin(found) if self.then else found

    for then in (False, True):
        torch.manual_seed(0)
        module, x = Block(then=then), torch.randn(16, 8)
        plain = torch.autograd.grad(module(x).square().sum(), [*module.parameters()])
        undo = recompute(module, lambda: way)
        with Counted() as counted:
            found = module(x)
            kept = [*_held()]
            forwards = counted.counts["addmm"]
            loss = found.square().sum()
            again = torch.autograd.grad(loss, [*module.parameters()], retain_graph=False)
        undo()
        assert all(map(torch.equal, plain, again))
        products = counted.counts["addmm"] - forwards
        assert products == (0 if way != "operations" or not then else 1)
        assert (kept.count(16 * 8 * 1024) > 0) == (then and way != "operations")


def _held() -> Iterator[int]:
    """Elements of what selective checkpoints keep now."""
    wrapper = torch.utils.checkpoint._VersionWrapper
    gc.collect()
    for one in gc.get_objects():
        if type(one) is wrapper:
            yield one.val.numel()


@pytest.mark.parametrize("way", ["elementwise", "operations", "products"])
def test_attention_that_is_only_added_is_kept(way: Way) -> None:
    """Its backward needs its result."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.three = nn.Linear(32, 96)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.three(x).view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
            return x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 16, 32)

    block = Block()
    undo = recompute(block, lambda: way)
    found = block(torch.randn(2, 16, 32)).sum()
    with Counted() as counted:
        found.backward()
    undo()
    forwards = {name for name in counted.counts if "attention" in name and "backward" not in name}
    assert not forwards


@pytest.mark.parametrize("way", ["elementwise", "operations", "attention", "products", "full"])
def test_units_with_buffers_that_change_can_be_computed_in_part(way: Way) -> None:
    """And keep as little in their first forward as in later ones."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.norm(self.up(x)))

    torch.manual_seed(0)
    plain, x = Block(), torch.randn(16, 8)
    block = copy.deepcopy(plain)
    recompute(block, lambda: way)
    kept = []
    for _ in range(3):
        for module in (plain, block):
            found = module(x).square().sum()
            kept += [sum(_held())] if module is block else []
            found.backward()
    assert len({*kept}) == 1
    for (name, one), other in zip(plain.named_buffers(), block.buffers(), strict=True):
        assert torch.equal(one, other), name
    for one, other in zip(plain.parameters(), block.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("way", ["elementwise", "operations", "attention", "products"])
def test_higher_order_operators_know_a_part_of_a_forward(way: Way) -> None:
    """As flex attention is one, which has no backward on processors."""
    from torch.nn.attention.flex_attention import flex_attention

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x + flex_attention(*[x.detach()] * 3))

    x = torch.randn(1, 2, 128, 16)
    torch.manual_seed(0)
    block = Block()
    (plain,) = torch.autograd.grad(block(x).square().sum(), [block.out.weight])
    recompute(block, lambda: way)
    (again,) = torch.autograd.grad(block(x).square().sum(), [block.out.weight])
    assert torch.equal(plain, again)
