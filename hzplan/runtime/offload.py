"""Offloaded optimizer state: its copies in the host's memory and in the device buffers it is fetched to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hzplan.runtime.bucket import Bucket
from hzplan.runtime.host_memory import host_buffer
from hzplan.runtime.unit import UnitState

MASTER = "master"
"""Key of master weights beside the optimizer's own keys; no optimizer keeps anything under the name."""

Keys = Mapping[str, torch.dtype]


@dataclass(frozen=True, eq=False)
class Offloaded:
    """A tensor's two copies [elements]: ``host``; ``device``, valid from its unit's fetch to its store."""

    host: Tensor
    device: Tensor


class HostStates:
    """Optimizer state and master weights of the units that a plan offloads.

    A unit's tensors lie in one buffer, so that they travel in one copy. After its store, the unit's buffer on
    the device is another unit's. Host memory is page-locked where the device copies it by itself.
    """

    def __init__(
        self,
        units: Sequence[UnitState],
        buffers: Mapping[str, int],
        keys: Callable[[nn.Parameter], Keys],
        device: torch.device,
    ) -> None:
        """``buffers``: by unit, the number of its device buffer; ``keys``: for a parameter, the optimizer's
        tensors of the parameter's size."""
        self._tensors: dict[tuple[int, int, str], Offloaded] = {}  # by bucket, first element and key
        parts = {unit.name: _parts(unit, keys) for unit in units}
        sizes = {name: sum(_nbytes(*part[3:]) for part in of) for name, of in parts.items()}
        largest: dict[int, int] = {}
        for name, size in sizes.items():
            largest[buffers[name]] = max(size, largest.get(buffers[name], 0))
        on_device = {
            buffer: torch.zeros(size, dtype=torch.uint8, device=device) for buffer, size in largest.items()
        }
        self._units: dict[str, Offloaded] = {}
        for unit in units:
            name, of = unit.name, parts[unit.name]
            host = host_buffer(device)(sizes[name])
            copies = self._units[name] = Offloaded(host, on_device[buffers[name]][: sizes[name]])
            ends = accumulate(_nbytes(*part[3:]) for part in of)
            for (bucket, first, key, numel, dtype), end in zip(of, ends, strict=True):
                span = slice(end - _nbytes(numel, dtype), end)
                self._tensors[id(bucket), first, key] = Offloaded(
                    copies.host[span].view(dtype), copies.device[span].view(dtype)
                )
            for bucket in unit.trainable_buckets:  # now, so that few masters are there twice
                if bucket.layout.keeps_master:
                    first = bucket.bounds(bucket.layout.levels.optim)[0]
                    host = self._tensors[id(bucket), first, MASTER].host
                    host.copy_(bucket.master)
                    bucket.master = host

    @property
    def host_buffers(self) -> list[Tensor]:
        """All buffers in the host's memory, one per unit (uint8)."""
        return [copies.host for copies in self._units.values()]

    def master(self, bucket: Bucket) -> Tensor | None:
        """The device copy of a bucket's master weights, where they are updated; None when not offloaded."""
        copies = self.copies(bucket, bucket.bounds(bucket.layout.levels.optim)[0], MASTER)
        return copies.device if copies is not None else None

    def copies(self, bucket: Bucket, first: int, key: str) -> Offloaded | None:
        """State ``key`` of the piece that begins at element ``first`` of a bucket; None if not offloaded."""
        return self._tensors.get((id(bucket), first, key))

    def fetch(self, unit: str) -> None:
        """Copy a unit's state to the device, on the current stream."""
        self._units[unit].device.copy_(self._units[unit].host, non_blocking=True)

    def store(self, unit: str) -> None:
        """Copy a unit's state back to the host."""
        self._units[unit].host.copy_(self._units[unit].device, non_blocking=True)


def _parts(
    unit: UnitState, keys: Callable[[nn.Parameter], Keys]
) -> list[tuple[Bucket, int, str, int, torch.dtype]]:
    """A unit's tensors as (bucket, first element, key, elements, dtype); wide dtypes first aligns all."""
    found = []
    for bucket in unit.trainable_buckets:
        start, end = bucket.bounds(bucket.layout.levels.optim)
        if bucket.layout.keeps_master:
            found.append((bucket, start, MASTER, end - start, bucket.master.dtype))
        for index, low, high in bucket.layout.pieces(start, end):
            kept = keys(bucket.parameters[index])
            found += [(bucket, low, key, high - low, dtype) for key, dtype in kept.items()]
    return sorted(found, key=lambda part: -part[4].itemsize)


def _nbytes(numel: int, dtype: torch.dtype) -> int:
    return numel * dtype.itemsize


def state_keys(
    make: Callable[[list[nn.Parameter]], Optimizer], dtype: torch.dtype, device: torch.device
) -> Keys:
    """The tensors that an optimizer keeps for a parameter that are as large as it is, and their dtypes.

    Found by a step on two zeros: torch's optimizers make their state in their first one.
    """
    parameter = nn.Parameter(torch.zeros(1, 2, dtype=dtype, device=device))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = make([parameter])
    optimizer.step()
    return {
        key: value.dtype
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    }
