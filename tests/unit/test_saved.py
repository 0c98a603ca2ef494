"""Activations in the host's memory: the same numbers, and the bytes that the model of memory has."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.recompute import NOTHING, Recomputed
from hzplan.cost.model import CostModel
from hzplan.errors import UserError
from hzplan.formats.profile import CopyPoint, HostEntry, Profile
from hzplan.models.recompute import recompute
from hzplan.models.saved import Saved, unseen_host_buffer
from hzplan.models.workload import load
from hzplan.profiler.model.memory import HostMemory
from hzplan.runtime.apply import Choice, apply
from hzplan.runtime.backends.threads import Post, ThreadWorld
from hzplan.runtime.host_memory import host_buffer
from tests.unit.test_recompute import measured

MODEL, SIZE = "gpt:tiny", 2
LAYERS = [f"layers.{index}" for index in range(4)]


class Attention(nn.Module):
    """Views of one storage, what was given, a buffer, and a result that is kept as well."""

    def __init__(self) -> None:
        super().__init__()
        self.three, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.register_buffer("mask", torch.rand(16, 16))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        q, k, v = self.three(x * scale).chunk(3, dim=-1)
        weights = (q @ k.transpose(-1, -2) * self.mask).softmax(-1)
        return self.out(weights @ v).tanh()


@pytest.mark.parametrize("in_time", [False, True])
def test_gradients_are_the_same_to_the_bit(in_time: bool) -> None:
    torch.manual_seed(0)
    module, x = Attention(), torch.randn(4, 16, 32, requires_grad=True)
    scale = torch.rand(32)
    expected = torch.autograd.grad(module(x, scale).sum(), [x, *module.parameters()])
    saved = Saved(unseen_host_buffer)
    recompute(module, lambda: "host", saved=saved, in_time=lambda: in_time)
    result = module(x, scale)
    assert not saved.is_free
    if in_time:
        saved.save()
        saved.release()
        saved.allocate()
        saved.load()
    found = torch.autograd.grad(result.sum(), [x, *module.parameters()])
    assert all(map(torch.equal, found, expected))
    assert saved.is_free


class InPlace(nn.Module):
    """Changes what backward needs: of its own inside, or what it returns, which its caller then changes."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.linear, self.inside = nn.Linear(32, 32), inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        z = y.exp()  # backward needs the result
        if self.inside:
            z.mul_(2)
            return z + 1
        return z


@pytest.mark.parametrize("rows", [1, 16], ids=["small", "moves"])
@pytest.mark.parametrize("inside", [False, True])
def test_what_is_changed_in_place_is_an_error_as_without(inside: bool, rows: int) -> None:
    module, x = InPlace(inside=inside), torch.randn(rows, 32, requires_grad=True)

    def backward() -> None:
        result = module(x)
        (result if inside else result.mul_(2)).sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward()
    recompute(module, lambda: "host", saved=Saved(unseen_host_buffer))
    with pytest.raises(RuntimeError, match="changed in place after forward had kept it"):
        backward()


def test_a_graph_that_is_kept_leaves_its_host_memory_alone() -> None:
    """A second forward's activations then stay on the device."""
    torch.manual_seed(0)
    module, x, other = Attention(), torch.randn(4, 16, 32), torch.randn(4, 16, 32)
    scale = torch.rand(32)
    expected = [torch.autograd.grad(module(of, scale).sum(), [*module.parameters()]) for of in (x, other)]
    recompute(module, lambda: "host", saved=Saved(unseen_host_buffer))
    first = module(x, scale)
    with pytest.warns(UserWarning, match="stay on the device"):
        second = module(other, scale)
    for result, exact in zip((first, second), expected, strict=True):
        assert all(map(torch.equal, torch.autograd.grad(result.sum(), [*module.parameters()]), exact))


class Given(nn.Module):
    """Backward needs what it was given, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.linear(x)) * self.scale


@pytest.mark.parametrize("what", ["given", "buffer"])
def test_what_others_have_is_checked_too(what: str) -> None:
    module = Given()

    def backward() -> None:
        x = torch.randn(16, 32, requires_grad=True) * 1
        result = module(x)
        (x if what == "given" else module.scale).mul_(2)
        (x + result).sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward()
    recompute(module, lambda: "host", saved=Saved(unseen_host_buffer))
    with pytest.raises(RuntimeError, match="changed in place after forward had kept it"):
        backward()


@dataclass
class Hidden:
    value: torch.Tensor


class Escaping(nn.Module):
    """What it returns is in an object that no list of tensors knows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> Hidden:
        return Hidden(self.linear(x).exp())


def test_what_is_changed_before_it_is_copied_is_an_error() -> None:
    module, saved = Escaping(), Saved(unseen_host_buffer)
    recompute(module, lambda: "host", saved=saved, in_time=lambda: True)
    result = module(torch.randn(16, 32)).value
    result.mul_(2)
    saved.save()
    saved.release()
    with pytest.raises(RuntimeError, match="changed in place after forward had kept it"):
        result.sum().backward()


def test_conjugated_tensors_are_what_they_were() -> None:
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.view_as_complex(self.linear(x).view(16, 32, 2))
            return torch.view_as_real(y.conj() * y.exp()).tanh().flatten(1) * 1

    module, x = Rotated(), torch.randn(16, 64)
    expected = torch.autograd.grad(module(x).sum(), [*module.parameters()])
    recompute(module, lambda: "host", saved=Saved(unseen_host_buffer))
    found = torch.autograd.grad(module(x).sum(), [*module.parameters()])
    assert all(map(torch.equal, expected, found))


def test_a_host_that_has_no_memory_left_is_one_line() -> None:
    with pytest.raises(UserError, match=r"the host has no .* bytes of memory left .* --host-memory"):
        host_buffer(torch.device("cpu"))(1 << 62)


def test_what_others_have_too_stays_on_the_device() -> None:
    """What forward was given and returns, and its parameters: only the rest frees memory."""
    module, x, scale = Attention(), torch.randn(4, 16, 32, requires_grad=True), torch.rand(32)
    saved = Saved(unseen_host_buffer)
    with saved.forward(module, (x, scale)) as returned:
        result = module(x, scale)
        returned(result)
    sizes = sorted(storage.nbytes for storage in saved._kept)
    scaled, three, scores, weights, mixed = 8192, 3 * 8192, 4096, 4096, 8192
    assert sizes == sorted([scaled, three, scores, weights, mixed]) or sizes == sorted(
        [scaled, three, weights, mixed]
    )


@pytest.fixture(scope="module")
def profile() -> Profile:
    """With a link to the host's memory, which profiles of a CPU lack."""
    points = (CopyPoint(bytes=1, seconds=1e-6, spread=0.0), CopyPoint(bytes=1 << 30, seconds=0.1, spread=0.0))
    found = measured(load(MODEL), SIZE, MAX_BLOCKS=2)
    return found.model_copy(update={"host": HostEntry(points=points)})


def choice(profile: Profile, recompute: Recomputed, *, prefetch: int, accumulation: int = 1) -> Choice:
    return Choice(
        mesh=Mesh.parse("1"),
        levels={t.name: Levels(0, 0, 0) for unit in profile.units for t in unit.tensors},
        uses=tuple(use.use for use in profile.uses),
        prefetch=prefetch,
        accumulation=accumulation,
        clip=True,
        dtype="float32",
        requires={unit.name: unit.requires for unit in profile.units},
        recompute=recompute,
    )


def peak(choice: Choice) -> int:
    """Most bytes that a micro-batch's forward and backward take, in the runtime."""
    torch.manual_seed(0)
    workload = load(MODEL)
    model, optimizer = apply(workload.build(), choice, torch.optim.SGD, world=ThreadWorld(Post(1), 0), lr=0.1)
    batch = workload.batch(SIZE, torch.Generator().manual_seed(0))

    def step() -> None:
        workload.loss(model, batch).backward()

    for _ in range(2):
        step()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    with HostMemory() as trace:
        trace.cut()
        step()
    optimizer.engine.close()
    return trace.segments()[0].peak_bytes


@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize("units", [LAYERS[:1], LAYERS[:2], LAYERS[1:3], LAYERS])
def test_memory_on_the_device_is_as_predicted(profile: Profile, prefetch: int, units: list[str]) -> None:
    """What is saved of the peak, to 1% of it."""
    model, on_host = CostModel(profile), Recomputed.of(units, "host")
    schedule = model.schedule(prefetch=prefetch, accumulation=1, clip=True, offload=True)
    predicted = {which: model.activations.peak_bytes(SIZE, which, schedule) for which in (NOTHING, on_host)}
    runs = {which: peak(choice(profile, which, prefetch=prefetch)) for which in predicted}
    assert runs[NOTHING] - runs[on_host] == pytest.approx(
        predicted[NOTHING] - predicted[on_host], abs=0.01 * predicted[NOTHING]
    )
    if prefetch == 1 or units != LAYERS[1:3]:
        assert predicted[on_host] < predicted[NOTHING]


def test_mixed_with_ways_to_compute_again(profile: Profile) -> None:
    model = CostModel(profile)
    schedule = model.schedule(prefetch=1, accumulation=1, clip=True, offload=True)
    some = Recomputed({"layers.0": "host", "layers.1": "host", "layers.2": "full", "head": "chunks"})
    lost = [
        model.activations.peak_bytes(SIZE, which, schedule) - peak(choice(profile, which, prefetch=1))
        for which in (NOTHING, some)
    ]
    assert lost[0] == pytest.approx(lost[1], abs=0.01 * model.activations.peak_bytes(SIZE))
