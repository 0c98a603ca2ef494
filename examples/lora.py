"""Adapters on a frozen model: a factory for hzplan, with peft on a language model of transformers.

hzplan profile lora:factory --nproc 2 -o profile.json
hzplan solve profile.json --global-batch 16 -o plan.json
hzplan run plan.json lora:factory --steps 100

What is frozen has parameters only: no gradients travel, no optimizer state is kept. Start from pretrained
weights with AutoModelForCausalLM.from_pretrained in place of the configuration.
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM


class factory:
    """The model, a batch of it, and its loss."""

    vocab, seq_len = 256, 64

    def __init__(self) -> None:
        config = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=self.seq_len,
            use_cache=False,
        )
        adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        self.model: nn.Module = get_peft_model(LlamaForCausalLM(config), adapters)

    def batch(self, n: int, generator: torch.Generator) -> Tensor:
        """Tokens [n, seq_len + 1]."""
        return torch.randint(self.vocab, (n, self.seq_len + 1), generator=generator)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean cross-entropy of every next token."""
        logits = model(input_ids=batch[:, :-1]).logits
        return cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
