"""Other people's libraries beside ours: adapters on a frozen model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hzplan.core.hierarchy import Levels
from hzplan.core.schedule import Kind
from hzplan.models.workload import load
from hzplan.runtime.optimizer import ShardedOptimizer
from hzplan.training.verify import verify
from tests.plans import make_plan
from tests.threads import in_threads

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_adapters_of_peft_are_all_that_is_reduced_and_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    torch.manual_seed(0)
    workload = load("lora:factory")
    plan = make_plan(workload, mesh="2|2", levels=Levels(2, 0, 2), micro_batch=1)
    initial = workload.build()
    trained = sum(p.numel() for p in initial.parameters() if p.requires_grad)
    everything = sum(p.numel() for p in initial.parameters())
    assert 0 < trained < everything / 20

    def rank(_: int, model: nn.Module, optimizer: ShardedOptimizer) -> tuple[int, int, int]:
        engine = optimizer.engine
        first, second = (
            sum(
                engine.tasks.nbytes(task)
                for task in engine.schedule.tasks
                if task.kind is kind and task.tier == 0
            )
            for kind in (Kind.FINAL_REDUCE, Kind.UNSHARD)
        )
        return first, second, sum(piece.high - piece.low for piece in optimizer.updates.pieces)

    sent = in_threads(plan, initial, rank)
    assert sum(held for *_, held in sent) == trained  # each element is updated once
    for reduced, gathered, _ in sent:
        assert 4 * trained <= reduced < 4 * trained * 1.3  # alignment and padding
        assert gathered >= 4 * everything  # the base is sharded, as this plan says


def test_adapters_of_peft_train_as_one_process_would(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    torch.manual_seed(0)
    plan = make_plan(load("lora:factory"), mesh="2|2", levels=Levels(1, 0, 2), micro_batch=1, accumulation=2)
    found = verify(plan, "lora:factory")
    assert found.ok, found
