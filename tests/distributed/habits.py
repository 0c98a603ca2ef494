"""What people's loops do besides, on the ranks: models made without memory, ragged and uneven batches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hzplan.models.deferred import deferred_init
from hzplan.models.gpt import GPT, GPTConfig
from hzplan.runtime.apply import apply, full_parameters
from tests.distributed.oracle import LENGTH, VOCAB, Case, choice, fresh_model, sharded, worst

DTYPES = ("float32", "bfloat16")
TRIPLES = ((0, 0, 0), (0, 1, 2), (1, 1, 2), (2, 2, 2))
IGNORED = -100


class Buffered(GPT):
    """A GPT with buffers, one of them random, that no state dict has."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)), persistent=False)
        self.register_buffer("noise", torch.randn(5))


def deferred(_: Any) -> dict[str, list[str]]:
    """By case, of a model that was made without memory, the tensors that are not what rank 0 had made."""
    found = {}
    build = partial(Buffered, GPTConfig(vocab=VOCAB, layers=2, width=16, heads=2, seq_len=LENGTH))
    for case in (Case("2|2", triple, dtype=dtype) for triple in TRIPLES for dtype in DTYPES):
        torch.manual_seed(0)
        made = build()
        expected = {name: p.detach() for name, p in made.named_parameters()} | dict(made.named_buffers())
        torch.manual_seed(dist.get_rank())
        model, optimizer = apply(deferred_init(build), choice(case), torch.optim.AdamW)
        there = full_parameters(optimizer) | dict(model.named_buffers())
        found[case.name] = [name for name in expected if not torch.equal(there[name], expected[name])]
        optimizer.engine.close()
    return found


def ragged(_: Any) -> dict[str, float]:
    """By case, the largest difference to one process that has all sequences in one batch."""
    cases = [Case("2|2", triple, accumulation=2, steps=5) for triple in TRIPLES]
    cases += [replace(case, clip=False) for case in cases]
    return {f"{case.name}-{case.clip}": _ragged(case) for case in cases}


def _ragged(case: Case) -> float:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = sharded(case)
    single = fresh_model(case)
    alone = torch.optim.AdamW(single.parameters(), lr=1e-2)
    off = []
    for step in range(case.steps):
        mine = [_tokens(step, number, rank) for number in range(_micro_batches(step))]
        tokens = torch.tensor([float(sum(_counted(batch) for batch in mine))])
        dist.all_reduce(tokens)
        loss = torch.zeros((), dtype=torch.float64)
        for batch in mine:
            # Gradients are means over ranks: times how many there are, over all tokens of the step.
            part = _summed(model, batch) * world / tokens.item()
            part.backward()
            loss += part.detach() / world
        if case.clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        whole = torch.cat(
            [_tokens(step, number, r) for number in range(_micro_batches(step)) for r in range(world)]
        )
        expected = _summed(single, whole) / _counted(whole)
        expected.backward()
        if case.clip:
            nn.utils.clip_grad_norm_(single.parameters(), 1.0)
        alone.step()
        alone.zero_grad()
        off.append(float((loss - expected.detach()).abs()))
    weights = full_parameters(optimizer)
    optimizer.engine.close()
    off += [float((weights[name] - value.detach()).norm()) for name, value in single.named_parameters()]
    return worst(off)


def _micro_batches(step: int) -> int:
    """The last step has fewer than the plan accumulates."""
    return 1 if step == 4 else 2


def _tokens(step: int, number: int, rank: int) -> Tensor:
    """Sequences of different lengths, filled up; as many on every rank but in the last step, where only the
    first two ranks have any."""
    generator = torch.Generator().manual_seed(1 + step * 100 + number * 10 + rank)
    rows = 2 if step < 4 else max(0, 2 - rank)
    tokens = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=generator)
    lengths = torch.randint(2, LENGTH + 2, (rows, 1), generator=generator)
    tokens[torch.arange(LENGTH + 1) >= lengths] = IGNORED
    return tokens


def _counted(batch: Tensor) -> int:
    return int((batch[:, 1:] != IGNORED).sum())


def _summed(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1].clamp_min(0))
    return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")
