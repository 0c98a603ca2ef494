"""What a profile says of units is taken into another one where shapes and micro-batches are the same."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from hzplan.core.hierarchy import Mesh
from hzplan.errors import UserError
from hzplan.formats.profile import Profile
from hzplan.models.gpt import GPT, GPTConfig
from hzplan.models.workload import Workload, load
from hzplan.profiler.measure import measure
from hzplan.profiler.model.reuse import EarlierCosts

measuring = importlib.import_module("hzplan.profiler.measure")  # the package has a function of that name


def model(layers: int, width: int = 32) -> Workload:
    config = GPTConfig(vocab=300, layers=layers, width=width, heads=4, seq_len=32)
    return replace(load("gpt:nano"), name="model", build=lambda: GPT(config), vocab=300)


def measured(workload: Workload, sizes: list[int], **options: Any) -> Profile:
    return measure(
        workload,
        mesh=Mesh.of_tiers(1),
        tier_names=("node",),
        micro_batches=sizes,
        dtype="float32",
        optimizer="adamw",
        progress=lambda *_: None,
        **options,
    )


@pytest.fixture(scope="module")
def small() -> Profile:
    return measured(model(2), [1])


def test_only_a_new_size_is_measured(small: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    real = measuring.measure_uses

    def noted(ranks: Any, model: Any, passes: Any, *others: Any, **named: Any) -> Any:
        asked.append([each.micro_batch for each in passes])
        return real(ranks, model, passes, *others, **named)

    monkeypatch.setattr(measuring, "measure_uses", noted)
    said: list[str] = []
    more = measured(model(2), [1, 2], earlier={"small": small}, message=said.append)
    assert asked == [[2]] and "micro-batch 1; 1 to measure" in said[0]
    assert [use.costs[0] for use in more.uses] == [use.costs[0] for use in small.uses]
    assert more.micro_batches == (1, 2) and more.units == small.units
    again = measured(model(2), [2, 1], earlier={"more": more})
    assert asked == [[2]] and again.uses == more.uses and again.optimizer == more.optimizer


@pytest.mark.long
def test_more_layers_of_the_same_are_known(small: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError

    with monkeypatch.context() as patched:
        patched.setattr(measuring, "measure_uses", never)
        deeper = measured(model(5), [1], earlier={"small": small})
    seconds = {(use.unit, use.phase): use.costs[0].seconds for use in small.uses}
    for use in deeper.uses:
        like = f"layers.{min(1, int(use.unit[7:]))}" if use.unit.startswith("layers.") else use.unit
        assert use.costs[0].seconds == seconds[like, use.phase]
    fresh = measured(model(5), [1])
    assert [u.use for u in deeper.uses] == [u.use for u in fresh.uses] and deeper.model == fresh.model
    for mine, theirs in zip(deeper.uses, fresh.uses, strict=True):
        assert mine.costs[0].flops == theirs.costs[0].flops
    forwards = [
        [use.costs[0].retained_bytes for use in found.uses if use.phase == "forward"]
        for found in (deeper, fresh)
    ]
    assert sum(forwards[0]) == pytest.approx(sum(forwards[1]), rel=0.02)
    assert sum(use.costs[0].retained_bytes for use in deeper.uses) == 0


def test_what_keeps_other_bytes_is_measured(small: Profile) -> None:
    """Dropout shows in neither shapes nor operations."""
    config = GPTConfig(vocab=300, layers=2, width=32, heads=4, seq_len=32)

    def build() -> GPT:
        made = GPT(config)
        for layer in made.layers:
            for _ in range(6):
                layer.register_forward_hook(lambda module, given, out: torch.dropout(out, 0.5, train=True))
        return made

    said: list[str] = []
    workload = replace(load("gpt:nano"), name="model", build=build, vocab=300)
    measured(workload, [1], earlier={"small": small}, message=said.append)
    assert "at micro-batch no size; 1 to measure" in said[0]


def test_a_model_that_looks_at_values_is_measured(small: Profile) -> None:
    config = GPTConfig(vocab=300, layers=2, width=32, heads=4, seq_len=32)

    class Looks(GPT):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) * (1.0 if tokens.sum().item() >= 0 else 2.0)

    said: list[str] = []
    workload = replace(load("gpt:nano"), name="looks", build=lambda: Looks(config), vocab=300)
    assert measured(workload, [1], earlier={"small": small}, message=said.append).uses
    assert said[0].startswith("--known: all is measured: looks: ")


def test_updates_that_were_timed_without_a_norm_are_measured(small: Profile) -> None:
    old = small.optimizer.model_copy(update={"norm": None})
    known = {"small": small, "old": small.model_copy(update={"optimizer": old})}
    for name, taken in (("small", True), ("old", False)):
        found = EarlierCosts.of_profiles({name: known[name]}, torch.device("cpu"), "float32", 1)
        elements = small.optimizer.points[-1].elements
        assert (found.optimizer(small.optimizer.name, elements) is not None) == taken


def test_other_shapes_are_measured(small: Profile) -> None:
    said: list[str] = []
    wider = measured(model(2, width=64), [1], earlier={"small": small}, message=said.append)
    assert "at micro-batch no size; 1 to measure" in said[0]
    assert wider.uses != small.uses


@pytest.mark.parametrize(
    ("part", "changes", "why"),
    [
        ("provenance", {"torch": "1.0"}, "--known old: made with torch 1.0, and here that is"),
        ("model", {"dtype": "bfloat16"}, "made with dtype bfloat16"),
        ("cluster", {"device": "cuda"}, "made with device cuda"),
        ("provenance", {"cpus": 1000}, "made with processors 1000"),
        ("provenance", {"ranks_per_host": 4}, "made with ranks per host 4, and here that is 1"),
    ],
)
def test_what_was_made_otherwise_is_refused(
    small: Profile, part: str, changes: dict[str, Any], why: str
) -> None:
    other = small.model_copy(update={part: getattr(small, part).model_copy(update=changes)})
    with pytest.raises(UserError, match=why):
        measured(model(2), [1], earlier={"old": other})
