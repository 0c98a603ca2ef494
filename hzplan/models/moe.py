"""A mixture-of-experts GPT: dropless top-k routing, shared experts, and a loss that balances the load.

Experts are gathered like all parameters, and tokens stay where they are: every rank computes all experts on
its own tokens. So ranks whose tokens are routed unevenly differ in the sizes of their products, not in sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hzplan.models.gpt import GPT, MLP, Attention, GPTConfig, cross_entropy


@dataclass(frozen=True)
class MoEConfig(GPTConfig):
    """A GPT whose layers have ``experts`` feed-forward networks, ``active`` of them for each token.

    ``shared``: how many more every token passes; ``expert_width``: an expert's inner width; ``balance``: the
    weight of the load-balancing loss. Raises ValueError when a size makes no sense.
    """

    experts: int = 8
    active: int = 2
    shared: int = 1
    expert_width: int = 128
    balance: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.active <= self.experts:
            raise ValueError(f"MoEConfig.active must be from 1 to {self.experts} experts, not {self.active}")
        if self.shared < 0 or self.expert_width < 1 or not 0 <= self.balance < inf:
            raise ValueError("MoEConfig: shared and balance must be at least 0, expert_width at least 1")


PRESETS: dict[str, MoEConfig] = {
    "nano": MoEConfig(vocab=256, layers=2, width=32, heads=2, seq_len=32, experts=4, expert_width=32),
    "tiny": MoEConfig(vocab=256, layers=4, width=128, heads=4, seq_len=128, experts=8, expert_width=256),
    "small": MoEConfig(
        vocab=256, layers=4, width=256, heads=8, seq_len=128, mlp_ratio=2, experts=16, expert_width=512
    ),
    "5b": MoEConfig(
        vocab=50257, layers=24, width=2048, heads=16, seq_len=2048, experts=8, expert_width=5632, shared=0
    ),
    "11b": MoEConfig(
        vocab=50257,
        layers=28,
        width=2048,
        heads=16,
        seq_len=4096,
        mlp_ratio=1,
        experts=64,
        active=6,
        expert_width=1408,
        shared=2,
    ),
}
"""Shapes by name, over bytes up to ``small``; the last two have Mixtral's and DeepSeek-MoE's proportions."""


_EVEN: ContextVar[bool] = ContextVar("even", default=False)


@contextmanager
def evenly_routed() -> Iterator[None]:
    """Inside, every expert gets as many tokens as the others: for passes in shapes, which know no values."""
    token = _EVEN.set(True)
    try:
        yield
    finally:
        _EVEN.reset(token)


def _evenly(total: int, parts: int) -> list[int]:
    return [(total + part) // parts for part in range(parts)]


class Experts(nn.Module):
    """Experts as two stacked weights: of [tokens, width], each row to ``active`` of them, weighted."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(config.experts, config.expert_width, config.width))
        self.down = nn.Parameter(torch.empty(config.experts, config.width, config.expert_width))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """``chosen``, ``weights`` [tokens, active]: expert numbers, and what each one's output counts."""
        count, active = len(self.up), chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)  # all pairs of token and expert, by expert
        counts = (
            _evenly(chosen.numel(), count)
            if _EVEN.get()
            else torch.bincount(chosen.flatten(), minlength=count).tolist()
        )
        tokens = order // active
        parts = x[tokens].split(counts)
        # Unbound once: the gradients of all experts are stacked once, rather than added up whole.
        outputs = [
            F.gelu(part @ up.T) @ down.T
            for part, up, down in zip(parts, self.up.unbind(), self.down.unbind(), strict=True)
        ]
        weighted = torch.cat(outputs) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, tokens, weighted)


class MoE(nn.Module):
    """Routed and shared experts: [B, S, width] to the same shape, and how uneven the routing is.

    The balancing loss is experts × Σ share of tokens × mean probability, 1 where both are even (Fedus, Zoph,
    Shazeer 2021, §2.2).
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.active = config.active
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = Experts(config)
        self.shared = nn.ModuleList(MLP(config) for _ in range(config.shared))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and the balancing loss of these tokens."""
        flat = x.flatten(0, 1)
        scores = self.router(flat)
        if scores.dtype == torch.bfloat16:
            scores = scores.float()  # which expert is best must not depend on rounding
        probabilities = scores.softmax(-1)
        weights, chosen = probabilities.topk(self.active, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = self.experts(flat, chosen, weights).view_as(x)
        for expert in self.shared:
            out = out + expert(x)
        count = probabilities.shape[1]
        share = F.one_hot(chosen, count).to(probabilities.dtype).mean((0, 1))
        balance: Tensor = count * (share * probabilities.mean(0)).sum()
        return out, balance


class Block(nn.Module):
    """One pre-norm layer: [B, S, width] to the same shape, and the balancing loss."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.moe = MoE(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x))
        out, balance = self.moe(self.norm2(x))
        return x + out, balance


class MoEGPT(GPT):
    """A language model: tokens int64 [B, S] to logits [B, S, vocab], and the layers' mean balancing loss."""

    config: MoEConfig

    def layer(self, config: Any) -> nn.Module:
        """See GPT."""
        return Block(config)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.embedded(tokens)
        balance = x.new_zeros(())
        for layer in self.layers:
            x, uneven = layer(x)
            balance = balance + uneven / len(self.layers)
        return self.head(self.norm(x)), balance


def balanced_loss(model: nn.Module, batch: object) -> Tensor:
    """Mean cross-entropy, in nats, of every next token of ``batch`` int64 [n, seq_len + 1]; in training with
    the balancing loss, as the model's ``config.balance`` weighs it."""
    assert isinstance(batch, Tensor)
    logits, balance = model(batch[:, :-1])
    if not model.training:
        return cross_entropy(logits, batch[:, 1:])
    config = next(module.config for module in model.modules() if isinstance(module, MoEGPT))
    loss: Tensor = cross_entropy(logits, batch[:, 1:]) + config.balance * balance
    return loss


def closed_form_parameters(config: MoEConfig) -> tuple[int, int]:
    """How many numbers all parameters hold, and those of routed experts; without building them."""
    w, f = config.width, config.expert_width
    routed = config.layers * config.experts * 2 * w * f
    shared = config.shared * (2 * config.mlp_ratio * w * w + (config.mlp_ratio + 1) * w)
    block = 4 * w * w + 4 * w + 4 * w + config.experts * w + shared  # attention, two norms, router
    tables = (config.vocab * (1 if config.tied else 2) + config.seq_len) * w
    return config.layers * block + routed + tables + 2 * w, routed
