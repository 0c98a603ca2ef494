"""The example loops: a few lines apart, and the same training."""

from __future__ import annotations

import difflib
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.command import ROOT, Done, hzplan, python, torchrun

EXAMPLES = ROOT / "examples"


def code_of(path: Path) -> list[str]:
    """The lines after the docstring."""
    return path.read_text(encoding="utf-8").split('"""', 2)[2].splitlines()


def test_the_loops_are_four_lines_apart() -> None:
    difference = difflib.ndiff(code_of(EXAMPLES / "train_fsdp2.py"), code_of(EXAMPLES / "train.py"))
    ours = [line for line in difference if line.startswith("+ ") and line.strip() != "+"]
    assert 1 <= len(ours) <= 4, ours


def losses(done: Done) -> list[float]:
    """What a script prints."""
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples, with a plan for two ranks."""
    folder = shutil.copytree(EXAMPLES, tmp_path_factory.mktemp("user") / "examples")
    model = ("mymodel:Transformer", "--nproc", 2, "--micro-batch", 4, "-o", "profile.json")
    assert hzplan("profile", *model, cwd=folder).code == 0
    # Less than replicas of everything need.
    budget = ("--memory", "18MiB", "--global-batch", 16, "-o", "plan.json")
    assert hzplan("solve", "profile.json", *budget, cwd=folder).code == 0
    return folder


@pytest.mark.distributed
@pytest.mark.long
def test_both_loops_train_alike(folder: Path) -> None:
    done = torchrun(2, "train.py", cwd=folder)
    assert done.code == 0, done.stderr
    # How FSDP2's ends is not ours to say: now and then torch aborts when Python is taken apart.
    planned, fsdp2 = losses(done), losses(torchrun(2, "train_fsdp2.py", cwd=folder))
    assert len(planned) == len(fsdp2) == 6
    assert planned == pytest.approx(fsdp2, rel=1e-3)
    assert planned[-1] < planned[0] - 1


@pytest.mark.distributed
@pytest.mark.launch
def test_an_error_in_the_loop_stays_what_it_is(folder: Path) -> None:
    """Collectives are under way in threads when the interpreter ends, which must not abort it."""
    raising = "    if step == 3 and dist.get_rank() == 1:\n        raise ValueError('mine')\n"
    text = (folder / "train.py").read_text(encoding="utf-8")
    broken = text.replace("    scheduler.step()\n", f"    scheduler.step()\n{raising}")
    (folder / "broken.py").write_text(broken, encoding="utf-8")
    done = torchrun(2, "broken.py", cwd=folder)
    assert "ValueError: mine" in done.stderr
    assert "terminate called" not in done.stderr
    assert re.search(r"exitcode +: 1 ", done.stderr), done.stderr


def one_process(folder: Path, script: str) -> list[float]:
    """What a script of its own prints, without ranks."""
    done = python("-c", script, cwd=folder, timeout_s=300)
    assert done.code == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


TRAINER_ALONE = """
import torch
from train_trainer import SAMPLES, TrainingArguments, factory, sample
from transformers import Trainer

arguments = TrainingArguments(
    "alone", use_cpu=True, per_device_train_batch_size=2, gradient_accumulation_steps=4, num_train_epochs=2,
    learning_rate=3e-3, lr_scheduler_type="constant", max_grad_norm=1.0, weight_decay=0.01, logging_steps=1,
    save_strategy="no", report_to="none", disable_tqdm=True, seed=0,
)
torch.manual_seed(0)
trainer = Trainer(factory(), arguments, train_dataset=[sample(index) for index in range(SAMPLES)])
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"loss {float(entry['loss']):.5f}")
"""


@pytest.mark.distributed
def test_trainer_trains_as_it_would_alone(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = shutil.copytree(EXAMPLES, tmp_path / "examples")
    model = ("train_trainer:factory", "--nproc", 2, "--micro-batch", 2, "-o", "profile.json")
    assert hzplan("profile", *model, cwd=folder).code == 0
    assert hzplan("solve", "profile.json", "--global-batch", 8, "--memory", "5MiB", cwd=folder).code == 0
    done = torchrun(2, "train_trainer.py", cwd=folder)
    assert done.code == 0, done.stderr
    planned, alone = losses(done), one_process(folder, TRAINER_ALONE)
    assert len(planned) == len(alone) == 26  # every thirteenth has half the samples, of ragged length
    assert planned == pytest.approx(alone, rel=2e-3)
    assert planned[-1] < planned[0] / 3
    newest = folder / "trained" / "checkpoint-20"
    assert (newest / "model.safetensors").exists() and (newest / "hzplan").is_dir()
    shutil.rmtree(folder / "trained" / "checkpoint-26")  # as of a job that was killed before
    again = torchrun(2, "train_trainer.py", "resume", cwd=folder)
    assert again.code == 0, again.stderr
    assert losses(again)[-6:] == planned[-6:]  # to the last digit that is printed
    alike = python("-c", WEIGHTS, cwd=folder, timeout_s=300)
    assert alike.code == 0, alike.stderr


WEIGHTS = """
from train_trainer import LlamaForCausalLM, factory
model = LlamaForCausalLM.from_pretrained("trained/checkpoint-26")
assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in factory().parameters())
"""


LIGHTNING_ALONE = """
import torch
from mymodel import Transformer, batch
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
model = Transformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
for step in range(60):
    for part in range(2):
        found = 0.0
        for rank in range(2):
            tokens = batch(step, part, rank)
            loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) / 2
            (loss / 2).backward()
            found += loss.item()
        if (2 * step + part) % 20 == 19:
            print(f"loss {found:.5f}")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
"""

LIGHTNING_WEIGHTS = """
from pathlib import Path
from train_lightning import LanguageModel
(path,) = Path("lightning").glob("*step=40.ckpt")
LanguageModel.load_from_checkpoint(path)
assert path.with_name(path.name + ".hzplan").is_dir()
"""


LIGHTNING_LAST = """
from pathlib import Path
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from train_lightning import LanguageModel, PlannedStrategy

kept = ModelCheckpoint("last", save_last=True)
options = {"accelerator": "cpu", "devices": 2, "logger": False, "use_distributed_sampler": False}
options |= {"reload_dataloaders_every_n_epochs": 1, "gradient_clip_val": 1.0, "limit_train_batches": 4}
trainer = L.Trainer(strategy=PlannedStrategy("plan.json"), max_epochs=3, callbacks=[kept], **options)
torch.manual_seed(0)
model = LanguageModel()
trainer.fit(model)
before = float(trainer.callback_metrics["held out"])
trainer.strategy.barrier()
folder = Path("last/last.ckpt.hzplan")
assert [path.name for path in folder.glob("step-*")] == ["step-00000006"], [*folder.iterdir()]
trainer.validate(model, ckpt_path="last/last.ckpt")
assert abs(float(trainer.callback_metrics["held out"]) - before) < 1e-5
"""


LIGHTNING_AUTO = """
import lightning as L
import torch
from train_lightning import LanguageModel, PlannedStrategy

options = {"memory_bytes": 1 << 30, "cache": "cache", "gauge_s": 20.0}
strategy = PlannedStrategy("auto", loss=lambda module, tokens: module.loss(tokens), **options)
options = {"accelerator": "cpu", "devices": 2, "logger": False, "use_distributed_sampler": False}
options |= {"reload_dataloaders_every_n_epochs": 1, "gradient_clip_val": 1.0, "accumulate_grad_batches": 2}
options |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = L.Trainer(strategy=strategy, max_epochs=3, **options)
torch.manual_seed(0)
trainer.fit(LanguageModel())
assert strategy.plan.batch.accumulation == 2 and strategy.plan.batch.micro_batch == 4
"""


@pytest.mark.distributed
@pytest.mark.long
def test_lightning_plans_for_itself(folder: Path) -> None:
    pytest.importorskip("lightning")
    (folder / "auto.py").write_text(LIGHTNING_AUTO, encoding="utf-8")
    done = torchrun(2, "auto.py", cwd=folder)
    assert done.code == 0, done.stderr
    assert "auto: " in done.stderr and "self.log" not in done.stderr
    assert losses(done) == pytest.approx(one_process(folder, LIGHTNING_ALONE), rel=2e-3)


@pytest.mark.distributed
@pytest.mark.long
def test_lightnings_last_checkpoint_is_the_last(folder: Path) -> None:
    pytest.importorskip("lightning")
    (folder / "last.py").write_text(LIGHTNING_LAST, encoding="utf-8")
    done = torchrun(2, "last.py", cwd=folder)
    assert done.code == 0, done.stderr


@pytest.mark.distributed
@pytest.mark.long
def test_lightning_trains_as_one_process_would(folder: Path) -> None:
    pytest.importorskip("lightning")
    done = torchrun(2, "train_lightning.py", cwd=folder)
    assert done.code == 0, done.stderr
    planned, alone = losses(done), one_process(folder, LIGHTNING_ALONE)
    assert len(planned) == len(alone) == 6
    assert planned == pytest.approx(alone, rel=2e-3)
    assert "held out" in done.stdout and "`optimizer.step()`" not in done.stderr
    (last,) = (folder / "lightning").glob("*step=60.ckpt")
    last.unlink()  # as of a job that was killed before
    again = torchrun(2, "train_lightning.py", "resume", cwd=folder)
    assert again.code == 0, again.stderr
    assert losses(again) == planned[-2:]  # to the last digit that is printed
    read = python("-c", LIGHTNING_WEIGHTS, cwd=folder, timeout_s=300)
    assert read.code == 0, read.stderr


@pytest.mark.distributed
@pytest.mark.long
def test_accelerate_trains_as_one_process_would(folder: Path) -> None:
    pytest.importorskip("accelerate")
    done = torchrun(2, "train_accelerate.py", cwd=folder)
    assert done.code == 0, done.stderr
    planned, alone = losses(done), one_process(folder, LIGHTNING_ALONE)
    assert len(planned) == len(alone) == 6
    assert planned == pytest.approx(alone, rel=2e-3)
    assert "`optimizer.step()`" not in done.stderr
    assert (folder / "accelerated" / "model.safetensors").exists()
    again = torchrun(2, "train_accelerate.py", "resume", cwd=folder)
    assert again.code == 0, again.stderr
    assert losses(again) == planned[-2:]  # to the last digit that is printed
    read = python("-c", ACCELERATE_WEIGHTS, cwd=folder, timeout_s=300)
    assert read.code == 0, read.stderr


ACCELERATE_WEIGHTS = """
from mymodel import Transformer
from safetensors.torch import load_file

Transformer().load_state_dict(load_file("accelerated/model.safetensors"))
"""


ACCELERATE_AUTO = """
import torch
import train_accelerate
from torch.nn.functional import cross_entropy


def loss(model, tokens):
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Auto(train_accelerate.PlannedAccelerator):
    def __init__(self, plan, **options):
        asked = {"loss": loss, "memory_bytes": 1 << 30, "cache": "cache", "gauge_s": 20.0}
        super().__init__(plan="auto", auto=asked, gradient_accumulation_steps=2, **options)


train_accelerate.PlannedAccelerator = Auto
train_accelerate.main()
"""


@pytest.mark.distributed
@pytest.mark.long
def test_accelerate_plans_for_itself(folder: Path) -> None:
    pytest.importorskip("accelerate")
    (folder / "accelerate_auto.py").write_text(ACCELERATE_AUTO, encoding="utf-8")
    done = torchrun(2, "accelerate_auto.py", cwd=folder)
    assert done.code == 0, done.stderr
    assert "auto: " in done.stderr
    assert losses(done) == pytest.approx(one_process(folder, LIGHTNING_ALONE), rel=2e-3)
