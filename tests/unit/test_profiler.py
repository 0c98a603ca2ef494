"""The profiler: memory to the byte, uses in order, FLOPs in closed form, a profile that loads."""

from __future__ import annotations

import gc
import itertools
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hzplan.core.hierarchy import Mesh
from hzplan.core.schedule import Use, build
from hzplan.cost.model import CostModel
from hzplan.errors import UserError
from hzplan.formats.profile import Profile, signature
from hzplan.models.gpt import PRESETS, closed_form_forward_flops, closed_form_parameters
from hzplan.models.units import find_units
from hzplan.models.workload import Workload, load
from hzplan.profiler import default_mesh, measure
from hzplan.profiler.model import optimizer, passes
from hzplan.profiler.model.calls import RecordedCalls
from hzplan.profiler.model.flops import FlopProbe
from hzplan.profiler.model.matrices import measure_matrices
from hzplan.profiler.model.memory import HostMemory, Segment
from hzplan.profiler.model.optimizer import measure_optimizer
from hzplan.profiler.network.wakeup import measure_wakeup, wakeups
from hzplan.profiler.session.machine import peak_flops, rank_memory_bytes
from hzplan.profiler.session.ranks import Ranks
from hzplan.profiler.session.statistics import rising, sizes, spread

ALONE = Ranks(0, 1, "none", torch.device("cpu"))


def workload_of(build: Callable[[], nn.Module], features: int, rows: int = 1) -> Workload:
    """Random numbers [n·rows, features] through a module, and the sum of squares of what comes out."""

    def batch(n: int, generator: torch.Generator) -> object:
        return torch.randn(n * rows, features, generator=generator)

    def loss(model: nn.Module, data: object) -> Tensor:
        out: Tensor = model(data)
        return out.square().sum()

    return Workload("their.code:model", build, batch, loss, seq_len=1, vocab=None)


def trace(model: nn.Module, step: Callable[[], Tensor]) -> tuple[tuple[Use, ...], list[Segment]]:
    calls = RecordedCalls(find_units(model), world=4)
    ran = calls.run(step)
    memory = HostMemory()
    with memory:
        assert calls.run(step, memory) == ran
    calls.detach()
    return ran, memory.segments()


def test_memory_of_a_chain_is_exact() -> None:
    n, float32 = 10, 4
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 48), nn.Linear(48, 8))
    data = torch.randn(n, 16)
    ran, segments = trace(model, lambda: model(data).square().sum())
    assert list(map(str, ran)) == ["F 0", "F 1", "F 2", "B 2", "B 1", "B 0"]
    first, second, third = n * 32 * float32, n * 48 * float32, n * 8 * float32
    # A forward leaves its output, which the next layer saves.
    assert segments[0] == Segment(first, first)
    assert segments[1] == Segment(second, second)
    # The last one: the gradient of its output in the output's place, the loss, and the loss' own gradient.
    assert segments[2].retained_bytes == third + 2 * float32
    # A backward frees the gradient that came in and what was saved, and leaves the gradient that goes on.
    assert [s.retained_bytes for s in segments[3:]] == [
        second - third - second,
        first - second - first,
        -first - 2 * float32,
    ]
    # At its highest it holds the gradients of input (not for the first layer), weight and bias.
    assert [s.peak_bytes for s in segments[3:]] == [
        second + (48 * 8 + 8) * float32,
        first + (32 * 48 + 48) * float32,
        (16 * 32 + 32) * float32,
    ]


def test_a_pass_keeps_nothing_and_garbage_does_not_disturb() -> None:
    workload = load("gpt:nano")
    model = workload.build()
    batch = workload.batch(2, torch.Generator())
    _, expected = trace(model, lambda: workload.loss(model, batch))
    assert sum(segment.retained_bytes for segment in expected) == 0
    for _ in range(50):  # cycles that hold tensors, and would be collected sooner or later
        cycle: list[object] = [torch.zeros(1000)]
        cycle.append(cycle)
    assert gc.isenabled()
    _, again = trace(model, lambda: workload.loss(model, batch))
    assert gc.isenabled()
    assert again == expected
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_uses_of_a_gpt() -> None:
    model = load("gpt:nano").build()
    ran, _ = trace(model, lambda: model(torch.zeros(1, 8, dtype=torch.int64)).sum())
    forward = ["embed", "positions", "layers.0", "layers.1", "norm", "head"]
    assert [use.unit for use in ran if use.phase == "forward"] == forward
    assert [use.phase for use in ran] == ["forward"] * 6 + ["backward"] * 6
    assert [use.unit for use in ran[6:10]] == ["head", "norm", "layers.1", "layers.0"]
    assert ran[0] == Use("embed", "forward") and ran[-1] == Use("embed", "backward")


def test_recomputation_and_tied_modules_are_uses_like_others() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.last = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(self.inner(x))
            out: Tensor = checkpoint(self.last, x, use_reentrant=False)
            return out

    model, data = Twice(), torch.randn(3, 8)
    ran, segments = trace(model, lambda: model(data).square().sum())
    assert list(map(str, ran)) == [
        "F inner",
        "F inner",
        "F last",
        "B last",
        "F last",
        "B inner",
        "B inner",
    ]
    assert sum(segment.retained_bytes for segment in segments) == 0


def test_gradients_are_scaled_into_the_buffer() -> None:
    model, data = nn.Linear(5, 7), torch.randn(4, 5)
    expected = torch.autograd.grad(model(data).sum(), [model.weight, model.bias])
    calls = RecordedCalls(find_units(model), world=4)
    calls.run(lambda: model(data).sum())
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(calls._slots[id(parameter)], gradient / 4)
        assert parameter.grad is None
    calls.detach()
    model(data).sum().backward()
    assert model.weight.grad is not None  # no hook is left


def test_flops_of_a_gpt_in_closed_form() -> None:
    workload = load("gpt:nano")
    model = workload.build()
    batch = workload.batch(3, torch.Generator())
    calls, probe = RecordedCalls(find_units(model), world=1), FlopProbe()
    with probe.counter:
        ran = calls.run(lambda: workload.loss(model, batch), probe)
    flops = dict(zip(ran, probe.flops(), strict=True))
    assert sum(flops.values()) == 3 * closed_form_forward_flops(PRESETS["nano"], 3)
    assert flops[Use("layers.0", "backward")] == 2 * flops[Use("layers.0", "forward")]
    assert flops[Use("head", "forward")] == 2 * 3 * 32 * 32 * 256


def test_a_profile_of_one_process(tmp_path: Path) -> None:
    said: list[tuple[str, float]] = []
    mesh, tiers = default_mesh()
    random_state = torch.get_rng_state()
    profile = measure(
        load("gpt:nano"),
        mesh=mesh,
        tier_names=tiers,
        micro_batches=[4, 2, 4],
        dtype="float32",
        optimizer="adamw",
        progress=lambda text, fraction: said.append((text, fraction)),
    )
    assert torch.equal(torch.get_rng_state(), random_state)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile

    fractions = [fraction for _, fraction in said]
    assert fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] == 1
    assert len({text for text, _ in said}) >= 4
    assert profile.micro_batches == (2, 4)
    assert profile.mesh == Mesh.of_tiers(1) and profile.cluster.tier_names == ("node",)
    assert profile.cluster.backend == "none" and not profile.collectives
    assert 1e8 < profile.cluster.peak_flops < 1e14
    assert profile.cluster.wakeup_seconds is not None and 1e-6 < profile.cluster.wakeup_seconds < 0.1
    assert profile.model.parameters == closed_form_parameters(PRESETS["nano"])
    tensors = [tensor for unit in find_units(load("gpt:nano").build()) for tensor in unit.tensors]
    assert profile.model.signature == signature(tensors)
    assert profile.optimizer.state_per_element == 2
    assert profile.optimizer.temporary_per_element == 0
    assert profile.optimizer.points[0].elements == 1024

    small, large = profile.uses[2].costs  # the first layer's forward
    assert large.flops == 2 * small.flops and large.retained_bytes == 2 * small.retained_bytes
    for index in range(2):
        assert sum(use.costs[index].retained_bytes for use in profile.uses) == 0
    costs = CostModel(profile)
    assert costs.flops(2) == 3 * closed_form_forward_flops(PRESETS["nano"], 2)
    saved = sum(use.costs[0].retained_bytes for use in profile.uses if use.phase == "forward")
    assert saved <= costs.activations.peak_bytes(2) < 2 * saved


@pytest.mark.long
def test_a_profile_in_bfloat16() -> None:
    """Activations and parameters in two bytes; gradients, state and links as for float32."""
    single, half = (
        measure(
            load("gpt:nano"),
            mesh=Mesh.of_tiers(1),
            tier_names=("node",),
            micro_batches=[2],
            dtype=dtype,
            optimizer="adamw",
            progress=lambda *_: None,
        )
        for dtype in ("float32", "bfloat16")
    )
    assert half.model.dtype == "bfloat16"
    assert {tensor.dtype for unit in half.units for tensor in unit.tensors} == {"bfloat16"}
    assert half.optimizer.state_per_element == 2 and half.optimizer.temporary_per_element == 0
    saved = [
        sum(use.costs[0].retained_bytes for use in profile.uses if use.phase == "forward")
        for profile in (single, half)
    ]
    assert 0.45 < saved[1] / saved[0] < 0.75  # tokens and statistics of norms stay as they are
    costs = [CostModel(profile) for profile in (single, half)]
    assert costs[0].flops(2) == costs[1].flops(2)


def test_gradients_are_scaled_in_float32() -> None:
    """A third of a bfloat16 number is none; and no chunk is left out."""
    linear = nn.Linear(700, 300, bias=False).bfloat16()
    data = torch.randn(4, 700).bfloat16()
    (exact,) = torch.autograd.grad(linear(data).float().square().sum(), [linear.weight])
    calls = RecordedCalls(find_units(linear), world=3)
    calls.run(lambda: linear(data).float().square().sum())
    found = calls._slots[id(linear.weight)]
    calls.detach()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact.float() / 3, rtol=1e-6, atol=0)


def test_floating_inputs_of_a_bfloat16_unit_are_cast() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor, *, masks: list[Tensor]) -> Tensor:
            self.seen = [x.dtype, *(mask.dtype for mask in masks)]
            return x * self.weight

    for model, seen in ((Takes(), torch.float32), (Takes().bfloat16(), torch.bfloat16)):
        calls = RecordedCalls(find_units(model), world=1)
        model(torch.ones(2, 3), masks=[torch.ones(2), torch.ones(2, dtype=torch.int64)])
        calls.detach()
        assert model.seen == [seen, seen, torch.int64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", optimizer.OPTIMIZERS)
def test_optimizers(name: str, dtype: torch.dtype) -> None:
    entry = measure_optimizer(ALONE, name, dtype, 5000, lambda: None, lambda _: None)
    assert entry.state_per_element == {"adamw": 2, "adam": 2, "sgd": 0, "muon": 2}[name]
    assert entry.temporary_per_element == 0
    assert [point.elements for point in entry.points] == [1024, 4096, 16384]
    seconds = [point.seconds for point in entry.points]
    assert seconds == sorted(seconds) and seconds[0] > 0


def test_matrices_are_measured_by_shape_and_in_halves() -> None:
    shapes = [(16, 16), (32, 16), (16, 64)]
    entry = measure_matrices(ALONE, "muon", torch.bfloat16, shapes, lambda: None, lambda _: None)
    assert entry.state_per_element == 1
    assert [(point.rows, point.columns) for point in entry.products] == shapes
    for points in (entry.begin, entry.finish):
        assert [point.elements for point in points] == [1024]
    assert all(point.seconds > 0 for point in (*entry.products, *entry.begin, *entry.finish))


def test_wakeups_are_from_the_end_of_another_stream() -> None:
    schedule = build(
        [Use("u", "forward"), Use("u", "backward")],
        {"u": ("u",)},
        ("u",),
        tiers=1,
        prefetch=1,
        accumulation=1,
        clip=True,
    )
    begins = [10.0 * task.index + len(task.stream) for task in schedule.tasks]
    ends = [10.0 * task.index + 9 for task in schedule.tasks]
    last = [max(task.after) for task in schedule.tasks[1:]]  # every task ends after those before it
    handed = [
        (t, b) for t, b in zip(schedule.tasks[1:], last, strict=True) if schedule.tasks[b].stream != t.stream
    ]
    assert 2 < len(handed) < len(last)
    assert [*wakeups(schedule, begins, ends)] == [
        begins[task.index] - ends[before] for task, before in handed
    ]


def test_wakeups_leave_no_thread() -> None:
    before = {thread.name for thread in threading.enumerate()}
    assert 1e-6 < measure_wakeup(ALONE) < 0.1
    assert {thread.name for thread in threading.enumerate()} <= before


def test_temporaries_of_an_optimizer_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = partial(torch.optim.Adam, foreach=False, amsgrad=True)
    monkeypatch.setattr(optimizer, "OPTIMIZERS", {"plain": plain})
    entry = measure_optimizer(ALONE, "plain", torch.float32, 1, lambda: None, lambda _: None)
    assert entry.state_per_element == 3
    assert entry.temporary_per_element == 2  # a root, and the same divided


def test_what_cannot_be_measured_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "WARM_UPS", 1)

    def refused(workload: Workload, says: str, **changed: object) -> None:
        arguments: dict[str, object] = {
            "mesh": Mesh.of_tiers(1),
            "tier_names": ("node",),
            "micro_batches": [2],
            "dtype": "float32",
            "optimizer": "adamw",
            "progress": lambda *_: None,
        }
        with pytest.raises(UserError, match=says) as caught:
            measure(workload, **(arguments | changed))  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)

    nano = load("gpt:nano")
    refused(nano, "this job has 1", mesh=Mesh.of_tiers(4))
    refused(nano, "1 tiers, but 2", tier_names=("node", "network"))
    refused(nano, "--micro-batch", micro_batches=[])
    refused(nano, "--micro-batch", micro_batches=[0, 2])
    refused(nano, "dtype int8 .*use one of float64", dtype="int8")
    refused(nano, "dtype float16 .*use one of float64", dtype="float16")
    refused(nano, "optimizer lamb .*adamw, adam, sgd", optimizer="lamb")
    refused(workload_of(lambda: nn.Linear(3, 3).requires_grad_(False), 3), "no parameter is trained")
    refused(workload_of(lambda: nn.Linear(4, 3), 3), "micro-batch 2 failed: RuntimeError")
    trained = nn.Linear(3, 3)
    unused = replace(
        workload_of(lambda: trained, 3), loss=lambda model, _: torch.zeros(1, requires_grad=True)
    )
    refused(unused, "uses no module")

    class Moody(nn.Module):
        """Takes one of two ways by chance."""

        def __init__(self) -> None:
            super().__init__()
            self.ways = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
            self.luck = random.Random(1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.ways[self.luck.randrange(2)](x)
            return out

    refused(workload_of(Moody, 3), "the order in which modules are used must be fixed")


def test_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole = rank_memory_bytes(ALONE)
    assert 2**28 < whole < 2**50
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert rank_memory_bytes(ALONE) == whole // 4
    assert peak_flops(ALONE, torch.float32) > 1e8


def test_default_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    def mesh(world: str | None, local: str | None) -> tuple[str, tuple[str, ...]]:
        for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", local)):
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        found, names = default_mesh()
        return str(found), names

    assert mesh(None, None) == ("1", ("node",))
    assert mesh("4", None) == ("2,2", ("node",))
    assert mesh("4", "4") == ("2,2", ("node",))
    assert mesh("8", "4") == ("2,2|2", ("node", "network"))
    assert mesh("3", "1") == ("1|3", ("node", "network"))
    for world, local in (("4", "3"), ("4", "many"), ("0", None)):
        with pytest.raises(UserError, match="SIZE="):
            mesh(world, local)


def test_sizes() -> None:
    assert sizes(4096, 786432, 4, 8) == [4096, 16384, 65536, 262144, 1048576]
    assert sizes(4096, 1, 4, 8) == [4096]
    assert sizes(4096, 16384, 4, 12) == [4104, 16392]


def test_spread() -> None:
    assert spread([2.0]) == 0 and spread([2.0, 2.0, 2.0]) == 0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1 / 3, abs=1e-4)


def test_rising_leaves_what_rises_and_averages_what_falls() -> None:
    assert rising([1.0, 2.0, 2.0, 5.0]) == [1, 2, 2, 5]
    assert rising([3.0, 1.0, 5.0]) == [2, 2, 5]
    assert rising([1.0, 9.0, 2.0, 4.0]) == [1, 5, 5, 5]


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=20))
def test_rising_curves_rise_and_keep_their_sum(values: list[float]) -> None:
    found = rising(values)
    assert len(found) == len(values)
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(found))
    assert sum(found) == pytest.approx(sum(values), abs=1e-6)
