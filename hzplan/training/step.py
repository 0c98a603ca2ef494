"""The micro-batches of one optimizer step, the same for whoever trains."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

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

    The loss is on the model's device, which is not waited for.
    ``around`` gives what each micro-batch runs in, and is told whether it is the step's last.
    """
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for index in range(accumulation):
        with around(index == accumulation - 1):
            loss = workload.loss(model, on_device(data.train(step, index, rank), device)) / accumulation
            loss.backward()
        total += loss.detach()
    return total


def on_device(batch: object, device: torch.device) -> object:
    """A batch with its tensors on a device; a GPU copies them while it computes."""

    def moved(tensor: Tensor) -> Tensor:
        locked = tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
        return locked.to(device, non_blocking=True)

    return tree_map_only(Tensor, moved, batch)
