"""What trainers of others cannot do under a plan is refused before anything is made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hzplan import Muon, auto, parallelize
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


def test_a_trainer_s_own_optimizer_and_scheduler_are_those_of_the_shards(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from hzplan.integrations.trainer import PlannedTrainer

    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    model = load("gpt:nano").build()
    model.config = SimpleNamespace()  # type: ignore[assignment] # Trainer writes to it
    parameters = list(model.parameters())
    theirs = torch.optim.AdamW([{"params": parameters[:3], "lr": 1e-2}, {"params": parameters[3:]}], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: step / 2)
    plan = make_plan("gpt:nano", mesh="1", clip=True)
    trainer = PlannedTrainer(model, arguments, optimizers=(theirs, scheduler), plan=plan)
    made = trainer.create_optimizer()
    assert trainer._sharded is not None and trainer.lr_scheduler is scheduler
    assert [group["lr"] for group in trainer._sharded.param_groups] == [0.0, 0.0]
    scheduler.step()
    assert [group["lr"] for group in trainer._sharded.param_groups] == [5e-3, 5e-4]
    assert trainer.create_optimizer() is made  # as a second train() asks for it
    trainer._sharded.engine.close()


@pytest.fixture
def accelerated() -> Iterator[Any]:
    """``PlannedAccelerator`` in one process, and nothing of it afterwards."""
    accelerate = pytest.importorskip("accelerate")
    from hzplan.integrations.accelerate import PlannedAccelerator

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield PlannedAccelerator
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mixed_precision": "bf16"}, "mixed_precision=bf16: the plan says what is computed in"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4, and the plan accumulates 2"),
        ({"auto": {}}, 'auto= is for plan="auto"'),
    ],
)
def test_an_accelerator_beside_a_plan(options: dict[str, Any], said: str, accelerated: Any) -> None:
    with pytest.raises(UserError, match=said):
        accelerated(cpu=True, plan=make_plan("gpt:nano", mesh="1", accumulation=2), **options)


def test_a_loop_of_accelerates_in_one_process(accelerated: Any, tmp_path: Path) -> None:
    """It trains as without a plan, through a saved state, and what a plan cannot do is one line."""
    accelerate = pytest.importorskip("accelerate")
    from safetensors.torch import load_model

    workload = load("gpt:nano")
    batches = [workload.batch(4, torch.Generator().manual_seed(seed)) for seed in range(8)]

    def losses(accelerator: Any, model: nn.Module, optimizer: Any, scheduler: Any, some: Any) -> list[float]:
        found = []
        for batch in some:
            with accelerator.accumulate(model):
                loss = workload.loss(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found.append(loss.item())
        return found

    def prepared(kind: type, **options: Any) -> tuple[Any, nn.Module, Any, Any]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = kind(cpu=True, **options)
        torch.manual_seed(0)
        model = workload.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        model, optimizer = accelerator.prepare(model, optimizer)
        return accelerator, model, optimizer, accelerator.prepare(scheduler)

    alone = losses(*prepared(accelerate.Accelerator, gradient_accumulation_steps=2), some=batches)
    plan = make_plan("gpt:nano", mesh="1", micro_batch=4, accumulation=2, clip=True)
    planned = accelerator, model, *_ = prepared(accelerated, plan=plan)
    assert losses(*planned, some=batches[:4]) == pytest.approx(alone[:4], rel=1e-5)
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.save_model(model, str(tmp_path / "weights"))
    assert load_model(workload.build(), tmp_path / "weights" / "model.safetensors") == (set(), [])
    going_on = losses(*planned, some=batches[4:])
    assert going_on == pytest.approx(alone[4:], rel=1e-5)
    with pytest.raises(UserError, match="prepare has 1 models and 0 optimizers, after those of before"):
        accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(UserError, match="gradients are in shards; clip by the norm"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    loss = workload.loss(model, batches[0])
    with pytest.raises(UserError, match="the plan accumulates 2 micro-batches; put "):
        accelerator.backward(loss)
    with accelerator.accumulate(model):
        accelerator.backward(loss)
        with pytest.raises(UserError, match="clip where a step ends"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(UserError, match="save between steps"):
        accelerator.save_state(str(tmp_path / "within"))
    assert not (tmp_path / "within").exists()
    (tmp_path / "state" / "hzplan.id").rename(tmp_path / "id")  # as a save leaves it that did not end
    planned = accelerator, model, *_ = prepared(accelerated, plan=plan)
    with pytest.raises(UserError, match="a save was interrupted, and its schedulers and samplers"):
        accelerator.load_state(str(tmp_path / "state"))
    (tmp_path / "id").rename(tmp_path / "state" / "hzplan.id")
    planned = accelerator, model, *_ = prepared(accelerated, plan=plan)
    with pytest.raises(UserError, match="not of a planned run"):
        accelerator.load_state(str(tmp_path))
    accelerator.load_state(str(tmp_path / "state"))
    assert losses(*planned, some=batches[4:]) == going_on


def test_rates_of_a_scheduler_that_nobody_prepares_are_those_of_the_shards(accelerated: Any) -> None:
    model = load("gpt:nano").build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 2)
    accelerator = accelerated(cpu=True, plan=make_plan("gpt:nano", mesh="1"))
    model, sharded = accelerator.prepare(model, optimizer)
    assert [group["lr"] for group in sharded.param_groups] == [0.0]
    scheduler.step()
    assert [group["lr"] for group in sharded.param_groups] == scheduler.get_last_lr() == [5e-3]


def test_muon_trains_under_accelerate_as_without_a_plan(accelerated: Any) -> None:
    """Groups that are made before a plan's, with a scheduler on both; and one that gives all to Muon."""
    accelerate = pytest.importorskip("accelerate")
    workload = load("gpt:nano")
    batches = [workload.batch(4, torch.Generator().manual_seed(seed)) for seed in range(4)]
    plan = make_plan("gpt:nano", mesh="1", micro_batch=4, optimizer="muon", matrix="exchanged")

    def losses(kind: type, **options: Any) -> list[float]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = kind(cpu=True, **options)
        torch.manual_seed(0)
        model = workload.build()
        optimizer = Muon.of(model, lr=0.02, adamw={"lr": 5e-3, "betas": (0.8, 0.9)})
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        found = []
        for batch in batches:
            loss = workload.loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    alone = losses(accelerate.Accelerator)
    assert losses(accelerated, plan=plan) == pytest.approx(alone, rel=1e-5)
    model = workload.build()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(
        UserError, match=r"the plan has it under adamw; hzplan\.Muon\.of\(model, plan=…\) makes groups"
    ):
        accelerated(cpu=True, plan=plan).prepare(model, Muon(model.parameters()))


def test_whole_weights_in_bfloat16_are_all_there(accelerated: Any, tmp_path: Path) -> None:
    """Views of one bucket are no tied weights."""
    from safetensors.torch import load_file

    model = load("gpt:nano").build()
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    accelerator = accelerated(cpu=True, plan=make_plan("gpt:nano", mesh="1", dtype="bfloat16"))
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state(str(tmp_path))
    kept = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(kept[name].shape) for name in shapes} == shapes


def test_an_optimizer_is_prepared_with_its_model_and_before_its_first_step(accelerated: Any) -> None:
    model = load("gpt:nano").build()
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator = accelerated(cpu=True, plan=make_plan("gpt:nano", mesh="1"))
    with pytest.raises(UserError, match="in one call of prepare"):
        accelerator.prepare_optimizer(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with pytest.raises(UserError, match="the optimizer has state already"):
        accelerator.prepare(model, optimizer)
