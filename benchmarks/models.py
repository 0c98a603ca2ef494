"""The shapes that are trained: equal blocks, and few blocks between large tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hzplan.models.gpt import GPT, GPTConfig


@dataclass(frozen=True)
class Sized:
    """What a factory returns: a model, and the sequences that it takes."""

    model: nn.Module
    seq_len: int
    vocab: int

    @classmethod
    def of(cls, config: GPTConfig) -> Sized:
        """A GPT of this shape."""
        return cls(GPT(config), config.seq_len, config.vocab)


def deep() -> Sized:
    """2.7 M parameters, nearly all in six equal blocks."""
    return Sized.of(GPTConfig(vocab=256, layers=6, width=192, heads=4, seq_len=64))


def tall() -> Sized:
    """0.8 M parameters in sixteen blocks: a unit is a small part of the model, as in large ones."""
    return Sized.of(GPTConfig(vocab=256, layers=16, width=64, heads=4, seq_len=128))


def wide() -> Sized:
    """3.7 M parameters, more than half of them in an embedding and a head of its own."""
    return Sized.of(GPTConfig(vocab=4096, layers=2, width=256, heads=4, seq_len=64, tied=False))


def llama() -> Sized:
    """3.4 M parameters as Llama has them: RMS norms, rotary positions, gated MLPs, two heads to a key."""
    width, layers, vocab, seq_len = 256, 4, 1024, 128
    return Sized(Llama(width, layers, vocab, seq_len), seq_len, vocab)


class Llama(nn.Module):
    """Tokens int64 [B, S] to logits [B, S, vocab] (Touvron et al. 2023, §2.2)."""

    def __init__(self, width: int, layers: int, vocab: int, seq_len: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(LlamaLayer(width, heads=8, kv_heads=4) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


class LlamaLayer(nn.Module):
    """[B, S, width] to the same shape."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, each = heads, kv_heads, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * each, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        hidden = 8 * width // 3 // 32 * 32
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        each = width // self.heads
        together = self.qkv(self.norm1(x)).view(batch, length, -1, each).transpose(1, 2)
        q, k, v = together.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        inner = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(inner)) * self.up(inner))
        return out


def rotated(x: Tensor) -> Tensor:
    """Heads [B, H, S, d] with rotary positions (Su et al. 2021, §3.2.2), halves paired."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device), frequencies).to(x.dtype)
    one, other = x.split(half, dim=-1)
    return torch.cat(
        (one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()), -1
    )


def role(tensor: str) -> str:
    """What a tensor is for: embedding, attention, mlp or head (norms go with what they precede)."""
    if tensor.startswith(("embed", "positions")):
        return "embedding"
    if any(part in tensor for part in (".attention.", ".norm1.", ".qkv.", ".out.")):
        return "attention"
    if any(part in tensor for part in (".mlp.", ".norm2.", ".gate.", ".up.", ".down.")):
        return "mlp"
    return "head"
