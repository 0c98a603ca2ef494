"""Muon as it is run without a plan, under replicas and FSDP2: gathered and repeated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hzplan.formats.plan import Plan
from hzplan.runtime.muon import Muon, orthogonalized


def groups(model: nn.Module, plan: Plan) -> list[dict[str, Any]]:
    """A model's parameters as the plan's optimizer has them in groups."""
    own = {name for unit in plan.units for b in unit.buckets if b.matrix for name in b.tensors}
    named = [(name.removeprefix("module."), p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in named if name in own], "method": "muon"},
        {"params": [p for name, p in named if name not in own], "method": "adamw"},
    ]


class GatheredMuon(Muon):
    """Of DTensors: every rank gathers a whole matrix, in the dtype that it is computed in, computes all of it
    and keeps its part."""

    def orthogonal(self, update: Tensor, group: Mapping[str, Any]) -> Tensor:
        """See ``Muon``."""
        if not isinstance(update, DTensor):
            return super().orthogonal(update, group)
        sent: Any = update.to(getattr(torch, group["ns_dtype"]))
        whole = sent.full_tensor()
        found = orthogonalized(whole, group)
        return distribute_tensor(found, update.device_mesh, update.placements, src_data_rank=None)
