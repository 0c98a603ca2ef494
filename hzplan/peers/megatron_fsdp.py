"""Megatron-FSDP's ``fully_shard_model`` over the whole world, by its documentation as of version 0.6.1.

NOT RUN ON A GPU YET, and it runs nowhere else.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from hzplan.models.units import find_units
from hzplan.peers.contender import NotHere, Setting, Trainer
from hzplan.profiler.session.ranks import Ranks


class MegatronFSDP(Trainer):
    """Parameters, gradients and optimizer state sharded over all ranks, blocks gathered as it sees fit."""

    name = "megatron-fsdp"

    def __init__(self, setting: Setting) -> None:
        if setting.device.type != "cuda":
            raise NotHere("Megatron-FSDP needs GPUs")
        if any(Ranks.here().gather(importlib.util.find_spec("megatron_fsdp") is None)):
            raise NotHere("Megatron-FSDP is not installed on every rank; pip install megatron-fsdp")
        super().__init__(setting)

    def prepare(self) -> None:
        # Typed by nobody, and only there where GPUs are.
        theirs: Any = importlib.import_module("megatron_fsdp")
        setting = self.setting
        model = setting.build_model()
        if setting.bf16:
            model = model.to(torch.bfloat16)  # its main weights are made of these, in float32
        blocks = [type(unit.module) for unit in find_units(model) if unit.module is not model]
        self.model = theirs.fully_shard_model(
            model,
            # It looks for tensor parallelism's dimension whether there is any or not.
            device_mesh=init_device_mesh("cuda", (setting.world, 1), mesh_dim_names=("dp_shard", "tp")),
            dp_shard_dim="dp_shard",
            tp_dim="tp",
            fsdp_unit_modules=list(dict.fromkeys(blocks)),
            zero_dp_strategy="optim_grads_params",
            mixed_precision_policy=theirs.MixedPrecisionPolicy(
                main_params_dtype=torch.float32,
                main_grads_dtype=torch.float32,
                grad_comm_dtype=setting.reduce_dtype,
            ),
            sync_model_each_microbatch=setting.accumulation == 1,
        )
        made, arguments = setting.optimizer_class()
        self.optimizer = theirs.fully_shard_optimizer(made(self.model.parameters(), **arguments))

    def around(self, last: bool) -> AbstractContextManager[object]:
        if self.setting.accumulation > 1:
            sharded: Any = self.model
            sharded.set_model_auto_sync(last)
        return nullcontext()
