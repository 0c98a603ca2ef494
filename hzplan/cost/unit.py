"""The cost of one unit under one choice of levels: nanoseconds by task, bytes by category. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from hzplan.core.hierarchy import Stage
from hzplan.core.recompute import Way
from hzplan.core.schedule import Kind

GATHERS = (Kind.UNSHARD, Kind.GRAD_GATHER, Kind.PARAM_GATHER)
"""The kinds of messages that buckets join."""
MESSAGES = (*GATHERS, Kind.REDUCE, Kind.FINAL_REDUCE, Kind.ASSEMBLE, Kind.RETURN)
"""The kinds of tasks that send something."""


class Hosted(NamedTuple):
    """A matrix whose update one of ``ranks`` computes: its sides, and nanoseconds."""

    ranks: int
    rows: int
    columns: int
    ns: int


@dataclass(frozen=True)
class UnitCost:
    """One unit under one choice of levels: nanoseconds per task kind and tier, and bytes per rank.

    ``param``, ``master``, ``grad`` and ``optim`` bytes are resident; ``unshard`` and ``gradient_buffer``
    bytes are needed in a slot while the unit is unsharded, or its gradient is unreduced; ``scratch[t]`` for
    receiving on tier t. ``recompute``: in what way the unit's forward is computed again, None: not. ``host``
    bytes lie in the host's memory instead of ``master`` and ``optim``, and in a device slot during the
    update; ``copy_ns``: of one copy, in either direction. ``replicated``: whether every rank has all of its
    reduced gradients; ``norm_ns``: its share of what a norm over ranks takes longer than each rank's own,
    where they do not (``Norm.step_ns``). ``reduce_waits_ns`` and ``gather_waits_ns``: of
    ``final_reduce_ns`` and ``grad_gather_ns`` what units that are reduced together pay once. Of matrices that
    are brought together for their updates: ``assemble_ns`` and ``return_ns`` by tier, without the
    ``matrix_waits_ns`` that a group of units pays once; ``repeated_ns``: Newton–Schulz of those that every
    rank computes; ``hosted``: those that one rank each does; ``apply_ns``: the step afterwards;
    ``matrix_bytes``: of the buffers in which they come together, without what hosts receive.
    ``processor_ns``: processor time of messages, of all ranks that share processors over the number of these,
    by kind (``MESSAGES``) and tier; ``reduce_processor_ns``: by tier, of that of last reductions what units
    that are reduced together pay once. Both are empty where nobody measured them.
    """

    unshard_ns: tuple[int, ...]
    reduce_ns: tuple[int, ...]
    final_reduce_ns: tuple[int, ...]
    grad_gather_ns: tuple[int, ...]
    param_gather_ns: tuple[int, ...]
    update_ns: int
    param_bytes: int
    master_bytes: int
    grad_bytes: int
    optim_bytes: int
    unshard_bytes: int
    gradient_buffer_bytes: int
    scratch_bytes: tuple[int, ...]
    update_temporary_bytes: int
    recompute: Way | None = None
    host_bytes: int = 0
    copy_ns: int = 0
    replicated: bool = True
    norm_ns: int = 0
    reduce_waits_ns: tuple[int, ...] = ()
    gather_waits_ns: tuple[int, ...] = ()
    assemble_ns: tuple[int, ...] = ()
    return_ns: tuple[int, ...] = ()
    matrix_waits_ns: tuple[int, ...] = ()
    repeated_ns: int = 0
    hosted: tuple[Hosted, ...] = ()
    apply_ns: int = 0
    matrix_bytes: int = 0
    processor_ns: tuple[int, ...] = ()
    reduce_processor_ns: tuple[int, ...] = ()

    @property
    def resident_bytes(self) -> int:
        """Bytes that are allocated for the whole step."""
        return self.param_bytes + self.master_bytes + self.grad_bytes + self.optim_bytes

    def __add__(self, other: UnitCost) -> UnitCost:
        """The cost of both, one after the other: times and buffers add up, of scratch and temporaries the
        larger counts."""
        return UnitCost(
            unshard_ns=summed(self.unshard_ns, other.unshard_ns),
            reduce_ns=summed(self.reduce_ns, other.reduce_ns),
            final_reduce_ns=summed(self.final_reduce_ns, other.final_reduce_ns),
            grad_gather_ns=summed(self.grad_gather_ns, other.grad_gather_ns),
            param_gather_ns=summed(self.param_gather_ns, other.param_gather_ns),
            update_ns=self.update_ns + other.update_ns,
            param_bytes=self.param_bytes + other.param_bytes,
            master_bytes=self.master_bytes + other.master_bytes,
            grad_bytes=self.grad_bytes + other.grad_bytes,
            optim_bytes=self.optim_bytes + other.optim_bytes,
            unshard_bytes=self.unshard_bytes + other.unshard_bytes,
            gradient_buffer_bytes=self.gradient_buffer_bytes + other.gradient_buffer_bytes,
            scratch_bytes=tuple(map(max, self.scratch_bytes, other.scratch_bytes)),
            update_temporary_bytes=max(self.update_temporary_bytes, other.update_temporary_bytes),
            recompute=self.recompute or other.recompute,
            host_bytes=self.host_bytes + other.host_bytes,
            copy_ns=self.copy_ns + other.copy_ns,
            replicated=self.replicated and other.replicated,
            norm_ns=self.norm_ns + other.norm_ns,
            reduce_waits_ns=tuple(map(max, self.reduce_waits_ns, other.reduce_waits_ns)),
            gather_waits_ns=tuple(map(max, self.gather_waits_ns, other.gather_waits_ns)),
            assemble_ns=summed(self.assemble_ns, other.assemble_ns),
            return_ns=summed(self.return_ns, other.return_ns),
            matrix_waits_ns=tuple(map(max, self.matrix_waits_ns, other.matrix_waits_ns)),
            repeated_ns=self.repeated_ns + other.repeated_ns,
            hosted=self.hosted + other.hosted,
            apply_ns=self.apply_ns + other.apply_ns,
            matrix_bytes=self.matrix_bytes + other.matrix_bytes,
            processor_ns=summed(self.processor_ns, other.processor_ns),
            reduce_processor_ns=tuple(map(max, self.reduce_processor_ns, other.reduce_processor_ns)),
        )

    @classmethod
    def zero(cls, tiers: int, *, processors: bool = False) -> UnitCost:
        """A unit without tensors; ``processors``: whether processor time of messages is known."""
        none = (0,) * tiers
        zero = cls(none, none, none, none, none, 0, 0, 0, 0, 0, 0, 0, none, 0)
        return replace(
            zero,
            reduce_waits_ns=none,
            gather_waits_ns=none,
            matrix_waits_ns=none,
            assemble_ns=none,
            return_ns=none,
            processor_ns=none * len(MESSAGES) if processors else (),
            reduce_processor_ns=none if processors else (),
        )

    @cached_property
    def _by_kind(self) -> dict[Kind, tuple[int, ...]]:
        return {
            Kind.UNSHARD: self.unshard_ns,
            Kind.REDUCE: self.reduce_ns,
            Kind.FINAL_REDUCE: self.final_reduce_ns,
            Kind.GRAD_GATHER: self.grad_gather_ns,
            Kind.PARAM_GATHER: self.param_gather_ns,
            Kind.UPDATE: (self.update_ns,),  # on no tier: its number is -1
            Kind.ASSEMBLE: self.assemble_ns,
            Kind.RETURN: self.return_ns,
            Kind.ORTHOGONALIZE: (self.repeated_ns + sum(one.ns // one.ranks for one in self.hosted),),
            Kind.APPLY: (self.apply_ns,),
            Kind.FETCH: (self.copy_ns,),
            Kind.STORE: (self.copy_ns,),
            Kind.STEP: (self.norm_ns,),
        }

    def duration_ns(self, kind: Kind, tier: int) -> int:
        """Nanoseconds of this unit's part of a task; of matrices that go to hosts at least, each host's
        share."""
        by_tier = self._by_kind.get(kind)
        return by_tier[tier] if by_tier else 0

    def once_ns(self, kind: Kind, tier: int) -> int:
        """Of them those that units which are reduced together pay once, the same for each."""
        by_tier = {Kind.FINAL_REDUCE: self.reduce_waits_ns, Kind.GRAD_GATHER: self.gather_waits_ns}.get(kind)
        return by_tier[tier] if by_tier else 0

    def messages_processor_ns(self, kind: Kind, tier: int) -> int:
        """Of ``processor_ns`` that of a kind of messages on a tier."""
        return self.processor_ns[processor_at(kind, tier, len(self.unshard_ns))] if self.processor_ns else 0

    def once_processor_ns(self, kind: Kind, tier: int) -> int:
        """Of them those that units which are reduced together pay once."""
        known = kind is Kind.FINAL_REDUCE and self.reduce_processor_ns
        return self.reduce_processor_ns[tier] if known else 0


def processor_at(kind: Kind, tier: int, tiers: int) -> int:
    """The index into ``UnitCost.processor_ns`` of a kind of messages on a tier."""
    return MESSAGES.index(kind) * tiers + tier


class BucketCost(NamedTuple):
    """A bucket's cost without gathers, and its gathers as (0 unshard, 1 grad_gather, 2 param_gather; tier;
    stage; bytes; nanoseconds of rounding)."""

    cost: UnitCost
    gathers: tuple[tuple[int, int, Stage, int, int], ...]


def summed(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    """Two sequences by tier, added up tier by tier."""
    return tuple(a + b for a, b in zip(first, second, strict=True))
