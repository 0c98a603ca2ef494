"""Process groups: one communicator per stage and stream, created only when a plan uses it."""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import ClassVar

import torch.distributed as dist

from hzplan.core.hierarchy import Mesh, Stage


class Communicators:
    """This rank's process groups, by (stream kind, stage).

    Unshard, reduce and sync of one stage have a communicator each: collectives on one communicator are
    ordered by their launch, and streams must not order each other. Groups last as long as the job's default
    group: a second plan in the same process takes them over, and those of an earlier job are freed.
    """

    _made: ClassVar[dict[tuple[dist.ProcessGroup, str, tuple[int, ...]], dist.ProcessGroup]] = {}

    def __init__(
        self,
        mesh: Mesh,
        wanted: Iterable[tuple[str, Stage]],
        rank: int | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """``wanted`` must be the same on every rank; ranks of the group alone take part in making it.

        ``rank``: this process's place in the mesh; ``ranks``: the job's ranks at all places. By default they
        are one and the same.
        """
        self.groups: dict[tuple[str, Stage], dist.ProcessGroup] = {}
        for kind, stage in sorted(set(wanted)):  # none in a world of one, which needs no job
            world = dist.group.WORLD
            assert world is not None
            place = dist.get_rank() if rank is None else rank
            for old in [key for key in self._made if key[0] is not world]:
                del self._made[old]  # its threads would look after connections that are gone
            members = mesh.group(place, stage)
            if ranks is not None:
                members = tuple(ranks[member] for member in members)
            if (world, kind, members) not in self._made:
                self._made[world, kind, members] = dist.new_group(
                    list(members),
                    use_local_synchronization=True,
                    sort_ranks=False,
                    timeout=_timeout(mesh, kind, stage, world),
                    group_desc=f"hzplan {kind} {stage.low}-{stage.high}",
                )
            self.groups[kind, stage] = self._made[world, kind, members]

    def __getitem__(self, key: tuple[str, Stage]) -> dist.ProcessGroup:
        return self.groups[key]


LATER = 0.1
"""Of the job's timeout, by place in a chain of stages."""


def _timeout(mesh: Mesh, kind: str, stage: Stage, world: dist.ProcessGroup) -> timedelta | None:
    """The job's timeout, for a new group's default is another; more for stages that wait for others' first.

    A rank that hangs holds up its group of the first stage, and that group the next stage's. Who waits for
    the rank itself must be the first to give up. None: the job's is not known.
    """
    backend = world._get_backend(world._device_types[0])
    given: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    if given is None:
        return None
    tier = next(i for i, (low, high) in enumerate(mesh.tier_bounds) if low <= stage.low < high)
    place = tier if kind == "reduce" else len(mesh.tiers) - 1 - tier
    return given * (1 + LATER * place)


@atexit.register
def _keep() -> None:
    """Leave the groups, and the job's own, to the operating system.

    Python would free them while it is taken apart, and a thread of theirs that has to do with the interpreter
    then aborts the process: now and then, of scripts without this package too.
    """
    for (world, *_), group in Communicators._made.items():
        for kept in (world, group):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
