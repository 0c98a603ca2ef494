"""Memory of one rank over a step, by category. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from hzplan.core.buffers import Slots, matrix_slots, slot_sizes
from hzplan.core.hierarchy import Mesh
from hzplan.core.schedule import Kind, Schedule
from hzplan.cost.matrices import buffer_bytes
from hzplan.cost.unit import UnitCost
from hzplan.formats.profile import ClusterEntry, Profile


@dataclass(frozen=True)
class Memory:
    """Bytes per rank by category; ``peak`` is the largest total over the step's events.

    ``host``: optimizer state and activations in the host's memory, not part of the peak; ``optimizer``
    includes the device slots that the state is fetched to.
    """

    parameters: int
    master: int
    gradients: int
    optimizer: int
    unshard_buffers: int
    gradient_buffers: int
    scratch: int
    activations: int
    host: int
    peak: int

    def by_category(self) -> dict[str, int]:
        """Bytes by category, without the peak; ``host`` only where it is above 0."""
        named = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "peak"}
        return {name: nbytes for name, nbytes in named.items() if nbytes or name != "host"}

    def with_activations(self, activation_peak: int, schedule: Schedule) -> Memory:
        """This memory, which has no activations yet, with ``activation_peak`` bytes of them."""
        update = self.activations
        activations = max(activation_peak, update) if schedule.clip else activation_peak + update
        return replace(self, activations=activations, peak=self.peak - update + activations)


def memory(
    units: Mapping[str, UnitCost],
    slots: Slots,
    schedule: Schedule,
    activation_peak: int,
    host_activations: int = 0,
) -> Memory:
    """Memory of one rank over a step. ``activation_peak``: bytes of activations on the device,
    ``host_activations`` in the host's memory.

    Buffers are allocated once, so they count at every event; the events that differ are the uses
    (activations and temporaries) and the optimizer step (its temporaries). Without clipping units are updated
    during backward, beside all activations; with it in the first turns of the next forward, when few are
    alive, which are neglected.
    """
    parameters = sum(cost.param_bytes for cost in units.values())
    master = sum(cost.master_bytes for cost in units.values())
    gradients = sum(cost.grad_bytes for cost in units.values())
    optimizer = sum(cost.optim_bytes for cost in units.values())
    host = host_activations + sum(cost.host_bytes for cost in units.values())
    slots_of = schedule.offload_slots
    optimizer += sum(slot_sizes(slots_of, {unit: units[unit].host_bytes for unit in slots_of}))
    unshard = sum(slot_sizes(slots.unshard, {unit: units[unit].unshard_bytes for unit in slots.unshard}))
    unreduced = sum(
        slot_sizes(slots.gradient, {unit: units[unit].gradient_buffer_bytes for unit in slots.gradient})
    )
    scratch = sum(
        max((c.scratch_bytes[tier] for c in units.values()), default=0) for tier in range(schedule.tiers)
    )
    groups = [task.units for task in schedule.tasks if task.kind is Kind.ORTHOGONALIZE]
    scratch += sum(matrix_slots([buffer_bytes(units[unit] for unit in group) for group in groups]))
    update = max((cost.update_temporary_bytes for cost in units.values()), default=0)
    lasting = parameters + master + gradients + optimizer + unshard + unreduced + scratch
    without = Memory(
        *(parameters, master, gradients, optimizer, unshard, unreduced, scratch, update, host),
        peak=lasting + update,
    )
    return without.with_activations(activation_peak, schedule)


RESERVED_SHARE, MOST_RESERVED_SHARE = 0.05, 0.5
"""Share of a device's memory that a budget leaves free where nobody names one, at least and at most."""

CONTEXT_BYTES, COMMUNICATOR_BYTES = 512 << 20, 600 << 20
"""What CUDA's context with its libraries takes, and one communicator of NCCL. Assumed, where nobody measured:
544 to 688 MB a communicator on A100 with NCCL's defaults (github.com/NVIDIA/nccl, issue 964)."""


@dataclass(frozen=True)
class Reserve:
    """A device's memory that a budget leaves free: ``share`` of it, or what ``context`` and ``communicators``
    of ``communicator`` bytes each take, where that is more, up to ``most``. ``measured``: whether
    ``hzplan profile`` did."""

    share: int
    context: int
    communicators: int
    communicator: int
    most: int
    measured: bool

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return min(self.most, max(self.share, self.context + self.communicators * self.communicator))


def reserve(
    cluster: ClusterEntry, *, ordered: bool = False, matrices: bool = False, flat: bool = False
) -> Reserve:
    """Bytes of a device's memory that no plan accounts for; nothing but a share where there is no NCCL.

    On GPUs the context and as many communicators as a plan can have: the job's, and for each tier those of
    unshards, of reductions and of gathers, or in a message order (``ordered``) one; and where there are
    ``matrices`` to bring together one more for each, and one for what spans tiers; one more for sums over all
    tiers (``flat``). They are made in the first step, when buffers are there.
    """
    share, mesh = int(cluster.memory_bytes * RESERVED_SHARE), Mesh.parse(cluster.mesh)
    most = int(cluster.memory_bytes * MOST_RESERVED_SHARE)
    if cluster.device != "cuda" or mesh.world == 1:
        return Reserve(share, 0, 0, 0, most, measured=False)
    context, communicator = cluster.context_bytes, cluster.communicator_bytes
    tiers = sum(prod(tier) > 1 for tier in mesh.tiers)
    return Reserve(
        share,
        CONTEXT_BYTES if context is None else context,
        1 + (1 if ordered else 3) * tiers + (tiers + (tiers > 1) if matrices else 0) + flat,
        COMMUNICATOR_BYTES if communicator is None else communicator,
        most,
        measured=context is not None and communicator is not None,
    )


def budget_bytes(cluster: ClusterEntry, *, matrices: bool = False, flat: bool = False) -> int:
    """Bytes of a device's memory for plans where the user names none. ``matrices``, ``flat``: see
    ``reserve``."""
    return cluster.memory_bytes - reserve(cluster, matrices=matrices, flat=flat).nbytes


def budget_of(profile: Profile) -> int:
    """``budget_bytes`` of a profile's device."""
    matrices = profile.optimizer.matrix is not None
    return budget_bytes(profile.cluster, matrices=matrices, flat=profile.sums_over_tiers)
