"""The whole search: every micro-batch size and pace that may hold the best plan; one bound over all."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from hzplan.cost import CostModel
from hzplan.errors import UserError
from hzplan.formats.plan import Recompute
from hzplan.formats.profile import Profile
from hzplan.hierarchy import Levels
from hzplan.layout import REDUCE_DTYPES
from hzplan.solver.candidates import NEAR, Candidates
from hzplan.solver.evaluate import (
    MAX_ACCUMULATION,
    Evaluation,
    Modes,
    evaluate,
    fastest_of,
    recomputations,
    tensors_of,
    uniform,
    unit_costs,
)
from hzplan.solver.local import WORTH, Surroundings, improve
from hzplan.solver.paths import MS
from hzplan.solver.patterns import Family, enumerate_patterns, switch, switch_names
from hzplan.solver.pins import Pins
from hzplan.solver.relaxation import INFINITY, TOLERANCE
from hzplan.solver.search import PREFETCH_DEPTHS, Request, Search

__all__ = [
    "NEAR",
    "PREFETCH_DEPTHS",
    "Failed",
    "Infeasible",
    "Outcome",
    "Request",
    "Solved",
    "Standing",
    "searches_of",
    "solve",
]


@dataclass(frozen=True)
class Solved:
    """A plan was found. ``gap`` = (objective − bound) / bound, over the whole search."""

    status: Literal["optimal", "feasible"]
    best: Evaluation
    bound_ns: float
    gap: float
    seconds: float


LOCAL_S, LOCAL_SHARE = 6.0, 0.1
"""Seconds that are kept for the local search in the simulator, and their share of the time at most."""


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


@dataclass(frozen=True)
class Standing:
    """How a search stands: seconds since its begin, what is being done, and in milliseconds the best
    objective and the bound (infinite, and 0, where there is none)."""

    seconds: float
    doing: str
    best_ms: float
    bound_ms: float

    @property
    def gap(self) -> float:
        """Of the best plan to the bound."""
        return self.best_ms / self.bound_ms - 1 if self.bound_ms else INFINITY

    def __str__(self) -> str:
        if self.best_ms == INFINITY:
            return f"{self.doing}, none found yet"
        return f"{self.doing}, best {self.best_ms:,.1f} ms, gap {self.gap:.2%}"


Watch = Callable[[Standing], None]


def solve(
    profile: Profile,
    request: Request,
    watch: Watch = lambda standing: None,
    *,
    interruptible: bool = False,
) -> Outcome:
    """Choose levels per tensor, prefetch depth and micro-batch size: the fastest step within the memory.

    Deterministic for one solver version while the time limit does not bind. ``interruptible``:
    KeyboardInterrupt ends the search with the best plan found and its gap, if there is one. UserError when no
    measured micro-batch size divides the global batch.
    """
    started = time.monotonic()
    deadline = started + request.time_limit_s
    searches = searches_of(profile, request)
    found = Candidates()

    def tell(doing: str) -> None:
        bound = min(found.least_ms, *(search.bound_ms for search in searches))
        watch(Standing(time.monotonic() - started, doing, found.least_ms, bound))

    try:
        kept = min(LOCAL_S, LOCAL_SHARE * request.time_limit_s) if request.gap > 0 else 0.0
        feasible = _explored(searches, found, request, deadline - kept, tell)
        if not found.all and not all(search.certainly_too_large for search in feasible):
            reason = "no plan was found in the time, and none was proven impossible; raise --time-limit"
            return Failed(reason, time.monotonic() - started)
        if not found.all:
            smallest = min((search.smallest for search in searches), key=lambda least: least.memory.peak)
            return Infeasible(smallest, time.monotonic() - started)
        if request.gap > 0:
            tell("improving in the simulator")
            found.all += _improved(found, searches, request, deadline)
    except KeyboardInterrupt:
        if not interruptible or not found.all:
            raise
        feasible = searches
    tell("done")
    bound = min(found.least_ns, *(search.bound_ms / MS for search in feasible))
    best = found.choose(bound, request.gap)
    if request.gap > 0:
        best = _tidied(best, searches)
    gap = (best.objective_ns - bound) / max(bound, 1.0)
    proven = gap <= request.gap + TOLERANCE  # floating point of the solver
    return Solved("optimal" if proven else "feasible", best, bound, gap, time.monotonic() - started)


def _explored(
    searches: Sequence[Search],
    found: Candidates,
    request: Request,
    deadline: float,
    tell: Callable[[str], None],
) -> Sequence[Search]:
    """Add what the relaxations and the ILPs find, and plain plans; the searches that something fits in."""
    useful: dict[int, set[int]] = defaultdict(set)
    while time.monotonic() < deadline:
        unproven = [search for search in searches if search.open and search.worth(found)]
        if not unproven:
            break
        tell("relaxations")
        min(unproven, key=lambda search: search.bound_ms).expand(found, useful)
    feasible = searches
    if not found.all:  # perhaps only an exact choice fits, perhaps none does
        found.all += [s.smallest for s in searches if s.fits(s.smallest)]
        feasible = [search for search in searches if not search.certainly_too_large]
    feasible = sorted(feasible, key=lambda search: search.bound_ms)
    for number, search in enumerate(feasible):
        left = deadline - time.monotonic()
        if left > 0 and search.worth(found):
            tell(f"ILP of {search}")
            search.run(found, left / sum(other.worth(found) for other in feasible[number:]))
    if found.all:
        _add_plain(found, feasible, min(search.bound_ms for search in feasible) / MS)
    return feasible


def _add_plain(found: Candidates, searches: Sequence[Search], bound_ns: float) -> None:
    """Plans with one triple for all tensors that may be chosen: the fastest, or as fast with less
    communication."""
    model = searches[0].question.model
    pins = Pins(searches[0].request.pins, model.profile)
    uniforms = {triple: uniform(model.profile, triple) for triple in model.mesh.triples()}
    agains = recomputations(model, searches[0].request.recompute)
    plain = {
        (triple, again): unit_costs(model, of, Modes(again))
        for triple, of in uniforms.items()
        if pins.keep(model.profile, of)
        for again in agains
    }
    fastest = fastest_of(found.all).predicted.period_ns
    for known in sorted(chain(*(search.floors(plain) for search in searches)), key=lambda one: one[:2]):
        if known.floor_ns > fastest * (1 + NEAR):
            continue
        triple, again = known.plain
        one = known.search.replay(uniforms[triple], Modes(again))
        if one.objective_ns <= fastest * (1 + NEAR) and one.predicted.period_ns <= fastest * (1 + NEAR):
            found.all.append(one)
            fastest = min(fastest, one.predicted.period_ns)
            if fastest <= bound_ns * (1 + NEAR):  # nothing is faster, and what follows communicates more
                return


def _improved(
    found: Candidates, searches: Sequence[Search], request: Request, deadline: float
) -> list[Evaluation]:
    """The plan predicted fastest, and the one with a single triple, changed as long as that helps."""
    families, profile = searches[0].families, searches[0].question.model.profile
    switches = searches[0].question.switches
    groups = _alike({unit: f for unit, f in families.items() if unit not in {*switches.values()}})
    free = {unit: families[name] for unit, name in switches.items() if len(families[name].levels) > 1}
    around = Surroundings(
        groups,
        {unit: [tensor.trainable for tensor in tensors] for unit, tensors in tensors_of(profile).items()},
        {
            units[0]: list(dict.fromkeys(one.levels[unit] for one in found.all for unit in units))
            for units in groups
        },
        searches[0].question.model.mesh.triples(),
        _alike(free),
        [units for units in groups if families[units[0]].host.any()],
    )

    def triples(one: Evaluation) -> set[Levels]:
        """Of what is trained."""
        pairs = ((unit, triple, index) for unit, of in one.levels.items() for index, triple in enumerate(of))
        return {triple for unit, triple, index in pairs if around.trained[unit][index]}

    pins = Pins(request.pins, profile)

    def fits(one: Evaluation) -> bool:
        return searches[0].fits(one) and pins.keep(profile, one.levels)

    plain = [one for one in found.all if len(triples(one)) == 1]
    starts = [fastest_of(some) for some in (found.all, plain) if some]
    improved = []
    for start in starts:
        paces = [search for search in searches if search.question.micro_batch == start.micro_batch]
        paces.sort(key=lambda search: search.question.schedule != start.schedule)
        replays = [search.replay for search in paces]
        improved.append(improve(start, replays, around, fits, lambda: time.monotonic() > deadline))
    return improved


def _tidied(best: Evaluation, searches: Sequence[Search]) -> Evaluation:
    """Of like units the first are recomputed, as many as were, where that is as good: later ones then keep
    less while those compute again, and a reader sees one run of layers."""
    families, again = searches[0].families, set(best.modes.recompute)
    switches = searches[0].question.switches  # the same in all
    for units in _alike({unit: families[name] for unit, name in switches.items()}):
        count = len(again.intersection(units))
        again = again.difference(units) | set(units[:count])
    if again == best.modes.recompute:
        return best
    modes = best.modes._replace(recompute=frozenset(again))
    tidy = evaluate(best.model, best.levels, best.schedule, best.micro_batch, best.slots, modes)
    worse = 1 + WORTH
    as_good = (
        searches[0].fits(tidy)
        and tidy.objective_ns <= best.objective_ns * worse
        and tidy.predicted.period_ns <= best.predicted.period_ns * worse
    )
    return tidy if as_good else best


def _alike(families: Mapping[str, Family]) -> list[list[str]]:
    """Units that have one family, in groups."""
    found: dict[int, list[str]] = {}
    for unit, family in families.items():
        found.setdefault(id(family), []).append(unit)
    return list(found.values())


def searches_of(profile: Profile, request: Request) -> list[Search]:
    """Every micro-batch size and pace of a question; UserError where it has no answer whatever the memory."""
    world = profile.data_ranks
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
    if request.host_bytes and profile.host is None:
        raise UserError(
            "--host-memory: the profile knows no link to the host's memory; profile again, on GPUs or with "
            "--analytic"
        )
    model = CostModel(profile, request.reduce_dtype)
    families: dict[str, Family] = {}
    alike: dict[object, Family] = {}
    pins, triples = Pins(request.pins, profile), model.mesh.triples()
    some = model.schedule(prefetch=1, accumulation=1, clip=request.clip, offload=request.host_bytes > 0)
    for unit, tensors in tensors_of(profile).items():
        if tensors:
            offload = unit in some.host_slots
            allowed = tuple(pins.allowed(t.name, triples, trainable=t.trainable) for t in tensors)
            key = tuple((t.shape, t.dtype, t.trainable, may) for t, may in zip(tensors, allowed, strict=True))
            if (key, offload) not in alike:
                alike[key, offload] = enumerate_patterns(
                    *(tensors, model, triples, allowed if request.pins else None),
                    offload=offload,
                )
            families[unit] = alike[key, offload]
    switches = _switches(model, request.recompute, families)
    return [
        Search(model, size, pace, request, families, switches)
        for size in sizes
        for pace in model.paces(request.depths)
    ]


def _switches(model: CostModel, recompute: Recompute, families: dict[str, Family]) -> dict[str, str]:
    """Add to the families a switch for every unit that may be recomputed, the same one for like units; their
    names, by unit."""
    if recompute == "none":
        return {}
    states, made = ([False, True] if recompute == "choose" else [True]), dict[int, Family]()
    found = {}
    for unit, name in switch_names(model).items():
        found[unit] = name
        kind = id(families.get(unit))
        families[name] = made.setdefault(kind, switch(len(model.mesh.tiers), states))
    return found
