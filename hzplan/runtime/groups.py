"""Process groups: one communicator per stage and stream, created only when a plan uses it."""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Iterable
from datetime import timedelta
from typing import ClassVar

import torch.distributed as dist

from hzplan.hierarchy import Mesh, Stage


class Communicators:
    """This rank's process groups, by (stream kind, stage).

    Unshard, reduce and sync of one stage have a communicator each: collectives on one communicator are
    ordered by their launch, and streams must not order each other. Groups last as long as the job's default
    group: a second plan in the same process takes them over.
    """

    _made: ClassVar[dict[tuple[dist.ProcessGroup, str, tuple[int, ...]], dist.ProcessGroup]] = {}

    def __init__(self, mesh: Mesh, wanted: Iterable[tuple[str, Stage]]) -> None:
        """``wanted`` must be the same on every rank; ranks of the group alone take part in making it."""
        self._groups: dict[tuple[str, Stage], dist.ProcessGroup] = {}
        for kind, stage in sorted(set(wanted)):  # none in a world of one, which needs no job
            rank, world = dist.get_rank(), dist.group.WORLD
            assert world is not None
            members = mesh.group(rank, stage)
            if (world, kind, members) not in self._made:
                self._made[world, kind, members] = dist.new_group(
                    list(members),
                    use_local_synchronization=True,
                    sort_ranks=False,
                    timeout=timeout_of(world),
                    group_desc=f"hzplan {kind} {stage.low}-{stage.high}",
                )
            self._groups[kind, stage] = self._made[world, kind, members]

    def __getitem__(self, key: tuple[str, Stage]) -> dist.ProcessGroup:
        return self._groups[key]


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long a group's collectives may take; a new group's default is not the job's. None: unknown."""
    backend = group._get_backend(group._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", None)


@atexit.register
def _keep() -> None:
    """Leave the groups to the operating system.

    Taking one apart ends the waits of threads that are still in its collectives, after an error for
    instance; these then want the interpreter, which is no more, and that aborts the process.
    """
    for group in Communicators._made.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
