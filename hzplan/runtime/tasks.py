"""What the tasks of a schedule do on one rank, on their streams' threads or in a device's queues."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hzplan.core.buffers import MATRIX_SLOTS, MAX_IN_FLIGHT, matrix_slots, rounding_bytes
from hzplan.core.hierarchy import Mesh, Stage
from hzplan.core.order import LINK_STREAM
from hzplan.core.schedule import EXCHANGE_STREAM, Kind, Schedule, Task
from hzplan.core.stages import Collective, communicators
from hzplan.models.saved import Saved
from hzplan.runtime.backends.base import Group
from hzplan.runtime.bucket import Bucket, Forms
from hzplan.runtime.buffers import CommunicationBuffers
from hzplan.runtime.matrices import MatrixExchange
from hzplan.runtime.messages import Messages
from hzplan.runtime.unit import UnitState
from hzplan.runtime.updates import Updates
from hzplan.runtime.world import World


class Tasks:
    """Does tasks; has the process groups and the memory that they need."""

    def __init__(
        self,
        units: Mapping[str, UnitState],
        updates: Updates,
        schedule: Schedule,
        unshard_buffers: Mapping[str, int],
        gradient_buffers: Mapping[str, int],
        mesh: Mesh,
        device: torch.device,
        world: World,
        saved: Mapping[str, Saved],
        forms: Forms,
    ) -> None:
        """``*_buffers``: by unit the number of its buffer. ``saved``: by unit whose activations the plan has
        on the host. ``forms``: what values travel in."""
        self.units, self.updates, self.schedule, self.saved = units, updates, schedule, saved
        made: dict[tuple[str, Stage], Group] = {}
        self.groups: dict[tuple[str, Stage], Group] = {}
        buckets = [bucket for unit in units.values() for bucket in unit.buckets]
        for kind, stage in sorted(
            communicators((b.layout for b in buckets), mesh)
        ):  # in one order on all ranks
            name = kind if schedule.order is None or kind == EXCHANGE_STREAM else LINK_STREAM
            if (name, stage) not in made:
                made[name, stage] = world.new_group(mesh, name, stage, device)
            self.groups[kind, stage] = made[name, stage]
        tiers = len(mesh.tiers)
        self.buffers = CommunicationBuffers(
            units, self.groups, tiers, unshard_buffers, gradient_buffers, device
        )
        self.buffer_bytes = dict(self.buffers.nbytes)
        self._exchanges = self._matrix_exchanges(device)
        if any(bucket.layout.narrow for bucket in buckets):
            on_device = device.type != "cpu"
            self.buffer_bytes["scratch"] += sum(
                rounding_bytes(forms.wire, tier, on_device=on_device) for tier in range(tiers)
            )
        self.messages = Messages(units, self.groups, self.buffers.scratch, len(schedule.uses))

    def _matrix_exchanges(self, device: torch.device) -> dict[tuple[str, ...], MatrixExchange]:
        """By group of units what brings their matrices together; groups have the two buffers in turn."""
        found = {
            task.units: MatrixExchange(
                [bucket for name in task.units for bucket in self.units[name].trainable_buckets],
                *(self.updates, self.groups),
            )
            for task in self.schedule.tasks
            if task.kind is Kind.ORTHOGONALIZE
        }
        slots = matrix_slots([one.nbytes for one in found.values()])
        self._matrix_buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for size in slots]
        for number, one in enumerate(found.values()):
            one.bind(self._matrix_buffers[number % MATRIX_SLOTS])
        self.buffer_bytes["scratch"] += sum(slots)
        return found

    @property
    def most_in_flight(self) -> int:
        """How many tasks of a tier's stream may be under way at once."""
        return MAX_IN_FLIGHT if any(group.concurrent for group in self.groups.values()) else 1

    @property
    def on_host(self) -> list[Tensor]:
        """The buffers in the host's memory; on a CPU too, apart from what the plan counts as the device's."""
        return [*self.updates.on_host, *(one.host for one in self.saved.values() if one.host is not None)]

    def idle(self, task: Task) -> bool:
        """Whether a task has nothing to do under this plan; the same on every rank."""
        if task.kind is Kind.UPDATE:
            return all(self.updates.is_with_another(unit) for unit in task.units)
        if task.kind in (Kind.ORTHOGONALIZE, Kind.APPLY):
            return not self._exchanges[task.units].buckets
        if task.kind in (Kind.FETCH, Kind.STORE):
            return not any(self.units[unit].offload for unit in task.units)
        if task.kind in (Kind.SAVE, Kind.LOAD):
            return not any(unit in self.saved for unit in task.units)
        return not self.collectives(task)

    def collectives(self, task: Task) -> list[tuple[Bucket, Collective]]:
        """The collectives of a communication task, in order."""
        buckets = (bucket for name in task.units for bucket in self.units[name].buckets)
        return [(bucket, one) for bucket in buckets for one in bucket.collectives(task.kind, task.tier)]

    def nbytes(self, task: Task) -> int:
        """Bytes of a communication task's buffers in the form they travel in, counting the coarser slice."""
        if task.kind in (Kind.ASSEMBLE, Kind.RETURN):
            return self._exchanges[task.units].sent_bytes(task.kind, task.tier)
        return sum(
            bucket.sent_nbytes(task.kind, task.tier, one.stage) for bucket, one in self.collectives(task)
        )

    def run(self, task: Task, scratch: int = 0) -> None:
        """Do a task's work for all its units, called where autograd does not record. ``scratch``: number of
        the tier's buffer to receive into."""
        if task.kind is Kind.UPDATE:
            for name in task.units:
                self.updates.update(name)
            return
        if task.kind is Kind.APPLY:
            for name in task.units:
                self.updates.apply(name)
            return
        if task.kind in (Kind.ASSEMBLE, Kind.ORTHOGONALIZE, Kind.RETURN):
            self._exchanges[task.units].run(task.kind, task.tier, task.index + 1)
            return
        if task.kind in (Kind.FETCH, Kind.STORE):
            for name in task.units:
                self.updates.fetch(name) if task.kind is Kind.FETCH else self.updates.store(name)
            return
        if task.kind in (Kind.SAVE, Kind.LOAD):
            for name in task.units:
                self.saved[name].save() if task.kind is Kind.SAVE else self.saved[name].load()
            return
        self.messages.run(task, scratch)
