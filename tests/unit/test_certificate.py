"""Certificates: what follows from them holds for every plan, and what does not follow is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from hzplan.errors import UserError
from hzplan.formats.certificate import Certificate, Multipliers, Node, PaceProof, path_of, save
from hzplan.formats.profile import Profile
from hzplan.solver.certificate import Multiplication, Refused, certify, multiplied
from hzplan.solver.emit import emit
from hzplan.solver.guard import guard
from hzplan.solver.in_order import pace_of
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
        pace = proof.micro_batch, proof.prefetch, proof.gradient_buffers
        if not proof.in_order and pace in truth.by_pace:
            assert proof.bound_s * 1e9 <= truth.by_pace[pace] * NEARLY + 1


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
            proof = PaceProof(
                micro_batch=pace[0],
                prefetch=pace[1],
                gradient_buffers=pace[2],
                in_order=False,
                bound_s=0.0,
                walks=tuple(known),
                nodes=(Node(multipliers=multipliers),),
            )
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
    proof = certificate.paces[walk]
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


def test_check_refuses_a_proof_of_other_data(tmp_path: Path) -> None:
    profile, request, outcome = solved(5, gap=0.05)
    profile.save(tmp_path / "profile.json")
    path = tmp_path / "plan.json"
    plan = emit(profile, request, outcome, profile_path=tmp_path / "profile.json", plan_path=path)
    certificate = certify(profile, outcome)
    save(plan, certificate, path)
    assert guard(path, replay_only=True).changes == ()
    bold = plan.model_copy(
        update={"proof": plan.proof.model_copy(update={"bound_s": plan.proof.bound_s * 1.1})}
    )
    bold.save(path)  # remarked: multiplications do not give it
    found = guard(path, replay_only=True)
    assert found.ok and [change.kind for change in found.changes] == ["proof"]
    plan.save(path)
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
