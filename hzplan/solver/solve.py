"""The whole search: over every micro-batch size and pace, with one bound over all."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hzplan.core.layout import REDUCE_DTYPES
from hzplan.core.recompute import HOST, NOTHING, Recomputed, Way
from hzplan.cost.model import CostModel, tensors_of
from hzplan.errors import UserError
from hzplan.formats.plan import Recompute
from hzplan.formats.profile import Profile
from hzplan.solver.baseline import Baseline
from hzplan.solver.candidates import Candidates
from hzplan.solver.evaluate import (
    MAX_ACCUMULATION,
    Evaluation,
    evaluate,
    fastest_of,
    uniform,
    within,
    within_objective,
)
from hzplan.solver.exhaust import exhaust
from hzplan.solver.in_order import InOrder
from hzplan.solver.paths import MS
from hzplan.solver.patterns import (
    MAX_BUCKETS,
    ColumnPool,
    enumerate_patterns,
    recompute_names,
    recompute_pool,
)
from hzplan.solver.prefer import ceiling_ns, margin_of, plain_enough, preferred, tie_of, within_tie
from hzplan.solver.refine import improved, simplified
from hzplan.solver.relaxation import TOLERANCE
from hzplan.solver.rows import INFINITY
from hzplan.solver.schemes import Row, Settings, schemes_of
from hzplan.solver.search import PREFETCH_DEPTHS, Request, Search, cost_model, grammar_for, paces, pins_of
from hzplan.solver.target import Grammar, joined, keeps

__all__ = [
    "PREFETCH_DEPTHS",
    "Failed",
    "Infeasible",
    "Outcome",
    "Request",
    "SearchState",
    "Solved",
    "searches_of",
    "solve",
]


@dataclass(frozen=True)
class Solved:
    """A plan was found. No choice searched has an objective, and so no predicted step, below ``bound_ns``,
    in whatever order of messages; none in the plan's own order below ``in_order_bound_ns``.

    ``status``: "optimal" where the search found an objective within the gap that was asked for. The
    plan's own may be larger, where its predicted step is shorter. At a gap of 0 where no choice searched is
    predicted to be faster, with links shared or in the plan's order: all that may be were ``replayed``, so
    many (``exhaust``).
    ``rows``: the schemes that users set by hand, and the user's own setting, each at its best.
    ``searches``, ``inside``: what the bounds follow from (``certificate``).
    """

    status: Literal["optimal", "feasible"]
    best: Evaluation
    bound_ns: float
    in_order_bound_ns: float
    seconds: float
    rows: tuple[Row, ...] = ()
    searches: Sequence[Search] = ()
    inside: InOrder | None = None
    replayed: int | None = None

    @property
    def gap(self) -> float:
        """By how much the predicted step is above the bound in its order, as a share of that bound."""
        return max(0.0, self.best.predicted.period_ns / max(self.in_order_bound_ns, 1.0) - 1)

    @property
    def objective_gap(self) -> float:
        """By how much the objective is above the bound, as a share of it: what ``--gap`` asks for."""
        return (self.best.objective_ns - self.bound_ns) / max(self.bound_ns, 1.0)


KEPT_SHARE = 0.5
"""Share of the time limit that is kept for the local search in the simulator and the search in an order."""
STAYING_SHARE = 0.2
"""Share of the time limit for plans whose activations all stay on the device, where others are asked for."""


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
class SearchState:
    """Progress of a search: seconds since its start, the phase (``doing``), and in milliseconds the best
    objective (infinite without a plan) and the bound (0 without one)."""

    seconds: float
    doing: str
    best_ms: float
    bound_ms: float

    @property
    def gap(self) -> float:
        """The gap of the best objective to the bound, as a share of the bound."""
        return self.best_ms / self.bound_ms - 1 if self.bound_ms else INFINITY

    def __str__(self) -> str:
        if self.best_ms == INFINITY:
            return f"{self.doing}, none found yet"
        return f"{self.doing}, best {self.best_ms:,.1f} ms, gap {self.gap:.2%}"


Watch = Callable[[SearchState], None]


def solve(
    profile: Profile,
    request: Request,
    watch: Watch = lambda state: None,
    *,
    interruptible: bool = False,
    baseline: Baseline | None = None,
    like: Evaluation | None = None,
) -> Outcome:
    """Choose levels per tensor, prefetch depth and micro-batch size: the fastest step within the memory.

    The schemes that users set by hand are candidates from the start, and so is their own setting
    (``baseline``); which of several equal plans is taken ``prefer`` says (``like``: a plan to stay near).
    Deterministic for one solver version while the time limit does not bind. ``interruptible``:
    KeyboardInterrupt ends the search with the best plan found and its gap, if there is one. UserError when no
    measured micro-batch size divides the global batch.
    """
    started = time.monotonic()
    deadline = started + request.time_limit_s
    searches = searches_of(profile, request)
    found, rows = _candidates(profile, request), list[Row]()
    inside: InOrder | None = None
    replayed: int | None = None
    feasible: Sequence[Search] = searches
    settings = Settings(searches, request)

    def tell(doing: str) -> None:
        bound = min(found.least_ms, *(search.bound_ms for search in searches))
        watch(SearchState(time.monotonic() - started, doing, found.least_ms, bound))

    def bound_ns() -> float:
        return min(found.least_ns, *(search.bound_ms / MS for search in feasible))

    try:
        tell("known schemes")
        rows = settings.rows()
        if baseline is not None:
            rows.append(_on_own_schedule(baseline, settings).row(settings))
        rows = [replace(row, allowed=_answers(row.found, profile, request)) for row in rows]
        own = [row for row in rows if row.fits and row.allowed]
        found.all += [row.found for row in own]
        _by_scheme(settings, found, profile, request)
        if like is not None:
            like = _replayed(like, settings)
            found.all += [like] if _answers(like, profile, request) else []
        kept = KEPT_SHARE * request.time_limit_s
        tie = tie_of(request.gap, request.tie)

        def refine(until: float) -> None:
            """Add what is faster in the simulator than what was found."""
            nonlocal inside
            if within_tie(bound_ns(), own, tie):  # no plan is faster by more
                return
            tell("improving in the simulator")
            more, searched = improved(found, searches, request, until, bound_ns())
            found.all += more
            inside = searched or inside

        if any(HOST in search.ways for search in searches[:1]):
            # Copies leave relaxations far below any plan; what is best without them is found sooner.
            staying = searches_of(profile, request, on_host=False)
            _relaxed(staying, found, started + STAYING_SHARE * request.time_limit_s, tell)
        _relaxed(searches, found, deadline - kept, tell, deadline - kept / 2)
        if found.all:
            refine(deadline - kept / 2)
        before = found.all and fastest_of(found.all)
        if request.gap == 0 or not _is_proven(inside, found, request):  # at 0, other orders count too
            feasible = _with_ilps(searches, found, deadline, tell)
        if not found.all and not all(search.certainly_too_large for search in feasible):
            reason = "no plan was found in the time, and none was proven impossible; raise --time-limit"
            enough = min(search.smallest.memory.peak for search in feasible)
            if time.monotonic() < deadline and enough > request.memory_bytes:  # of matrices bounds are looser
                reason = (
                    f"no plan was found in {request.memory_bytes:,} bytes, and none was proven impossible: "
                    f"{enough:,} are enough; give as many with --memory"
                )
            return Failed(reason, time.monotonic() - started)
        if not found.all:
            smallest = min((search.smallest for search in searches), key=lambda least: least.memory.peak)
            return Infeasible(smallest, time.monotonic() - started)
        if not within_tie(bound_ns(), own, tie):  # else no plan is faster than a scheme by more
            tell("one triple for all")
            _add_plain(settings, found, bound_ns() * (1 + tie), profile, request)
        if fastest_of(found.all) is not before:
            refine(deadline)
        if request.gap == 0:
            tell("replaying what may be faster")
            replayed = exhaust(feasible, inside, found, deadline)
    except KeyboardInterrupt:
        if not interruptible or not found.all:
            raise
        deadline = time.monotonic()
    tell("choosing")
    best, rows = _decided(found, rows, settings, bound_ns(), request, deadline, like, inside)
    if best.schedule.order is not None and (inside is None or not inside.covers(best)):
        replayed = None
    tell("done")
    bound = bound_ns()
    in_order = inside.bound_ns if inside is not None and inside.covers(best) else bound
    goal = 1 + request.gap + TOLERANCE  # floating point of the solver
    least = min(found.least_ns, best.objective_ns)
    proven = least <= bound * goal or best.in_order_ns <= in_order * goal
    if request.gap == 0:
        proven = replayed is not None
    status: Literal["optimal", "feasible"] = "optimal" if proven else "feasible"
    bounds = bound, max(bound, in_order)
    assert bounds[1] <= best.predicted.period_ns * (1 + TOLERANCE), "a bound is above a plan's step"
    seconds = time.monotonic() - started
    return Solved(status, best, *bounds, seconds, tuple(rows), searches, inside, replayed)


def solve_each(
    profile: Profile, request: Request, watch: Watch = lambda state: None, **options: Any
) -> tuple[Request, Outcome]:
    """``solve``, where the target has one triple for all of a model once for each, pinned, without and with
    recomputation of all; the question that was answered, with its answer, the fastest. UserError where pins
    leave none."""
    grammar = grammar_for(profile, request)
    if grammar is None or not grammar.for_all:
        return request, solve(profile, request, watch, **options)
    answers: list[tuple[Request, Outcome]] = []
    refused: UserError | None = None
    again: tuple[Recompute, ...] = ("none", "all") if request.recompute == "choose" else (request.recompute,)
    questions, began = [*itertools.product(grammar.triples, again)], time.perf_counter()
    for number, (triple, recompute) in enumerate(questions):
        pin = f"*={','.join(map(str, triple.shards(profile.mesh)))}"
        left = request.time_limit_s - (time.perf_counter() - began)
        limit = max(left, 0.1 * request.time_limit_s) / (len(questions) - number)
        pinned = replace(request, pins=(*request.pins, pin), time_limit_s=limit, recompute=recompute)
        try:
            answers.append((pinned, solve(profile, pinned, watch, **options)))
        except UserError as error:  # of the user's own pins
            refused = error
    if not answers:
        raise refused or UserError("no levels of the target are on this mesh")

    def worth(answer: tuple[Request, Outcome]) -> tuple[int, float]:
        _, outcome = answer
        if isinstance(outcome, Solved):
            return 0, outcome.best.predicted.period_ns
        if isinstance(outcome, Infeasible):
            return 2, outcome.smallest.memory.peak
        return 1, 0.0

    return min(answers, key=worth)


def _on_own_schedule(baseline: Baseline, settings: Settings) -> Baseline:
    return baseline if baseline.plan is None else replace(baseline, plan=_replayed(baseline.plan, settings))


def _replayed(one: Evaluation, settings: Settings) -> Evaluation:
    """A plan from outside, evaluated on a schedule with host copies where this question allows them, and with
    its whole gradients summed as this question's are."""
    request = settings.request
    flat = settings.model.flat_sums and one.model.knows_flat_sums  # its gradients may travel narrow
    model = replace(one.model, flat_sums=flat)
    levels = {
        unit: tuple(
            of._replace(flat=flat and tensor.trainable and of.three == (0, 0, 0))
            for of, tensor in zip(listed, model.tensors[unit], strict=True)
        )
        for unit, listed in one.levels.items()
    }
    schedule = model.schedule(
        **one.schedule.pace._asdict(),
        accumulation=one.schedule.accumulation,
        clip=one.schedule.clip,
        offload=request.host_bytes > 0 or bool(one.modes.offload),
    )
    return evaluate(model, levels, schedule, one.micro_batch, modes=one.modes)


def _answers(one: Evaluation, profile: Profile, request: Request) -> bool:
    """Whether a plan keeps every option of the question: batch, clipping, dtypes, budgets, pins,
    recompute."""
    batch = one.micro_batch * one.schedule.accumulation * profile.data_ranks
    everything = Recomputed.of(one.model.recomputable)
    recompute = {"none": NOTHING, "all": everything}.get(request.recompute, one.modes.recompute)
    kept = REDUCE_DTYPES[profile.model.dtype][0]  # where no other is asked for
    return (
        batch == request.global_batch
        and one.schedule.clip == request.clip
        and one.modes.recompute == recompute
        and (one.model.reduce_dtype or kept) == (request.reduce_dtype or kept)
        and (one.model.narrow_sums, one.model.wire) == (request.narrow_sums, request.wire)
        and one.fits(request.memory_bytes, request.host_bytes)
        and pins_of(profile, request).keep(profile, one.levels)
        and ((grammar := grammar_for(profile, request)) is None or grammar.says(one))
    )


def _candidates(profile: Profile, request: Request) -> Candidates:
    """No plans yet, of those that a target which wraps some units together can be told."""
    grammar = grammar_for(profile, request)
    if grammar is None:
        return Candidates()
    trained = {unit: [t.trainable for t in of] for unit, of in tensors_of(profile).items()}

    def instead(one: Evaluation) -> Iterator[Evaluation]:
        for levels in joined(grammar, one, trained):
            same = evaluate(one.model, levels, one.schedule, one.micro_batch, one.slots, one.modes)
            if same.fits(request.memory_bytes, request.host_bytes):
                yield same

    return Candidates(admits=lambda one: keeps(grammar, trained, one.levels), instead=instead)


def _by_scheme(settings: Settings, found: Candidates, profile: Profile, request: Request) -> None:
    """Add schemes with as many recomputed blocks as they need to fit, where that makes them the fastest.

    Users do not set such counts by hand, so these plans are no rows of the table.
    """
    pins = pins_of(profile, request)
    for triple in schemes_of(settings.model).values():
        if pins.keep(profile, uniform(profile, triple)):
            limit = fastest_of(found.all).predicted.period_ns if found.all else INFINITY
            one = settings.fastest(settings.chosen(triple), limit)
            found.all += [one] if one is not None and _answers(one, profile, request) else []


def _add_plain(
    settings: Settings, found: Candidates, enough_ns: float, profile: Profile, request: Request
) -> None:
    """Add plans with one triple for all tensors that are faster than ``found`` by more than the tie.

    Stops when a plan's predicted step is within ``enough_ns``.
    """
    pins, known = pins_of(profile, request), set(schemes_of(settings.model).values())
    tie = tie_of(request.gap, request.tie)
    fastest = fastest_of(found.all).predicted.period_ns
    for triple in settings.model.triples:
        if fastest <= enough_ns:
            return
        if (
            triple in known
            or not pins.keep(profile, uniform(profile, triple))
            or not settings.may_fit(triple)
        ):
            continue
        some = [*settings.of(triple), *settings.chosen(triple)]
        one = settings.fastest(some, fastest / (1 + tie))
        if one is not None and _answers(one, profile, request):
            found.all.append(one)
            fastest = one.predicted.period_ns


def _decided(
    found: Candidates,
    rows: Sequence[Row],
    settings: Settings,
    bound_ns: float,
    request: Request,
    deadline: float,
    like: Evaluation | None,
    inside: InOrder | None,
) -> tuple[Evaluation, list[Row]]:
    """The plan, by the order of preference, and the rows beside it."""
    tie = tie_of(request.gap, request.tie)
    fastest = fastest_of(found.all)
    own = [row for row in rows if row.fits and row.allowed]
    limit = fastest.predicted.period_ns * (1 + tie)
    tied = {row.name for row in within_tie(fastest.predicted.period_ns, own, tie)}
    margin = margin_of(request.gap, request.tie, fastest.model)
    if margin > tie and (row := plain_enough(own, fastest.predicted.period_ns, margin)) is not None:
        limit, tied = row.found.predicted.period_ns * (1 + tie), {row.name}
    if tie:
        rows = [settings.lean(row, limit) if row.name in tied else settings.as_fast(row) for row in rows]
    if tied:
        return preferred([row.found for row in rows if row.name in tied], limit, like), list(rows)
    ceiling = ceiling_ns(fastest, own, tie)
    # Of plans that count as equal those come first of which more is proven.
    covered = [one for one in found.all if inside is not None and inside.covers(one) and within(one, ceiling)]
    best = preferred(covered or found.all, ceiling, like)
    if tie:
        proven = bound_ns * (1 + request.gap)  # what is proven stays so
        most = proven if within_objective(best, proven) else INFINITY
        best = simplified(best, found, settings.searches, request, (ceiling, most), deadline)
    return best, list(rows)


def _relaxed(
    searches: Sequence[Search],
    found: Candidates,
    deadline: float,
    tell: Callable[[str], None],
    latest: float = 0.0,
) -> None:
    """Run relaxations, the one with the lowest bound first, adding plans rounded from them to ``found``.

    Until ``latest`` those of searches that have had none: their bound is computation alone, and so is that of
    the whole question, for as long as there is one of them.
    """
    useful: dict[int, set[int]] = defaultdict(set)
    while (now := time.monotonic()) < max(deadline, latest):
        unproven = [search for search in searches if search.has_open_nodes and search.may_improve(found)]
        if now >= deadline:
            unproven = [search for search in unproven if not search.expanded]
        if not unproven:
            break
        tell("relaxations")
        min(unproven, key=lambda search: search.bound_ms).branch(found, useful)


def _is_proven(inside: InOrder | None, found: Candidates, request: Request) -> bool:
    """Whether the fastest plan is in an order, within the gap of what was proven there."""
    if inside is None or not found.all or not inside.covers(fastest := fastest_of(found.all)):
        return False
    return fastest.predicted.period_ns <= inside.bound_ns * (1 + request.gap)


def _with_ilps(
    searches: Sequence[Search], found: Candidates, deadline: float, tell: Callable[[str], None]
) -> Sequence[Search]:
    """Run ILPs, adding plans to ``found``; returns the searches that have a feasible plan."""
    feasible = searches
    if not found.all:  # perhaps only an exact choice fits, perhaps none does
        for smallest in [s.smallest for s in searches if s.fits(s.smallest)]:
            found.add(smallest)
        feasible = [search for search in searches if not search.certainly_too_large]
    feasible = sorted(feasible, key=lambda search: search.bound_ms)
    for number, search in enumerate(feasible):
        left = deadline - time.monotonic()
        if left > 0 and search.may_improve(found):
            tell(f"ILP of {search}")
            search.run(found, left / sum(other.may_improve(found) for other in feasible[number:]))
    return feasible


def searches_of(profile: Profile, request: Request, *, on_host: bool = True) -> list[Search]:
    """One search per micro-batch size and pace; UserError where no memory budget would give an answer.
    ``on_host``: whether activations may be there, where the question allows it."""
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
    model = cost_model(profile, request)
    pools: dict[str, ColumnPool] = {}
    alike: dict[object, ColumnPool] = {}
    grammar, pins = grammar_for(profile, request), pins_of(profile, request)
    triples = list(model.triples) if grammar is None else list(grammar.triples)
    some = model.schedule(prefetch=1, accumulation=1, clip=request.clip, offload=request.host_bytes > 0)
    for unit, tensors in model.tensors.items():
        if tensors:
            offload = unit in some.offload_slots
            allowed = tuple(pins.allowed(t, triples) for t in tensors)
            kinds = [replace(t, name="") for t in tensors]
            key = tuple(zip(kinds, allowed, strict=True))
            if (key, offload) not in alike:
                alike[key, offload] = enumerate_patterns(
                    *(tensors, model, triples, allowed if request.pins or grammar is not None else None),
                    offload=offload,
                    max_buckets=MAX_BUCKETS if grammar is None else 1,
                )
            pools[unit] = alike[key, offload]
    binaries = _recompute_binaries(model, request, pools, grammar, on_host=on_host and request.host_bytes > 0)
    return [
        Search(model, size, pace, request, pools, binaries)
        for size in sizes
        for pace in paces(model, request.depths, grammar)
    ]


def _recompute_binaries(
    model: CostModel,
    request: Request,
    pools: dict[str, ColumnPool],
    grammar: Grammar | None,
    *,
    on_host: bool,
) -> dict[str, str]:
    """Add to ``pools`` a recompute choice for every unit that may be recomputed; their names by unit.

    Like units share one pool.
    """
    if request.recompute == "none":
        return {}
    made: dict[object, ColumnPool] = {}
    found = {}
    for unit, name in recompute_names(model).items():
        known = [way for way in model.ways[unit] if way != HOST or on_host]
        known = [way for way in known if grammar is None or grammar.may(unit, way)]
        ways: list[Way | None] = [None, *known] if request.recompute == "choose" else ["full"]
        if {*ways} <= {None, *known}:
            found[unit] = name
            kind = id(pools.get(unit)), *ways
            pools[name] = made.setdefault(kind, recompute_pool(model, ways))
    return found
