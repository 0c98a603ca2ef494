"""A plain GPT, of ``torch.nn`` only: pre-norm blocks, learned positions, GELU, tied embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. ``seq_len`` is the longest sequence, in tokens; ``tied`` shares embed and head.

    Raises ValueError when a size is below 1 or ``heads`` does not divide ``width``.
    """

    vocab: int
    layers: int
    width: int
    heads: int
    seq_len: int
    mlp_ratio: int = 4
    tied: bool = True

    def __post_init__(self) -> None:
        for field in ("vocab", "layers", "width", "heads", "seq_len", "mlp_ratio"):
            if getattr(self, field) < 1:
                raise ValueError(f"GPTConfig.{field} must be at least 1, not {getattr(self, field)}")
        if self.width % self.heads:
            raise ValueError(f"GPTConfig.width {self.width} is not a multiple of heads {self.heads}")


PRESETS: dict[str, GPTConfig] = {
    "nano": GPTConfig(vocab=256, layers=2, width=32, heads=2, seq_len=32),
    "tiny": GPTConfig(vocab=256, layers=4, width=128, heads=4, seq_len=128),
    "small": GPTConfig(vocab=256, layers=8, width=512, heads=8, seq_len=256),
    "medium": GPTConfig(vocab=50257, layers=12, width=768, heads=12, seq_len=1024),
    "1.3b": GPTConfig(vocab=50257, layers=24, width=2048, heads=16, seq_len=2048),
    "7b": GPTConfig(vocab=50257, layers=32, width=4096, heads=32, seq_len=2048),
}
"""Shapes by name: up to ``small`` over bytes, from ``medium`` (GPT-2's smallest) over GPT-2's vocabulary."""


class Attention(nn.Module):
    """Causal self-attention: [B, S, width] to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # [B, S, 3·width] → three of [B, heads, S, width/heads]
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class MLP(nn.Module):
    """Two linear layers around a GELU: [B, S, width] to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.mlp_ratio * config.width)
        self.down = nn.Linear(config.mlp_ratio * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """One pre-norm transformer layer: [B, S, width] to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """A language model: tokens int64 [B, S] to logits [B, S, vocab], for S up to ``config.seq_len``.

    With ``config.tied``, ``head.weight`` and ``embed.weight`` are the same Parameter object.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.seq_len, config.width)
        self.layers = nn.ModuleList(self.layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        # A tied head's own weight would be thrown away at once, so it never takes memory.
        device = "meta" if config.tied else None
        self.head = nn.Linear(config.width, config.vocab, bias=False, device=device)
        if config.tied:
            self.head.weight = self.embed.weight
        self._initialise()

    def _initialise(self) -> None:
        """GPT-2's: normal 0.02, and less where 2·layers branches add up in the residual stream."""
        deviation = 0.02
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)
            elif name.endswith(("attention.out.weight", "down.weight", "experts.down")):
                nn.init.normal_(parameter, std=deviation / sqrt(2 * self.config.layers))
            else:
                nn.init.normal_(parameter, std=deviation)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def layer(self, config: Any) -> nn.Module:
        """One of the model's layers."""
        return Block(config)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Tokens and positions as vectors [B, S, width]."""
        length = tokens.shape[1]
        if length > self.config.seq_len:
            raise ValueError(f"{length} tokens are more than the model's seq_len, {self.config.seq_len}")
        found: Tensor = self.embed(tokens) + self.positions(torch.arange(length, device=tokens.device))
        return found


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all positions, in nats: logits [B, S, vocab], targets int64 [B, S]."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()  # a sum over the vocabulary loses too much in half precision
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def closed_form_parameters(config: GPTConfig) -> int:
    """How many numbers the model's parameters hold, a tied weight counted once; without building it."""
    w, r = config.width, config.mlp_ratio
    block = (4 + 2 * r) * w * w + (9 + r) * w  # qkv, out, up and down; their biases and two norms
    tables = (config.vocab * (1 if config.tied else 2) + config.seq_len) * w
    return config.layers * block + tables + 2 * w


def closed_form_forward_flops(config: GPTConfig, sequences: int = 1) -> int:
    """FLOPs of the matrix products in one forward over ``sequences`` full sequences; backward: twice that.

    A multiply-add counts two. Attention counts every pair of positions, as torch's FlopCounterMode does.
    """
    w, s = config.width, config.seq_len
    weights = config.layers * (4 + 2 * config.mlp_ratio) * w * w + config.vocab * w
    attention = config.layers * 2 * s * w
    return 2 * sequences * s * (weights + attention)
