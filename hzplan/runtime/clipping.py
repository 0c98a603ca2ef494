"""Formulas of clipping: a sum of squares, and the factor that brings a norm down to its limit.

Which gradients count is decided in ``updates.py``, where they are also multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def square_sum(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of all elements' squares, a float64 number on the device; zero of none."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return nn.utils.get_total_norm(gradients, foreach=True).double().square_()


def clipping(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of a norm are multiplied by: as torch's ``clip_grad_norm_``, and 1 where it is NaN."""
    return torch.nan_to_num((max_norm / (norm + 1e-6)).clamp(max=1.0), nan=1.0)
