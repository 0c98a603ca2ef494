"""The search: for every micro-batch size and prefetch depth a relaxation, then ILPs; one bound over all."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from hzplan.cost import CostModel
from hzplan.errors import UserError
from hzplan.formats.profile import Profile
from hzplan.hierarchy import Levels
from hzplan.layout import REDUCE_DTYPES, Dtype
from hzplan.memory import assign_slots
from hzplan.solver.evaluate import Evaluation, evaluate, tensors_of, uniform
from hzplan.solver.local import Surroundings, improve
from hzplan.solver.patterns import Family, enumerate_patterns
from hzplan.solver.problem import MS, Coefficients, Question, build_fastest, build_smallest
from hzplan.solver.relax import TOLERANCE, optimise, relax

PREFETCH_DEPTHS = (1, 2, 3)
FIRST_OFFER = 24  # patterns per unit in the first ILP
MAX_ACCUMULATION = 1024  # forward passes in a step
MAX_POSITIONS = 128  # uses with rows of their own; what a longer step leaves out costs tightness, not truth
NEAR = 0.01
"""Predicted steps that differ by less than this share are called equal: no profile is more exact."""
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


@dataclass(frozen=True)
class Solved:
    """A plan was found. ``gap`` = (objective − bound) / bound, over the whole search."""

    status: Literal["optimal", "feasible"]
    best: Evaluation
    bound_ns: float
    gap: float
    seconds: float


@dataclass(frozen=True)
class Infeasible:
    """No choice fits; ``smallest`` has the least peak memory of all."""

    smallest: Evaluation
    seconds: float


@dataclass(frozen=True)
class Failed:
    """No plan was found within the limit, and none was proven impossible."""

    reason: str
    seconds: float


Outcome = Solved | Infeasible | Failed
Progress = Callable[[str, float], None]


def solve(profile: Profile, request: Request, progress: Progress = lambda text, fraction: None) -> Outcome:
    """Choose levels per tensor, prefetch depth and micro-batch size: the fastest step within the memory.

    Deterministic for one solver version while the time limit does not bind. UserError when no measured
    micro-batch size divides the global batch.
    """
    started = time.monotonic()
    searches = _searches(profile, request)
    found = Candidates()
    feasible = []
    for number, search in enumerate(searches):
        progress(f"relaxing {search}", 0.4 * number / len(searches))
        if search.relax(found):
            feasible.append(search)
            search.add_known_schemes(found)
    if not feasible:
        smallest = min((search.smallest for search in searches), key=lambda least: least.memory.peak)
        return Infeasible(smallest, time.monotonic() - started)
    feasible.sort(key=lambda search: search.bound_ms)
    for number, search in enumerate(feasible):
        progress(f"solving {search}", 0.4 + 0.6 * number / len(feasible))
        left = request.time_limit_s - (time.monotonic() - started)
        if left > 0 and search.bound_ms * (1 + request.gap) < found.least_ms:
            search.run(found, left / (len(feasible) - number))
    if not found.all:
        seconds = time.monotonic() - started
        return Failed("the time limit ended the search before a plan was found; raise --time-limit", seconds)
    if request.gap > 0:
        progress("improving the plan in the simulator", 0.95)
        found.all += _improved(found, searches, request, started + request.time_limit_s)
    progress("done", 1.0)
    seconds = time.monotonic() - started
    bound = min(found.least_ms, *(search.bound_ms for search in feasible)) / MS
    best = found.choose(bound, request.gap)
    gap = (best.objective_ns - bound) / bound if bound else 0.0
    proven = gap <= request.gap + TOLERANCE  # floating point of the solver
    return Solved("optimal" if proven else "feasible", best, bound, gap, seconds)


class Candidates:
    """Every plan that was replayed and fits."""

    def __init__(self) -> None:
        self.all: list[Evaluation] = []

    @property
    def least_ms(self) -> float:
        """The least objective so far, in milliseconds."""
        return min((found.objective_ns for found in self.all), default=float("inf")) * MS

    def choose(self, bound_ns: float, gap: float) -> Evaluation:
        """The plan that keeps the links least busy, of those that the simulator calls as good as fastest.

        The ILP leaves the sharing of links out, so the least objective need not be the fastest plan. The
        simulator leaves out what communication costs compute, so of predictions that differ by less than
        ``NEAR`` the plan with less communication is the faster one. Where the proven optimum of the objective
        is asked for (a gap of 0), only plans that reach it count; else those within the gap, where there are
        any. Of equals: fewer different triples, then fewer gradients that are copied to be scattered, then
        less memory.
        """
        least = min(found.objective_ns for found in self.all)
        near = [f for f in self.all if gap > 0 or f.objective_ns <= max(least, bound_ns)]
        fastest = min(f.predicted.period_ns for f in near)
        near = [f for f in near if f.predicted.period_ns <= fastest * (1 + NEAR)]
        proven = [f for f in near if f.objective_ns <= bound_ns * (1 + gap + TOLERANCE)]
        return min(proven or near, key=_plainness)


def _improved(
    found: Candidates, searches: Sequence[_Search], request: Request, deadline: float
) -> list[Evaluation]:
    """The plan predicted fastest, and the one with a single triple, changed as long as that helps."""
    families, profile = searches[0].families, searches[0].question.model.profile
    alike: dict[int, list[str]] = {}
    for unit, family in families.items():
        alike.setdefault(id(family), []).append(unit)
    groups = list(alike.values())
    around = Surroundings(
        groups,
        {unit: [tensor.trainable for tensor in tensors] for unit, tensors in tensors_of(profile).items()},
        {
            units[0]: list(dict.fromkeys(one.levels[unit] for one in found.all for unit in units))
            for units in groups
        },
        searches[0].question.model.mesh.triples(),
    )

    def triples(one: Evaluation) -> set[Levels]:
        """Of what is trained."""
        pairs = ((unit, triple, index) for unit, of in one.levels.items() for index, triple in enumerate(of))
        return {triple for unit, triple, index in pairs if around.trained[unit][index]}

    def fits(one: Evaluation) -> bool:
        return one.memory.peak <= request.memory_bytes

    plain = [one for one in found.all if len(triples(one)) == 1]
    starts = [min(some, key=lambda one: one.predicted.period_ns) for some in (found.all, plain) if some]
    improved = []
    for start in starts:
        paces = [search for search in searches if search.question.micro_batch == start.micro_batch]
        paces.sort(key=lambda search: search.question.schedule != start.schedule)
        replays = [search.replay for search in paces]
        improved.append(improve(start, replays, around, fits, lambda: time.monotonic() > deadline))
    return improved


def _plainness(evaluation: Evaluation) -> tuple[float, ...]:
    triples = {triple for levels in evaluation.levels.values() for triple in levels}
    return (
        evaluation.communication_ns,
        len(triples),
        sum(cost.staging_bytes for cost in evaluation.units.values()),
        evaluation.predicted.period_ns,
        evaluation.memory.peak,
    )


def _searches(profile: Profile, request: Request) -> list[_Search]:
    world = profile.mesh.world
    sizes = [size for size in profile.micro_batches if request.global_batch % (world * size) == 0]
    if not sizes or request.global_batch < 1:
        raise UserError(
            f"--global-batch {request.global_batch} is no multiple of {world} ranks × a measured micro-batch "
            f"size ({', '.join(map(str, profile.micro_batches))}); choose one, or profile more sizes"
        )
    sizes = [size for size in sizes if request.global_batch // (world * size) <= MAX_ACCUMULATION]
    if not sizes:
        raise UserError(
            f"--global-batch {request.global_batch} needs more than {MAX_ACCUMULATION} forward passes "
            "of each rank in a step; choose a smaller one, or profile larger micro-batch sizes"
        )
    dtype = profile.model.dtype
    if request.reduce_dtype not in (None, *REDUCE_DTYPES[dtype]):
        raise UserError(
            f"--reduce-dtype {request.reduce_dtype}: gradients of a model that computes in {dtype} travel in "
            f"{' or '.join(REDUCE_DTYPES[dtype])}"
        )
    model = CostModel(profile, request.reduce_dtype)
    families: dict[str, Family] = {}
    alike: dict[object, Family] = {}
    for unit, tensors in tensors_of(profile).items():
        if tensors:
            key = tuple((tensor.shape, tensor.dtype, tensor.trainable) for tensor in tensors)
            if key not in alike:
                alike[key] = enumerate_patterns(tensors, model, model.mesh.triples())
            families[unit] = alike[key]
    return [
        _Search(model, size, pace, request, families)
        for size in sizes
        for pace in model.paces(request.depths)
    ]


class _Search:
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

    def relax(self, found: Candidates) -> bool:
        """Solve the relaxation; False when no choice fits the budget."""
        offered = {unit: family.plainest for unit, family in self.families.items()}
        relaxed = relax(self.question, offered, build_fastest)
        if relaxed is None:  # perhaps only a mixed choice fits
            smallest = self.smallest
            if smallest.memory.peak > self.request.memory_bytes:
                return False
            found.all.append(smallest)
            for unit, levels in smallest.levels.items():
                offered[unit] = [*offered[unit], self.families[unit].levels.index(levels)]
            relaxed = relax(self.question, offered, build_fastest)
            assert relaxed is not None, "a choice that fits was offered"
        self.relaxed_ms, self.excess = relaxed
        self.bound_ms = self.relaxed_ms
        return True

    @cached_property
    def smallest(self) -> Evaluation:
        """The choice with the least peak memory (time is ignored); by the same argument as ``run``."""
        offered = {unit: family.plainest for unit, family in self.families.items()}
        relaxed = relax(self.question, offered, build_smallest)
        assert relaxed is not None, "without a budget something always fits"
        bound = relaxed[0]
        excess = {unit: np.full(len(values), np.inf) for unit, values in relaxed[1].items()}
        for unit, family in self.families.items():
            excess[unit][family.leanest] = relaxed[1][unit][family.leanest]
        reach, limit, known = sys.float_info.max, FIRST_OFFER, -1
        while True:
            offered = _cheapest(excess, reach, limit)
            problem = build_smallest(self.question, offered)
            if optimise(problem, 0.0, SMALLEST_S) != "solution":  # large, and out of time: a plain answer
                return self.evaluate(
                    {unit: int(np.argmin(f.resident + f.unshard)) for unit, f in self.families.items()}
                )
            reach = problem.lp.objective.value() - bound + TOLERANCE
            needed = sum(int((values <= reach).sum()) for values in excess.values())
            if sum(map(len, offered.values())) >= needed or needed == known:
                return self.evaluate(problem.choice())
            limit, known = limit * 8, needed

    def add_known_schemes(self, found: Candidates) -> None:
        """Plans with one triple for all tensors."""
        for triple in self.question.model.mesh.triples():
            evaluated = self.replay(uniform(self.question.model.profile, triple))
            if evaluated.memory.peak <= self.request.memory_bytes:
                found.all.append(evaluated)

    def run(self, found: Candidates, seconds: float) -> None:
        """Add better plans to those found, and prove what can be proven in the time."""
        deadline = time.monotonic() + seconds
        question, limit = self.question, FIRST_OFFER
        while True:
            offered = _cheapest(self.excess, self._reach(found), limit)
            if not all(offered.values()):  # nothing better than what was found
                self.bound_ms = max(self.bound_ms, found.least_ms)
                return
            problem = build_fastest(question, offered)
            solved = optimise(problem, self.request.gap / 2, max(0.5, deadline - time.monotonic()))
            if solved == "solution":
                evaluated = self.evaluate(problem.choice())
                over = evaluated.memory.peak - self.request.memory_bytes
                if over > 0:  # floating point let some bytes through: ask for those less
                    question = replace(question, budget_bytes=question.budget_bytes - over)
                    continue
                found.all.append(evaluated)
            dual = problem.lp.solverModel.getInfo().mip_dual_bound
            self._prove(found, float("inf") if solved == "infeasible" else dual, offered)
            goal = found.least_ms / (1 + self.request.gap)
            # Only patterns whose excess keeps the bound below the goal need to be offered.
            needed = max(int((values < goal - self.relaxed_ms).sum()) for values in self.excess.values())
            if self.bound_ms >= goal or needed <= limit or time.monotonic() >= deadline:
                return
            limit = min(needed, 16 * limit)

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
