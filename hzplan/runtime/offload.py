"""Optimizer state in the host's memory: where it lies there, and in the slots that it is fetched to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hzplan.errors import UserError
from hzplan.runtime.bucket import Bucket
from hzplan.runtime.unit import UnitState

MASTER = "master"
"""What master weights are called here; no optimizer keeps anything under the name."""

Keys = Mapping[str, torch.dtype]


@dataclass(frozen=True, eq=False)
class Home:
    """A tensor's two places, both [elements]: ``kept`` in the host's memory; ``here`` on the device, where it
    is from its unit's fetch to its store."""

    kept: Tensor
    here: Tensor


class HostStates:
    """Optimizer state and master weights of the units that a plan offloads.

    Of a unit all lies in one buffer, so that it travels in one copy; its slot on the device is another
    unit's when it has been stored. Host memory is page-locked where the device copies it by itself.
    """

    def __init__(
        self,
        units: Sequence[UnitState],
        slots: Mapping[str, int],
        keys: Callable[[nn.Parameter], Keys],
        device: torch.device,
    ) -> None:
        """``slots``: by unit; ``keys``: of a parameter, the state that is as large as it is."""
        self._homes: dict[tuple[int, int, str], Home] = {}  # by bucket, first element and key
        parts = {unit.name: _parts(unit, keys) for unit in units}
        sizes = {name: sum(_nbytes(*part[3:]) for part in of) for name, of in parts.items()}
        room: dict[int, int] = {}
        for name, size in sizes.items():
            room[slots[name]] = max(size, room.get(slots[name], 0))
        on_device = {slot: torch.zeros(size, dtype=torch.uint8, device=device) for slot, size in room.items()}
        self._ways: dict[str, Home] = {}
        for unit in units:
            name, of = unit.name, parts[unit.name]
            kept = torch.zeros(sizes[name], dtype=torch.uint8)
            if device.type == "cuda":
                _lock(kept)
            here = on_device[slots[name]][: sizes[name]]
            self._ways[name] = Home(kept, here)
            ends = accumulate(_nbytes(*part[3:]) for part in of)
            for (bucket, first, key, numel, dtype), end in zip(of, ends, strict=True):
                span = slice(end - _nbytes(numel, dtype), end)
                self._homes[id(bucket), first, key] = Home(kept[span].view(dtype), here[span].view(dtype))
            for bucket in unit.trainable_buckets:  # now, so that few masters are there twice
                if bucket.layout.keeps_master:
                    home = self._homes[id(bucket), bucket.bounds(bucket.layout.levels.optim)[0], MASTER]
                    home.kept.copy_(bucket.master)
                    bucket.master = home.kept

    @property
    def kept(self) -> list[Tensor]:
        """All of it in the host's memory."""
        return [way.kept for way in self._ways.values()]

    def master(self, bucket: Bucket) -> Tensor | None:
        """A bucket's master weights where they are updated; None where it has none here."""
        home = self._homes.get((id(bucket), bucket.bounds(bucket.layout.levels.optim)[0], MASTER))
        return home.here if home is not None else None

    def home(self, bucket: Bucket, first: int, key: str) -> Home | None:
        """Of the piece that begins with element ``first`` of a bucket; None where it has none here."""
        return self._homes.get((id(bucket), first, key))

    def fetch(self, unit: str) -> None:
        """To the device, on the current stream."""
        self._ways[unit].here.copy_(self._ways[unit].kept, non_blocking=True)

    def store(self, unit: str) -> None:
        """Back to the host."""
        self._ways[unit].kept.copy_(self._ways[unit].here, non_blocking=True)


def _lock(kept: Tensor) -> None:
    """Lock a buffer's pages, so that a GPU copies it by itself. NOT RUN ON A GPU YET.

    torch's own page-locked memory is rounded up to a power of two, up to twice what the plan counts.
    """
    if not kept.numel():
        return
    place, runtime = kept.data_ptr(), torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(place, kept.numel(), 0))
    if code:
        raise UserError(
            f"{kept.numel()} bytes of the host's memory could not be page-locked (CUDA error {code}); allow "
            "more locked memory (ulimit -l), or solve with less --host-memory"
        )
    weakref.finalize(kept.untyped_storage(), runtime.cudaHostUnregister, place)


def _parts(
    unit: UnitState, keys: Callable[[nn.Parameter], Keys]
) -> list[tuple[Bucket, int, str, int, torch.dtype]]:
    """What a unit has: bucket, first element, key, elements, dtype; wide dtypes first, which aligns all."""
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
    parameter = nn.Parameter(torch.zeros(2, dtype=dtype, device=device))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = make([parameter])
    optimizer.step()
    return {
        key: value.dtype
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    }
