"""The shapes that are trained: equal blocks, and few blocks between large tables."""

from __future__ import annotations

from dataclasses import dataclass

from hzplan.models.gpt import GPT, GPTConfig


@dataclass(frozen=True)
class Sized:
    """What a factory returns: a model, and the sequences that it takes."""

    model: GPT
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


def role(tensor: str) -> str:
    """What a tensor is for: embedding, attention, mlp or head (norms go with what they precede)."""
    if tensor.startswith(("embed", "positions")):
        return "embedding"
    if ".attention." in tensor or ".norm1." in tensor:
        return "attention"
    if ".mlp." in tensor or ".norm2." in tensor:
        return "mlp"
    return "head"
