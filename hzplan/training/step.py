"""The micro-batches of one optimizer step, the same for whoever trains."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from hzplan.models.workload import Workload
from hzplan.training.batches import Batches


def forward_backward(
    model: nn.Module,
    workload: Workload,
    data: Batches,
    *,
    step: int,
    accumulation: int,
    rank: int,
    around: Callable[[bool], AbstractContextManager[object]] = lambda last: nullcontext(),
) -> Tensor:
    """Forward and backward of a step's micro-batches; this rank's mean loss, float64 [].

    ``around`` gives what each micro-batch runs in, and is told whether it is the step's last.
    """
    total = torch.zeros((), dtype=torch.float64)
    for index in range(accumulation):
        with around(index == accumulation - 1):
            loss = workload.loss(model, data.train(step, index, rank)) / accumulation
            loss.backward()
        total += loss.detach().cpu()
    return total
