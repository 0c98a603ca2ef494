"""Patterns: the ways to cut one unit's tensors into buckets with levels.

A pattern gives every tensor a legal triple, with at most three different triples in a unit. There are about
|triples|^|tensors| of them, so the smallest tensors are joined into *atoms*, which share a triple, until
the patterns can be enumerated. Little is lost, because joined tensors are small.

Of the enumerated ones the *dominated* are dropped: where pattern q is no worse than p in any duration and any
byte count, replacing p by q makes no plan slower or larger (exact). The patterns left are the columns of the
unit's *column pool*; which of them the ILP gets is decided by reduced costs (``search``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hzplan.core.hierarchy import Levels
from hzplan.core.layout import TensorSpec, bucketise
from hzplan.core.recompute import WAYS, Way
from hzplan.core.schedule import Kind
from hzplan.cost.matrices import least_buffer_bytes
from hzplan.cost.model import REDUCED_TOGETHER, CostModel
from hzplan.cost.unit import MESSAGES, BucketCost, UnitCost
from hzplan.errors import UserError

MAX_BUCKETS = 3
"""Different triples in one pattern at most; each is a bucket, and so messages of its own."""
MAX_PATTERNS = 6_000
"""Patterns that are enumerated per unit before dominated ones are dropped; a second of work."""
MAX_NS = 24 * 3600 * 10**9
"""Longest duration of a task that is accepted, one day: sums of nanoseconds then stay inside 64 bits."""


class DurationKey(NamedTuple):
    """A part of a unit's duration in a task, what is paid ``once`` by units that are reduced together being
    one of its own. Part of no duration are ``processors``, processor time of messages, and ``sends``, 1 ms
    where there is a message."""

    kind: Kind
    tier: int = -1
    once: bool = False
    way: Way | None = None
    processors: bool = False
    sends: bool = False

    def of(self, cost: UnitCost) -> int:
        """Nanoseconds of a unit's cost."""
        if self.processors:
            once = cost.once_processor_ns(self.kind, self.tier)
            return once if self.once else cost.messages_processor_ns(self.kind, self.tier) - once
        if self.sends:
            return 10**6 if cost.duration_ns(self.kind, self.tier) else 0
        once = cost.once_ns(self.kind, self.tier)
        return once if self.once else cost.duration_ns(self.kind, self.tier) - once


def keys_of(model: CostModel) -> list[DurationKey]:
    """What of a unit's durations depends on the pattern, as ``durations_ns`` has it."""
    tiers, processors = len(model.mesh.tiers), model.compute_processor_share is not None
    sent = [*product(MESSAGES, range(tiers))]
    found = [DurationKey(kind, tier) for kind, tier in sent]
    found += [DurationKey(kind, tier, processors=True) for kind, tier in sent if processors]
    found += [
        DurationKey(Kind.FINAL_REDUCE, tier, once=True, processors=True)
        for tier in range(tiers)
        if processors
    ]
    found += [DurationKey(kind, tier, sends=True) for kind, tier in sent if model.is_late]
    found += [DurationKey(kind, tier, once=True) for kind in REDUCED_TOGETHER for tier in range(tiers)]
    found += [DurationKey(kind) for kind in (Kind.UPDATE, Kind.FETCH, Kind.STORE, Kind.STEP)]
    found += [DurationKey(kind) for kind in (Kind.ORTHOGONALIZE, Kind.APPLY)]
    return [*found, *RECOMPUTE_KEYS.values()]


RECOMPUTE_KEYS: Mapping[Way, DurationKey] = {way: DurationKey(Kind.COMPUTE, way=way) for way in WAYS}
"""The duration keys of a recompute choice: 1 ms for the way that is taken. ``paths.Network`` multiplies it by
the milliseconds that this adds to each backward use."""


@dataclass(frozen=True)
class ColumnPool:
    """The columns of one unit: its patterns, none dominated by another.

    ``levels[i]``: the triple of each tensor in pattern i; ``durations_ns`` [patterns, keys_of]; in
    bytes ``resident``, ``unshard``, ``gradient_buffer``, ``temporary``, ``host``, ``matrix`` [patterns] and
    ``scratch`` [patterns, tiers]. ``host`` is above 0 where the optimizer state lies in the host's memory;
    ``matrix``: of a group's buffer what is sure to be this unit's.
    ``ways`` [patterns]: of a recompute choice (``recompute_pool``) its ways, else None.
    """

    levels: tuple[tuple[Levels, ...], ...]
    durations_ns: NDArray[np.int64]
    resident: NDArray[np.int64]
    unshard: NDArray[np.int64]
    gradient_buffer: NDArray[np.int64]
    scratch: NDArray[np.int64]
    temporary: NDArray[np.int64]
    host: NDArray[np.int64]
    matrix: NDArray[np.int64]
    ways: tuple[Way | None, ...]

    @cached_property
    def recompute(self) -> NDArray[np.int64]:
        """1 where something is computed again, else 0 [patterns]."""
        return np.array([way is not None for way in self.ways], dtype=np.int64)

    @cached_property
    def plainest(self) -> list[int]:
        """Indices of the patterns with the fewest different triples, the first columns of a search."""
        variety = [len(set(levels)) for levels in self.levels]
        return [index for index, number in enumerate(variety) if number == min(variety)]

    @cached_property
    def leanest(self) -> list[int]:
        """Indices of the patterns that are not dominated in bytes; enough where time is ignored."""
        numbers = np.array([0 if way is None else 1 + WAYS.index(way) for way in self.ways])
        recompute = (numbers, -numbers)  # each needs less memory than the others at some events
        parts = (self.resident, self.unshard, self.gradient_buffer, self.temporary, self.host, self.matrix)
        sizes = np.column_stack([*parts, *recompute, self.scratch])
        return _undominated(sizes[:, :0], sizes)


def enumerate_patterns(
    tensors: Sequence[TensorSpec],
    model: CostModel,
    triples: Sequence[Levels],
    allowed: Sequence[frozenset[Levels]] | None = None,
    *,
    max_patterns: int = MAX_PATTERNS,
    offload: bool = False,
    max_buckets: int = MAX_BUCKETS,
) -> ColumnPool:
    """The column pool of a unit: all patterns, over atoms where there are too many, less dominated ones.

    A frozen tensor takes only a triple's ℓp. ``allowed``: the triples allowed for every tensor, None for all.
    ``offload``: whether to add each pattern with its optimizer state in the host's memory; ``max_buckets``:
    different triples in a pattern at most. UserError where pins leave no pattern.
    """
    sets = list(allowed) if allowed is not None else [frozenset(triples)] * len(tensors)
    one = max_buckets == 1
    atoms = [[*range(len(tensors))]] if one else _atoms(tensors, sets, len(triples), max_patterns)
    plain = list(dict.fromkeys(triple._replace(matrix="") for triple in triples))
    choices = [triples if tensors[atom[0]].matrix else plain for atom in atoms]
    levels = [
        pattern
        for pattern in dict.fromkeys(_by_tensor(tensors, atoms, a) for a in _assignments(choices))
        if allowed is None or all(triple in may for triple, may in zip(pattern, allowed, strict=True))
    ]
    if not levels:
        raise UserError(
            f"--pin: the tensors of one unit, {tensors[0].name} and others, would need more than "
            f"{MAX_BUCKETS} different triples; pin fewer of them apart"
        )
    known: dict[tuple[tuple[int, ...], Levels], list[BucketCost]] = {}
    costs = [_cost(tensors, pattern, model, known) for pattern in levels]
    if offload:
        # Not while matrices travel between the halves of their update: state would have to stay meanwhile.
        offloaded = [
            (pattern, moved)
            for pattern, cost in zip(levels, costs, strict=True)
            if not cost.matrix_bytes and (moved := model.offloaded(cost)).host_bytes
        ]
        levels += [pattern for pattern, _ in offloaded]
        costs += [cost for _, cost in offloaded]
    keys = keys_of(model)
    lengths = [[key.of(cost) for key in keys] for cost in costs]
    if max(map(max, lengths)) > MAX_NS:
        raise UserError(
            "collectives, optimizer.points or host.points: at this model's sizes the times measured come "
            "to more than a day; profile again"
        )
    durations = np.array(lengths)
    sizes = np.array([_sizes(cost) for cost in costs])
    kept = _undominated(durations, sizes)
    sizes = sizes[kept]
    return ColumnPool(
        tuple(levels[index] for index in kept),
        durations[kept],
        resident=sizes[:, 0],
        unshard=sizes[:, 1],
        gradient_buffer=sizes[:, 2],
        temporary=sizes[:, 3],
        host=sizes[:, 4],
        matrix=sizes[:, 5],
        scratch=sizes[:, 6:],
        ways=(None,) * len(kept),
    )


def recompute_names(model: CostModel) -> dict[str, str]:
    """By unit that can be recomputed, the name of that choice; no unit has such a name."""
    prefix = "recompute "
    while any(unit.name.startswith(prefix) for unit in model.profile.units):
        prefix = f"re{prefix}"
    return {unit: f"{prefix}{unit}" for unit in model.ways}


def recompute_pool(model: CostModel, ways: Sequence[Way | None]) -> ColumnPool:
    """The column pool of a unit's recomputation, one pattern per allowed way.

    Cost and saving of recomputation do not depend on the unit's levels. So the choice has a pool of its own,
    and the relaxation, the ILP and the rounding treat it as one more unit. Its time and bytes depend on the
    micro-batch size and are in ``paths.Network`` and in the buffer of activations.
    """
    tiers, keys = len(model.mesh.tiers), keys_of(model)
    none = np.zeros(len(ways), dtype=np.int64)
    durations = np.zeros((len(ways), len(keys)), dtype=np.int64)
    for pattern, way in enumerate(ways):
        if way is not None:
            durations[pattern, keys.index(RECOMPUTE_KEYS[way])] = 10**6
    return ColumnPool(
        ((),) * len(ways),
        durations,
        resident=none,
        unshard=none,
        gradient_buffer=none,
        temporary=none,
        host=none,
        matrix=none,
        scratch=np.zeros((len(ways), tiers), dtype=np.int64),
        ways=tuple(ways),
    )


def _sizes(cost: UnitCost) -> list[int]:
    fixed = [cost.resident_bytes, cost.unshard_bytes, cost.gradient_buffer_bytes, cost.update_temporary_bytes]
    return [*fixed, cost.host_bytes, least_buffer_bytes(cost), *cost.scratch_bytes]


def _undominated(durations: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[int]:
    """Indices such that every pattern is dominated by one of them (possibly itself), in order."""
    figures = np.hstack([durations, sizes])
    relative = figures / np.maximum(1, figures.max(axis=0))
    # A dominating pattern has the smaller sum, so it comes first; of equals the first enumerated stays.
    order = np.lexsort((np.arange(len(figures)), relative.sum(axis=1)))
    rows = np.empty_like(figures)
    kept: list[int] = []
    for index in order:
        if not (rows[: len(kept)] <= figures[index]).all(axis=1).any():
            rows[len(kept)] = figures[index]
            kept.append(int(index))
    return sorted(kept)


def unit_cost(tensors: Sequence[TensorSpec], levels: Sequence[Levels], model: CostModel) -> UnitCost:
    """What a unit costs with a triple for each of its tensors."""
    return model.unit(bucketise(zip(tensors, levels, strict=True), model.mesh))


def _cost(
    tensors: Sequence[TensorSpec],
    levels: Sequence[Levels],
    model: CostModel,
    known: dict[tuple[tuple[int, ...], Levels], list[BucketCost]],
) -> UnitCost:
    """``unit_cost`` with a cache, ``known``, by set of tensors and triple."""
    sets: dict[Levels, list[int]] = {}
    for index, triple in enumerate(levels):
        sets.setdefault(triple, []).append(index)
    parts: list[BucketCost] = []
    for triple, indices in sets.items():
        key = (tuple(indices), triple)
        if key not in known:
            buckets = bucketise([(tensors[i], triple) for i in indices], model.mesh)
            known[key] = [model.part(bucket) for bucket in buckets]
        parts += known[key]
    return model.combined(parts)


def _by_tensor(
    tensors: Sequence[TensorSpec], atoms: Sequence[Sequence[int]], assigned: Sequence[Levels]
) -> tuple[Levels, ...]:
    levels = [assigned[0]] * len(tensors)
    for atom, triple in zip(atoms, assigned, strict=True):
        for index in atom:
            tensor = tensors[index]
            levels[index] = triple.of(trainable=tensor.trainable, matrix=tensor.matrix)
    return tuple(levels)


def _atoms(
    tensors: Sequence[TensorSpec], allowed: Sequence[frozenset[Levels]], triples: int, limit: int
) -> list[list[int]]:
    """Atoms as lists of tensor indices: the smallest are joined until at most ``limit`` patterns exist."""
    atoms = [[index] for index in range(len(tensors))]

    def kind(atom: list[int]) -> object:
        first = tensors[atom[0]]
        return first.dtype, first.trainable, first.matrix, first.narrow, allowed[atom[0]]

    def nbytes(atom: list[int]) -> int:
        return sum(tensors[index].nbytes for index in atom)

    while _count(len(atoms), triples) > limit:
        pairs = [(a, b) for a, b in combinations(atoms, 2) if kind(a) == kind(b)]
        if not pairs:
            break
        first, second = min(pairs, key=lambda pair: (nbytes(pair[0]) + nbytes(pair[1]), pair))
        atoms = [atom for atom in atoms if atom not in (first, second)] + [sorted(first + second)]
        atoms.sort()
    return atoms


def _count(atoms: int, triples: int) -> int:
    """How many maps from atoms to triples use at most three triples: Σ_k C(triples, k) · onto(atoms, k)."""
    onto = {1: 1, 2: 2**atoms - 2, 3: 3**atoms - 3 * 2**atoms + 3}
    return sum(comb(triples, k) * onto[k] for k in range(1, min(MAX_BUCKETS, atoms, triples) + 1))


def _assignments(choices: Sequence[Sequence[Levels]]) -> Iterator[tuple[Levels, ...]]:
    """One of each atom's triples for it, at most ``MAX_BUCKETS`` different ones."""

    def extend(chosen: tuple[Levels, ...], used: frozenset[Levels]) -> Iterator[tuple[Levels, ...]]:
        if len(chosen) == len(choices):
            yield chosen
            return
        for triple in choices[len(chosen)]:
            with_it = used | {triple}
            if len(with_it) <= MAX_BUCKETS:
                yield from extend((*chosen, triple), with_it)

    return extend((), frozenset())
