"""The known schemes, each at its best hand-made setting: candidates of the search, and rows of its table.

A scheme gives every tensor the same levels (a *triple*). Beside it a user sets by hand the micro-batch size,
the prefetch depth, and which layers are recomputed: none, every k-th, or all. A lower bound is computed for
each such setting (``Search.floors_of``); only those that may be the fastest, or the leanest of the fast ones,
are replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.recompute import HOST, NOTHING, PARTIAL_WAYS, WAYS, Recomputed, Way
from hzplan.core.schedule import Pace
from hzplan.cost.model import CostModel
from hzplan.formats.plan import Recompute
from hzplan.show import readable
from hzplan.solver.evaluate import Evaluation, Modes, fastest_of, within, within_objective
from hzplan.solver.search import Bounded, Request, Search, Uniform

EVERY = (2, 3, 4, 5, 6, 8)
"""The distances k at which every k-th layer is recomputed, as users set them (torchtitan's selective
option)."""
ORDINALS = {2: "2nd", 3: "3rd"}
MOST_LEAN = 3
"""Number of too slow replays after which ``leanest`` stops looking for a setting with less memory."""
SAME = 1e-6
"""Relative difference below which two predicted steps count as equal."""
SLACK_BYTES, SLACK_SHARE = 2**30, 0.05
"""Peak memories that differ by less than the smaller of 1 GiB and 5 % count as equal."""


def slack_bytes(peak_bytes: int) -> float:
    """Bytes above ``peak_bytes`` within which another plan's peak counts as equal."""
    return min(SLACK_BYTES, SLACK_SHARE * peak_bytes)


def schemes(mesh: Mesh, *, flat: bool = False) -> dict[str, Levels]:
    """The known schemes as triples. ``flat``: DDP sums over all tiers at once.

    HSDP shards inside the fastest tier, or to the middle level of a single tier; hpZ (ZeRO++) keeps
    parameters there and shards gradients and optimizer states over all ranks.
    """
    finest = mesh.levels
    inner = mesh.tier_bounds[0][1] if len(mesh.tiers) > 1 else finest // 2
    found = {"ZeRO-3": Levels(finest, finest, finest)}
    if mesh.shards[inner] not in (1, mesh.world):
        found["hpZ"] = Levels(inner, finest, finest)
        found["HSDP"] = Levels(inner, inner, inner)
    found["ZeRO-2"] = Levels(0, finest, finest)
    return found | {"ZeRO-1": Levels(0, 0, finest), "DDP": Levels(0, 0, 0, flat=flat)}


def schemes_of(model: CostModel) -> dict[str, Levels]:
    """The known schemes of a question, whose DDP sums as its plans do."""
    return schemes(model.mesh, flat=model.flat_sums)


@dataclass(frozen=True)
class RecomputeOptions:
    """The recomputable units of a profile. ``blocks``: those with like units, which are the layers of a
    model, in order (all where no unit has a like one); ``all``: every recomputable unit; ``partial``: the
    ways that all blocks have beside the full one."""

    blocks: tuple[str, ...]
    all: tuple[str, ...]
    partial: tuple[Way, ...] = ()

    @classmethod
    def of(cls, model: CostModel) -> RecomputeOptions:
        """Units are alike where their tensors have the same shapes and dtypes."""
        able = model.recomputable
        many = Counter(model.like[unit] for unit in able)
        repeated = tuple(unit for unit in able if many[model.like[unit]] > 1 and model.tensors[unit])
        blocks = repeated or able
        parts = (way for way in PARTIAL_WAYS if way not in ("chunks", HOST))
        ways = (way for way in parts if blocks and _all_have(model, blocks, way))
        return cls(blocks, able, tuple(ways))

    def by_hand(self, asked: Recompute) -> list[Recomputed]:
        """What users recompute by hand, smallest first: none, every k-th block, all blocks in a part, all
        blocks, all units."""
        if asked == "all":
            return [Recomputed.of(self.all)]
        found = [NOTHING, *(self.every(k) for k in sorted(EVERY, reverse=True))]
        found += [Recomputed.of(self.blocks, way) for way in self.partial]
        found += [Recomputed.of(self.blocks), Recomputed.of(self.all)]
        return list(dict.fromkeys(found)) if asked == "choose" else found[:1]

    def every(self, k: int) -> Recomputed:
        """Every k-th block."""
        return Recomputed.of(self.blocks[k - 1 :: k])

    def first(self, count: int) -> Recomputed:
        """The first ``count`` blocks, and beyond them all other units."""
        return Recomputed.of(self.blocks[:count] if count <= len(self.blocks) else self.all)

    def name(self, chosen: Recomputed) -> str:
        """``none``, ``all``, ``every 3rd`` or ``22 of 80``, counted in blocks; ``operations`` where that part
        of all blocks is recomputed, ``8 of 32, operations 24`` where ways are mixed."""
        if not chosen:
            return "none"
        by_way = {way: frozenset(u for u, of in chosen.items() if of == way) for way in reversed(WAYS)}
        parts = [self._of(units, way) for way, units in by_way.items() if units]
        return ", ".join(parts)

    def _of(self, units: frozenset[str], way: Way) -> str:
        blocks = frozenset(self.blocks)
        if way == "chunks":
            return readable.way(way)
        if way == HOST:
            return f"{len(units)} on the host"
        if way != "full":
            of = len(units & blocks)
            return way if units >= blocks else f"{way} {of or len(units)}"
        if units >= blocks:
            return "all"
        for k in EVERY:
            if units == frozenset(self.every(k)):
                return f"every {ORDINALS.get(k, f'{k}th')}"
        named = units & blocks
        return f"{len(named)} of {len(blocks)}" if named else f"{len(units)} of {len(self.all)}"


def _all_have(model: CostModel, units: Iterable[str], way: Way) -> bool:
    return all(way in model.ways[unit] for unit in units)


@dataclass(frozen=True)
class Row:
    """A scheme at its best.

    ``found``: the fastest of its settings that fit, and of equally fast ones the leanest; where the scheme
    may be the plan, the leanest within the tie; where none fits, the one with the least memory. ``settings``:
    all of them. ``allowed``: whether the options of the question admit it as the plan.
    """

    name: str
    found: Evaluation
    fits: bool
    settings: Sequence[Bounded]
    allowed: bool = True


class Settings:
    """The hand-made settings of triples, each bounded once and replayed only where it may be better."""

    def __init__(self, searches: Sequence[Search], request: Request) -> None:
        self.searches, self.request = searches, request
        self.model = searches[0].question.model
        self.recompute_options = RecomputeOptions.of(self.model)
        self._uniforms: dict[Levels, Uniform] = {}
        self._firsts: dict[int, Recomputed] = {}
        self._replayed: dict[tuple[Levels, Recomputed, int], Evaluation] = {}

    def of(self, triple: Levels, recompute_choices: Sequence[Recomputed] | None = None) -> list[Bounded]:
        """The settings of a triple with each of ``recompute_choices``; None: those that are made by hand."""
        uniform = self._uniform(triple)
        if recompute_choices is None:
            recompute_choices = self.recompute_options.by_hand(self.request.recompute)
        return [one for search in self.searches for one in search.floors_of(uniform, recompute_choices)]

    def chosen(self, triple: Levels) -> list[Bounded]:
        """The settings of a triple with just as many recomputed blocks as the budget needs; none where the
        question fixes recomputation."""
        if self.request.recompute != "choose":
            return []
        uniform = self._uniform(triple)
        return [
            one
            for search in self.searches
            for one in search.floors_of(uniform, [self._fewest(search, uniform)])
        ]

    def _uniform(self, triple: Levels) -> Uniform:
        if triple not in self._uniforms:
            self._uniforms[triple] = Uniform.of(self.model, triple, self.searches[0].question.network)
        return self._uniforms[triple]

    def may_fit(self, triple: Levels) -> bool:
        """Whether a triple fits the budget at the smallest micro-batch, with all units recomputed or none."""
        smallest = min(search.question.micro_batch for search in self.searches)
        nothing, everything = NOTHING, Recomputed.of(self.recompute_options.all)
        choices = {"none": [nothing], "all": [everything]}
        activations = min(
            self.model.activations.peak_bytes(smallest, recompute)
            for recompute in choices.get(self.request.recompute, [nothing, everything])
        )
        return any(
            search.base_memory(self._uniform(triple))
            .with_activations(activations, search.question.schedule)
            .peak
            <= self.request.memory_bytes
            for search in self.searches
        )

    def replay(self, one: Bounded) -> Evaluation:
        """Replay a setting, once."""
        key = one.uniform.triple, one.recompute, id(one.search)
        if key not in self._replayed:
            self._replayed[key] = one.search.replay(one.uniform.levels, Modes(one.recompute))
        return self._replayed[key]

    def fits(self, one: Bounded) -> bool:
        """Whether its peak is within the budget."""
        return one.peak_bytes <= self.request.memory_bytes

    def fastest(self, settings: Sequence[Bounded], limit_ns: float = float("inf")) -> Evaluation | None:
        """The fastest setting that fits and has a step below ``limit_ns``; None where there is none.

        For each micro-batch size and recomputation only the deepest paces are replayed, because a deeper pace
        lets every task begin no later.
        """
        best = None
        fitting = [one for one in settings if self.fits(one)]
        for one in sorted(_deepest(fitting), key=lambda one: (one.floor_ns, one.peak_bytes)):
            if one.floor_ns >= limit_ns:
                break
            found = self.replay(one)
            if within_objective(found, limit_ns) and found.predicted.period_ns < limit_ns:
                best, limit_ns = found, found.predicted.period_ns
        return best

    def leanest(
        self, settings: Sequence[Bounded], start: Evaluation, ceiling_ns: float, most: int = MOST_LEAN
    ) -> Evaluation:
        """The leanest setting whose step is within the ceiling, or ``start`` where none is leaner.

        Other paces of the start's micro-batch size and recomputation are tried first, because they cost
        least; then other settings, until ``most`` were too slow.
        """
        kind = start.micro_batch, start.modes.recompute
        alike = [one for one in settings if _kind(one) == kind]
        best = self._leanest(alike, start, ceiling_ns, len(alike))
        others = [one for one in settings if _kind(one) != kind]
        best = self._leanest(others, best, ceiling_ns, most)
        if best is start:
            return start
        limit = best.memory.peak + slack_bytes(best.memory.peak)  # as lean, and perhaps faster
        kind = best.micro_batch, best.modes.recompute
        as_lean = [one for one in settings if _kind(one) == kind and one.peak_bytes <= limit]
        return fastest_of([best, *map(self.replay, _deepest(as_lean))])

    def _leanest(
        self, settings: Sequence[Bounded], start: Evaluation, ceiling_ns: float, most: int
    ) -> Evaluation:
        """``leanest`` over the given settings, tried by rising memory until ``most`` were too slow."""
        goal = start.memory.peak - slack_bytes(start.memory.peak)
        lighter = [one for one in settings if one.peak_bytes < goal and one.floor_ns <= ceiling_ns]
        slow: list[Bounded] = []
        for one in sorted(lighter, key=lambda one: one.peak_bytes):
            if any(_shallower(one, other) for other in slow):
                continue
            if len(slow) == most:
                break
            found = self.replay(one)
            if within(found, ceiling_ns):
                return found
            slow.append(one)
        return start

    def row(self, name: str, settings: Sequence[Bounded]) -> Row:
        """A scheme, or a user's own setting, at its fastest."""
        best = self.fastest(settings)
        if best is None:
            least = self.replay(min(settings, key=lambda one: one.peak_bytes))
            return Row(name, least, False, settings)
        return Row(name, best, True, settings)

    def rows(self) -> list[Row]:
        """Every known scheme at its fastest."""
        return [self.row(name, self.of(triple)) for name, triple in schemes_of(self.model).items()]

    def lean(self, row: Row, ceiling_ns: float, most: int = MOST_LEAN) -> Row:
        """A row with the leanest of its settings whose step is within the ceiling; see ``leanest``."""
        if not row.fits:
            return row
        found = self.leanest(row.settings, row.found, ceiling_ns, most)
        return replace(row, found=self._with_fewer_messages(row.settings, found, ceiling_ns))

    def _with_fewer_messages(
        self, settings: Sequence[Bounded], found: Evaluation, ceiling_ns: float
    ) -> Evaluation:
        """The fastest of the settings within the ceiling that are as lean and join messages more than
        ``found``; else that. Sums over tiers that wait long enough to be joined cost processors more than
        predictions count."""
        if not self.model.flat_sums:
            return found
        limit = found.memory.peak + slack_bytes(found.memory.peak)
        kind = found.micro_batch, found.modes.recompute
        fewer = [
            one
            for one in settings
            if _kind(one) == kind
            and one.peak_bytes <= limit
            and one.search.question.schedule.message_bytes > found.schedule.message_bytes
        ]
        near = [one for one in map(self.replay, _deepest(fewer)) if within(one, ceiling_ns)]
        return fastest_of(near) if near else found

    def as_fast(self, row: Row) -> Row:
        """A row with the leanest of its equally fast settings, so that a gain over it owes nothing to the
        tie."""
        return self.lean(row, row.found.predicted.period_ns * (1 + SAME), 0)

    def _fewest(self, search: Search, uniform: Uniform) -> Recomputed:
        """The smallest number of first blocks whose recomputation makes a triple fit; else all units."""
        low, high = 0, len(self.recompute_options.blocks) + 1
        question, without = search.question, search.base_memory(uniform)
        while low < high:
            middle = (low + high) // 2
            recompute = self._first(middle)
            peak = self.model.activations.peak_bytes(question.micro_batch, recompute, question.schedule)
            if without.with_activations(peak, question.schedule).peak <= self.request.memory_bytes:
                high = middle
            else:
                low = middle + 1
        return self._first(low)

    def _first(self, count: int) -> Recomputed:
        if count not in self._firsts:
            self._firsts[count] = self.recompute_options.first(count)
        return self._firsts[count]


def _pace(one: Bounded) -> Pace:
    return one.search.question.schedule.pace


def _kind(one: Bounded) -> tuple[int, Recomputed]:
    return one.search.question.micro_batch, one.recompute


def _shallower(one: Bounded, other: Bounded) -> bool:
    """Whether the paces differ, and the first's is nowhere deeper."""
    if _kind(one) != _kind(other):
        return False
    mine, theirs = _pace(one), _pace(other)
    nowhere = mine.prefetch <= theirs.prefetch and mine.gradient_buffers <= theirs.gradient_buffers
    alike = (mine.message_bytes, mine.matrix_units) == (theirs.message_bytes, theirs.matrix_units)
    return nowhere and alike and mine != theirs


def _deepest(settings: Sequence[Bounded]) -> list[Bounded]:
    kinds: dict[object, list[Bounded]] = {}
    for one in settings:
        kinds.setdefault(_kind(one), []).append(one)
    return [
        one for some in kinds.values() for one in some if not any(_shallower(one, other) for other in some)
    ]
