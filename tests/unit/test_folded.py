"""Models larger than the device; measurements that go on; units by pattern."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hzplan.core.hierarchy import Mesh
from hzplan.errors import UserError
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile
from hzplan.models.gpt import GPT, GPTConfig
from hzplan.models.units import blocks_like, blocks_of, find_units
from hzplan.models.workload import Workload, load
from hzplan.profiler.measure import measure
from hzplan.profiler.model.build import share_weights, weights_exceed
from hzplan.profiler.model.calls import RecordedCalls
from hzplan.profiler.model.memory import memory_trace
from hzplan.solver.emit import emit
from hzplan.solver.solve import Request, Solved, solve
from hzplan.training.batches import SyntheticBatches
from hzplan.training.loop import train
from hzplan.training.run import RunOptions

measuring = importlib.import_module("hzplan.profiler.measure")  # the package has a function of that name


def deep(*, tied: bool = True) -> Workload:
    """Twelve equal blocks."""
    config = GPTConfig(vocab=300, layers=12, width=64, heads=4, seq_len=64, tied=tied)
    return replace(load("gpt:nano"), name="deep", build=lambda: GPT(config), vocab=300)


def measured(workload: Workload, **options: Any) -> Profile:
    return measure(
        workload,
        mesh=Mesh.of_tiers(1),
        tier_names=("node",),
        micro_batches=[2, 4],
        dtype="float32",
        optimizer="adamw",
        progress=lambda *_: None,
        **options,
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_folded_model_has_distinct_units_only(tied: bool) -> None:
    workload = deep(tied=tied)
    whole = sum(p.numel() for p in workload.build().parameters())
    folded = share_weights(workload, torch.float32, torch.device("cpu"), seed=0)
    assert sum(p.numel() for p in folded.model.parameters()) == whole
    storages = {p.untyped_storage().data_ptr(): p.nbytes for p in folded.model.parameters()}
    units = workload.units_of(folded.model)
    block = sum(p.nbytes for p in units[2].module.parameters())
    assert sum(storages.values()) == 4 * whole - 11 * block
    assert [unit.name for unit in units] == [unit.name for unit in find_units(workload.build())]


def test_what_units_save_is_there_once() -> None:
    """Memory held over from forward to backward: one block's instead of twelve's."""
    workload = deep()
    batch = workload.batch(2, torch.Generator().manual_seed(0))
    folded = share_weights(workload, torch.float32, torch.device("cpu"), seed=0)
    calls = RecordedCalls(workload.units_of(folded.model), 1)
    loss = partial(workload.loss, folded.model, batch)
    model = workload.build()
    plain = RecordedCalls(find_units(model), 1)
    held = []
    for each, step in (
        (plain, lambda: workload.loss(model, batch)),
        (calls, lambda: folded.forward(loss, lambda: calls.current_unit)),
    ):
        each.run(step)
        with memory_trace(torch.device("cpu")) as trace:
            uses = each.run(step, trace)
        forward = [
            s.retained_bytes for s, u in zip(trace.segments(), uses, strict=True) if u.phase == "forward"
        ]
        held.append(sum(forward))
    assert held[1] < held[0] / 4


@pytest.mark.long
def test_a_model_too_large_for_memory_is_profiled_as_if_it_were_not() -> None:
    workload = deep()
    weights = 4 * sum(p.numel() for p in workload.build().parameters())
    assert weights_exceed(workload, torch.float32, weights) and not weights_exceed(
        workload, torch.float32, 4 * weights
    )
    whole, folded = measured(workload), measured(workload, memory_bytes=weights)
    assert folded.units == whole.units and folded.model == whole.model
    assert [use.use for use in folded.uses] == [use.use for use in whole.uses]
    for mine, theirs in zip(folded.uses, whole.uses, strict=True):
        for cost, other in zip(mine.costs, theirs.costs, strict=True):
            assert cost.flops == other.flops and cost.seconds > 0
    for size in (0, 1):
        saved = [
            sum(use.costs[size].retained_bytes for use in profile.uses if use.phase == "forward")
            for profile in (whole, folded)
        ]
        assert abs(saved[1] / saved[0] - 1) < 0.02


@pytest.mark.long
def test_a_measurement_that_was_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, said = tmp_path / "profile.json.partial", list[str]()
    counted: list[str] = []
    model = measuring._measure_model

    def counting(*arguments: Any, **options: Any) -> Any:
        counted.append("model")
        return model(*arguments, **options)

    def lost(*_: object) -> None:
        raise UserError("rank 1 is gone")

    monkeypatch.setattr(measuring, "_measure_model", counting)
    with monkeypatch.context() as cut, pytest.raises(UserError, match="gone"):
        cut.setattr(measuring, "_measure_links", lost)
        measured(deep(), partial_path=kept)
    assert counted == ["model"] and kept.exists()
    profile = measured(deep(), partial_path=kept, message=said.append)
    assert counted == ["model"] and said == [
        f"model: taken from {kept}, measured before"
    ]  # and links were measured
    again = measured(deep(), partial_path=kept, message=said.append)
    assert len(said) == 3 and again == profile.model_copy(update={"provenance": again.provenance})
    # Another question, a damaged file and an old one are no reason to trust it.
    measured(deep(tied=False), partial_path=kept)
    assert counted == ["model"] * 2
    for text in ("{", "[]", json.dumps({**json.loads(kept.read_text()), "time": 0})):
        kept.write_text(text)
        measured(deep(tied=False), partial_path=kept)
    assert counted == ["model"] * 5


class Encoder(nn.Module):
    """Two halves of different classes, no container that repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.first, self.second = Half(), Half()
        self.out = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.second(self.first(self.table(tokens))))
        return found


class Half(nn.Module):
    """A unit that nobody would find."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.up(x).relu())
        return found


def test_units_by_class_or_name() -> None:
    model = Encoder()
    assert len(find_units(model)) == 6
    for patterns in (["Half"], ["first", "second"], ["[fs]*"]):
        blocks = blocks_like(model, patterns)
        assert blocks is not None
        units = find_units(model, blocks)
        assert [unit.name for unit in units] == ["table", "first", "second", "out"]
        again = find_units(model, blocks_of([unit.name for unit in units]))
        assert [(u.name, u.requires, u.tensors) for u in again] == [
            (u.name, u.requires, u.tensors) for u in units
        ]
    (whole,) = find_units(model, blocks_like(model, ["Encoder"]))
    assert whole.name == "" and len(whole.parameters) == 11
    with pytest.raises(
        UserError, match=r"--unit Third: no module .* classes are Embedding, Encoder, Half, Linear"
    ):
        blocks_like(model, ["Third"])


@pytest.mark.long
def test_a_plan_keeps_the_units_that_were_asked_for(tmp_path: Path) -> None:
    nano = load("gpt:nano")
    workload = replace(
        nano,
        name="encoder",
        build=Encoder,
        batch=lambda n, generator: torch.randint(16, (n, 5), generator=generator),
        vocab=16,
        seq_len=4,
        units=("Half",),
    )
    profile = measured(workload)
    request = Request(1 << 30, 4)
    outcome = solve(profile, request)
    assert isinstance(outcome, Solved)
    plan = emit(
        profile, request, outcome, profile_path=tmp_path / "profile.json", plan_path=tmp_path / "plan.json"
    )
    assert {unit.name for unit in plan.units} == {"table", "first", "second", "out"}
    plan.save(tmp_path / "plan.json")
    result = train(Plan.load(tmp_path / "plan.json"), workload, None, RunOptions(steps=3))
    assert result.unplanned_steps == 0
    assert isinstance(SyntheticBatches(workload, micro_batch=1, seed=0).train(0, 0, 0), torch.Tensor)
