"""The search under one micro-batch size and pace: a relaxation, plans rounded from it, then ILPs."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hzplan.cost import CostModel, UnitCost
from hzplan.hierarchy import Levels
from hzplan.layout import Dtype
from hzplan.memory import assign_slots, memory
from hzplan.solver.candidates import Candidates
from hzplan.solver.evaluate import Evaluation, evaluate, tensors_of
from hzplan.solver.paths import MS, Cut
from hzplan.solver.patterns import Family
from hzplan.solver.problem import Coefficients, Question, build_fastest, build_smallest, optimise
from hzplan.solver.relaxation import INFINITY, TOLERANCE, Relaxation

PREFETCH_DEPTHS = (1, 2, 3)
FIRST_OFFER = 24  # patterns per unit in the first ILP
MAX_POSITIONS = 2048  # uses with nodes of their own; what a longer step leaves out costs tightness, not truth
MAX_ROUNDS = 60
ROUNDED_EVERY = 4
"""Rounds of the relaxation between two plans made from it."""
OFFERED_AT_ONCE = 2
"""Patterns of a unit that a round adds."""
PRICES = tuple(10.0**power for power in range(-3, 4))
"""Of memory against time, each in units of its whole range: what the relaxation begins with."""
SMALLEST_S = 10.0  # for each ILP that looks for the least memory


@dataclass(frozen=True)
class Request:
    """What is asked of the solver. ``reduce_dtype``: what gradients travel in; None: as they are kept."""

    memory_bytes: int
    global_batch: int
    gap: float = 0.005
    time_limit_s: float = 60.0
    clip: bool = True
    reduce_dtype: Dtype | None = None
    depths: tuple[int, ...] = PREFETCH_DEPTHS


class Known(NamedTuple):
    """A plan with one triple for all tensors, not yet replayed: what it keeps the links busy for, and what
    its objective is at least, in nanoseconds."""

    communication_ns: float
    floor_ns: float
    triple: Levels
    search: Search


class Search:
    """One micro-batch size, prefetch depth and number of gradient buffers.

    The relaxation over *all* patterns gives a bound, and for every pattern how much more a plan with it
    costs at least (``excess``). The ILP is offered the patterns with the least excess. A plan then either
    uses offered patterns only and costs at least what the ILP proves, or it uses one left out and costs at
    least the relaxation plus its excess; the smaller of the two is this search's bound.
    """

    def __init__(
        self,
        model: CostModel,
        micro_batch: int,
        pace: tuple[int, int],
        request: Request,
        families: Mapping[str, Family],
    ) -> None:
        accumulation = request.global_batch // (model.mesh.world * micro_batch)
        prefetch, buffers = pace
        schedule = model.schedule(
            prefetch=prefetch, accumulation=accumulation, clip=request.clip, gradient_buffers=buffers
        )
        explicit = min(accumulation, max(2, MAX_POSITIONS // len(model.profile.uses)))
        short = model.schedule(
            prefetch=prefetch, accumulation=explicit, clip=request.clip, gradient_buffers=buffers
        )
        slots = assign_slots(schedule, tensors_of(model.profile))
        self.request, self.families = request, families
        self.question = Question(model, schedule, short, slots, families, micro_batch, request.memory_bytes)
        self.relaxed_ms = self.bound_ms = 0.0
        self.excess: dict[str, Coefficients] = {}
        self.cuts: list[Cut] = []

    def __str__(self) -> str:
        schedule = self.question.schedule
        return (
            f"micro-batch {self.question.micro_batch}, prefetch {schedule.prefetch}, "
            f"{schedule.gradient_buffers} gradient buffers"
        )

    def evaluate(self, choice: Mapping[str, int]) -> Evaluation:
        """Replay a choice of patterns."""
        return self.replay({unit: self.families[unit].levels[index] for unit, index in choice.items()})

    def replay(self, levels: Mapping[str, tuple[Levels, ...]]) -> Evaluation:
        """Replay a choice of levels."""
        q = self.question
        return evaluate(q.model, levels, q.schedule, q.micro_batch, q.slots)

    def worth(self, found: Candidates) -> bool:
        """Whether this search may still have a plan that is better by more than the gap."""
        return self.bound_ms * (1 + self.request.gap) < found.least_ms - TOLERANCE

    def relax(self, found: Candidates, deadline: float, known: Mapping[int, set[int]]) -> bool:
        """Bound this search, and add plans rounded from the relaxation; False when no choice fits.

        ``known``: patterns that other searches found useful, by the family's id.
        """
        lp = Relaxation(self.question)
        network = self.question.network
        lp.cut(network.capacities)
        for unit, patterns in self._beginning(known).items():
            lp.offer(unit, patterns)
        self.cuts = [cut for _, cut in lp.cuts]
        for number in range(1, MAX_ROUNDS + 1):
            if not lp.solve():
                break
            reduced = lp.reduced_costs()
            self._bound(lp.value, reduced)
            grown = [
                lp.offer(unit, [int(p) for p in np.argsort(costs)[:OFFERED_AT_ONCE] if costs[p] < -TOLERANCE])
                for unit, costs in reduced.items()
            ]
            durations = lp.durations()
            period = float(lp.values[lp.period])
            walks = [cut for cut in network.walks(durations) if cut.at(durations) > period * (1 + 1e-7)]
            over = time.monotonic() > deadline
            done = not walks and not any(grown)
            if done or over or number % ROUNDED_EVERY == 0:
                self._round(lp, found)
            if done or over or not self.worth(found):
                break
            lp.cut(walks)
            self.cuts += walks
        for unit in self.families:
            known[id(self.families[unit])].update(lp.shares(unit))
        if lp.excess_mib > TOLERANCE:  # perhaps what is offered does not fit, perhaps nothing does
            if self.smallest.memory.peak > self.request.memory_bytes:
                return False
            found.all.append(self.smallest)
        return True

    def _bound(self, value: float, reduced: Mapping[str, Coefficients]) -> None:
        """Take over a round's bound if it is the best so far; see ``relaxation``."""
        floors = {unit: min(0.0, float(costs.min())) for unit, costs in reduced.items()}
        bound = value + sum(floors.values())
        if bound > self.relaxed_ms or not self.excess:
            self.relaxed_ms = max(0.0, bound)
            self.excess = {unit: np.maximum(costs - floors[unit], 0.0) for unit, costs in reduced.items()}
            self.bound_ms = max(self.bound_ms, self.relaxed_ms)

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

    def _round(self, lp: Relaxation, found: Candidates) -> None:
        """Add the plan that follows the shares of every pattern from unit to unit, if it can be made to fit.

        What is too much takes the leanest pattern that its unit has a share of; then what fits takes the
        heaviest, which is the faster one, because all that have a share cost the same at the prices.
        """
        shares = {unit: lp.shares(unit) for unit in self.families}
        choice: dict[str, int] = {}
        carried: dict[int, Counter[int]] = defaultdict(Counter)
        for unit, of in shares.items():
            carry = carried[id(self.families[unit])]
            carry.update(of)
            choice[unit] = max(of, key=lambda pattern: carry[pattern])
            carry[choice[unit]] -= 1
        weights = {unit: lp.memory_ms(unit) for unit in shares}
        by_weight = {unit: sorted(of, key=weights[unit].__getitem__) for unit, of in shares.items()}
        lean = {unit: of[0] for unit, of in by_weight.items()}
        gains = {u: float(of[choice[u]] - of[lean[u]]) for u, of in weights.items()}
        for unit in sorted(gains, key=lambda unit: -gains[unit]):
            if self._fits(choice):
                break
            choice[unit] = lean[unit]
        if not self._fits(choice):
            return
        for unit, patterns in by_weight.items():
            for pattern in reversed(patterns[patterns.index(choice[unit]) + 1 :]):
                if self._fits({**choice, unit: pattern}):
                    choice[unit] = pattern
                    break
        evaluated = self.evaluate(choice)
        if evaluated.memory.peak <= self.request.memory_bytes:
            found.all.append(evaluated)

    def _weight(self, unit: str) -> Coefficients:
        """The bytes of a unit's patterns, whatever is shared."""
        family = self.families[unit]
        return np.asarray(family.resident + family.unshard + family.staging, dtype=float)

    def _fits(self, choice: Mapping[str, int]) -> bool:
        room = self.question.room
        total = sum(float(room.resident[unit][pattern]) for unit, pattern in choice.items())
        for buffer in room.shared:
            largest = max(float(sizes[choice[unit]]) for unit, sizes in buffer.sizes.items())
            total += max(0.0, largest - buffer.free_mib)
        return total <= self.question.room_mib

    @cached_property
    def smallest(self) -> Evaluation:
        """The choice with the least peak memory (time is ignored); by the same argument as ``run``."""
        bound, excess = self._least_memory()
        for unit, family in self.families.items():
            lean = np.full(len(family.levels), np.inf)
            lean[family.leanest] = excess[unit][family.leanest]
            excess[unit] = lean
        reach, limit, known = sys.float_info.max, FIRST_OFFER, -1
        while True:
            offered = _cheapest(excess, reach, limit)
            problem = build_smallest(self.question, offered)
            if optimise(problem, 0.0, SMALLEST_S) != "solution":  # large, and out of time: a plain answer
                return self.evaluate({unit: int(np.argmin(self._weight(unit))) for unit in self.families})
            reach = problem.lp.objective.value() - bound + TOLERANCE
            needed = sum(int((values <= reach).sum()) for values in excess.values())
            if sum(map(len, offered.values())) >= needed or needed == known:
                return self.evaluate(problem.choice())
            limit, known = limit * 8, needed

    def _least_memory(self) -> tuple[float, dict[str, Coefficients]]:
        """A bound on the memory in MiB, and every pattern's excess."""
        lp = Relaxation(self.question, least_memory=True)
        for unit, family in self.families.items():
            lp.offer(unit, [int(np.argmin(self._weight(unit))), *family.plainest])
        while True:
            assert lp.solve(), "without a budget something always fits"
            reduced = lp.reduced_costs()
            floors = {unit: min(0.0, float(costs.min())) for unit, costs in reduced.items()}
            grown = [
                lp.offer(unit, [int(p) for p in np.argsort(costs)[:OFFERED_AT_ONCE] if costs[p] < -TOLERANCE])
                for unit, costs in reduced.items()
            ]
            if not any(grown):
                excess = {unit: np.maximum(costs - floors[unit], 0.0) for unit, costs in reduced.items()}
                return lp.value + sum(floors.values()), excess

    def floors(self, plain: Mapping[Levels, Mapping[str, UnitCost]]) -> list[Known]:
        """Of plans with one triple for all tensors: those that fit, with the least that they can take."""
        q, found = self.question, []
        for triple, units in plain.items():
            room = memory(units, q.slots, q.schedule, q.activations_bytes)
            if room.peak <= self.request.memory_bytes:
                durations = q.network.durations(units)
                *loads, processors = (cut.at(durations) / MS for cut in q.network.capacities)
                found.append(Known(sum(loads), max(processors, *loads), triple, self))
        return found

    def run(self, found: Candidates, seconds: float) -> None:
        """Add better plans to those found, and prove what can be proven in the time."""
        deadline = time.monotonic() + seconds
        question, limit = self.question, FIRST_OFFER
        while True:
            offered = _cheapest(self.excess, self._reach(found), limit)
            if not all(offered.values()):  # nothing better than what was found
                self.bound_ms = max(self.bound_ms, found.least_ms)
                return
            question = self._solve(question, offered, found, deadline)
            goal = found.least_ms / (1 + self.request.gap)
            # Only patterns whose excess keeps the bound below the goal need to be offered.
            needed = max(int((values < goal - self.relaxed_ms).sum()) for values in self.excess.values())
            if self.bound_ms >= goal or needed <= limit or time.monotonic() >= deadline:
                return
            limit = min(needed, 16 * limit)

    def _solve(
        self, question: Question, offered: Mapping[str, list[int]], found: Candidates, deadline: float
    ) -> Question:
        """The ILP over what is offered, with more walks as long as its answer violates some."""
        problem, gap = build_fastest(question, offered, self.cuts), self.request.gap
        while True:
            better = found.least_ms / (1 + gap / 2)  # what is worth finding
            problem.period.upBound = better if better < INFINITY else None
            enough = self.bound_ms * (1 + gap)
            solved = optimise(problem, gap / 2, max(0.5, deadline - time.monotonic()), enough)
            dual = problem.lp.solverModel.getInfo().mip_dual_bound
            self._prove(found, better if solved == "infeasible" else dual, offered)
            if solved != "solution":
                return question
            choice = problem.choice()
            evaluated = self.evaluate(choice)
            over = evaluated.memory.peak - self.request.memory_bytes
            if over > 0:  # floating point let some bytes through: ask for those less
                question = replace(question, budget_bytes=question.budget_bytes - over)
                problem = build_fastest(question, offered, self.cuts)
                continue
            found.all.append(evaluated)
            durations = np.array([self.question.durations_ms[unit][choice[unit]] for unit in self.families])
            period = problem.period.value() * (1 + 1e-9)
            walks = [c for c in self.question.network.walks(durations) if c.at(durations) > period]
            if not walks or not self.worth(found) or time.monotonic() >= deadline:
                return question
            problem.walk_rows(walks)
            self.cuts += walks

    def _reach(self, found: Candidates) -> float:
        """The excess beyond which a pattern cannot be part of a better plan."""
        return found.least_ms - self.relaxed_ms + TOLERANCE

    def _prove(self, found: Candidates, proven_ms: float, offered: Mapping[str, list[int]]) -> None:
        """Raise this search's bound; see the class."""
        bound = min(proven_ms, found.least_ms)
        for unit, excess in self.excess.items():
            left_out = np.delete(excess, offered[unit])
            if len(left_out):
                bound = min(bound, self.relaxed_ms + float(left_out.min()))
        self.bound_ms = max(self.bound_ms, bound)


def _cheapest(excess: Mapping[str, Coefficients], reach: float, limit: int) -> dict[str, list[int]]:
    """For every unit the patterns with the least excess, none beyond ``reach``."""
    return {
        unit: [int(i) for i in np.argsort(values, kind="stable")[:limit] if values[i] <= reach]
        for unit, values in excess.items()
    }
