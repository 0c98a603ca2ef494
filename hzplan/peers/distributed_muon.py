"""A distributed Muon of others: DDP with pytorch_optimizer's DistributedMuon."""

from __future__ import annotations

from collections import defaultdict
from importlib.util import find_spec
from typing import Any

from torch import nn

from hzplan.peers.contender import NotHere, Setting
from hzplan.peers.ddp import DDP
from hzplan.peers.gathered_muon import groups
from hzplan.runtime.muon import Muon


class DistributedMuon(DDP):
    """DDP, its matrices updated in turn by one rank each, and gathered as many at once as there are ranks."""

    def __init__(self, setting: Setting, *, name: str = "pytorch-optimizer", buckets: int = 0) -> None:
        super().__init__(setting, name=name, buckets=buckets)

    def make_optimizer(self) -> None:
        made, arguments = self.setting.optimizer_class()
        if made is not Muon:
            raise NotHere("pytorch_optimizer's DistributedMuon is for matrices, which only Muon has")
        if find_spec("pytorch_optimizer") is None:
            raise NotHere("needs the package pytorch-optimizer; pip install pytorch-optimizer")
        import pytorch_optimizer as theirs

        ours = Muon(groups(self.model, self.setting.plan), **arguments)
        muon, _ = ours.param_groups
        if any(matrix.ndim > 2 for matrix in muon["params"]):
            raise NotHere("pytorch_optimizer takes a stack of matrices, as of experts, for one matrix")
        if (muon["ns_dtype"], muon["eps"]) != ("bfloat16", 1e-7):
            raise NotHere("pytorch_optimizer's Newton–Schulz is in bfloat16, with an eps of 1e-7")
        self.optimizer = theirs.DistributedMuon(_groups(ours))


def _groups(ours: Muon) -> list[dict[str, Any]]:
    """An optimizer's groups and options as theirs has them: one for each shape, for it gathers equal ones."""
    of_shape: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
    muon, adamw = ours.param_groups
    for matrix in muon["params"]:
        of_shape[tuple(matrix.shape)].append(matrix)
    shared = {name: muon[name] for name in ("lr", "momentum", "weight_decay", "nesterov", "ns_steps")}
    matrices = {
        **shared,
        "ns_coeffs": muon["ns_coefficients"],
        "use_adjusted_lr": muon["adjust_lr_fn"] == "match_rms_adamw",
        "use_muon": True,
    }
    others = {name: adamw[name] for name in ("params", "lr", "betas", "eps", "weight_decay")}
    return [
        *({"params": params, **matrices} for params in of_shape.values()),
        {**others, "use_muon": False},
    ]
