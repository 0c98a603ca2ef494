"""The search under one micro-batch size and pace: a relaxation, plans rounded from it, then ILPs."""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, floor
from typing import NamedTuple

import numpy as np

from hzplan.core.buffers import assign_slots
from hzplan.core.hierarchy import Levels
from hzplan.core.layout import Dtype
from hzplan.cost.memory import Memory, memory
from hzplan.cost.model import CostModel
from hzplan.cost.unit import UnitCost
from hzplan.formats.plan import Recompute
from hzplan.solver.candidates import Candidates
from hzplan.solver.evaluate import Evaluation, Modes, evaluate, uniform, unit_costs
from hzplan.solver.paths import MS, Network
from hzplan.solver.patterns import SWITCHED, Family
from hzplan.solver.problem import MIB, Coefficients, Question, build_fastest, build_smallest, optimise
from hzplan.solver.relaxation import INFINITY, TOLERANCE, Limits, Relaxation
from hzplan.solver.rounding import rounded

PREFETCH_DEPTHS = (1, 2, 3)
FIRST_OFFER = 24  # patterns per unit in the first ILP
MAX_POSITIONS = 2048  # uses with nodes of their own; what a longer step leaves out costs tightness, not truth
ROUNDS = 8  # of a relaxation before another search has its turn
MAX_NODES = 60  # turns of one search
TAIL = 0.1
"""A turn that raises a bound by less than this share of the gap asked for is the relaxation's last."""
PRICES = tuple(10.0**power for power in range(-3, 4))
"""Of memory against time, each in units of its whole range: what the relaxation begins with."""
SMALLEST_S = 10.0  # for each ILP that looks for the least memory


@dataclass(frozen=True)
class Request:
    """What is asked of the solver.

    ``host_bytes``: of the host's memory that a rank may take for optimizer state. ``reduce_dtype``: what
    gradients travel in; None: as they are kept. ``pins``: what is decided already, and
    ``recompute``: whether it is decided which units compute their forward again. ``tie``: the share of a step
    by which predictions may differ and count as equal; None: what the gap says (``prefer.tie_of``).
    """

    memory_bytes: int
    global_batch: int
    gap: float = 0.005
    time_limit_s: float = 60.0
    clip: bool = True
    reduce_dtype: Dtype | None = None
    depths: tuple[int, ...] = PREFETCH_DEPTHS
    pins: tuple[str, ...] = ()
    recompute: Recompute = "choose"
    host_bytes: int = 0
    tie: float | None = None


@dataclass(frozen=True)
class Uniform:
    """One triple for all tensors: ``levels`` and ``units`` (costs) by unit. ``network``: any of the
    question's; rows and keys are the same in all."""

    triple: Levels
    levels: Mapping[str, tuple[Levels, ...]]
    units: Mapping[str, UnitCost]
    network: Network

    @classmethod
    def of(cls, model: CostModel, triple: Levels, network: Network) -> Uniform:
        """With the costs of a model."""
        levels = uniform(model.profile, triple)
        return cls(triple, levels, unit_costs(model, levels), network)

    @cached_property
    def durations(self) -> Coefficients:
        """Milliseconds [units, keys], nothing recomputed."""
        return self.network.durations(self.units)

    @cached_property
    def lasting(self) -> dict[int, Memory]:
        """Memory without activations, by the search's id, as far as it was asked for."""
        return {}


class Bounded(NamedTuple):
    """A plan with one triple for all tensors, not yet replayed: its peak memory, what it keeps the links busy
    for, and what its step takes at least, in nanoseconds."""

    uniform: Uniform
    recompute: frozenset[str]
    search: Search
    peak_bytes: int
    communication_ns: float
    floor_ns: float


Costs = Mapping[str, Coefficients]
"""By unit, milliseconds that a plan with each of its patterns takes at least."""


class Leaf(NamedTuple):
    """A part of a search's plans, those within limits: what each takes at least, in all (``bound`` ms) and
    with a pattern. ``number`` is the order in which leaves were made."""

    bound: float
    number: int
    limits: Limits
    costs: Costs


class Search:
    """One micro-batch size, prefetch depth and number of gradient buffers.

    The relaxation over *all* patterns gives a bound, and for every pattern what a plan with it costs at
    least: in every part that it was split into, so of all plans the least of the parts'. The ILP is offered
    the patterns that may cost least. A plan then either uses offered patterns only and costs at least what
    the ILP proves, or it uses one left out and costs at least what that one does; the smaller of the two is
    this search's bound.
    """

    def __init__(
        self,
        model: CostModel,
        micro_batch: int,
        pace: tuple[int, int],
        request: Request,
        families: Mapping[str, Family],
        switches: Mapping[str, str],
    ) -> None:
        accumulation = request.global_batch // (model.profile.data_ranks * micro_batch)
        prefetch, buffers = pace
        schedule = model.schedule(
            prefetch=prefetch,
            accumulation=accumulation,
            clip=request.clip,
            gradient_buffers=buffers,
            offload=request.host_bytes > 0,
        )
        explicit = min(accumulation, max(2, MAX_POSITIONS // len(model.profile.uses)))
        short = model.schedule(
            prefetch=prefetch,
            accumulation=explicit,
            clip=request.clip,
            gradient_buffers=buffers,
            offload=request.host_bytes > 0,
        )
        slots = assign_slots(schedule, model.tensors)
        self.request, self.families = request, families
        self.question = Question(
            *(model, schedule, short, slots, families, switches, micro_batch),
            budget_bytes=request.memory_bytes,
            host_bytes=request.host_bytes,
        )
        self.lp = Relaxation(self.question)
        uses = range(len(model.profile.uses))
        computes_ms = accumulation * sum(model.compute_ns(use, micro_batch) for use in uses) * MS
        self.leaves = [Leaf(computes_ms, 0, {}, {})]
        self.nodes = self.made = 0  # turns taken, leaves made
        self.closed_ms = INFINITY  # the least bound of what was not taken further
        self.closed: Costs = {}  # likewise, by pattern
        self.proven_ms = 0.0  # by ILPs
        self.rounded: Coefficients | None = None

    def __str__(self) -> str:
        schedule = self.question.schedule
        return (
            f"micro-batch {self.question.micro_batch}, prefetch {schedule.prefetch}, "
            f"{schedule.gradient_buffers} gradient buffers"
        )

    def evaluate(self, choice: Mapping[str, int]) -> Evaluation:
        """Replay a choice of patterns."""
        switches = self.question.switches
        names = {*switches.values()}
        levels = {u: self.families[u].levels[index] for u, index in choice.items() if u not in names}
        again = (unit for unit, name in switches.items() if self.families[name].recompute[choice[name]])
        moved = (unit for unit in levels if self.families[unit].host[choice[unit]])
        return self.replay(levels, Modes(frozenset(again), frozenset(moved)))

    def replay(self, levels: Mapping[str, tuple[Levels, ...]], modes: Modes) -> Evaluation:
        """Replay a choice of levels and modes."""
        q = self.question
        return evaluate(q.model, levels, q.schedule, q.micro_batch, q.slots, modes)

    def fits(self, one: Evaluation) -> bool:
        """Whether a choice is within what may be taken."""
        return one.fits(self.request.memory_bytes, self.request.host_bytes)

    @property
    def bound_ms(self) -> float:
        """What every plan of this search costs at least."""
        return max(self.proven_ms, min(self.closed_ms, self.leaves[0][0] if self.leaves else INFINITY))

    def worth(self, found: Candidates) -> bool:
        """Whether this search may still have a plan that is better by more than the gap."""
        return self._worth(self.bound_ms, found)

    def _worth(self, bound_ms: float, found: Candidates) -> bool:
        return bound_ms * (1 + self.request.gap) < found.least_ms - TOLERANCE

    @property
    def open(self) -> bool:
        """Whether there is a relaxation left to go on with."""
        return bool(self.leaves) and self.nodes < MAX_NODES and self.leaves[0][0] <= self.bound_ms

    def expand(self, found: Candidates, known: Mapping[int, set[int]]) -> None:
        """Go on with the relaxation of the least bound for some rounds; add plans rounded from it.

        A relaxation tears what units share: a buffer that holds a third of every unit is a third as large.
        So it is solved again with the buffer no larger than what it holds whole, and with it larger; likewise
        with no more like units recomputed than a part of one less, and with more.
        ``known``: patterns that other searches found useful, by the family's id.
        """
        bound, _, limits, costs = self.leaves[0]  # which stays there until this is done, or interrupted
        if not self.nodes:
            self.lp.cut(self.question.network.capacities)
            for unit, patterns in self._beginning(known).items():
                self.lp.offer(unit, patterns)
        parts: list[Limits] = []
        if self.lp.restrict(limits):
            reached, converged, costs = self._rounds(found, costs)
            converged |= reached - bound < TAIL * self.request.gap * bound
            bound = max(bound, reached)
            parts = self._parts(bound, limits, found, converged=converged)
            if not parts:
                self.closed = _least([self.closed, costs] if self.closed else [costs])
                self.closed_ms = min(self.closed_ms, bound)
        leaves = list(self.leaves)
        heapq.heappop(leaves)
        self.nodes += 1
        for part in parts:
            self.made += 1
            heapq.heappush(leaves, Leaf(bound, self.made, part, costs))
        self.leaves = leaves
        if self.lp.solved:
            for unit, family in self.families.items():
                known[id(family)].update(self.lp.shares(unit))

    def _parts(self, bound: float, limits: Limits, found: Candidates, *, converged: bool) -> list[Limits]:
        """What to go on with after a turn: the same, two parts that have every plan between them, or none."""
        if not self.lp.solved or not self._worth(bound, found):
            return []
        if not converged:
            return [limits]
        if self.lp.excess_mib > TOLERANCE:  # at a price of the budget too low, or nothing fits
            return [limits] if self.lp.dearer() else []
        if (undecided := self.lp.undecided()) is not None:
            group, number = undecided
            low, high = limits.get(group, (0.0, INFINITY))
            return [{**limits, group: (low, floor(number))}, {**limits, group: (ceil(number), high)}]
        torn = self.lp.torn()
        if torn is None:
            return []
        buffer, below, above = torn
        low, high = limits.get(buffer, (0.0, INFINITY))
        return [{**limits, buffer: (low, below)}, {**limits, buffer: (above, high)}]

    def _rounds(self, found: Candidates, costs: Costs) -> tuple[float, bool, Costs]:
        """Some rounds of rows and columns where they are needed: a bound in milliseconds, whether no more
        are needed, and what plans with every pattern cost at least, ``costs`` so far."""
        lp, network, best = self.lp, self.question.network, 0.0
        for number in range(1, ROUNDS + 1):
            if not lp.solve():
                return best, True, costs
            reduced = lp.reduced_costs()
            bound, excess = lp.bound(reduced)
            mine = {unit: bound + more for unit, more in excess.items()}
            costs = {unit: np.maximum(costs[unit], of) for unit, of in mine.items()} if costs else mine
            best = max(best, bound)
            period = float(lp.values[lp.period]) * (1 + 1e-7)
            durations = lp.durations()
            walks = network.walks(durations)
            if self.rounded is not None:  # walks between here and a plan cut deeper
                walks += network.walks((durations + self.rounded) / 2)
            walks = [walk for walk in walks if walk.at(durations) > period]
            widened = lp.widen()
            converged = not lp.grow(reduced) and not walks and not widened
            done = converged or not self._worth(best, found)
            if done or number in (1, ROUNDS):
                self._add(rounded(lp), found)
            if done:
                return best, converged, costs
            lp.cut(walks)
        return best, False, costs

    def _add(self, choice: Mapping[str, int] | None, found: Candidates) -> None:
        if choice is not None:
            self.rounded = self.question.durations_of(choice)
            evaluated = self.evaluate(choice)
            if self.fits(evaluated):
                found.all.append(evaluated)

    def _beginning(self, known: Mapping[int, set[int]]) -> dict[str, list[int]]:
        """For every unit the best patterns at some prices of memory, and what other searches used."""
        network = self.question.network
        load = sum((cut.weights for cut in network.capacities[:-1]), np.zeros(network.shape))
        found: dict[int, list[int]] = {}
        for unit, family in self.families.items():
            if id(family) not in found:
                durations = self.question.durations_ms[unit] @ load[network.rows[unit]]
                nbytes = self._weight(unit)
                time_range, byte_range = np.ptp(durations) or 1.0, float(np.ptp(nbytes)) or 1.0
                picks = [int(np.argmin(durations / time_range + p * nbytes / byte_range)) for p in PRICES]
                found[id(family)] = sorted({*picks, *known.get(id(family), ())})
        return {unit: found[id(family)] for unit, family in self.families.items()}

    def _weight(self, unit: str) -> Coefficients:
        """The bytes of a unit's patterns, whatever is shared."""
        family = self.families[unit]
        return np.asarray(family.resident + family.unshard + family.staging - family.recompute, dtype=float)

    def _plain(self, unit: str) -> int:
        """The lightest pattern of a unit that takes nothing of the host's memory."""
        return int(np.argmin(np.where(self.families[unit].host, np.inf, self._weight(unit))))

    @property
    def smallest(self) -> Evaluation:
        """The choice with the least peak memory (time is ignored), as far as it was found."""
        return self._smallest[0]

    @property
    def certainly_too_large(self) -> bool:
        """Whether it is proven that no choice fits."""
        return self._smallest[1] > self.request.memory_bytes

    @cached_property
    def _smallest(self) -> tuple[Evaluation, float]:
        """The choice, and a bound on the memory in bytes; by the same argument as ``run``."""
        bound, excess = self._least_memory()
        for unit, family in self.families.items():
            lean = np.full(len(family.levels), np.inf)
            lean[family.leanest] = excess[unit][family.leanest]
            excess[unit] = lean
        reach, limit = sys.float_info.max, FIRST_OFFER
        while True:
            offered = _cheapest(excess, reach, limit)
            problem = build_smallest(self.question, offered)
            solved = optimise(problem, 0.0, SMALLEST_S)
            if solved == "nothing":  # large, and out of time: a plain answer
                plain = {unit: self._plain(unit) for unit in self.families}
                return self.evaluate(plain), bound / MIB
            found = self.evaluate(problem.choice())
            if solved != "optimal":
                return found, bound / MIB
            reach = problem.lp.objective.value() - bound + TOLERANCE
            needed = sum(int((values <= reach).sum()) for values in excess.values())
            if sum(map(len, offered.values())) >= needed:
                return found, found.memory.peak
            limit *= 8

    def _least_memory(self) -> tuple[float, dict[str, Coefficients]]:
        """A bound on the memory in MiB, and every pattern's excess."""
        lp = Relaxation(self.question, least_memory=True)
        for unit, family in self.families.items():
            lp.offer(unit, [self._plain(unit), *family.plainest])
        while True:
            assert lp.solve(), "without a budget something always fits"
            reduced, widened = lp.reduced_costs(), lp.widen()
            if not lp.grow(reduced) and not widened:
                return lp.bound(reduced)

    def bounded(self, plain: Uniform, agains: Iterable[frozenset[str]]) -> list[Bounded]:
        """A triple with each choice of what is recomputed, whether it fits or not."""
        q, none = self.question, self.lasting(plain)
        *loads, processors = (cut.at(plain.durations) / MS for cut in q.network.capacities)
        again_ns = self._again_ns
        found = []
        for again in agains:
            peak = none.with_activations(q.model.activation_peak_bytes(q.micro_batch, again), q.schedule)
            floor = max(processors + sum(again_ns.get(unit, 0.0) for unit in again), *loads)
            found.append(Bounded(plain, again, self, peak.peak, sum(loads), floor))
        return found

    def lasting(self, plain: Uniform) -> Memory:
        """A triple's memory without activations."""
        if id(self) not in plain.lasting:
            q = self.question
            plain.lasting[id(self)] = memory(plain.units, q.slots, q.schedule, 0)
        return plain.lasting[id(self)]

    @cached_property
    def _again_ns(self) -> dict[str, float]:
        """By unit, nanoseconds that a step computes longer where it is recomputed."""
        q = self.question
        column, weights = q.network.columns[SWITCHED], q.network.capacities[-1].weights
        return {unit: float(weights[q.network.rows[name], column]) / MS for unit, name in q.switches.items()}

    def run(self, found: Candidates, seconds: float) -> None:
        """Add better plans to those found, and prove what can be proven in the time."""
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
        """For every unit so many patterns, at most, that may be part of a better plan, the best first."""
        return _cheapest(self.costs, found.least_ms + TOLERANCE, limit)

    @property
    def costs(self) -> Costs:
        """What a plan with a pattern costs at least; empty before the first relaxation."""
        parts = [leaf.costs for leaf in self.leaves] + [self.closed] * bool(self.closed)
        return _least(parts) if parts and all(parts) else {}

    def _solve(
        self, question: Question, offered: Mapping[str, list[int]], found: Candidates, deadline: float
    ) -> Question:
        """The ILP over what is offered, with more walks as long as its answer violates some."""
        problem, gap = build_fastest(question, offered, [cut for _, cut in self.lp.cuts]), self.request.gap
        while True:
            better = found.least_ms / (1 + gap / 2)  # what is worth finding
            problem.period.upBound = better if better < INFINITY else None
            enough = self.bound_ms * (1 + gap)
            proof = found.least_ms / (1 + gap)
            solved = optimise(problem, gap / 2, max(0.5, deadline - time.monotonic()), enough, proof)
            dual = problem.lp.solverModel.getInfo().mip_dual_bound
            if question is self.question:  # else plans that fit may be left out
                self._prove(found, better if solved == "infeasible" else min(dual, better), offered)
            if solved in ("infeasible", "nothing"):
                return question
            choice = problem.choice()
            evaluated = self.evaluate(choice)
            if not self.fits(evaluated):  # floating point let some bytes through: ask for those less
                over = max(0, evaluated.memory.peak - self.request.memory_bytes)
                host = max(0, evaluated.memory.host - self.request.host_bytes)
                question = replace(
                    question,
                    budget_bytes=question.budget_bytes - over,
                    host_bytes=question.host_bytes - host,
                )
                problem = build_fastest(question, offered, [cut for _, cut in self.lp.cuts])
                continue
            found.all.append(evaluated)
            durations, period = question.durations_of(choice), problem.period.value() * (1 + 1e-9)
            walks = [walk for walk in question.network.walks(durations) if walk.at(durations) > period]
            if not walks or not self.worth(found) or time.monotonic() >= deadline:
                return question
            problem.walk_rows(walks)
            self.lp.cut(walks)

    def _prove(self, found: Candidates, proven_ms: float, offered: Mapping[str, list[int]]) -> None:
        """Raise this search's bound; see the class."""
        bound = min(proven_ms, found.least_ms)
        for unit, costs in self.costs.items():
            left_out = np.delete(costs, offered[unit])
            if len(left_out):
                bound = min(bound, float(left_out.min()))
        self.proven_ms = max(self.proven_ms, bound)


def _least(parts: Sequence[Costs]) -> Costs:
    """Of every pattern the least of all parts."""
    return {unit: np.minimum.reduce([part[unit] for part in parts]) for unit in parts[0]}


def _cheapest(costs: Mapping[str, Coefficients], reach: float, limit: int) -> dict[str, list[int]]:
    """For every unit the patterns that cost least, none beyond ``reach``."""
    return {
        unit: [int(i) for i in np.argsort(values, kind="stable")[:limit] if values[i] <= reach]
        for unit, values in costs.items()
    }
