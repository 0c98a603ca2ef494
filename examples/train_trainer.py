"""Hugging Face's Trainer under a plan, with a language model of transformers.

hzplan profile train_trainer:factory --nproc 2 --micro-batch 2 -o profile.json
hzplan solve profile.json --global-batch 8 -o plan.json
torchrun --nproc-per-node 2 train_trainer.py

``PlannedTrainer(…, plan="plan.json")`` in the place of ``Trainer(…)``; with ``plan="auto"`` there is nothing
to profile and solve before. Trainer counts tokens over all ranks and micro-batches
(``average_tokens_across_devices``), so ragged batches weigh what they should. It goes on from its newest
checkpoint: ``torchrun … train_trainer.py resume``.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from hzplan.integrations.trainer import PlannedTrainer

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


def main() -> None:
    """Train for two epochs; the last step of each has fewer micro-batches."""
    dist.init_process_group()
    arguments = TrainingArguments(
        "trained",
        use_cpu=True,
        num_train_epochs=2,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        weight_decay=0.01,
        logging_steps=1,
        save_steps=10,
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    torch.manual_seed(0)
    dataset = [sample(index) for index in range(SAMPLES)]
    trainer = PlannedTrainer(factory(), arguments, train_dataset=dataset, plan="plan.json")
    trainer.train(resume_from_checkpoint="resume" in sys.argv)
    if dist.get_rank() == 0:
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}: loss {float(entry['loss']):.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
