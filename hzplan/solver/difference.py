"""How two plans differ: in the choice for each tensor, and in predicted time and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hzplan.core.schedule import MessageOrder
from hzplan.core.wire import EXACT
from hzplan.formats.plan import Plan, Shards, WireEntry
from hzplan.show import readable

Sides = tuple[object, object]


@dataclass(frozen=True)
class Difference:
    """One difference from plan A (``before``) to plan B (``after``); None: not in that plan.

    Without ``tensors``, ``unit`` names a setting of the whole plan, such as the prefetch depth, or a mode of
    a unit.
    """

    unit: str
    tensors: tuple[str, ...]
    before: object
    after: object

    def __str__(self) -> str:
        names = self.tensors
        of = f" ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})" if names else ""
        return f"{self.unit or '(root)'}{of}: {shards_text(self.before)} → {shards_text(self.after)}"


def choices(one: Plan, other: Plan) -> list[Difference]:
    """Settings, then units in their order, with the tensors whose shards changed in the same way together."""
    return [*_settings(one, other), *_tensors(one, other)]


def _settings(one: Plan, other: Plan) -> Iterator[Difference]:
    pairs: dict[str, Sides] = {
        "model": (one.model.name, other.model.name),
        "signature": (one.model.signature[:12], other.model.signature[:12]),
        "sequence length": (one.model.seq_len, other.model.seq_len),
        "mesh": (one.cluster.mesh, other.cluster.mesh),
        "tiers": (_listed(one.cluster.tier_names), _listed(other.cluster.tier_names)),
        "backend": (one.cluster.backend, other.cluster.backend),
        "CTAs": (_listed(map(str, one.ctas or ())), _listed(map(str, other.ctas or ()))),
        "memory budget": (one.source.memory_budget_bytes, other.source.memory_budget_bytes),
        "host memory": (one.source.host_memory_bytes, other.source.host_memory_bytes),
        "target": (one.source.target, other.source.target),
        "pins": (_listed(one.source.pins), _listed(other.source.pins)),
        "global batch": (one.batch.global_batch, other.batch.global_batch),
        "micro-batch": (one.batch.micro_batch, other.batch.micro_batch),
        "accumulation": (one.batch.accumulation, other.batch.accumulation),
        "prefetch": (one.prefetch, other.prefetch),
        "gradient buffers": (one.gradient_buffers, other.gradient_buffers),
        "message bytes": (one.message_bytes or 0, other.message_bytes or 0),
        "matrix units": (one.matrix_units or 0, other.matrix_units or 0),
        "message order": (_order_text(one.message_order), _order_text(other.message_order)),
        "clip": (one.clip, other.clip),
        "dtype": (one.model.dtype, other.model.dtype),
        "reduce dtype": (one.reduce_dtype, other.reduce_dtype),
        "narrow sums": (bool(one.narrow_sums), bool(other.narrow_sums)),
        "flat sums": (bool(one.flat_sums), bool(other.flat_sums)),
        "wire": (_wire_text(one.wire), _wire_text(other.wire)),
        "optimizer": (one.optimizer, other.optimizer),
        "groups": (_groups_text(one), _groups_text(other)),
    }
    for name, (before, after) in pairs.items():
        if before != after:
            yield Difference(name, (), before, after)
    if one.source.recompute != other.source.recompute:
        yield Difference("recomputation", (), one.source.recompute, other.source.recompute)
    both = {unit.name for unit in one.units} & {unit.name for unit in other.units}
    for unit in (unit.name for unit in one.units if unit.name in both):
        way, other_way = one.recomputed.get(unit), other.recomputed.get(unit)
        if way != other_way:
            yield Difference(unit, (), readable.way(way), readable.way(other_way))
        before, after = unit in one.offloaded, unit in other.offloaded
        if before != after:
            yield Difference(unit, (), _place(host=before), _place(host=after))
    if one.uses != other.uses:
        yield Difference("uses", (), f"{len(one.uses)} of units", f"{len(other.uses)}, in another order")


def _order_text(order: MessageOrder | None) -> str:
    if order is None:
        return "links shared"
    counts = Counter(ahead for _, ahead in order.ahead)
    numbers = [f"{_listed(map(str, ahead))} ({count} units)" for ahead, count in sorted(counts.items())]
    return "; ".join([*numbers, f"parameters {order.sync} uses ahead"])


def _wire_text(wire: WireEntry | None) -> str:
    return EXACT if wire is None else wire.formats.text


def _groups_text(plan: Plan) -> str:
    tier = plan.replica_sync
    if isinstance(tier, str):
        return "all wait for each other"
    said = (
        f"{tier.groups} groups, {tier.rule} every {tier.every} steps, {tier.parts} parts, {tier.delay} later"
    )
    kept = f"mixing {tier.mixing:g}, outer rate {tier.outer_lr:g}, momentum {tier.momentum:g}"
    return f"{said}, {tier.wire}, {kept}, decay {tier.decay:g}, copies on the {tier.copies}"


def _place(*, host: bool) -> str:
    return f"optimizer state on the {'host' if host else 'device'}"


def _listed(names: Iterable[str]) -> str | None:
    return ", ".join(names) or None


def _tensors(one: Plan, other: Plan) -> Iterator[Difference]:
    before, after = _shards(one), _shards(other)
    for unit in dict.fromkeys([*(u for u, _ in before), *(u for u, _ in after)]):
        names = dict.fromkeys(n for u, n in [*before, *after] if u == unit)
        changed: dict[Sides, list[str]] = {}
        for name in names:
            sides = before.get((unit, name)), after.get((unit, name))
            if sides[0] != sides[1]:
                changed.setdefault(sides, []).append(name)
        for (was, now), tensors in changed.items():
            yield Difference(unit, tuple(tensors), was, now)


class Cut(NamedTuple):
    """How a tensor is cut, and how a matrix optimizer gets the whole of it."""

    shards: Shards
    matrix: str | None

    def __str__(self) -> str:
        of = self.shards
        way = f", {self.matrix}" if self.matrix else ""
        return f"{of.param}, {of.grad}, {of.optim}{way}"


def _shards(plan: Plan) -> dict[tuple[str, str], Cut]:
    return {
        (unit.name, tensor): Cut(bucket.shards, bucket.matrix)
        for unit in plan.units
        for bucket in unit.buckets
        for tensor in bucket.tensors
    }


def shards_text(value: object) -> str:
    """``8, 8, 128`` of shards; else what it is."""
    return "none" if value is None else str(value)


def figures(one: Plan, other: Plan) -> dict[str, tuple[float, float]]:
    """Predicted seconds of a step and of waits, and bytes by category, in both plans; those that are 0 in
    both are left out."""
    found: dict[str, tuple[float, float]] = {
        "step_s": (one.predicted.step_s, other.predicted.step_s),
        "objective_s": (one.proof.objective_s, other.proof.objective_s),
        "bound_s": (one.proof.bound_s, other.proof.bound_s),
    }
    waits = one.predicted.exposed_comm_s, other.predicted.exposed_comm_s
    for name in dict.fromkeys([*waits[0], *waits[1]]):
        found[f"waits_s.{name}"] = waits[0].get(name, 0.0), waits[1].get(name, 0.0)
    memory = one.predicted.memory_bytes, other.predicted.memory_bytes
    for name in dict.fromkeys([*memory[0], *memory[1]]):
        found[f"bytes.{name}"] = memory[0].get(name, 0), memory[1].get(name, 0)
    found["bytes.peak"] = one.predicted.peak_memory_bytes, other.predicted.peak_memory_bytes
    return {name: pair for name, pair in found.items() if any(pair)}
