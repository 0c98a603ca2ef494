"""Out of memory: the unit, the category, and what the plan had said."""

from __future__ import annotations

import multiprocessing
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hzplan.errors import OutOfMemory
from hzplan.models.workload import Workload, load
from hzplan.runtime.unit import UnitState
from hzplan.training.loop import train
from hzplan.training.run import RunOptions
from tests.plans import make_plan

MIB = 2**20


def failing_in(workload: Workload, unit: str) -> Workload:
    """The workload, for which a unit's forward has no memory left."""

    def loss(model: nn.Module, batch: object) -> Tensor:
        def out(*_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0 has none.")

        handle = model.get_submodule(unit).register_forward_hook(out)
        try:
            return workload.loss(model, batch)
        finally:
            handle.remove()

    return replace(workload, loss=loss)


def test_activations_are_blamed_on_the_unit_whose_turn_it_is() -> None:
    plan, workload = make_plan("gpt:nano", mesh="1"), load("gpt:nano")
    with pytest.raises(OutOfMemory) as caught:
        train(plan, failing_in(workload, "layers.1"), None, RunOptions(steps=1))
    text = str(caught.value)
    assert "the forward of unit layers.1 asked for 20.50 MiB more (activations: " in text
    assert f"{plan.predicted.memory_bytes.get('activations', 0) / MIB:,.0f} MiB predicted" in text
    assert f"{plan.predicted.peak_memory_bytes / MIB:,.0f} MiB, of " in text
    assert f"{plan.source.memory_budget_bytes / MIB:,.0f} MiB allowed" in text


def test_what_lasts_is_blamed_on_the_unit_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    made = UnitState.__init__

    def limited(self: UnitState, name: str, *others: object, **named: bool) -> None:
        if name == "layers.1":
            raise MemoryError
        made(self, name, *others, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(UnitState, "__init__", limited)
    with pytest.raises(OutOfMemory, match=r"unit layers\.1 \(parameters: "):
        train(make_plan("gpt:nano", mesh="1"), load("gpt:nano"), None, RunOptions(steps=1))


def test_optimizer_state_is_blamed_on_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    step = torch.optim.AdamW.step

    def none_left(self: torch.optim.AdamW, closure: None = None) -> None:
        if max(p.numel() for group in self.param_groups for p in group["params"]) > 2:  # else it only counts
            raise RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
            )
        step(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", none_left)
    with pytest.raises(OutOfMemory, match=r"task update\S* \S+ asked for 4096 bytes more \(optimizer: "):
        train(make_plan("gpt:nano", mesh="1"), load("gpt:nano"), None, RunOptions(steps=3))


def _starved(said: Path) -> None:
    """Train with 768 MiB of address space more than there is already, and a batch that needs more."""
    torch.set_num_threads(1)
    plan, workload = make_plan("gpt:nano", mesh="1"), load("gpt:nano")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 768 * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    large = replace(workload, batch=lambda n, generator: workload.batch(32768 * n, generator))
    try:
        train(plan, large, None, RunOptions(steps=1))
    except OutOfMemory as error:
        said.write_text(str(error))


def test_the_hosts_own_allocator_is_understood(tmp_path: Path) -> None:
    said = tmp_path / "said"
    process = multiprocessing.get_context("spawn").Process(target=_starved, args=(said,))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == 0
    assert "ward of unit" in said.read_text() and "(activations: " in said.read_text()
