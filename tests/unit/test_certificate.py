"""Certificates: what follows from them holds for every plan, and what does not follow is refused."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from hzplan.core.schedule import Pace
from hzplan.errors import UserError
from hzplan.formats.certificate import Certificate, Multipliers, Node, PaceProof, path_of, save
from hzplan.formats.plan import gap_of
from hzplan.formats.profile import Profile
from hzplan.solver.certificate import Multiplication, Refused, certify, multiplied
from hzplan.solver.emit import emit
from hzplan.solver.guard import guard
from hzplan.solver.in_order import pace_of
from hzplan.solver.question import Question
from hzplan.solver.solve import Request, Solved, searches_of, solve
from tests.instances import random_profile, try_everything

NEARLY = 1 + 1e-6


def solved(seed: int, *, share: float = 1.05, gap: float = 0.005) -> tuple[Profile, Request, Solved]:
    """An instance whose memory is scarce, and its answer."""
    rng = random.Random(seed)
    profile = random_profile(rng, micro_batches=(1, 2))
    request = Request(1, profile.mesh.world * 2, gap=gap, depths=(1, 2))
    least = try_everything(profile, request).smallest_bytes
    request = replace(request, memory_bytes=int(least * share), depths=(1, 2, 3))
    outcome = solve(profile, request)
    assert isinstance(outcome, Solved)
    return profile, request, outcome


@pytest.mark.parametrize("seed", range(12))
def test_a_certificate_is_as_good_as_the_relaxation_and_below_every_plan(seed: int) -> None:
    profile, request, outcome = solved(seed, share=1.0 + seed % 4 / 10)
    certificate = certify(profile, outcome)
    follows = multiplied(certificate, outcome.best, searches_of(profile, request))
    assert follows.bound_s == pytest.approx(certificate.bound_s, abs=2e-9)
    relaxed_ms = min(search.tree.bound_ms for search in outcome.searches)
    assert certificate.bound_s * 1e3 * NEARLY + 2e-6 >= relaxed_ms
    truth = try_everything(profile, request)
    assert truth.objective_ns is not None
    for proof in certificate.paces:
        pace = proof.micro_batch, Pace(proof.prefetch, proof.gradient_buffers, proof.message_bytes or 0)
        if not proof.in_order and pace in truth.by_pace:
            assert proof.bound_s * 1e9 <= truth.by_pace[pace] * NEARLY + 1


def _of_one_leaf(
    pace: tuple[int, Pace], walks: Iterable[tuple[int, ...]], multipliers: Multipliers
) -> PaceProof:
    return PaceProof(
        micro_batch=pace[0],
        prefetch=pace[1].prefetch,
        gradient_buffers=pace[1].gradient_buffers,
        message_bytes=pace[1].message_bytes or None,
        in_order=False,
        bound_s=0.0,
        walks=tuple(walks),
        nodes=(Node(multipliers=multipliers),),
    )


@pytest.mark.parametrize("seed", range(12))
def test_any_multipliers_give_a_bound(seed: int) -> None:
    rng = random.Random(seed)
    profile, request, outcome = solved(seed)
    truth = try_everything(profile, request)
    for search in outcome.searches:
        pace = pace_of(search)
        if pace not in truth.by_pace:
            continue
        question = search.question
        shared, known = question.memory_use.shared, [cut.walk for _, cut in search.lp.cycles if cut.walk]
        fixed = 1 + len(question.network.capacities)
        for _ in range(20):
            scale = 10.0 ** rng.uniform(-3, 3)
            multipliers = Multipliers(
                rows=tuple(
                    (row, rng.expovariate(1)) for row in range(fixed + len(known)) if rng.random() < 0.5
                ),
                memory=rng.expovariate(1) * scale,
                host=rng.expovariate(1),
                buffers=tuple(
                    (number, unit, rng.expovariate(1) * scale)
                    for number, buffer in enumerate(shared)
                    for unit in buffer.sizes
                    if rng.random() < 0.3
                ),
                events=tuple(
                    (number, event, rng.expovariate(1) * scale)
                    for number, buffer in enumerate(shared)
                    for event in range(len(buffer.events.base))
                    if rng.random() < 0.3
                ),
                counts=tuple((group, rng.gauss(0, 0.1)) for group in range(len(question.alike))),
            )
            proof = _of_one_leaf(pace, known, multipliers)
            assert Multiplication(question, proof).bound_s * 1e9 <= truth.by_pace[pace] * NEARLY + 1


def _changed(certificate: Certificate, number: int, **fields: object) -> Certificate:
    paces = list(certificate.paces)
    paces[number] = paces[number].model_copy(update=fields)
    return certificate.model_copy(update={"paces": tuple(paces)})


def test_what_does_not_follow_is_refused_by_name() -> None:
    for seed in range(40):  # one whose proof has a walk and a split
        profile, request, outcome = solved(seed, share=1.0)
        certificate = certify(profile, outcome)
        with_walk = [n for n, proof in enumerate(certificate.paces) if proof.walks]
        with_split = [n for n, proof in enumerate(certificate.paces) if len(proof.nodes) > 1]
        if with_walk and with_split:
            break
    else:
        raise AssertionError("no instance has both")
    searches = searches_of(profile, request)

    def refused(wrong: Certificate, why: str) -> None:
        with pytest.raises(Refused, match=why):
            multiplied(wrong, outcome.best, searches)

    walk, split = with_walk[0], with_split[0]
    proof, question = certificate.paces[walk], searches[0].question
    higher = proof.bound_s * 1.001 + 1e-8
    refused(_changed(certificate, walk, bound_s=higher), "leaf .* gives .* its largest row is")
    refused(certificate.model_copy(update={"bound_s": certificate.bound_s * 2}), "field bound_s")
    shorter = (proof.walks[0][:-1], *proof.walks[1:])
    refused(_changed(certificate, walk, walks=shorter), r"row \d+: .*(does not wait|no cycle)")
    refused(_changed(certificate, walk, walks=()), "row that does not exist")
    refused(certificate.model_copy(update={"paces": certificate.paces[1:]}), "no proof of micro-batch")
    nodes = certificate.paces[split].nodes
    refused(_changed(certificate, split, nodes=nodes[:-1]), "have no leaf")
    refused(_changed(certificate, split, nodes=(*nodes, nodes[-1])), "of no split")
    at, below, above = next(node.split for node in nodes if node.split)
    apart = tuple(Node(split=(at, 0.0, above + 1e6)) if node.split else node for node in nodes)
    assert below < above
    refused(_changed(certificate, split, nodes=apart), "leaves plans out")
    idle = tuple(Node(split=(at, above, above)) if node.split else node for node in nodes)
    refused(_changed(certificate, split, nodes=idle), "splits nothing")
    twice = certificate.model_copy(update={"paces": (*certificate.paces, certificate.paces[0])})
    refused(twice, "2 proofs of micro-batch .* one is needed")
    strange = certificate.paces[0].model_copy(update={"prefetch": 99})
    unknown = certificate.model_copy(update={"paces": (*certificate.paces, strange)})
    refused(unknown, "a proof of .* prefetch 99, .* which the question does not have")
    for size in (1e200, 1e308):  # whose sum is no number, or only what it was rounded by
        large = Multipliers(rows=((0, 1.0),), memory=size, counts=((0, size),) if question.alike else ())
        wrong = _changed(certificate, 0, bound_s=1e12, walks=(), nodes=(Node(multipliers=large),))
        refused(wrong, "too large for a bound|leaf 0 gives")


def _memory_alone(question: Question, price: float) -> Multipliers:
    """All compute, and the least memory: each buffer has the price of what asks for most of it."""
    buffers, events = [], []
    for number, buffer in enumerate(question.memory_use.shared):
        sizes = {unit: float(of.min()) for unit, of in buffer.sizes.items()}
        least = sum((of.min(axis=0) for of in buffer.events.added.values()), buffer.events.base)
        if len(least) and least.max() > max(sizes.values(), default=0.0):
            events.append((number, int(least.argmax()), price))
        elif sizes:
            buffers.append((number, max(sizes, key=sizes.__getitem__), price))
    return Multipliers(rows=((0, 1.0),), memory=price, buffers=tuple(buffers), events=tuple(events))


@pytest.mark.parametrize("seed", range(12))
def test_rounding_forges_no_bound(seed: int) -> None:
    """Where the budget is exactly what the smallest plan takes, a price of memory cancels out."""
    profile, request, outcome = solved(seed, share=1.0)
    truth = try_everything(profile, request)
    tried = 0
    for search in outcome.searches:
        pace = pace_of(search)
        if pace not in truth.by_pace or search.smallest.memory.peak != request.memory_bytes:
            continue
        for scale in range(0, 40, 2):
            proof = _of_one_leaf(pace, (), _memory_alone(search.question, 10.0**scale / 3))
            assert Multiplication(search.question, proof).bound_s * 1e9 <= truth.by_pace[pace] * NEARLY + 1
            tried += 1
    assert tried


def test_check_refuses_figures_that_do_not_follow(tmp_path: Path) -> None:
    profile, request, outcome = solved(5, gap=0.05)
    profile.save(tmp_path / "profile.json")
    path = tmp_path / "plan.json"
    plan = emit(profile, request, outcome, profile_path=tmp_path / "profile.json", plan_path=path)
    save(plan, certify(profile, outcome), path)
    assert guard(path).changes == () and plan.message_order is None
    step_s, bound_s = plan.predicted.step_s, plan.proof.bound_s
    between = (step_s + bound_s) / 2
    assert bound_s * 1.006 < between < step_s

    def said(**figures: object) -> list[tuple[str, bool]]:
        plan.model_copy(update={"proof": plan.proof.model_copy(update=figures)}).save(path)
        changes = guard(path, replay_only=True).changes
        return [(change.what, change.fails) for change in changes]

    ((what, fails),) = said(gap=plan.proof.gap / 2)
    assert fails and what.startswith("gap is ")
    (what, fails), *_ = said(bound_s=step_s * 1.001, gap=0.0)
    assert fails and "above the step of" in what
    (what, fails), *_ = said(in_order_bound_s=bound_s)
    assert fails and "the plan has none" in what
    ((what, fails),) = said(bound_s=between, gap=gap_of(step_s, between))
    assert not fails and "an ILP proved the rest" in what  # perhaps: without solving nobody can tell
    found = guard(path)
    assert not found.ok and "solving again proves" in found.reason


def test_check_refuses_a_proof_of_other_data(tmp_path: Path) -> None:
    profile, request, outcome = solved(5, gap=0.05)
    profile.save(tmp_path / "profile.json")
    path = tmp_path / "plan.json"
    plan = emit(profile, request, outcome, profile_path=tmp_path / "profile.json", plan_path=path)
    certificate = certify(profile, outcome)
    save(plan, certificate, path)
    assert guard(path, replay_only=True).changes == ()
    path_of(path).unlink()
    found = guard(path, replay_only=True)
    assert found.ok and "plan.proof is not there" in str(found.changes[0])
    os.mkfifo(path_of(path))
    with pytest.raises(UserError, match=r"plan.proof: is no regular file"):
        guard(path, replay_only=True)
    path_of(path).unlink()
    save(plan, certificate, path)
    faster = [
        use.model_copy(
            update={"costs": tuple(c.model_copy(update={"seconds": c.seconds / 2}) for c in use.costs)}
        )
        for use in profile.uses
    ]
    other = profile.model_copy(update={"uses": tuple(faster)})
    other.save(tmp_path / "profile.json")
    found = guard(path, replay_only=True)
    assert any(change.kind == "proof" and "leaf" in change.what for change in found.changes)
    path_of(path).write_text("{}")
    with pytest.raises(UserError, match=r"plan.proof"):
        guard(path, replay_only=True)
