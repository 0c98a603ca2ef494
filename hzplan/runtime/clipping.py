"""Formulas of clipping: a sum of squares, and the factor that brings a norm down to its limit.

Which gradients count is decided in ``updates.py``, where they are also multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def norms(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The 2-norm of each gradient [count], on the device."""
    return torch.stack(torch._foreach_norm(list(gradients))) if gradients else torch.zeros(0, device=device)


def square_sum(norms: Tensor) -> Tensor:
    """The sum of the squares of all elements that have these norms, a float64 number; zero of none."""
    total: Tensor = torch.linalg.vector_norm(norms)
    return total.double().square_()


def clipping(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of a norm are multiplied by: as torch's ``clip_grad_norm_``, and 1 where it is NaN."""
    return torch.nan_to_num((max_norm / (norm + 1e-6)).clamp(max=1.0), nan=1.0)
