"""A model and its data as a user has them: nothing here knows how it will be sharded."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Transformer(nn.Module):
    """A causal transformer over bytes: tokens int64 [batch, length] to logits [batch, length, vocab]."""

    def __init__(self, vocab: int = 256, width: int = 128, layers: int = 4, length: int = 64) -> None:
        super().__init__()
        self.seq_len = length
        self.embed = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocab)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.head(x)


def batch(step: int, micro_batch: int, rank: int, *, sequences: int = 4, length: int = 64) -> Tensor:
    """Bytes int64 [sequences, length + 1] that count up from a start of their own, in steps of their own."""
    generator = torch.Generator().manual_seed(step * 1_000_003 + micro_batch * 1009 + rank)
    start, stride = torch.randint(1, 64, (2, sequences, 1), generator=generator)
    return (start + stride * torch.arange(length + 1)) % 256
