"""Hugging Face's Trainer under a plan, with a language model of transformers.

hzplan profile train_trainer:factory --nproc 2 --micro-batch 2 -o profile.json
hzplan solve profile.json --global-batch 8 -o plan.json
torchrun --nproc-per-node 2 train_trainer.py

Trainer counts tokens over all ranks and micro-batches (``average_tokens_across_devices``), so ragged batches
weigh what they should. Gradients are clipped by the plan's optimizer, whose pieces they are in:
``max_grad_norm=0`` keeps Trainer from clipping what it cannot see.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hzplan

VOCAB, LENGTH, SAMPLES = 64, 32, 100


def factory() -> LlamaForCausalLM:
    """A small model of random weights."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        eos_token_id=None,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def sample(index: int) -> dict[str, torch.Tensor]:
    """Counting in steps, as long as the sample's number says; the rest is not counted."""
    length = LENGTH - index % 5
    tokens = torch.arange(LENGTH) * (1 + index % 3) % VOCAB
    labels = tokens.masked_fill(torch.arange(LENGTH) >= length, -100)
    return {"input_ids": tokens, "labels": labels}


class Planned(Trainer):
    """A Trainer whose optimizer is the plan's."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Shard the model; what accelerate is told is ready, it leaves as it is."""
        _, optimizer = hzplan.parallelize(
            self.model, "plan.json", torch.optim.AdamW, lr=self.args.learning_rate
        )
        self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
        self.optimizer = self.accelerator.prepare(optimizer, device_placement=[False])
        return self.optimizer


class Clip(TrainerCallback):
    """Gradients to a norm of 1, over all ranks."""

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        """Before each update."""
        optimizer.optimizer.clip_grad_norm_(1.0)


def main() -> None:
    """Train for two epochs; the last step of each has fewer micro-batches."""
    dist.init_process_group()
    plan = hzplan.Plan.load("plan.json")
    arguments = TrainingArguments(
        "trained",
        use_cpu=True,
        per_device_train_batch_size=plan.batch.micro_batch,
        gradient_accumulation_steps=plan.batch.accumulation,
        num_train_epochs=2,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    torch.manual_seed(0)
    trainer = Planned(
        factory(),
        arguments,
        train_dataset=[sample(index) for index in range(SAMPLES)],
        callbacks=[Clip()],
    )
    trainer.train()
    if dist.get_rank() == 0:
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}: loss {float(entry['loss']):.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
