"""The ranks that measure together, or one process on its own."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from hzplan.core.hierarchy import Mesh
from hzplan.errors import UserError

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """All ranks of torch.distributed's default group; a world of one where it is not initialised."""

    rank: int
    size: int
    backend: str
    device: torch.device

    @classmethod
    def here(cls) -> Ranks:
        """The ranks of this process's job; the device is the current CUDA device where there is one, and in a
        job under NCCL, else the CPU."""
        if not dist.is_initialized():
            return cls(0, 1, "none", _current(torch.cuda.is_available()))
        backend = str(dist.get_backend())
        cuda = "nccl" in backend and torch.cuda.is_available()
        return cls(dist.get_rank(), dist.get_world_size(), "nccl" if cuda else backend, _current(cuda))

    def barrier(self) -> None:
        """Return when every rank, with its device, has come here."""
        self.finish_device()
        if self.size > 1:
            dist.barrier()

    def finish_device(self) -> None:
        """Return when this rank's device has done what it was given; a CPU has."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, by rank, on every rank."""
        if self.size == 1:
            return [value]
        found: list[Value | None] = [None] * self.size
        dist.all_gather_object(found, value)
        return found  # type: ignore[return-value]  # every entry was filled

    def share(self, value: Value) -> Value:
        """Rank 0's value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def _current(cuda: bool) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def local_ranks(ranks: Ranks) -> int:
    """How many ranks share this host: LOCAL_WORLD_SIZE where it is set, else those with its host name.

    Every rank calls it. Raises UserError when hosts hold different numbers of ranks.
    """
    everyone = ranks.gather(platform.node())
    counted = ranks.gather(_count("LOCAL_WORLD_SIZE") or everyone.count(platform.node()))
    for rank, count in enumerate(counted):
        if count != counted[0]:
            raise UserError(
                f"the host of rank 0 has {counted[0]} ranks, that of rank {rank} has {count}; "
                "start the same number on every host"
            )
    return counted[0]


def default_mesh() -> tuple[Mesh, tuple[str, ...]]:
    """The mesh of this job, and its tiers' names: one host is ``node``; several add ``network``.

    Where torch.distributed is not initialised, WORLD_SIZE and LOCAL_WORLD_SIZE describe the job; else every
    rank calls this. Raises UserError when hosts hold different numbers of ranks.
    """
    ranks = Ranks.here()
    if dist.is_initialized():
        world, local = ranks.size, local_ranks(ranks)
    else:
        world = _count("WORLD_SIZE") or 1
        local = _count("LOCAL_WORLD_SIZE") or world
    if world % local:
        raise UserError(f"{world} ranks do not divide into hosts of LOCAL_WORLD_SIZE={local}")
    if local == world:
        return Mesh.of_tiers(world), ("node",)
    return Mesh.of_tiers(local, world // local), ("node", "network")


def _count(variable: str) -> int | None:
    text = os.environ.get(variable)
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{variable}={text}: must be a positive number of ranks")
    return int(text)
