"""What this rank holds of a parameter: all of it, or its part of a DTensor of tensor parallelism."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from hzplan.errors import UserError, one_line

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_distributed(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor. (Who has made none need not wait for their import.)"""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's values, without a copy."""
    return tensor._local_tensor if is_distributed(tensor) else tensor


def put(parameter: nn.Parameter, values: Tensor) -> None:
    """Let a parameter be a view of ``values``, which have its local shape.

    A DTensor keeps its own description, and computes with what its local tensor is by then.
    """
    if is_distributed(parameter):
        parameter._local_tensor = values
    else:
        parameter.data = values


def cast(parameter: nn.Parameter, dtype: torch.dtype, name: str) -> None:
    """Make a DTensor's description say ``dtype``; others take it from what is put there.

    UserError, naming the parameter, where something refers to it that would then refer to the old one.
    """
    if not is_distributed(parameter) or parameter.dtype == dtype:
        return
    from torch.distributed.tensor import DTensor

    made = DTensor.from_local(
        parameter._local_tensor.to(dtype),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    parameter.grad = None
    try:
        torch.utils.swap_tensors(parameter, nn.Parameter(made, requires_grad=parameter.requires_grad))
    except RuntimeError as error:
        raise UserError(
            f"{name} is a DTensor, which becomes {made.dtype} only while nothing else refers to it; call "
            f"parallelize before a forward pass and without weak references ({one_line(error)})"
        ) from None


def take_gradient(parameter: nn.Parameter) -> Tensor | None:
    """This rank's part of what backward has left in ``parameter.grad``, which is then None.

    Gradients of a DTensor may be sums that are still to be made over its mesh.
    """
    gradient, parameter.grad = parameter.grad, None
    if gradient is None or not is_distributed(gradient):
        return gradient
    assert is_distributed(parameter)
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    values: Any = gradient._local_tensor
    found: Tensor = values.wait() if hasattr(values, "wait") else values
    return found


def split_over(parameter: Tensor) -> tuple[Any, ...]:
    """The process groups whose ranks hold different elements of it."""
    if not is_distributed(parameter):
        return ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    )
