"""A fused cross-entropy, as frameworks have it: logits are read once, and become their own gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _FusedCrossEntropy(torch.autograd.Function):
    """Its passes over memory, without its values: for shapes only."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, passes: int) -> Tensor:
        """Read logits [tokens, vocab] once, and ``passes`` times more; keep them."""
        ctx.save_for_backward(logits)
        for _ in range(passes):
            logits.detach().amax(-1)
        return logits.detach().amax(-1).float().sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Read and write the kept logits, in place."""
        (logits,) = ctx.saved_tensors
        found: Tensor = logits.detach().mul_(2.0)
        return found, None


METRIC_PASSES = 7
"""Reads of logits in 16 bits that are as many bytes as a metric of them in fp32: a cast (2 read, 4 written
for each), and a log-softmax (4 and 4)."""


def fused_loss(model: nn.Module, batch: object, passes: int = 0) -> Tensor:
    """The loss of ``batch`` int64 [n, seq_len + 1], in shapes; logits are read ``passes`` times more."""
    assert isinstance(batch, Tensor)
    found = model(batch[:, :-1])
    logits: Tensor = getattr(found, "logits", found)
    loss: Tensor = _FusedCrossEntropy.apply(logits.flatten(0, 1), passes)  # type: ignore[no-untyped-call]
    return loss
