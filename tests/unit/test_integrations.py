"""What trainers of others cannot do under a plan is refused before anything is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hzplan import auto, parallelize
from hzplan.errors import UserError
from hzplan.models.workload import load
from tests.plans import make_plan


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"load_best_model_at_end": True, "eval_strategy": "steps"}, "load the best one afterwards"),
        ({"fp16": True}, "plans compute in fp32 or bf16"),
    ],
)
def test_arguments_that_no_plan_is_beside(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from hzplan.integrations.trainer import PlannedTrainer

    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    for name, value in wrong.items():  # as given; on a CPU some are refused by Trainer's own arguments
        setattr(arguments, name, value)
    with pytest.raises(UserError, match=said):
        PlannedTrainer(nn.Linear(2, 2), arguments, plan="plan.json")


def test_what_is_wrapped_or_made_already_is_said() -> None:
    plan = make_plan("gpt:nano", mesh="1")
    model = load("gpt:nano").build()
    with pytest.raises(UserError, match="an optimizer of the class AdamW was given; give the class"):
        parallelize(model, plan, torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type]
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    for call in (lambda: parallelize(wrapped, plan), lambda: auto(wrapped, global_batch=1, sample={})):
        with pytest.raises(UserError, match="the model is in DDP"):
            call()


def test_accumulation_that_is_not_the_plans_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from hzplan.integrations.trainer import PlannedTrainer

    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", gradient_accumulation_steps=4
    )
    with pytest.raises(UserError, match="gradient_accumulation_steps=4, and the plan accumulates 2"):
        PlannedTrainer(nn.Linear(2, 2), arguments, plan=make_plan("gpt:nano", accumulation=2))


def test_the_precision_is_the_plans(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from hzplan.integrations.lightning import PlannedStrategy

    plan = make_plan("gpt:nano")
    with pytest.raises(UserError, match="precision=bf16-mixed: the plan says what is computed in"):
        lightning.Trainer(
            strategy=PlannedStrategy(plan), accelerator="cpu", devices=2, precision="bf16-mixed", logger=False
        )


def test_what_auto_is_told_is_not_for_a_plan() -> None:
    pytest.importorskip("lightning")
    from hzplan.integrations.lightning import PlannedStrategy

    with pytest.raises(UserError, match="memory_bytes is for"):
        PlannedStrategy(make_plan("gpt:nano"), memory_bytes=1)
    with pytest.raises(UserError, match="find_unused_parameters is for DDP"):
        PlannedStrategy("auto", find_unused_parameters=True)


def test_a_factory_of_transformers_has_no_more_tokens_than_positions() -> None:
    pytest.importorskip("transformers")
    assert load("tests.unit.test_integrations:short").seq_len == 16


def short() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_positions=16, n_embd=8, n_layer=1, n_head=1, vocab_size=32))


def test_a_plan_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from hzplan.integrations.trainer import PlannedTrainer

    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(UserError, match="no such file"):
        PlannedTrainer(nn.Linear(2, 2), arguments, plan=tmp_path / "none.json")
