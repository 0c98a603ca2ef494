"""torch's ``fully_shard`` (FSDP2), over the whole world or inside groups with replicas across (HSDP)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hzplan.core.hierarchy import Mesh
from hzplan.models.units import find_units
from hzplan.peers.contender import NotHere, Setting, Trainer
from hzplan.runtime.backends.base import Buffers, Collectives
from hzplan.runtime.backends.groups import on_device
from hzplan.runtime.muon import Muon

AHEAD = 1
"""Blocks that are gathered ahead."""


class _Exchange:
    """Where FSDP2 has its communication buffers from."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ExchangeAllGather(_Exchange):
    """All-gather as hzplan does it on gloo, which uses both directions of a link at once.

    What FSDP2 asks of ``set_custom_all_gather``.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        buffers = Buffers(output_tensor, input_tensor)
        under_way = _UnderWay(on_device(group, output_tensor.device).all_gather([buffers]))
        if async_op:
            return under_way
        under_way.wait()
        return None


class _UnderWay(dist.Work):
    """An exchange as one piece of work."""

    def __init__(self, gather: Collectives) -> None:
        super().__init__()
        self._gather = gather
        gather.begin()

    def wait(self, timeout: Any = None) -> bool:
        self._gather.end()
        return True


class ExchangeReduceScatter(_Exchange):
    """Reduce-scatter as hzplan does it on gloo: an exchange and a local sum, half the bytes of gloo's own.

    What FSDP2 asks of ``set_custom_reduce_scatter``.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        room = input_tensor.new_empty(output_tensor.numel())
        buffers = Buffers(input_tensor, output_tensor)
        on_device(group, input_tensor.device).reduce_scatter([buffers], room).run()
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


class FSDP2(Trainer):
    """Everything sharded over the world, blocks gathered ahead of their use.

    ``keep``: parameters stay whole between forward and backward, and gradients while accumulating.
    ``ahead``: how many blocks; 0: as torch does where nobody says. ``offload``: shards of weights, gradients
    and optimizer state lie in the host's memory, where they are updated.
    """

    def __init__(
        self,
        setting: Setting,
        *,
        name: str = "fsdp2",
        keep: bool = False,
        ahead: int = AHEAD,
        offload: bool = False,
    ) -> None:
        self.name, self.keep, self.ahead, self.offload = name, keep, ahead, offload
        super().__init__(setting)

    def device_mesh(self) -> DeviceMesh:
        """The mesh that ``fully_shard`` gets."""
        return init_device_mesh(self.setting.device.type, (self.setting.world,))

    def prepare(self) -> None:
        model = self.setting.build_model()
        mesh = self.device_mesh()
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": not self.keep}
        if self.setting.bf16:
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=self.setting.reduce_dtype, cast_forward_inputs=True
            )
        elif self.setting.reduce_dtype == torch.bfloat16:
            options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        if self.offload:
            if self.setting.device.type == "cuda" and self.setting.optimizer_class()[0] is Muon:
                raise NotHere(
                    "matrices that lie on the host would be gathered on the device, which is not done"
                )
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.setting.device.type == "cuda")
        # As users wrap: every repeated block, and the root with what is left.
        blocks = [unit.module for unit in find_units(model) if next(unit.module.children(), None) is not None]
        sharded = [fully_shard(block, **options) for block in blocks if block is not model]
        # The root is needed again at once after forward: by torch's default it is kept.
        self.root: FSDPModule = fully_shard(model, **options | {"reshard_after_forward": None})
        self.model = model
        _prefetch(sharded, self.ahead)
        for module in [*sharded, self.root] if self.setting.device.type == "cpu" else []:
            # On gloo there is no stream to run ahead on, so gathers must be asynchronous by themselves.
            module._set_unshard_async_op(True)
            if mesh.size(-1) == 2:  # in a larger group gloo's own ring goes on by itself
                module.set_custom_all_gather(ExchangeAllGather())  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(ExchangeReduceScatter())  # type: ignore[arg-type]
        self.make_optimizer()

    def on_host(self) -> Sequence[Tensor]:
        if not self.offload:
            return ()
        shards = list(self.model.parameters())
        state = [value for shard in shards for value in self.optimizer.state[shard].values()]
        kept = (*shards, *(shard.grad for shard in shards), *state)
        return [tensor.to_local() for tensor in kept if isinstance(tensor, DTensor)]

    def zero_grad(self) -> None:
        # An offloaded gradient stays where it lies, so that it is known to be the host's.
        self.optimizer.zero_grad(set_to_none=not self.offload)

    def around(self, last: bool) -> AbstractContextManager[object]:
        if self.keep:
            self.root.set_is_last_backward(last)
            self.root.set_requires_gradient_sync(last)
            self.root.set_reshard_after_backward(last)
        return nullcontext()


class HSDP(FSDP2):
    """Sharded inside a group of neighbours, replicated across; replicas meet on the last micro-batch."""

    def __init__(self, setting: Setting, *, name: str = "hsdp", ahead: int = AHEAD) -> None:
        self.inner = inner_shards(setting.plan.mesh)
        super().__init__(setting, name=name, ahead=ahead)

    def device_mesh(self) -> DeviceMesh:
        shape = (self.setting.world // self.inner, self.inner)
        return init_device_mesh(self.setting.device.type, shape, mesh_dim_names=("replicate", "shard"))

    def around(self, last: bool) -> AbstractContextManager[object]:
        self.root.set_requires_all_reduce(last)
        return super().around(last)


def inner_shards(mesh: Mesh) -> int:
    """Ranks in a sharding group: those inside the fastest tier, or the level nearest to it; see NotHere."""
    wanted = mesh.shards[mesh.tier_bounds[0][1]]
    between = [count for count in mesh.shards if 1 < count < mesh.world]
    if not between:
        raise NotHere(f"mesh {mesh} has no level between one rank and all")
    return min(between, key=lambda count: (abs(count - wanted), count))


def _prefetch(blocks: Sequence[FSDPModule], ahead: int) -> None:
    """Gather the next blocks while one computes, in forward and in backward."""
    for place, block in enumerate(blocks if ahead else ()):
        block.set_modules_to_forward_prefetch([*blocks[place + 1 : place + 1 + ahead]])
        block.set_modules_to_backward_prefetch([*reversed(blocks[max(0, place - ahead) : place])])
