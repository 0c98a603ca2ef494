"""Process groups: one communicator per stage and stream, made only when a plan uses it, and its back end.

``on_device`` chooses the back end, once per group: the library's own operation or point-to-point exchange.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from hzplan.core.hierarchy import Mesh, Stage
from hzplan.core.order import LINK_STREAM
from hzplan.runtime.backends.exchange import GlooGroup
from hzplan.runtime.backends.nccl import NcclGroup, check_order, max_ctas, options

ProcessGroup = GlooGroup | NcclGroup
"""A group of processes; its ``handle`` is torch's group."""

LATER = 0.1
"""Added share of the job's timeout, by place in a chain of stages."""

SORTS_ON_DEMAND = "sort_ranks" in inspect.signature(dist.new_group).parameters
"""Whether torch can be told to keep the order of ranks."""

SUMMED_ON = ("reduce", LINK_STREAM)
"""The stream kinds of sums; ``Mesh.whole`` is a stage of theirs for ``Levels.flat`` alone."""

STREAMS = 3
"""Streams of a tier, unshards, reductions and gathers, where no message order leaves it one."""

_Made = dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]
_made: WeakKeyDictionary[dist.ProcessGroup, _Made] = WeakKeyDictionary()
"""Torch's groups by the job's default group, while it lasts; then by kind and members."""
LETS_GO_S = 0.05
"""Seconds for threads of the groups to let go of what they have done."""
_alive: WeakSet[dist.ProcessGroup] = WeakSet()
"""All groups that were made, and the jobs' own, as long as somebody has them."""


def on_device(handle: dist.ProcessGroup, device: torch.device) -> ProcessGroup:
    """Choose the back end of a process group for tensors on a device.

    The backend is asked, not its name in the job's start, which may leave the choice to torch.
    """
    gloo = str(handle._get_backend(device).name()) == "gloo"
    return GlooGroup(handle) if gloo else NcclGroup(handle)


def process_group(
    mesh: Mesh,
    kind: str,
    stage: Stage,
    rank: int,
    ranks: Sequence[int],
    device: torch.device,
    ctas: Sequence[int] | None = None,
    streams: int | None = None,
) -> dist.ProcessGroup:
    """The process group of a rank of a mesh in a stage; only its members take part in making it.

    ``ranks``: the job's ranks at all places of the mesh; ``device``: where its tensors are; ``ctas``: see
    ``nccl.max_ctas``; ``streams``: of a tier, None: as many as there are without matrices that travel.
    Groups last as long as the job's default group: a second plan in the same process takes them over, and
    those of an earlier job are freed with it, or else their threads would look after connections that are
    gone.
    """
    world = dist.group.WORLD
    assert world is not None
    made = _made.setdefault(world, {})
    members = tuple(ranks[member] for member in _members(mesh, kind, stage, rank))
    if (kind, members) not in made:
        own = "gloo" if device.type == "cpu" else str(world._get_backend(device).name())
        backend, timeout = own, _timeout(mesh, kind, stage)
        given = None
        if backend == "nccl":
            check_order(torch.cuda.nccl.version(), os.environ)
            sms = torch.cuda.get_device_properties(device).multi_processor_count
            many = streams or (1 if kind == LINK_STREAM else STREAMS)
            most = max_ctas(ctas or [sms] * len(mesh.tiers), mesh.tier_of(stage.high - 1), many, sms)
            given = options(timeout, most)
        in_slice_order, kept = in_order(members)
        made[kind, members] = group = dist.new_group(
            in_slice_order,
            use_local_synchronization=True,
            timeout=timeout,
            backend=backend,  # one, where the job has one more for processors
            pg_options=given,
            group_desc=f"hzplan {kind} {stage.low}-{stage.high}",
            **kept,
        )
        _alive.update((world, group))
    return made[kind, members]


def _members(mesh: Mesh, kind: str, stage: Stage, rank: int) -> tuple[int, ...]:
    """A stage's group, in slice order; but where gradients are summed over tiers in the order of ranks, so
    that a ring goes out of each node, and into it, once."""
    found = mesh.group(rank, stage)
    return tuple(sorted(found)) if stage == mesh.whole and kind in SUMMED_ON else found


class _Placed(int):
    """A rank that sorts by its place in a group, for torch that sorts ranks without being asked (2.11)."""

    place: int

    def __lt__(self, other: object) -> bool:
        return isinstance(other, _Placed) and self.place < other.place


def in_order(members: tuple[int, ...]) -> tuple[list[int], dict[str, Any]]:
    """What ``new_group`` is given so that the ranks of a group are in slice order, whatever their numbers."""
    if SORTS_ON_DEMAND:
        return [*members], {"sort_ranks": False}
    placed = [_Placed(member) for member in members]
    for place, member in enumerate(placed):
        member.place = place
    return [*placed], {}


def release() -> None:
    """Destroy the stages' groups, with what their communicators keep on the device; every rank calls it.

    Only where they are split from the job's, as NCCL's are: others meet at keys of the job's store, by names
    that come again when fewer groups are left, and a later group would take an earlier one's for its own.
    """
    world = dist.group.WORLD
    if world is not None and world.bound_device_id is not None:
        for group in _made.pop(world, {}).values():
            dist.destroy_process_group(group)


def job_timeout() -> timedelta | None:
    """The timeout of the job's default group; None where there is no job, or it is not known."""
    if (world := dist.group.WORLD) is None:
        return None
    backend = world._get_backend(world._device_types[0])
    given: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return given


def _timeout(mesh: Mesh, kind: str, stage: Stage) -> timedelta | None:
    """The job's timeout, for a new group's default is another; more for stages that wait for others' first.

    A rank that hangs holds up its group of the first stage, and that group the next stage's. Who waits for
    the rank itself must be the first to give up.
    """
    given = job_timeout()
    tier = mesh.tier_of(stage.high - 1)
    place = tier if kind == "reduce" else len(mesh.tiers) - 1 - tier
    return None if given is None else given * (1 + LATER * place)


@atexit.register
def _keep() -> None:
    """Leave the groups, and the job's own, to the operating system.

    Python would free them while it is taken apart, and a thread of theirs that has to do with the interpreter
    then aborts the process: now and then, of scripts without this package too. So does a thread that has yet
    to let go of the tensors of the last collective. Jobs that are left (``join``) have neither.
    """
    kept = list(_alive)
    for group in kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    if kept:
        time.sleep(LETS_GO_S)
