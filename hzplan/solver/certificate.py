"""A plan's certificate: made of what the search kept, and multiplied out again without solving anything.

With multipliers λ of rows T ≥ row, μ of the device's memory, η of the host's, β and ε of what units and
events ask of shared buffers b, and γ of the counts n, every plan of a leaf has

    T ≥ Σ λ·constant + Σ ε·base − μ·budget − η·host budget + Σ_b (μ − Σβ_b − Σε_b)·b − Σ γ·n
        + Σ_u (Σ λ·weight·d + μ·resident + β·size + ε·added + γ·on + η·host)(pattern of u)

where Σ λ ≤ 1, and μ is at least what each buffer asks of it. Its least value over b, n and each unit's
patterns by itself is a bound (weak duality), whatever the multipliers are. So they may be rounded: what is
written here cannot be wrong, only weak. Large terms that nearly cancel would leave only what they were
rounded by: by so much the bound is less.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isnan

import numpy as np

from hzplan.core.schedule import Pace
from hzplan.formats.base import fingerprint
from hzplan.formats.certificate import Certificate, Multipliers, Node, PaceProof
from hzplan.formats.profile import Profile
from hzplan.solver import rows
from hzplan.solver.evaluate import Evaluation
from hzplan.solver.in_order import SizeAndPace, order_at, pace_of
from hzplan.solver.paths import LazyConstraint
from hzplan.solver.question import Coefficients, Question
from hzplan.solver.rows import ALL, INFINITY, Row
from hzplan.solver.search import Search
from hzplan.solver.solve import Solved
from hzplan.solver.tree import Limits, Split, halves

EPSILON = float(np.finfo(float).eps)
SLACK = 1e-11
"""Share by which a bound is stated below what was multiplied out here, so that it follows elsewhere too."""
DIGITS = 9
"""Significant digits that are kept of a multiplier."""
ROUNDING = 1e-9
"""By how much a stated bound may be above the multiplied one, as a share of it and in seconds: its digits."""


class Refused(ValueError):
    """A certificate from which its bound does not follow; the message names the row, leaf or pace."""


@dataclass(frozen=True)
class Certified:
    """What follows from a certificate: lower bounds on the step, s (``Certificate``)."""

    bound_s: float
    in_order_bound_s: float | None


def certify(profile: Profile, solved: Solved) -> Certificate:
    """The certificate of a solved plan: of every pace the leaves, as far as they are needed for its bound.

    ILPs raise bounds by branching that nobody else can follow, so what is certified may be less than
    ``Solved`` says.
    """
    bound_ms = min(search.tree.bound_ms for search in solved.searches)
    inside = solved.inside if solved.inside is not None and solved.inside.covers(solved.best) else None
    ordered = {} if inside is None else {pace_of(p.any_order): p.ordered for p in inside.paces if p.ordered}
    trees = {pace_of(search): search.tree for search in solved.searches}
    reached = {
        pace: max(tree.bound_ms, ordered[pace].tree.bound_ms if pace in ordered else 0.0)
        for pace, tree in trees.items()
    }
    in_order_ms = min(reached.values())
    proofs = []
    for search in solved.searches:
        one = ordered.get(pace_of(search))
        needs_order = one is not None and search.tree.bound_ms < in_order_ms
        enough = bound_ms if inside is None or needs_order else in_order_ms
        proofs.append(_pace_proof(search, enough, in_order=False))
        if one is not None and needs_order:
            proofs.append(_pace_proof(one, in_order_ms, in_order=True))
    of_pace = _by_pace(proofs)
    return Certificate(
        profile_sha256=fingerprint(profile),
        bound_s=min(any_order.bound_s for any_order, _ in of_pace.values()),
        in_order_bound_s=None if inside is None else min(_both(*pair) for pair in of_pace.values()),
        paces=tuple(proofs),
    )


def _pace_proof(search: Search, enough_ms: float, *, in_order: bool) -> PaceProof:
    """The proof of one pace up to a bound that is enough, with the walks that it uses."""
    nodes = [_rounded(node) for node in search.tree.nodes(enough_ms)]
    network = search.question.network
    fixed = len(network.capacities)
    used = sorted({n for node in nodes if node.multipliers for n, _ in node.multipliers.rows if n > fixed})
    places = {n: fixed + 1 + place for place, n in enumerate(used)}
    walks = [search.lp.cycles[n - 1][1].walk for n in used]
    assert all(walk is not None for walk in walks), "the rows behind the capacities are cycles"
    micro_batch, pace = pace_of(search)
    proof = PaceProof(
        micro_batch=micro_batch,
        prefetch=pace.prefetch,
        gradient_buffers=pace.gradient_buffers,
        message_bytes=pace.message_bytes or None,
        matrix_units=pace.matrix_units or None,
        in_order=in_order,
        bound_s=0.0,
        walks=tuple(walk for walk in walks if walk is not None),
        nodes=tuple(_with_rows(node, places) for node in nodes),
    )
    return proof.model_copy(update={"bound_s": _down(Multiplication(search.question, proof).bound_s)})


def _with_rows(node: Node, places: Mapping[int, int]) -> Node:
    """A node that names its rows by other numbers."""
    if node.multipliers is None:
        return node
    rows = tuple((places.get(number, number), value) for number, value in node.multipliers.rows)
    return Node(multipliers=node.multipliers.model_copy(update={"rows": rows}))


def _rounded(node: Node) -> Node:
    if (m := node.multipliers) is None:
        return node
    return Node(
        multipliers=Multipliers(
            rows=tuple((n, value) for n, of in m.rows if (value := _digits(of))),
            memory=_digits(m.memory),
            host=_digits(m.host),
            buffers=tuple((n, unit, value) for n, unit, of in m.buffers if (value := _digits(of))),
            events=tuple((n, event, value) for n, event, of in m.events if (value := _digits(of))),
            counts=tuple((n, value) for n, of in m.counts if (value := _digits(of))),
        )
    )


def _digits(value: float) -> float:
    return float(f"{value:.{DIGITS}g}") if abs(value) > 10.0**-DIGITS else 0.0


def _down(seconds: float) -> float:
    """Rounded to the places that a plan keeps, downwards; and by what sums in another order may differ."""
    return max(0.0, np.floor(seconds * (1 - SLACK) * 1e9) / 1e9) if seconds < INFINITY else 1e12


def multiplied(certificate: Certificate, plan: Evaluation, searches: Sequence[Search]) -> Certified:
    """The bounds that follow from a certificate, for ``searches``: all paces of the plan's question.

    Refused where a pace has no proof, or a row, a split or a bound does not follow.
    """
    known = {pace_of(search): search for search in searches}
    for (pace, in_order), times in Counter((_named(of), of.in_order) for of in certificate.paces).items():
        where = f"micro-batch {pace[0]}, {pace[1]}"
        if pace not in known:
            raise Refused(f"a proof of {where}, which the question does not have")
        if times > 1:
            raise Refused(f"{times} proofs of {where}{', in the order' * in_order}; one is needed")
    proofs = _by_pace(certificate.paces)
    order = plan.schedule.order if certificate.in_order_bound_s is not None else None
    found: dict[SizeAndPace, tuple[float, float]] = {}
    for pace, search in known.items():
        if pace not in proofs:
            raise Refused(f"no proof of {search}")
        any_order, ordered = proofs[pace]
        first = _followed(search, any_order)
        second = first
        if ordered is not None:
            if order is None:
                raise Refused(f"{search}: a proof in an order that the plan does not have")
            second = max(first, _followed(search.in_order(order_at(order, plan, search)), ordered))
        found[pace] = first, second
    bounds = min(first for first, _ in found.values()), min(second for _, second in found.values())
    for name, stated, follows in zip(
        ("bound_s", "in_order_bound_s"),
        (certificate.bound_s, certificate.in_order_bound_s),
        bounds,
        strict=True,
    ):
        if stated is not None and _exceeds(stated, follows):
            raise Refused(f"field {name} is {stated:.9g}, its paces give {follows:.9g}")
    return Certified(bounds[0], bounds[1] if certificate.in_order_bound_s is not None else None)


def _followed(search: Search, proof: PaceProof) -> float:
    """The bound of one pace, multiplied out, s."""
    product = Multiplication(search.question, proof)
    where = f"{search}{', in the order' if proof.in_order else ''}"
    try:
        follows = product.bound_s
    except Refused as error:
        raise Refused(f"{where}: {error}") from None
    if _exceeds(proof.bound_s, follows):
        raise Refused(
            f"{where}: leaf {product.weakest} gives {follows:.9g} s, not {proof.bound_s:.9g} s; "
            f"its largest row is {product.largest_row}"
        )
    return min(follows, proof.bound_s)


def _exceeds(stated: float, follows: float) -> bool:
    return stated > follows * (1 + ROUNDING) + ROUNDING


def _both(any_order: PaceProof, ordered: PaceProof | None) -> float:
    return any_order.bound_s if ordered is None else max(any_order.bound_s, ordered.bound_s)


def _by_pace(
    proofs: Iterable[PaceProof],
) -> dict[SizeAndPace, tuple[PaceProof, PaceProof | None]]:
    """By pace, the proof in any order, and that in the plan's."""
    found = {}
    listed = list(proofs)
    ordered = {_named(proof): proof for proof in listed if proof.in_order}
    for proof in listed:
        if not proof.in_order:
            found[_named(proof)] = proof, ordered.get(_named(proof))
    return found


def _named(proof: PaceProof) -> SizeAndPace:
    of = proof.prefetch, proof.gradient_buffers, proof.message_bytes or 0, proof.matrix_units or 0
    return proof.micro_batch, Pace(*of)


class _Sum:
    """A sum of floating-point numbers; ``at_least`` is below the exact one, or NaN where it is too large."""

    def __init__(self) -> None:
        self.total = self.sizes = 0.0
        self.terms = 0

    def add(self, value: float, size: float | None = None, terms: int = 1) -> None:
        """A value that is itself a sum of so many ``terms``, whose absolute values add up to ``size``."""
        self.total += value
        self.sizes += abs(value) if size is None else size
        self.terms += terms

    @property
    def at_least(self) -> float:
        """Less what n products and their sum are rounded by at most: 2 n ε Σ |terms|."""
        return self.total - 2 * self.terms * EPSILON * self.sizes


class Multiplication:
    """The proof of one pace multiplied out for a question. ``weakest``: the leaf with the lowest bound, by
    its number among the nodes."""

    def __init__(self, question: Question, proof: PaceProof) -> None:
        self.question, self.proof = question, proof
        self.weakest = 0

    @cached_property
    def rows(self) -> list[LazyConstraint]:
        """All compute, whole steps, and the walks; Refused where one is no cycle of the event graph."""
        network = self.question.network
        found = [network.compute, *network.capacities]
        for walk in self.proof.walks:
            try:
                found.append(network.checked(walk))
            except ValueError as error:
                raise Refused(f"row {len(found)}: {error}") from None
        return found

    @cached_property
    def bound_s(self) -> float:
        """The least bound of all leaves, s; infinite where no plan is in any."""
        least = INFINITY
        for number, limits, multipliers in self._leaves():
            try:
                bound = self._leaf_ms(limits, multipliers)
            except (IndexError, KeyError):
                raise Refused(f"leaf {number}: multiplies a row that does not exist") from None
            if isnan(bound):
                raise Refused(f"leaf {number}: its multipliers are too large for a bound to be left")
            if bound < least:
                least, self.weakest = bound, number
        return max(0.0, least) / 1e3

    @property
    def largest_row(self) -> str:
        """The row with the largest multiplier in the weakest leaf, in words."""
        multipliers = self.proof.nodes[self.weakest].multipliers
        if multipliers is None or not multipliers.rows:
            return "none"
        number, value = max(multipliers.rows, key=lambda row: row[1])
        fixed = 1 + len(self.question.network.capacities)
        if number == 0:
            what = "all compute"
        elif number < fixed:
            what = "a whole step's"
        else:
            what = f"the cycle of {len(self.proof.walks[number - fixed])} tasks"
        return f"{number} (× {value:.3g}), {what}"

    def _leaves(self) -> Iterator[tuple[int, Limits, Multipliers]]:
        """Number, limits and multipliers of every leaf; Refused where splits leave plans out."""
        waiting: list[Limits] = [{}]
        for number, node in enumerate(self.proof.nodes):
            if not waiting:
                raise Refused(f"node {number} is of no split")
            limits = waiting.pop()
            if node.split is not None:
                self._check(number, node.split)
                lower, upper = halves(limits, node.split)
                waiting += [upper, lower]
            else:
                yield number, limits, node.multipliers or Multipliers(rows=())
        if waiting:
            raise Refused(f"{len(waiting)} parts of splits have no leaf")

    def _check(self, number: int, split: Split) -> None:
        """A split leaves no plan out: no pattern, and no count, is between its two values."""
        index, below, above = split
        shared = self.question.memory_use.shared
        if below >= above:
            raise Refused(f"the split at node {number} splits nothing")
        if index < len(shared):
            sizes = shared[index].sizes.values()
            ok = not any(((of > below) & (of < above)).any() for of in sizes)
        else:
            ok = index - len(shared) < len(self.question.alike) and above - below <= 1
            ok &= below == int(below) and above == int(above)
        if not ok:
            raise Refused(f"the split at node {number} leaves plans out")

    def _leaf_ms(self, limits: Limits, of: Multipliers) -> float:
        """The bound of a leaf, ms; see the module."""
        question, network = self.question, self.question.network
        shared = question.memory_use.shared
        total, price = _Sum(), np.zeros(network.shape)
        scale = max(1.0, sum(value for _, value in of.rows))
        for number, value in of.rows:
            cut = self.rows[number]
            total.add(value / scale * cut.constant)
            price += value / scale * cut.weights
        needs: dict[str, list[Coefficients]] = {unit: [] for unit in question.pools}
        taken: dict[str, list[float]] = defaultdict(list)  # by variable, what the rows' sum has of it

        def multiply(row: Row, value: float) -> None:
            total.add(value * row.low)
            for name, coefficient in row.columns.items():
                taken[name].append(value * coefficient)
            for unit in row.units:
                needs[unit].append(value * row.of(unit, ALL))

        for number, unit, value in of.buffers:
            multiply(rows.holds(question, number, unit), value)
        for number, event, value in of.events:
            multiply(rows.event(question, number, event), value)
        for group, value in of.counts:
            multiply(rows.count(question, group), value)
        own = {unit for unit, terms in needs.items() if terms}
        # A buffer may be as large as it likes, so each MiB costs no less than what rows ask for it.
        memory = max([of.memory, *(sum(taken[buffer.name]) for buffer in shared)])
        multiply(rows.memory(question), memory)
        multiply(rows.host(question), of.host)
        total.add(-memory * question.budget_mib)
        for number, name in enumerate(rows.columns(question)):
            low, high = limits.get(number, (0.0, INFINITY))
            if number >= len(shared) and sum(taken[name]) > 0:
                low = min(high, len(question.alike[number - len(shared)]))
            parts = [-low * coefficient for coefficient in taken[name]]
            total.add(sum(parts), sum(map(abs, parts)), len(parts))
        least: dict[tuple[int, bytes], tuple[float, float, int]] = {}  # like units cost the same
        for unit, at in network.rows.items():
            alike = self._kinds[unit], price[at].tobytes()
            plain = unit not in own and not self._limited(unit, limits)
            if not plain or alike not in least:
                allowed = self._allowed(unit, limits)
                if not allowed.any():
                    return INFINITY
                terms = [question.durations_ms[unit] * price[at], *(of[:, None] for of in needs[unit])]
                costs = np.column_stack(terms)[allowed]
                sums, sizes = costs.sum(axis=1), np.abs(costs).sum(axis=1)
                lowest = float(sums.min()), float(sizes.max()), costs.shape[1]
                if plain:
                    least[alike] = lowest
            else:
                lowest = least[alike]
            total.add(*lowest)
        return total.at_least

    @cached_property
    def _kinds(self) -> dict[str, int]:
        """Units whose patterns last as long and hold as much share a number."""
        use, pools, known = self.question.memory_use, self.question.pools, dict[object, int]()
        return {
            unit: known.setdefault(
                (id(pools[unit]), use.resident[unit].tobytes(), unit in use.host), len(known)
            )
            for unit in pools
        }

    def _limited(self, unit: str, limits: Limits) -> bool:
        """Whether limits may forbid patterns of a unit."""
        shared = self.question.memory_use.shared
        return any(number < len(shared) and unit in shared[number].sizes for number in limits)

    def _allowed(self, unit: str, limits: Limits) -> Coefficients:
        """Which patterns ask for no more of a buffer than its limits allow [patterns]."""
        allowed = np.ones(len(self.question.pools[unit].levels), dtype=bool)
        shared = self.question.memory_use.shared
        for number, (_, high) in limits.items():
            if number < len(shared) and unit in shared[number].sizes:
                allowed &= shared[number].sizes[unit] <= high
        return allowed
