"""The memory that communication goes through, allocated before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hzplan.core.buffers import MAX_IN_FLIGHT, scratch_bytes, slot_sizes
from hzplan.core.schedule import Kind
from hzplan.runtime.backends.base import Groups
from hzplan.runtime.backends.nccl import registered
from hzplan.runtime.unit import UnitState


class CommunicationBuffers:
    """Units' buffers of unsharded parameters and of gradients, which the units are given, and scratch.

    ``scratch``: by tier and number, memory (uint8) to receive into; ``nbytes``: by category of memory.
    """

    def __init__(
        self,
        units: Mapping[str, UnitState],
        groups: Groups,
        tiers: int,
        unshard_of: Mapping[str, int],
        gradient_of: Mapping[str, int],
        device: torch.device,
    ) -> None:
        """``*_of``: by unit the number of its buffer."""

        def buffers(assigned: Mapping[str, int], sizes: Mapping[str, int]) -> list[Tensor]:
            return [
                torch.zeros(size, dtype=torch.uint8, device=device)
                for size in slot_sizes(assigned, {unit: sizes[unit] for unit in assigned})
            ]

        with registered(groups.values(), device) as self._pool:
            unshard = buffers(unshard_of, {name: unit.unshard_bytes for name, unit in units.items()})
            gradients = buffers(
                gradient_of, {name: unit.gradient_buffer_bytes for name, unit in units.items()}
            )
        for name, unit in units.items():
            unit.assign_buffers(
                unshard[unshard_of[name]] if name in unshard_of else None,
                gradients[gradient_of[name]] if name in gradient_of else None,
            )
        apart = any(group.needs_scratch for group in groups.values())
        received = [_received_bytes(units.values(), tier) if apart else 0 for tier in range(tiers)]
        self.scratch = [
            [
                torch.zeros(scratch_bytes(size) // MAX_IN_FLIGHT, dtype=torch.uint8, device=device)
                for _ in range(MAX_IN_FLIGHT)
            ]
            for size in received
        ]
        self.nbytes = {
            "unshard_buffers": sum(buffer.numel() for buffer in unshard),
            "gradient_buffers": sum(buffer.numel() for buffer in gradients),
            "scratch": sum(scratch.numel() for of_tier in self.scratch for scratch in of_tier),
        }


def _received_bytes(units: Iterable[UnitState], tier: int) -> int:
    """Most bytes that a reduction on a tier receives at once: a rank's slice."""
    return max(
        (
            bucket.layout.master_nbytes // bucket.mesh.shards[stage.high]
            for unit in units
            for bucket in unit.buckets
            for _, stage in bucket.collectives(Kind.FINAL_REDUCE, tier)
        ),
        default=0,
    )
