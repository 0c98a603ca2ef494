"""The cost model: seconds and bytes of collectives, compute and optimizer, from a profile. Pure; no torch.

Times are integer nanoseconds and sizes integer bytes, so that sums do not depend on their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hzplan.core.buffers import rounding_bytes, scratch_bytes
from hzplan.core.hierarchy import Levels, Mesh, Stage
from hzplan.core.layout import (
    ITEM_BYTES,
    MASTER_DTYPE,
    BucketLayout,
    Dtype,
    TensorSpec,
    gradient_bytes,
    marked,
)
from hzplan.core.order import in_order
from hzplan.core.recompute import HOST, WAYS, Way
from hzplan.core.schedule import HOST_LINK, Kind, MessageOrder, Schedule, Task, build
from hzplan.core.stages import PARAMETERS, Collective, Operation, collectives_of, format_of
from hzplan.core.wire import Format, Wire, packed_bytes
from hzplan.cost.activations import Activations
from hzplan.cost.curves import Curve, interpolate, latency
from hzplan.cost.events import EventGraph, event_graph
from hzplan.cost.interference import MAX_COMPUTE_LOSS, Interference
from hzplan.cost.lateness import Late
from hzplan.cost.matrices import ORTHOGONALIZED_BYTES, MatrixCosts, orthogonalize_ns
from hzplan.cost.norm import Norm
from hzplan.cost.unit import GATHERS, MESSAGES, BucketCost, UnitCost, processor_at, summed
from hzplan.formats.profile import InterferenceEntry, Profile, UseCost

COPIES = frozenset(itertools.chain(*HOST_LINK))
"""The streams of copies between a device and the host's memory."""
Curves = Mapping[tuple[str, int, int], Curve]
"""Points of (bytes, seconds) by operation and the two levels of a stage."""
Reading = Callable[[Curve, float], float]
"""What is read off a curve at a size."""

REDUCED_TOGETHER = (Kind.FINAL_REDUCE, Kind.GRAD_GATHER)
"""The kinds of tasks in which units pay something once: the largest of what each would pay alone. Bounds
count the mean, which is linear in the choice and never more; exact where all tensors have the same levels."""


def tensors_of(profile: Profile, wire: Wire | None = None) -> dict[str, tuple[TensorSpec, ...]]:
    """The tensors of every unit, with which of them travel narrow."""
    return {unit.name: marked((tensor.spec for tensor in unit.tensors), wire) for unit in profile.units}


@dataclass(frozen=True)
class CostModel:
    """The costs that a profile gives, cached.

    ``reduce_dtype``: the communication dtype of gradients; None: that of the master weights. The cast between
    them is neglected: it is a pass over memory, and is short beside the message.
    ``narrow_sums``: libraries add up in it, where they add; else ranks do, in that of the master weights.
    ``wire``: narrower formats, whose rounding takes its time.
    ``flat_sums``: whole tensors' gradients are summed by one all-reduce over all tiers (``Levels.flat``).
    """

    profile: Profile
    reduce_dtype: Dtype | None = None
    narrow_sums: bool = False
    wire: Wire | None = None
    flat_sums: bool = False

    @property
    def mesh(self) -> Mesh:
        """The cluster's mesh."""
        return self.profile.mesh

    @cached_property
    def _curves(self) -> Curves:
        return {
            (curve.operation, curve.low, curve.high): [(p.bytes, p.seconds) for p in curve.points]
            for curve in self.profile.collectives
        }

    @cached_property
    def _processor_curves(self) -> Curves:
        return {
            (curve.operation, curve.low, curve.high): [
                (p.bytes, p.processor_seconds or 0.0) for p in curve.points
            ]
            for curve in self.profile.collectives
        }

    @cached_property
    def compute_processor_share(self) -> float | None:
        """``ClusterEntry.compute_processor_share``."""
        return self.profile.cluster.compute_processor_share

    @cached_property
    def _optimizer_curve(self) -> list[tuple[int, float]]:
        return [(point.elements, point.seconds) for point in self.profile.optimizer.points]

    @cached_property
    def interference(self) -> Interference:
        """The measured interference; none where it was not measured."""
        wakeup_ns = (self.profile.cluster.wakeup_seconds or 0.0) * 1e9
        entries = self.profile.interference
        if not entries:
            none = Interference.none(len(self.mesh.tiers), wakeup_ns)
            return replace(none, beside_updates=self._beside_updates)
        parts = [self._beside_compute(tier, entry) for tier, entry in enumerate(entries)]
        return Interference(
            tuple(min(loss, MAX_COMPUTE_LOSS) for loss, _ in parts),
            tuple(slowdown for _, slowdown in parts),
            tuple(entry.contention for entry in entries),
            *(wakeup_ns, self._beside_updates),
        )

    def _beside_compute(self, tier: int, entry: InterferenceEntry) -> tuple[float, float]:
        """A tier's compute loss and communication slowdown: as measured with messages of blocks, where any
        travel there; half-way to that with 16 bits."""
        exact, narrow = (entry.compute_loss, entry.communication_slowdown), entry.narrow
        if self.wire is None or narrow is None:
            return exact
        formats = {self.wire.param[tier], self.wire.grad[tier]}
        share = 1.0 if formats & {"int8", "fp8"} else 0.5 if "bf16" in formats else 0.0
        wide = narrow.compute_loss, narrow.communication_slowdown
        loss, slowdown = (a + share * (b - a) for a, b in zip(exact, wide, strict=True))
        return loss, slowdown

    @property
    def _beside_updates(self) -> float:
        """How many times as long compute and updates of matrices take while both run.

        A device's products keep all of it busy, so two at a time take twice as long. So do those of ranks
        that have a processor each, or less; who has several, has one to spare.
        """
        if self.matrices is None:
            return 1.0
        if self.profile.cluster.device != "cpu":
            return 2.0
        made = self.profile.provenance
        share = (made.ranks_per_host or 1) / made.cpus
        return max(1.0, 2.0 * share) / max(1.0, share)

    def collective_ns(self, operation: str, stage: Stage, nbytes: int) -> int:
        """Nanoseconds of a collective on a stage; ``nbytes``: of its whole, gathered, buffer.

        An all-reduce that was not measured is taken for the two collectives that it replaces; an all-to-all
        of ``nbytes``, all that a rank sends, for a gather that ends with as many, in which as many arrive.
        Over a stage that spans tiers it is one on each: of what goes in n shares to n ranks, (n − 1)/n
        leaves.
        """
        return self._read(self._curves, interpolate, operation, stage, nbytes)

    def latency_ns(self, operation: str, stage: Stage, nbytes: int) -> int:
        """Of ``collective_ns`` what collectives under way together pay once (``curves.latency``)."""
        return self._read(self._curves, latency, operation, stage, nbytes)

    def collective_processor_ns(self, operation: str, stage: Stage, nbytes: int) -> int:
        """Processor time of a collective, ``CollectivePoint.processor_seconds``; sizes as for
        ``collective_ns``."""
        return self._read(self._processor_curves, interpolate, operation, stage, nbytes)

    def latency_processor_ns(self, operation: str, stage: Stage, nbytes: int) -> int:
        """Of ``collective_processor_ns`` what messages that are joined to one pay once."""
        return self._read(self._processor_curves, latency, operation, stage, nbytes)

    def _read(self, curves: Curves, reading: Reading, operation: str, stage: Stage, nbytes: int) -> int:
        """Nanoseconds of a collective read off ``curves``, summed over the collectives that stand for it;
        cached."""
        key = id(curves), reading, operation, stage, nbytes
        if key not in self._known:
            self._known[key] = self._interpolated(curves, reading, operation, stage, nbytes)
        return self._known[key]

    def _interpolated(
        self, curves: Curves, reading: Reading, operation: str, stage: Stage, nbytes: int
    ) -> int:
        if operation == "all_to_all":
            return sum(
                round(reading(curve, nbytes) * 1e9)
                for tier in range(len(self.mesh.tiers))
                if (one := self.mesh.stage_in_tier(tier, *stage)) is not None
                for curve in [curves.get((operation, *one)) or curves["all_gather", *one]]
            )
        if (operation, *stage) not in curves and operation == "all_reduce":
            parts = ("reduce_scatter", "all_gather")
            return sum(self._interpolated(curves, reading, part, stage, nbytes) for part in parts)
        return round(reading(curves[(operation, *stage)], nbytes) * 1e9)

    @cached_property
    def _known(self) -> dict[object, int]:
        return {}

    def compute_ns(self, use_index: int, micro_batch: int) -> int:
        """Nanoseconds of a use's computation, without recomputation."""
        return round(self._use_cost(use_index, micro_batch).seconds * 1e9)

    def recompute_ns(self, use_index: int, micro_batch: int, way: Way) -> int:
        """Nanoseconds that recomputation of its unit adds to a use."""
        again = self._use_cost(use_index, micro_batch).again.get(way)
        return round(again.seconds * 1e9) if again is not None else 0

    @cached_property
    def ways(self) -> Mapping[str, tuple[Way, ...]]:
        """By unit whose forward can be computed again the ways to do so, in the order of the profile."""
        found: dict[str, set[Way]] = {use.unit: {*WAYS} for use in self.profile.uses}
        for use in self.profile.uses:
            for cost in use.costs:
                found[use.unit] &= cost.again.keys() if use.reads_parameters else set()
        for unit in [unit for unit, ways in found.items() if "chunks" in ways]:
            if not self._stays_to_the_end(unit):
                found[unit] -= {"chunks"}
        known = [way for way in WAYS if way != HOST or self.profile.host is not None]
        named = {unit.name: found.get(unit.name, ()) for unit in self.profile.units}
        return {unit: tuple(way for way in known if way in of) for unit, of in named.items() if of}

    def _stays_to_the_end(self, unit: str) -> bool:
        """Whether a unit's parameters are there until the loss, after its forward: a loss in chunks reads
        them, and belongs to the last forward's turn."""
        needs = {one.name: one.requires for one in self.profile.units}
        forwards = [use.use for use in self.profile.uses if use.phase == "forward"]
        last = max((index for index, use in enumerate(forwards) if use.unit == unit), default=-1)
        return all(use.reads and unit in needs.get(use.unit, ()) for use in forwards[last + 1 :])

    @cached_property
    def recomputable(self) -> tuple[str, ...]:
        """The units all of whose forward can be computed again."""
        return tuple(unit for unit, ways in self.ways.items() if "full" in ways)

    def late_ns(self, schedule: Schedule, micro_batch: int) -> list[Late] | None:
        """For every task of a schedule, how late ranks are, nanoseconds; None where none is."""
        late = self.late_uses_ns(micro_batch)
        if late is None:
            return None
        uses = len(late)
        return [late[t.position % uses] if t.kind is Kind.COMPUTE else Late() for t in schedule.tasks]

    def late_uses_ns(self, micro_batch: int) -> list[Late] | None:
        """For every use of a micro-batch, how late ranks are, nanoseconds; None where none is, or only one is
        there."""
        if self.mesh.world == 1:
            return None
        costs = self._use_costs(micro_batch)
        late = [Late(round(c.straggler_seconds * 1e9), round(c.seconds * 1e9)) for c in costs]
        return late if any(one.slowest for one in late) else None

    @cached_property
    def is_late(self) -> bool:
        """Whether ranks differ at any micro-batch size."""
        return any(self.late_uses_ns(size) for size in self.profile.micro_batches)

    def meets(self, task: Task) -> bool:
        """Whether ranks wait for each other in a task whatever the levels are: where gradients are reduced
        over the slowest tier, once a step (``core.stages.collectives_of``)."""
        slowest = len(self.mesh.tiers) - 1
        return (
            task.kind is Kind.FINAL_REDUCE
            and task.tier == slowest
            and self.mesh.stage_in_tier(slowest, 0, self.mesh.levels) is not None
            and any(tensor.trainable for unit in task.units for tensor in self.tensors[unit])
        )

    def event_graph(self, schedule: Schedule, micro_batch: int) -> EventGraph:
        """The events of a schedule, with late ranks and interference."""
        key = id(schedule), micro_batch
        if key not in self._graphs:
            late = self.late_ns(schedule, micro_batch)
            self._graphs[key] = schedule, event_graph(schedule, self.interference, late, self.meets)
        return self._graphs[key][1]

    @cached_property
    def _graphs(self) -> dict[tuple[int, int], tuple[Schedule, EventGraph]]:
        return {}

    def _use_costs(self, micro_batch: int) -> list[UseCost]:
        """Every use's costs at a micro-batch size."""
        if micro_batch not in self._by_size:
            self._by_size[micro_batch] = [
                next(cost for cost in use.costs if cost.micro_batch == micro_batch)
                for use in self.profile.uses
            ]
        return self._by_size[micro_batch]

    @cached_property
    def _by_size(self) -> dict[int, list[UseCost]]:
        return {}

    def _use_cost(self, use_index: int, micro_batch: int) -> UseCost:
        return self._use_costs(micro_batch)[use_index]

    @cached_property
    def norm(self) -> Norm:
        """What clipping waits for."""
        return Norm.of(self.profile)

    @cached_property
    def activations(self) -> Activations:
        """Their bytes."""
        return Activations(self.profile.uses, self._use_costs)

    @cached_property
    def tensors(self) -> dict[str, tuple[TensorSpec, ...]]:
        """The tensors of every unit."""
        return tensors_of(self.profile, self.wire)

    @cached_property
    def unit_costs(self) -> dict[object, UnitCost]:
        """The cache of ``solver.evaluate.unit_costs``."""
        return {}

    @cached_property
    def activation_events(self) -> dict[object, Any]:
        """The cache of ``solver.question``."""
        return {}

    @cached_property
    def matrices(self) -> MatrixCosts | None:
        """The costs of matrices; None where all updates are element by element."""
        return None if self.profile.optimizer.matrix is None else MatrixCosts(self.profile.optimizer.matrix)

    @cached_property
    def triples(self) -> tuple[Levels, ...]:
        """All levels that tensors may have, in all ways to update matrices where there are such."""
        return self.mesh.triples(matrices=self.matrices is not None, flat=self.flat_sums)

    @cached_property
    def knows_flat_sums(self) -> bool:
        """Whether an all-reduce over all tiers was measured, and gradients travel as they are kept."""
        exact = self.wire is None and self.reduce_dtype in (None, MASTER_DTYPE[self.profile.model.dtype])
        own = {t.dtype for tensors in self.tensors.values() for t in tensors if t.trainable}
        same = len({MASTER_DTYPE[dtype] for dtype in own}) < 2  # else some are cast to others' dtype
        return exact and same and self.profile.sums_over_tiers

    @cached_property
    def like(self) -> dict[str, str]:
        """By unit, the first unit whose tensors have the same shapes, dtypes and trainable flags, and so the
        same cost."""
        first: dict[object, str] = {}
        return {
            unit: first.setdefault(tuple(replace(t, name="") for t in tensors), unit)
            for unit, tensors in self.tensors.items()
        }

    @cached_property
    def _savable(self) -> tuple[str, ...]:
        return tuple(unit for unit, ways in self.ways.items() if HOST in ways)

    @cached_property
    def copy_uses(self) -> int:
        """How many uses a copy of one unit's activations needs to be hidden behind compute, and the use that
        it comes from; 1 where none can be copied.

        By the forward, which is shorter than a backward, of the unit with the most to copy.
        """
        size = self.profile.micro_batches[-1]
        forward = {use.unit: at for at, use in enumerate(self.profile.uses) if use.phase == "forward"}
        largest = max(self._savable, key=lambda unit: self.activations.saved_bytes(unit, size), default=None)
        if largest is None:
            return 1
        return 1 - -self.save_ns(largest, size) // max(1, self.compute_ns(forward[largest], size))

    def save_ns(self, unit: str, micro_batch: int) -> int:
        """Nanoseconds of a copy of a unit's activations, in either direction."""
        nbytes = self.activations.saved_bytes(unit, micro_batch)
        return round(interpolate(self._host_curve, nbytes) * 1e9) if nbytes and self._host_curve else 0

    def flops(self, micro_batch: int) -> int:
        """Floating-point operations of one forward and backward."""
        return sum(self._use_cost(index, micro_batch).flops for index in range(len(self.profile.uses)))

    def bucket(self, bucket: BucketLayout) -> UnitCost:
        """Cost of one bucket on its own."""
        return self.unit([bucket])

    def unit(self, buckets: Iterable[BucketLayout]) -> UnitCost:
        """Cost of a unit."""
        return self.combined([self.part(bucket) for bucket in buckets])

    @cached_property
    def _host_curve(self) -> list[tuple[int, float]]:
        return (
            [(point.bytes, point.seconds) for point in self.profile.host.points] if self.profile.host else []
        )

    def offloaded(self, unit: UnitCost) -> UnitCost:
        """A unit's cost with its optimizer state, and master weights, in the host's memory.

        The first update creates the state on the device, beside the offload slot, hence the larger
        temporary. The slots themselves count in ``cost.memory``.
        """
        moved = unit.master_bytes + unit.optim_bytes
        return replace(
            unit,
            master_bytes=0,
            optim_bytes=0,
            host_bytes=moved,
            copy_ns=round(interpolate(self._host_curve, moved) * 1e9) if moved else 0,
            update_temporary_bytes=unit.update_temporary_bytes + unit.optim_bytes,
        )

    def combined(self, parts: Iterable[BucketCost]) -> UnitCost:
        """The cost of a unit from those of its buckets.

        Reductions run one after the other; gathers of one stage run as one message, and so do all-reduces.
        Gathers of several stages of a tier share its link, so their times add up. Exchanges are under way at
        the same time, so of their latencies only the largest counts.
        """
        tiers, share = len(self.mesh.tiers), self.compute_processor_share
        total = UnitCost.zero(tiers, processors=share is not None)
        working = [0] * len(total.processor_ns)
        twice = list(total.final_reduce_ns)  # what all-reduces wait, counted for each
        sizes: dict[tuple[int, int, Stage], int] = {}
        times = [[0] * len(self.mesh.tiers) for _ in range(3)]
        for part in parts:
            total += part.cost
            twice = [a + b for a, b in zip(twice, part.cost.reduce_waits_ns, strict=True)]
            for tier, ns in enumerate(part.cost.reduce_processor_ns):
                working[processor_at(Kind.FINAL_REDUCE, tier, tiers)] -= ns
            for kind, tier, stage, nbytes, rounding_ns in part.gathers:
                sizes[kind, tier, stage] = sizes.get((kind, tier, stage), 0) + nbytes
                times[kind][tier] += rounding_ns
                if share is not None:
                    working[processor_at(GATHERS[kind], tier, tiers)] += round(share * rounding_ns)
        for tier, ns in enumerate(total.reduce_processor_ns):
            working[processor_at(Kind.FINAL_REDUCE, tier, tiers)] += ns
        waited = [[0] * len(self.mesh.tiers) for _ in range(3)]
        at_once = self.profile.cluster.reduce_scatter_by_exchange
        for (kind, tier, stage), nbytes in sizes.items():
            alone = self.collective_ns("all_gather", stage, nbytes)
            once = self.latency_ns("all_gather", stage, nbytes) if at_once else 0
            times[kind][tier] += alone - once
            waited[kind][tier] = max(waited[kind][tier], once)
            if share is not None:
                working[processor_at(GATHERS[kind], tier, tiers)] += self.collective_processor_ns(
                    "all_gather", stage, nbytes
                )
        unshard, grad_gather, param_gather = map(summed, times, waited)
        final = tuple(
            ns - more + once
            for ns, more, once in zip(total.final_reduce_ns, twice, total.reduce_waits_ns, strict=True)
        )
        return replace(
            total,
            unshard_ns=unshard,
            final_reduce_ns=final,
            grad_gather_ns=grad_gather,
            param_gather_ns=param_gather,
            gather_waits_ns=tuple(waited[1]),
            processor_ns=summed(total.processor_ns, working),
        )

    def part(self, bucket: BucketLayout) -> BucketCost:
        """The cost of one bucket, for ``combined``.

        Each stage's collective is timed at the bytes of the coarser slice it spans: an all-gather between
        levels a < b yields the level-a slice, nbytes / S_a; a reduce-scatter starts from it. Parameters
        travel in the dtype that computes, gradients in ``reduce_dtype``.
        """
        mesh, levels = self.mesh, bucket.levels
        tiers = range(len(mesh.tiers))
        gathers = tuple(
            (number, tier, one.stage, nbytes, self._rounding_ns(bucket, kind, tier, one))
            for number, kind in enumerate(GATHERS)
            for tier in tiers
            for one, nbytes in self.collectives(bucket, kind, tier)
        )
        parameters = replace(
            UnitCost.zero(len(tiers), processors=self.compute_processor_share is not None),
            param_bytes=bucket.nbytes // mesh.shards[levels.param],
            unshard_bytes=bucket.buffer_nbytes if mesh.shards[levels.param] > 1 else 0,
        )
        if not bucket.trainable:
            return BucketCost(parameters, gathers)

        def reduced(kind: Kind) -> tuple[int, ...]:
            return tuple(
                sum(
                    self._reduction_ns(bucket, kind, tier, one, nbytes)
                    + self._rounding_ns(bucket, kind, tier, one)
                    for one, nbytes in self.collectives(bucket, kind, tier)
                )
                for tier in tiers
            )

        def once(of: Callable[[str, Stage, int], int]) -> tuple[int, ...]:
            """By tier, of a library's all-reduces that are joined to one what is paid once."""
            return tuple(
                sum(
                    of(*one, nbytes)
                    for one, nbytes in self.collectives(bucket, Kind.FINAL_REDUCE, tier)
                    if one.operation == "all_reduce"
                    and self._is_summed_by_library(bucket, Kind.FINAL_REDUCE, tier, one, nbytes)
                )
                for tier in tiers
            )

        replicated = mesh.shards[max(levels.grad, levels.optim)] == 1
        optim_numel = bucket.numel // mesh.shards[levels.optim]
        master_bytes = bucket.master_nbytes // mesh.shards[levels.optim]
        optimizer = self.profile.optimizer
        cost = replace(
            parameters,
            reduce_ns=reduced(Kind.REDUCE),
            final_reduce_ns=reduced(Kind.FINAL_REDUCE),
            update_ns=round(interpolate(self._optimizer_curve, optim_numel) * 1e9),
            master_bytes=master_bytes if bucket.keeps_master else 0,
            grad_bytes=bucket.master_nbytes // mesh.shards[levels.grad],
            optim_bytes=master_bytes * optimizer.state_per_element,
            gradient_buffer_bytes=bucket.gradient_buffer_nbytes if mesh.shards[levels.grad] > 1 else 0,
            scratch_bytes=tuple(self._scratch_bytes(bucket, tier) for tier in tiers),
            update_temporary_bytes=_largest_piece(bucket, optim_numel, optimizer.temporary_per_element),
            replicated=replicated,
            norm_ns=0 if replicated else self.norm.share_ns(sum(one.numel for one in bucket.tensors)),
            reduce_waits_ns=once(self.latency_ns),
            processor_ns=self._messages_processor_ns(bucket),
            reduce_processor_ns=parameters.reduce_processor_ns and once(self.latency_processor_ns),
        )
        if self.matrices is not None and levels.matrix:
            cost = self._with_messages(self.matrices.with_updates(cost, bucket, mesh), bucket)
            cost = replace(cost, optim_bytes=master_bytes * self.matrices.state_per_element)
        return BucketCost(cost, gathers)

    def _messages_processor_ns(self, bucket: BucketLayout) -> tuple[int, ...]:
        """``UnitCost.processor_ns`` of a bucket without its gathers, which buckets join."""
        if self.compute_processor_share is None:
            return ()
        found = []
        for kind, tier in itertools.product(MESSAGES, range(len(self.mesh.tiers))):
            total = 0
            if kind in (Kind.REDUCE, Kind.FINAL_REDUCE):
                for one, nbytes in self.collectives(bucket, kind, tier):
                    parts = self._reduction(bucket, kind, tier, one, nbytes)
                    total += sum(self.collective_processor_ns(part, one.stage, nbytes) for part in parts)
                    total += round(self.compute_processor_share * self._rounding_ns(bucket, kind, tier, one))
            elif kind in (Kind.ASSEMBLE, Kind.RETURN) and self.matrices is not None and bucket.levels.matrix:
                listed = self.collectives(bucket, kind, tier)
                total = sum(self.collective_processor_ns(*one, nbytes) for one, nbytes in listed)
            found.append(total)
        return tuple(found)

    def _scratch_bytes(self, bucket: BucketLayout, tier: int) -> int:
        """Bytes that a bucket's messages on a tier need beside their buffers: to receive, and to round."""
        listed = [one for one, _ in self.collectives(bucket, Kind.FINAL_REDUCE, tier)]
        received = max((_received_bytes(bucket, self.mesh, one.stage) for one in listed), default=0)
        cluster = self.profile.cluster
        total = scratch_bytes(received) if cluster.reduce_scatter_by_exchange else 0
        if bucket.narrow:
            total += rounding_bytes(self.wire, tier, on_device=cluster.device != "cpu")
        return total

    def _with_messages(self, cost: UnitCost, bucket: BucketLayout) -> UnitCost:
        """A bucket's cost with that of messages of its matrices."""
        listed = {
            kind: [[*self.collectives(bucket, kind, tier)] for tier in range(len(self.mesh.tiers))]
            for kind in (Kind.ASSEMBLE, Kind.RETURN)
        }
        waits = {
            kind: [sum(self.latency_ns(*one, nbytes) for one, nbytes in of) for of in by_tier]
            for kind, by_tier in listed.items()
        }
        times = {
            kind: tuple(
                max(0, sum(self.collective_ns(*one, nbytes) for one, nbytes in of) - wait)
                for of, wait in zip(by_tier, waits[kind], strict=True)
            )
            for kind, by_tier in listed.items()
        }
        return replace(
            cost,
            assemble_ns=times[Kind.ASSEMBLE],
            return_ns=times[Kind.RETURN],
            matrix_waits_ns=tuple(waits[Kind.ASSEMBLE]),
        )

    def collectives(self, bucket: BucketLayout, kind: Kind, tier: int) -> Iterator[tuple[Collective, int]]:
        """A bucket's collectives in a task of a kind on a tier, and bytes of their whole buffer; of matrices
        that are exchanged, of all that a rank sends."""
        if kind in (Kind.ASSEMBLE, Kind.RETURN):
            for one in collectives_of(kind, tier, bucket, self.mesh):
                level = one.stage.high if one.operation == "all_to_all" else one.stage.low
                yield one, bucket.numel * ORTHOGONALIZED_BYTES // self.mesh.shards[level]
            return
        dtype = bucket.dtype if kind in PARAMETERS else self.reduce_dtype or bucket.master_dtype
        for one in collectives_of(kind, tier, bucket, self.mesh):
            form = format_of(self.wire, kind, tier, bucket, one.stage, self.mesh)
            elements = bucket.numel // self.mesh.shards[one.stage.low]
            yield one, packed_bytes(form, elements, ITEM_BYTES[dtype])

    def _reduction_ns(self, bucket: BucketLayout, kind: Kind, tier: int, one: Collective, nbytes: int) -> int:
        """Nanoseconds of a reduction of gradients, ``nbytes`` of them on the wire.

        A library adds up what it sends. What is narrower than the sum goes to its rank as it is, in an
        all-to-all, and is added up there; of an all-reduce that is the first half.
        """
        parts = self._reduction(bucket, kind, tier, one, nbytes)
        return sum(self.collective_ns(part, one.stage, nbytes) for part in parts)

    def _reduction(
        self, bucket: BucketLayout, kind: Kind, tier: int, one: Collective, nbytes: int
    ) -> list[Operation]:
        """The collectives that a reduction of gradients is made of, one after the other."""
        if self._is_summed_by_library(bucket, kind, tier, one, nbytes):
            return [one.operation]
        by_exchange = self.profile.cluster.reduce_scatter_by_exchange
        first: Operation = "reduce_scatter" if by_exchange else "all_to_all"
        return [first, "all_gather"] if one.operation == "all_reduce" else [first]

    def _is_summed_by_library(
        self, bucket: BucketLayout, kind: Kind, tier: int, one: Collective, nbytes: int
    ) -> bool:
        """Whether a reduction is the library's own, or on gloo the exchange that stands for it: what travels
        is what is summed. Such all-reduces of a task are under way together; others' first halves go one
        after the other."""
        whole = bucket.master_nbytes // self.mesh.shards[one.stage.low]
        is_exact = format_of(self.wire, kind, tier, bucket, one.stage, self.mesh) == "exact"
        by_library = not self.profile.cluster.reduce_scatter_by_exchange
        return nbytes == whole or (is_exact and by_library and self.narrow_sums)

    def _rounding_ns(self, bucket: BucketLayout, kind: Kind, tier: int, one: Collective) -> int:
        """Nanoseconds in which a bucket's values are rounded to a format and read back, in a collective.

        Of n ranks each packs a slice and reads n for a gather; it packs n and reads n for a reduction; for
        an all-reduce both.
        """
        form = format_of(self.wire, kind, tier, bucket, one.stage, self.mesh)
        if form == "exact":
            return 0
        whole, part = (bucket.numel // self.mesh.shards[level] for level in one.stage)
        pack, unpack = self._rounding(form)
        gathers, reduces = one.operation != "reduce_scatter", one.operation != "all_gather"
        packed, read = part * gathers + whole * reduces, whole * (gathers + reduces)
        return round(interpolate(pack, packed) * 1e9 + interpolate(unpack, read) * 1e9)

    def _rounding(self, form: Format) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Curves of seconds by values, to a format and back; none where the profile does not know."""
        if form not in self._rounding_curves:
            listed = next((one.points for one in self.profile.rounding or () if one.format == form), ())
            self._rounding_curves[form] = (
                [(point.elements, point.pack_seconds) for point in listed] or [(1, 0.0)],
                [(point.elements, point.unpack_seconds) for point in listed] or [(1, 0.0)],
            )
        return self._rounding_curves[form]

    @cached_property
    def _rounding_curves(self) -> dict[Format, tuple[list[tuple[int, float]], list[tuple[int, float]]]]:
        return {}

    def schedule(
        self,
        *,
        prefetch: int,
        accumulation: int,
        clip: bool,
        gradient_buffers: int | None = None,
        message_bytes: int = 0,
        matrix_units: int = 0,
        offload: bool = False,
        order: MessageOrder | None = None,
    ) -> Schedule:
        """The schedule of the profile's uses under these settings, cached."""
        key = prefetch, accumulation, clip, gradient_buffers, message_bytes, matrix_units, offload, order
        if key not in self._schedules and order is not None:
            apart = self.schedule(
                prefetch=prefetch,
                accumulation=accumulation,
                clip=clip,
                gradient_buffers=gradient_buffers,
                message_bytes=message_bytes,
                matrix_units=matrix_units,
                offload=offload,
            )
            self._schedules[key] = in_order(apart, order)
        elif key not in self._schedules:
            self._schedules[key] = build(
                [use.use for use in self.profile.uses],
                {unit.name: unit.requires for unit in self.profile.units},
                [unit.name for unit in self.profile.units if any(t.trainable for t in unit.tensors)],
                tiers=len(self.mesh.tiers),
                prefetch=prefetch,
                accumulation=accumulation,
                clip=clip,
                gradient_buffers=gradient_buffers,
                offload=offload,
                message_bytes=message_bytes,
                saved=self._savable if offload else (),
                copy_uses=self.copy_uses,
                matrices=[unit for unit, tensors in self.tensors.items() if any(t.matrix for t in tensors)],
                matrix_units=matrix_units,
                gradient_bytes={unit: gradient_bytes(tensors) for unit, tensors in self.tensors.items()},
            )
        return self._schedules[key]

    @cached_property
    def _schedules(self) -> dict[object, Schedule]:
        return {}

    def durations(self, schedule: Schedule, units: Mapping[str, UnitCost], micro_batch: int) -> list[int]:
        """Nanoseconds of every task of a schedule."""
        distinct, places = schedule.distinct
        lengths = [self.task_ns(schedule, task, units, micro_batch) for task in distinct]
        return [lengths[place] for place in places]

    def processor_ns(
        self, schedule: Schedule, units: Mapping[str, UnitCost], durations_ns: Sequence[int]
    ) -> list[float] | None:
        """By task the processor time, of all ranks that share processors over the number of these,
        nanoseconds; None where unknown.

        That of messages was measured. Whatever else is done is like compute; of matrices that go to hosts
        each rank's share counts, while their group's task lasts as long as the host with most. The norm's
        task is left out: most of it is waiting for other ranks.
        """
        if (share := self.compute_processor_share) is None:
            return None

        def of(task: Task, duration_ns: int) -> float:
            named = (units[unit] for unit in task.units)
            if task.tier >= 0:
                parts = [
                    (unit.messages_processor_ns(*message), unit.once_processor_ns(*message))
                    for unit in named
                    for message in [(task.kind, task.tier)]
                ]
                return float(sum(all_of - once for all_of, once in parts) + max(once for _, once in parts))
            if task.kind is Kind.ORTHOGONALIZE:
                return share * sum(unit.duration_ns(task.kind, task.tier) for unit in named)
            return share * duration_ns if takes_processors(task) else 0.0

        distinct, places = schedule.distinct
        known: dict[int, float] = {}
        for place, duration_ns in zip(places, durations_ns, strict=True):
            if place not in known:
                known[place] = of(distinct[place], duration_ns)
        return [known[place] for place in places]

    def has_local_norm(self, schedule: Schedule, units: Mapping[str, UnitCost]) -> bool:
        """Whether each rank takes the norm of all gradients by itself: all have them, and it is shorter."""
        return self.norm.is_local(schedule, replicated=_replicated(units))

    def task_ns(self, schedule: Schedule, task: Task, units: Mapping[str, UnitCost], micro_batch: int) -> int:
        """Nanoseconds of one task."""
        if task.kind is Kind.STEP:
            return self.norm.step_ns(schedule, replicated=_replicated(units))
        if task.kind is Kind.COMPUTE:
            index = task.position % len(schedule.uses)
            recompute = units[schedule.uses[index].unit].recompute
            return self.compute_ns(index, micro_batch) + (
                self.recompute_ns(index, micro_batch, recompute) if recompute else 0
            )
        if task.kind in (Kind.SAVE, Kind.LOAD):
            (unit,) = task.units
            return self.save_ns(unit, micro_batch) if units[unit].recompute == HOST else 0
        if task.kind is Kind.ORTHOGONALIZE:
            return orthogonalize_ns(units[unit] for unit in task.units)
        total = sum(units[unit].duration_ns(task.kind, task.tier) for unit in task.units)
        if task.kind in (Kind.ASSEMBLE, Kind.RETURN):
            goes = [units[unit] for unit in task.units if units[unit].duration_ns(task.kind, task.tier)]
            total += max((unit.matrix_waits_ns[task.tier] for unit in goes), default=0)
        if task.kind in REDUCED_TOGETHER:
            once = [units[unit].once_ns(task.kind, task.tier) for unit in task.units]
            total -= sum(once) - max(once)
        return total


def takes_processors(task: Task) -> bool:
    """Whether a task that sends nothing is work like compute: no copy, and not the norm, which waits."""
    return task.tier < 0 and task.kind is not Kind.STEP and task.stream not in COPIES


def _replicated(units: Mapping[str, UnitCost]) -> bool:
    """Whether every rank has all reduced gradients."""
    return all(unit.replicated for unit in units.values())


def _received_bytes(bucket: BucketLayout, mesh: Mesh, stage: Stage) -> int:
    """Bytes that a rank receives from one peer in an exchange: its own slice."""
    return bucket.master_nbytes // mesh.shards[stage.high]


def _largest_piece(bucket: BucketLayout, slice_numel: int, temporary_per_element: float) -> int:
    """Bytes of the optimizer's temporaries, which works tensor by tensor: those of the largest tensor
    piece."""
    largest = max(min(tensor.numel, slice_numel) for tensor in bucket.tensors)
    return round(largest * ITEM_BYTES[bucket.master_dtype] * temporary_per_element)
