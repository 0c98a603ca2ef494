"""The search under one micro-batch size and pace: a relaxation, plans rounded from it, then ILPs."""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, floor
from operator import add
from typing import NamedTuple

import numpy as np

from hzplan.core.buffers import assign_slots
from hzplan.core.hierarchy import Levels
from hzplan.core.layout import Dtype, gradient_bytes
from hzplan.core.recompute import Recomputed, Way
from hzplan.core.schedule import MessageOrder, Pace
from hzplan.core.wire import Wire
from hzplan.cost.memory import Memory, memory
from hzplan.cost.model import CostModel
from hzplan.cost.unit import UnitCost
from hzplan.formats.plan import Recompute, Target
from hzplan.formats.profile import Profile
from hzplan.solver.candidates import Candidates
from hzplan.solver.evaluate import Evaluation, Modes, evaluate, uniform, unit_costs
from hzplan.solver.paths import MS, LazyConstraint, Network
from hzplan.solver.patterns import RECOMPUTE_KEYS, ColumnPool
from hzplan.solver.pins import Pins
from hzplan.solver.problem import build_fastest, build_smallest, optimise
from hzplan.solver.question import MIB, Coefficients, Question
from hzplan.solver.relaxation import TOLERANCE, Relaxation
from hzplan.solver.rounding import rounded
from hzplan.solver.rows import INFINITY, PERIOD
from hzplan.solver.target import Grammar, grammar_of
from hzplan.solver.tree import Limits, Split, Tree, halves

PREFETCH_DEPTHS = (1, 2, 3)
MATRIX_GROUPS = (2, 4, 8, 16)
"""How many groups of units with matrices are tried: more overlap, and share work less evenly."""
MESSAGES = (3, 6)
"""About how many messages of gradients a step has where units are reduced together."""
LEAST_WAITS = 0.01
LEAST_GAIN = 0.02
"""Share of replicas' step by which sums tier by tier have to be faster than those over all tiers at once:
three messages for one ask more of processors beside compute than profiles of messages alone say."""
FIRST_OFFER = 24  # patterns per unit in the first ILP
MAX_POSITIONS = 2048  # uses with nodes of their own; what a longer step leaves out costs tightness, not truth
ROUNDS = 8  # of column and row generation in one node before another search has its turn
MAX_NODES = 60  # branch-and-bound nodes that one search expands
TAIL = 0.1
"""Share of the gap asked for: a node whose rounds raised its bound by less is branched on."""
PRICES = tuple(10.0**power for power in range(-3, 4))
"""Prices of memory against time, each scaled to its range, at which the best patterns become the relaxation's
first columns."""
SMALLEST_S = 10.0  # time limit of each ILP that minimises memory


@dataclass(frozen=True)
class Request:
    """The question that a user asks the solver.

    ``host_bytes``: of the host's memory that a rank may take for optimizer state. ``reduce_dtype``: what
    gradients travel in; None: as they are kept; ``narrow_sums``: libraries add up in it; ``wire``: narrower
    formats. ``pins``: what is decided already, and
    ``recompute``: whether it is decided which units compute their forward again. ``tie``: the share of a step
    by which predictions may differ and count as equal; None: what the gap says (``prefer.tie_of``).
    ``target``: the runtime that the plan is for (``solver.target``); None: ours, which can do all.
    """

    memory_bytes: int
    global_batch: int
    gap: float = 0.005
    time_limit_s: float = 60.0
    clip: bool = True
    reduce_dtype: Dtype | None = None
    narrow_sums: bool = False
    wire: Wire | None = None
    depths: tuple[int, ...] = PREFETCH_DEPTHS
    pins: tuple[str, ...] = ()
    recompute: Recompute = "choose"
    host_bytes: int = 0
    tie: float | None = None
    target: Target | None = None


def cost_model(profile: Profile, request: Request) -> CostModel:
    """The costs of a question's plans; with whole tensors' gradients summed as replicas are faster by.

    That is decided once, by replicas' predicted step, like what travels in which format: a plan whose sums
    are of both kinds has more messages, and nothing that either of them lacks. At once is one message for
    three, so going by tier has to be faster by ``LEAST_GAIN``.
    """
    by_tier = CostModel(profile, request.reduce_dtype, request.narrow_sums, request.wire)
    if request.target is not None or not by_tier.knows_flat_sums:
        return by_tier
    at_once = replace(by_tier, flat_sums=True)
    gains = _replicas_ns(by_tier, request) < (1 - LEAST_GAIN) * _replicas_ns(at_once, request)
    return by_tier if gains else at_once


def _replicas_ns(model: CostModel, request: Request) -> float:
    """The predicted step of replicas at the best pace, with the smallest micro-batches."""
    profile = model.profile
    fitting = [
        size for size in profile.micro_batches if request.global_batch % (profile.data_ranks * size) == 0
    ]
    if not fitting or request.global_batch < 1:
        return INFINITY  # which is said elsewhere
    size, found = min(fitting), INFINITY
    accumulation = min(3, request.global_batch // (profile.data_ranks * size))  # more are like the second
    [whole] = (levels for levels in model.triples if levels.three == (0, 0, 0))
    for pace in paces(model, [max(request.depths)]):
        schedule = model.schedule(**pace._asdict(), accumulation=accumulation, clip=request.clip)
        found = min(found, evaluate(model, uniform(profile, whole), schedule, size).predicted.period_ns)
    return found


def grammar_for(profile: Profile, request: Request) -> Grammar | None:
    """The limits of the question's target."""
    least = profile.data_ranks * max(profile.micro_batches)
    return grammar_of(
        request.target,
        profile,
        accumulates=request.global_batch > least,
        reduce_dtype=request.reduce_dtype,
    )


def pins_of(profile: Profile, request: Request) -> Pins:
    """The question's pins, within the limits of its target."""
    return Pins(request.pins, profile, grammar_for(profile, request))


def paces(model: CostModel, depths: Iterable[int], grammar: Grammar | None = None) -> list[Pace]:
    """The paces to search, of those within a target's limits.

    For every depth as many buffers as uses in flight, and as many as there are reduces, which costs memory
    only where gradients are sharded; and the least depth with one buffer, which needs the least memory.
    """
    most = _reduces(model)
    listed = sorted(depths)
    apart = [Pace(depth, count) for depth in listed for count in (min(depth + 1, most), most)]
    joined = [
        Pace(depth, count, nbytes)
        for nbytes in message_sizes(model)
        if (count := _reduces(model, nbytes)) < most
        for depth in dict.fromkeys((listed[0], listed[-1] if model.flat_sums else listed[0]))
    ]
    found = list(dict.fromkeys([*apart, Pace(listed[0], 1), *joined]))
    found += [pace._replace(matrix_units=units) for pace in found[:1] for units in matrix_groups(model)]
    return found if grammar is None else grammar.paces(found, most)


def matrix_groups(model: CostModel) -> list[int]:
    """Of how many units matrices are brought together at once, beside all: about ``MATRIX_GROUPS`` groups."""
    units = sum(any(tensor.matrix for tensor in tensors) for tensors in model.tensors.values())
    found = dict.fromkeys(-(-units // groups) for groups in MATRIX_GROUPS if groups <= units)
    return [size for size in found if size < units]


def _reduces(model: CostModel, message_bytes: int = 0) -> int:
    """The reduces of a micro-batch."""
    schedule = model.schedule(
        prefetch=1,
        accumulation=1,
        clip=False,
        gradient_buffers=sys.maxsize,
        message_bytes=message_bytes,
    )
    return schedule.gradient_buffers


def message_sizes(model: CostModel) -> list[int]:
    """Largest messages that units' gradients may be joined to, bytes: about ``MESSAGES`` of a step.

    None where all-reduces do not wait long: over all of a step's units less than ``LEAST_WAITS`` of compute.
    """
    mesh, uses = model.mesh, range(len(model.profile.uses))
    stages = [mesh.stage_in_tier(tier, 0, mesh.levels) for tier in range(len(mesh.tiers))]
    stages = [mesh.whole] if model.flat_sums else stages
    waits = sum(model.collective_ns("all_reduce", stage, 0) for stage in stages if stage is not None)
    computes = min(
        sum(model.compute_ns(use, size) for use in uses) // size for size in model.profile.micro_batches
    )
    if waits * _reduces(model) < LEAST_WAITS * computes:
        return []
    gradients = sum(gradient_bytes(tensors) for tensors in model.tensors.values())
    # Greed fills a message to between half and all of its size.
    return [ceil(gradients / (number * 3 / 4)) for number in MESSAGES]


@dataclass(frozen=True)
class Uniform:
    """One triple for all tensors: ``levels`` and ``units`` (costs) by unit. ``network``: that of any search;
    rows and duration keys are the same in all."""

    triple: Levels
    levels: Mapping[str, tuple[Levels, ...]]
    units: Mapping[str, UnitCost]
    network: Network

    @classmethod
    def of(cls, model: CostModel, triple: Levels, network: Network) -> Uniform:
        """The triple with its costs under a cost model."""
        levels = uniform(model.profile, triple)
        return cls(triple, levels, unit_costs(model, levels), network)

    @cached_property
    def durations(self) -> Coefficients:
        """Milliseconds [units, keys], nothing recomputed."""
        return self.network.durations(self.units)

    @cached_property
    def base_memory(self) -> dict[int, Memory]:
        """A cache of ``Search.base_memory``, by the search's id."""
        return {}


class Bounded(NamedTuple):
    """A plan with one triple for all tensors, not replayed: its peak memory, the busy time of its links in
    ``communication_ns``, and in ``floor_ns`` a lower bound on its step."""

    uniform: Uniform
    recompute: Recomputed
    search: Search
    peak_bytes: int
    communication_ns: float
    floor_ns: float


Costs = Mapping[str, Coefficients]
"""Per unit: for each pattern, a lower bound in ms on the step of any plan that uses it (bound plus
margin)."""


class OpenNode(NamedTuple):
    """An open node of the branch and bound: the plans within ``limits``, with a lower bound in ms on all of
    them (``bound``) and by pattern (``costs``). ``number``: the order of creation; ``tree``: its proof."""

    bound: float
    number: int
    limits: Limits
    costs: Costs
    tree: Tree


class Search:
    """The branch and bound under one micro-batch size, prefetch depth and number of gradient buffers, and in
    one message order if there is one.

    The relaxation over *all* patterns gives a lower bound for all plans, and one for the plans with each
    pattern; over several nodes the smallest counts. The ILP gets only the patterns with the smallest bounds.
    A plan of ILP patterns costs at least the ILP's bound; any other plan has a pattern that was left out, and
    costs at least that pattern's bound. The smaller of the two is this search's bound.
    """

    def __init__(
        self,
        model: CostModel,
        micro_batch: int,
        pace: Pace,
        request: Request,
        pools: Mapping[str, ColumnPool],
        binaries: Mapping[str, str],
        order: MessageOrder | None = None,
    ) -> None:
        accumulation = request.global_batch // (model.profile.data_ranks * micro_batch)
        explicit = min(accumulation, max(2, MAX_POSITIONS // len(model.profile.uses)))
        schedule, short = (
            model.schedule(
                **pace._asdict(),
                accumulation=micro_batches,
                clip=request.clip,
                offload=request.host_bytes > 0,
                order=order,
            )
            for micro_batches in (accumulation, explicit)
        )
        slots = assign_slots(schedule, model.tensors)
        self.request, self.pools = request, pools
        self.question = Question(
            *(model, schedule, short, slots, pools, binaries, micro_batch),
            budget_bytes=request.memory_bytes,
            host_bytes=request.host_bytes,
        )
        uses = range(len(model.profile.uses))
        computes_ms = accumulation * sum(model.compute_ns(use, micro_batch) for use in uses) * MS
        self.tree = Tree(value=computes_ms)
        self.open_nodes = [OpenNode(computes_ms, 0, {}, {}, self.tree)]
        self.expanded = self.numbered = 0  # nodes expanded, nodes made
        self.fathomed_ms = INFINITY  # the smallest bound of a fathomed node
        self.fathomed: Costs = {}  # likewise, by pattern
        self.proven_ms = 0.0  # the largest bound that ILPs have proven
        self.rounded: Coefficients | None = None

    @cached_property
    def lp(self) -> Relaxation:
        """The relaxation, made when it is first asked for."""
        return Relaxation(self.question)

    @property
    def ways(self) -> set[Way | None]:
        """What may become of units' activations."""
        return {way for name in self.question.binaries.values() for way in self.pools[name].ways}

    def in_order(self, order: MessageOrder) -> Search:
        """The same search in a message order."""
        q = self.question
        return Search(q.model, q.micro_batch, q.schedule.pace, self.request, self.pools, q.binaries, order)

    def __str__(self) -> str:
        return f"micro-batch {self.question.micro_batch}, {self.question.schedule.pace}"

    def evaluate(self, choice: Mapping[str, int]) -> Evaluation:
        """Replay a choice of patterns."""
        binaries = self.question.binaries
        names = {*binaries.values()}
        levels = {u: self.pools[u].levels[index] for u, index in choice.items() if u not in names}
        ways = {unit: self.pools[name].ways[choice[name]] for unit, name in binaries.items()}
        recompute = Recomputed({unit: way for unit, way in ways.items() if way is not None})
        offload = (unit for unit in levels if self.pools[unit].host[choice[unit]])
        return self.replay(levels, Modes(recompute, frozenset(offload)))

    def replay(self, levels: Mapping[str, tuple[Levels, ...]], modes: Modes) -> Evaluation:
        """Replay a choice of levels and modes."""
        q = self.question
        return evaluate(q.model, levels, q.schedule, q.micro_batch, q.slots, modes)

    def fits(self, one: Evaluation) -> bool:
        """Whether a plan is within the budgets of device and host memory."""
        return one.fits(self.request.memory_bytes, self.request.host_bytes)

    @property
    def bound_ms(self) -> float:
        """The lower bound of this search, ms."""
        return max(
            self.proven_ms, min(self.fathomed_ms, self.open_nodes[0][0] if self.open_nodes else INFINITY)
        )

    def may_improve(self, found: Candidates) -> bool:
        """Whether this search may still have a plan that is better by more than the gap."""
        return self._may_improve(self.bound_ms, found)

    def _may_improve(self, bound_ms: float, found: Candidates) -> bool:
        return bound_ms * (1 + self.request.gap) < found.least_ms - TOLERANCE

    @property
    def has_open_nodes(self) -> bool:
        """Whether an open node is left that may raise the bound."""
        return bool(self.open_nodes) and self.expanded < MAX_NODES and self.open_nodes[0][0] <= self.bound_ms

    def branch(self, found: Candidates, known: Mapping[int, set[int]]) -> None:
        """Solve the relaxation of the best open node, branch on it, and add plans rounded from it to
        ``found``.

        Shared buffers are fractional in the relaxation: a buffer that serves a third of each unit is counted
        at a third of its size. So one child limits the buffer to the sizes that it serves in full, the other
        makes it larger; likewise for a fractional number of recomputed like units. ``known``: patterns that
        other searches had in their solutions, by the pool's id.
        """
        bound, _, limits, costs, tree = self.open_nodes[0]  # in the heap until its children replace it
        if not self.expanded:
            self.lp.add_cycles(self.question.network.capacities)
            for unit, patterns in self._beginning(known).items():
                self.lp.offer(unit, patterns)
        parts: list[tuple[Limits, Tree]] = []
        if self.lp.restrict(limits):
            reached, converged, costs = self._rounds(found, costs, tree)
            converged |= reached - bound < TAIL * self.request.gap * bound
            bound = max(bound, reached)
            parts = self._children(bound, limits, found, tree, converged=converged)
            if not parts:
                self.fathomed = _least([self.fathomed, costs] if self.fathomed else [costs])
                self.fathomed_ms = min(self.fathomed_ms, bound)
        open_nodes = list(self.open_nodes)
        heapq.heappop(open_nodes)
        self.expanded += 1
        for part, its_tree in parts:
            self.numbered += 1
            heapq.heappush(open_nodes, OpenNode(bound, self.numbered, part, costs, its_tree))
        self.open_nodes = open_nodes
        if self.lp.solved:
            for unit, pool in self.pools.items():
                known[id(pool)].update(self.lp.shares(unit))

    def _children(
        self, bound: float, limits: Limits, found: Candidates, tree: Tree, *, converged: bool
    ) -> list[tuple[Limits, Tree]]:
        """A node's children: the same again, two that cover every plan, or none (fathomed)."""
        if not self.lp.solved or not self._may_improve(bound, found):
            return []
        if not converged:
            return [(limits, tree)]
        if self.lp.memory_violation_mib > TOLERANCE:  # the penalty is too low, or nothing fits
            return [(limits, tree)] if self.lp.raise_penalty() else []
        split: Split | None
        if (undecided := self.lp.fractional_count()) is not None:
            group, number = undecided
            split = group, float(floor(number)), float(ceil(number))
        else:
            split = self.lp.fractional_buffer()
        return [] if split is None else list(zip(halves(limits, split), tree.divide(split), strict=True))

    def _rounds(self, found: Candidates, costs: Costs, tree: Tree) -> tuple[float, bool, Costs]:
        """Generate columns and rows for some rounds: (lower bound in ms, whether none were missing at the
        end, bounds by pattern, which begin at ``costs``)."""
        lp, network, best = self.lp, self.question.network, 0.0
        for number in range(1, ROUNDS + 1):
            if not lp.solve():
                return best, True, costs
            reduced = lp.reduced_costs()
            bound, margins = lp.bound(reduced)
            mine = {unit: bound + more for unit, more in margins.items()}
            costs = {unit: np.maximum(costs[unit], of) for unit, of in mine.items()} if costs else mine
            best = max(best, bound)
            tree.see(bound, lp.multipliers())
            period = lp.period_ms * (1 + 1e-7)
            durations = lp.durations()
            at = [durations]
            if self.rounded is not None:  # cycles half-way to the rounded plan cut deeper
                at.append((durations + self.rounded) / 2)
            cycles: list[LazyConstraint] = []
            for windows in (False, True):  # windows take longer to look through
                if not cycles and (not windows or not network.graph.plain):
                    some = [cycle for one in at for cycle in network.critical_cycles(one, windows=windows)]
                    cycles = [cycle for cycle in some if cycle.at(durations) > period]
            widened = lp.add_event_rows()
            converged = not lp.grow(reduced) and not cycles and not widened
            done = converged or not self._may_improve(best, found)
            if done or number in (1, ROUNDS):
                self._add(rounded(lp), found)
            if done:
                return best, converged, costs
            lp.add_cycles(cycles)
        return best, False, costs

    def _add(self, choice: Mapping[str, int] | None, found: Candidates) -> None:
        if choice is not None:
            self.rounded = self.question.durations_of(choice)
            evaluated = self.evaluate(choice)
            if self.fits(evaluated):
                found.add(evaluated)

    def _beginning(self, known: Mapping[int, set[int]]) -> dict[str, list[int]]:
        """The first columns by unit: the best patterns at ``PRICES`` of memory, and those of other
        searches."""
        network = self.question.network
        load = sum((cut.weights for cut in network.loads), np.zeros(network.shape))
        found: dict[int, list[int]] = {}
        for unit, pool in self.pools.items():
            if id(pool) not in found:
                durations = self.question.durations_ms[unit] @ load[network.rows[unit]]
                nbytes = self._weight(unit)
                time_range, byte_range = np.ptp(durations) or 1.0, float(np.ptp(nbytes)) or 1.0
                picks = [int(np.argmin(durations / time_range + p * nbytes / byte_range)) for p in PRICES]
                found[id(pool)] = sorted({*picks, *known.get(id(pool), ())})
        return {unit: found[id(pool)] for unit, pool in self.pools.items()}

    def _weight(self, unit: str) -> Coefficients:
        """Bytes of a unit's patterns as if no buffer were shared; of equal ones recomputation counts as
        less."""
        pool = self.pools[unit]
        return np.asarray(pool.resident + pool.unshard + pool.gradient_buffer - pool.recompute, dtype=float)

    def _plain(self, unit: str) -> int:
        """The pattern of a unit with the least bytes, and nothing in the host's memory."""
        return int(np.argmin(np.where(self.pools[unit].host, np.inf, self._weight(unit))))

    @property
    def smallest(self) -> Evaluation:
        """The plan with the least peak memory that was found, whatever its time."""
        return self._smallest[0]

    @property
    def certainly_too_large(self) -> bool:
        """Whether it is proven that no plan fits."""
        return self._smallest[1] > self.request.memory_bytes

    @cached_property
    def _smallest(self) -> tuple[Evaluation, float]:
        """The plan with the least memory, and a lower bound on the memory, bytes.

        The bound holds by the reasoning of ``run``, with memory in the place of time.
        """
        bound, margins = self._least_memory()
        for unit, pool in self.pools.items():
            lean = np.full(len(pool.levels), np.inf)
            lean[pool.leanest] = margins[unit][pool.leanest]
            margins[unit] = lean
        reach, limit = sys.float_info.max, FIRST_OFFER
        while True:
            offered = _cheapest(margins, reach, limit)
            problem = build_smallest(self.question, offered)
            solved = optimise(problem, 0.0, SMALLEST_S)
            if solved == "nothing":  # out of time without a solution
                plain = {unit: self._plain(unit) for unit in self.pools}
                return self.evaluate(plain), bound / MIB
            found = self.evaluate(problem.choice())
            if solved != "optimal":
                return found, bound / MIB
            reach = problem.lp.objective.value() - bound + TOLERANCE
            if all(len(offered[unit]) >= (values <= reach).sum() for unit, values in margins.items()):
                peak = found.memory.peak
                if self.question.model.matrices is None:
                    return found, peak
                # Of what hosts receive it counts each one's share, and the plan the largest.
                return found, min(peak, (problem.lp.objective.value() - TOLERANCE) / MIB)
            limit *= 8

    def _least_memory(self) -> tuple[float, dict[str, Coefficients]]:
        """A bound on the memory in MiB, and every pattern's margin."""
        lp = Relaxation(self.question, least_memory=True)
        for unit, pool in self.pools.items():
            lp.offer(unit, [self._plain(unit), *pool.plainest])
        while True:
            assert lp.solve(), "without a budget something always fits"
            reduced, widened = lp.reduced_costs(), lp.add_event_rows()
            if not lp.grow(reduced) and not widened:
                return lp.bound(reduced)

    def floors_of(self, plain: Uniform, recompute_choices: Iterable[Recomputed]) -> list[Bounded]:
        """The settings of a triple, one per choice of recomputed units, whether they fit or not."""
        q, none = self.question, self.base_memory(plain)
        loads = [cut.at(plain.durations) / MS for cut in q.network.loads]
        energies = [cut.at(plain.durations) / MS for cut in q.network.together]
        found = []
        for recompute in recompute_choices:
            peak = none.with_activations(
                q.model.activations.peak_bytes(q.micro_batch, recompute, q.schedule), q.schedule
            )
            more = [sum(added.get(one, 0.0) for one in recompute.items()) for added in self._recompute_ns]
            floor = max(*loads, *map(add, energies, more))
            found.append(Bounded(plain, recompute, self, peak.peak, sum(loads), floor))
        return found

    def base_memory(self, plain: Uniform) -> Memory:
        """The memory of a triple without activations."""
        if id(self) not in plain.base_memory:
            q = self.question
            plain.base_memory[id(self)] = memory(plain.units, q.slots, q.schedule, 0)
        return plain.base_memory[id(self)]

    @cached_property
    def _recompute_ns(self) -> list[dict[tuple[str, Way], float]]:
        """By energy, unit and way, the nanoseconds that recomputation adds to it."""
        network = self.question.network
        rows = {unit: network.rows[name] for unit, name in self.question.binaries.items()}
        return [
            {
                (unit, way): float(energy.weights[row, network.columns[key]]) / MS
                for unit, row in rows.items()
                for way, key in RECOMPUTE_KEYS.items()
            }
            for energy in network.together
        ]

    def run(self, found: Candidates, seconds: float) -> None:
        """Solve ILPs: add better plans to ``found`` and raise the bound, for at most ``seconds``."""
        deadline = time.monotonic() + seconds
        question, limit = self.question, FIRST_OFFER
        while costs := self.costs:
            offered = self.offered(found, limit)
            if not all(offered.values()):  # nothing better than what was found
                self.proven_ms = max(self.proven_ms, found.least_ms)
                return
            question = self._solve(question, offered, found, deadline)
            goal = found.least_ms / (1 + self.request.gap)
            # Only patterns that keep the bound below the goal need to be offered.
            needed = max(int((values < goal).sum()) for values in costs.values())
            if self.bound_ms >= goal or needed <= limit or time.monotonic() >= deadline:
                return
            limit = min(needed, 16 * limit)

    def offered(self, found: Candidates, limit: int) -> dict[str, list[int]]:
        """For every unit at most ``limit`` patterns that a better plan may have, the smallest bound first."""
        return _cheapest(self.costs, found.least_ms + TOLERANCE, limit)

    @property
    def costs(self) -> Costs:
        """Lower bounds by pattern over all nodes; empty before the first relaxation."""
        parts = [node.costs for node in self.open_nodes] + [self.fathomed] * bool(self.fathomed)
        return _least(parts) if parts and all(parts) else {}

    def _solve(
        self, question: Question, offered: Mapping[str, list[int]], found: Candidates, deadline: float
    ) -> Question:
        """Solve the ILP over the patterns offered, with new cycles as long as its answer violates some.

        Returns the question, whose budget is tighter where rounding errors had let a plan exceed it.
        """
        problem, gap = build_fastest(question, offered, [cut for _, cut in self.lp.cycles]), self.request.gap
        while True:
            better = found.least_ms / (1 + gap / 2)  # the longest period that is a gain
            problem.columns[PERIOD].upBound = better if better < INFINITY else None
            enough = self.bound_ms * (1 + gap)
            proof = found.least_ms / (1 + gap)
            solved = optimise(problem, gap / 2, max(0.5, deadline - time.monotonic()), enough, proof)
            dual = problem.lp.solverModel.getInfo().mip_dual_bound
            if question is self.question:  # a tightened budget may exclude plans that fit
                self._prove(found, better if solved == "infeasible" else min(dual, better), offered)
            if solved in ("infeasible", "nothing"):
                return question
            choice = problem.choice()
            evaluated = self.evaluate(choice)
            if not self.fits(evaluated):  # rounding errors: tighten the budget by the bytes above it
                over = max(0, evaluated.memory.peak - self.request.memory_bytes)
                host = max(0, evaluated.memory.host - self.request.host_bytes)
                question = replace(
                    question,
                    budget_bytes=question.budget_bytes - over,
                    host_bytes=question.host_bytes - host,
                )
                problem = build_fastest(question, offered, [cut for _, cut in self.lp.cycles])
                continue
            found.add(evaluated)
            durations, period = question.durations_of(choice), problem.columns[PERIOD].value() * (1 + 1e-9)
            cycles = [
                cycle for cycle in question.network.critical_cycles(durations) if cycle.at(durations) > period
            ]
            if not cycles or not self.may_improve(found) or time.monotonic() >= deadline:
                return question
            problem.add_cycles(cycles)
            self.lp.add_cycles(cycles)

    def _prove(self, found: Candidates, proven_ms: float, offered: Mapping[str, list[int]]) -> None:
        """Raise this search's bound to what an ILP proved and patterns left out allow; see the class."""
        bound = min(proven_ms, found.least_ms)
        for unit, costs in self.costs.items():
            left_out = np.delete(costs, offered[unit])
            if len(left_out):
                bound = min(bound, float(left_out.min()))
        self.proven_ms = max(self.proven_ms, bound)


def _least(parts: Sequence[Costs]) -> Costs:
    """For every pattern the smallest bound of all nodes."""
    return {unit: np.minimum.reduce([part[unit] for part in parts]) for unit in parts[0]}


def _cheapest(costs: Mapping[str, Coefficients], reach: float, limit: int) -> dict[str, list[int]]:
    """For every unit at most ``limit`` patterns of the least cost, none above ``reach``."""
    return {
        unit: [int(i) for i in np.argsort(values, kind="stable")[:limit] if values[i] <= reach]
        for unit, values in costs.items()
    }
