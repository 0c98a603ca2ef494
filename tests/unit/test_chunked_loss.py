"""The loss in chunks: values and gradients of plain logits, and logits for whoever asks for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hzplan.models.chunked_loss import ChunkedLogits
from hzplan.models.recompute import recompute

WIDTH, VOCAB, BATCH, LENGTH = 8, 50, 3, 7


def shifted(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def as_transformers(logits: Tensor, tokens: Tensor) -> Tensor:
    """How its causal models do it: padded labels, mean or sum."""
    labels = F.pad(tokens, (0, 1), value=-100)[..., 1:].contiguous()
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    return F.cross_entropy(
        logits.view(-1, VOCAB), labels.view(-1), ignore_index=-100, reduction="sum"
    ) / torch.tensor(BATCH * LENGTH)


def by_ellipsis(logits: Tensor, tokens: Tensor) -> Tensor:
    flat = logits[..., 1:, :].contiguous().reshape(-1, logits.size(-1))
    assert flat.shape == (BATCH * (LENGTH - 1), VOCAB) and flat.dim() == 2 and flat.requires_grad
    return F.cross_entropy(flat, tokens[..., 1:].reshape(-1))


LOSSES = (shifted, as_transformers, by_ellipsis)


def trained(
    loss: Callable[[Tensor, Tensor], Tensor], *, chunks: bool, bias: bool, dtype: torch.dtype
) -> list[Tensor]:
    """The loss, and the gradients of what came in and of the head."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCAB, bias=bias).to(dtype)
    hidden = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH))
    tokens[0, 2:5] = -100
    undo = recompute(head, lambda: "chunks") if chunks else lambda: None
    found = loss(head(hidden), tokens) / 3
    found.backward()
    undo()
    return [found.detach(), *(one.grad for one in (hidden, *head.parameters()) if one.grad is not None)]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "bar"), [(torch.float64, 1e-14), (torch.float32, 1e-5), (torch.bfloat16, 0.03)]
)
def test_values_and_gradients_are_those_of_plain_logits(
    loss: Callable[[Tensor, Tensor], Tensor], bias: bool, dtype: torch.dtype, bar: float
) -> None:
    plain = trained(loss, chunks=False, bias=bias, dtype=dtype)
    chunked = trained(loss, chunks=True, bias=bias, dtype=dtype)
    assert len(plain) == len(chunked) == 3 + bias
    for mine, theirs in zip(chunked, plain, strict=True):
        assert mine.dtype == theirs.dtype
        assert float((mine - theirs).abs().max()) <= bar * float(theirs.abs().max())


@pytest.mark.parametrize(
    "asked",
    [
        lambda logits, tokens: logits.softmax(-1)[..., 0].sum(),
        lambda logits, tokens: F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), label_smoothing=0.1),
        lambda logits, tokens: F.cross_entropy(logits.transpose(1, 2), tokens),
        lambda logits, tokens: (logits[..., :4] * 2).sum(),
        lambda logits, tokens: torch.cat([logits, logits]).square().mean(),
    ],
)
def test_who_asks_for_more_gets_logits_and_is_told(asked: Callable[[Tensor, Tensor], Tensor]) -> None:
    def both(logits: Tensor, tokens: Tensor) -> Tensor:
        return asked(logits, tokens.clamp(min=0))

    plain = trained(both, chunks=False, bias=True, dtype=torch.float64)
    with pytest.warns(UserWarning, match="was asked of logits, which are computed as a whole"):
        chunked = trained(both, chunks=True, bias=True, dtype=torch.float64)
    assert all(map(torch.equal, plain, chunked))


def test_a_head_that_is_not_trained_has_no_gradient() -> None:
    def found(*, chunks: bool) -> Tensor:
        torch.manual_seed(0)
        head, hidden = (
            nn.Linear(WIDTH, VOCAB).requires_grad_(False),
            torch.randn(5, WIDTH, requires_grad=True),
        )
        logits = ChunkedLogits.of(hidden, head) if chunks else head(hidden)
        F.cross_entropy(logits, torch.arange(5)).backward()
        assert head.weight.grad is None and head.bias.grad is None and hidden.grad is not None
        return hidden.grad

    torch.testing.assert_close(found(chunks=True), found(chunks=False))


def test_nothing_of_the_vocabularys_size_is_there_for_all_tokens() -> None:
    """Beside the gradient of the head: what was made is far smaller than logits."""
    head, hidden = nn.Linear(16, 4096, bias=False), torch.randn(2048, 16, requires_grad=True)
    logits = ChunkedLogits.of(hidden, head)
    with torch.autograd.profiler.profile(profile_memory=True) as seen:
        F.cross_entropy(logits, torch.randint(0, 4096, (2048,))).backward()
    level = peak = 0
    for event in seen.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    assert 0 < peak < 0.3 * 4 * 2048 * 4096


def test_a_loss_is_differentiated_once() -> None:
    head, hidden = nn.Linear(WIDTH, VOCAB), torch.randn(4, WIDTH, requires_grad=True)
    loss = F.cross_entropy(ChunkedLogits.of(hidden, head), torch.tensor([0, 1, 2, 3]))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
