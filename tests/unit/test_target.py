"""Plans for other runtimes: within what those can be told, the best of that, and exported without loss."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.recompute import Recomputed
from hzplan.core.schedule import Pace
from hzplan.cost.model import CostModel, tensors_of
from hzplan.errors import UserError
from hzplan.export import deepspeed, fsdp2, megatron_fsdp, megatron_fsdp_v2
from hzplan.export.shape import elements
from hzplan.formats.plan import Plan, Target
from hzplan.formats.profile import Profile
from hzplan.solver.emit import emit
from hzplan.solver.evaluate import Modes, evaluate, uniform
from hzplan.solver.pins import Pins
from hzplan.solver.search import grammar_for, paces, pins_of
from hzplan.solver.solve import Request, Solved, solve, solve_each
from hzplan.solver.target import TARGETS, grammar_of, keeps
from hzplan.solver.target import megatron_fsdp_v2 as megatron_fsdp_v2_triples
from tests.cli.command import ROOT
from tests.instances import random_profile, try_everything
from tests.long import shorter

EXPORTS: dict[str, Any] = {
    "fsdp2": fsdp2.export,
    "deepspeed": deepspeed.export,
    "megatron-fsdp": megatron_fsdp.export,
    "megatron-fsdp-v2": megatron_fsdp_v2.export,
}
GIB = 1 << 30


def question(seed: int, target: Target) -> tuple[Profile, Request]:
    rng = random.Random(seed)
    profile = random_profile(rng, micro_batches=rng.choice([(1,), (1, 2)]))
    batch = profile.mesh.world * profile.micro_batches[-1] * rng.choice((1, 2))
    request = Request(1 << 40, batch, gap=0.0, clip=rng.random() < 0.5, depths=(1, 2), time_limit_s=600)
    least = try_everything(profile, request).smallest_bytes
    return profile, replace(request, target=target, memory_bytes=int(least * rng.choice((1.3, 2, 4))))


@pytest.mark.parametrize("seed", shorter(range(40), without=range(5, 40)))
@pytest.mark.parametrize("target", TARGETS)
def test_the_best_that_a_target_can_be_told(seed: int, target: Target) -> None:
    profile, request = question(seed, target)
    grammar = grammar_for(profile, request)
    assert grammar is not None
    _, outcome = solve_each(profile, request)
    model, tensors = CostModel(profile), tensors_of(profile)
    best = float("inf")
    ways = [[None, *(way for way in of if grammar.may(unit, way))] for unit, of in model.ways.items()]
    for size, pace in itertools.product(profile.micro_batches, paces(model, request.depths, grammar)):
        if request.global_batch % (profile.mesh.world * size):
            continue
        accumulation = request.global_batch // (profile.mesh.world * size)
        schedule = model.schedule(**pace._asdict(), accumulation=accumulation, clip=request.clip)
        for levels, chosen in itertools.product(_levels(profile, grammar), itertools.product(*ways)):
            again = {unit: way for unit, way in zip(model.ways, chosen, strict=True) if way is not None}
            if grammar.for_all and {*again} not in (set(), {*model.recomputable}):
                continue
            one = evaluate(model, levels, schedule, size, modes=Modes(Recomputed(again)))
            if one.fits(request.memory_bytes, 0):
                best = min(best, one.predicted.period_ns)
    if best == float("inf"):
        assert not isinstance(outcome, Solved)
        return
    assert isinstance(outcome, Solved)
    assert grammar.says(outcome.best)
    trained = {unit: [t.trainable for t in of] for unit, of in tensors.items()}
    assert keeps(grammar, trained, outcome.best.levels)
    assert outcome.best.predicted.period_ns == pytest.approx(best, rel=1e-12)


def _levels(profile: Profile, grammar: Any) -> list[dict[str, tuple[Levels, ...]]]:
    """All choices of a triple for every unit that the target can be told."""
    trained = {unit: [t.trainable for t in of] for unit, of in tensors_of(profile).items()}
    tensors = {unit: of for unit, of in tensors_of(profile).items() if of}
    picks = (
        ((triple,) * len(tensors) for triple in grammar.triples)
        if grammar.for_all
        else itertools.product(grammar.triples, repeat=len(tensors))
    )
    found = [
        {
            unit: tuple(triple.of(trainable=t.trainable) for t in of)
            for (unit, of), triple in zip(tensors.items(), pick, strict=True)
        }
        for pick in picks
    ]
    return [levels for levels in found if keeps(grammar, trained, levels)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("name", "memory"),
    [
        pytest.param("llama3-8b-h100-8", 40 * GIB, marks=pytest.mark.long),
        ("gpt-small-4", 1 * GIB),
    ],
)
def test_nothing_is_lost_in_export(name: str, memory: int, target: Target, tmp_path: Path) -> None:
    path = ROOT / "plans" / "profiles" / f"{name}.json"
    profile = Profile.load(path)
    batch = profile.data_ranks * profile.micro_batches[-1] * 2
    request, outcome = solve_each(profile, Request(memory, batch, target=target))
    assert isinstance(outcome, Solved)
    plan = emit(profile, request, outcome, profile_path=path, plan_path=tmp_path / "plan.json")
    plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.source.target == target
    specs = [t.spec for unit in profile.units for t in unit.tensors]
    made = EXPORTS[target](tmp_path / "plan.json", plan, elements(specs))
    assert [f"{one.where}: {one.what}" for one in made.lost] == []


@pytest.mark.long
def test_a_target_costs_what_it_cannot_say() -> None:
    profile = Profile.load(ROOT / "plans" / "profiles" / "llama3-8b-h100-8.json")
    request = Request(40 * GIB, 64)
    free = solve(profile, request)
    assert isinstance(free, Solved)
    for target in TARGETS:
        _, outcome = solve_each(profile, Request(40 * GIB, 64, target=target))
        assert isinstance(outcome, Solved) and outcome.best.step_s >= free.best.step_s * (1 - 0.005)


def test_a_pin_holds_beside_a_target() -> None:
    profile = Profile.load(ROOT / "plans" / "profiles" / "gpt-small-4.json")
    request = Request(GIB, 16, target="deepspeed", pins=("*=1,1,1",))
    pins, finest = pins_of(profile, request), profile.mesh.levels
    assert pins.keep(profile, uniform(profile, Levels(0, 0, 0)))
    assert not pins.keep(profile, uniform(profile, Levels(finest, finest, finest)))


@pytest.mark.long
def test_all_is_recomputed_where_the_model_has_to() -> None:
    path = ROOT / "plans" / "profiles" / "llama3-70b-4096-h100-16.json"
    profile = Profile.load(path)
    asked = Request(60 * GIB, 2 * profile.data_ranks, target="deepspeed", time_limit_s=5)
    request, outcome = solve_each(profile, asked)
    assert isinstance(outcome, Solved) and request.recompute == "all"
    assert Pins(request.pins, profile).keep(profile, outcome.best.levels)
    plan = emit(profile, request, outcome, profile_path=path, plan_path=path)
    for target in ("deepspeed", "megatron-fsdp"):
        made = EXPORTS[target](path, plan, elements([]))
        assert made.lost == () and "gradient_checkpointing_enable" in made.beside[0]


def test_pins_that_a_target_cannot_say_are_refused() -> None:
    profile = Profile.load(ROOT / "plans" / "profiles" / "gpt-small-4.json")
    with pytest.raises(UserError, match="and the target say"):
        solve_each(profile, Request(GIB, 16, target="fsdp2", pins=("*=1,1,1",)))


REDISTRIBUTED = {"SR", "PR", "PS", "RS", "RP"}
"""Changes of one axis that Megatron-FSDP v2 makes: ``DBuffer.redistribute`` at d98e8a64."""


def _redistributes(placed: megatron_fsdp_v2.Placed) -> bool:
    """Whether all that happens to a unit in a step is a change of one axis at most, and shards lie inside."""
    whole, own = "R" * len(placed.ranks), "P" * len(placed.ranks)
    changes = [
        (placed.optimizer, placed.parameter),  # first forward after a step
        (placed.parameter, whole),  # every forward and backward
        (own, placed.gradient),  # after every backward
        (placed.gradient, placed.optimizer),  # after the last one
    ]
    changed = [{a + b for a, b in zip(*pair, strict=True) if a != b} for pair in changes]
    at_once = [sum(a != b for a, b in zip(*pair, strict=True)) for pair in changes]
    inside = ["SR" not in one and "SP" not in one for one in (*placed[1:], whole, own)]
    return max(at_once) <= 1 and set().union(*changed) <= REDISTRIBUTED and all(inside)


@pytest.mark.parametrize("text", ["4", "2,2", "2|2", "8|16", "2,4|16", "2|2|2", "2,2|2,2"])
def test_megatron_fsdp_v2_is_told_what_its_source_redistributes(text: str) -> None:
    mesh = Mesh.parse(text)
    able = [triple for triple in mesh.triples() if _redistributes(megatron_fsdp_v2.placed(mesh, triple))]
    assert {*megatron_fsdp_v2_triples(mesh)} == {*able}


def test_megatron_fsdp_v2_sums_in_float32() -> None:
    """What is left until after the last micro-batch does not travel in bfloat16."""
    profile = Profile.load(ROOT / "plans" / "profiles" / "llama3-8b-h100-8.json")
    found = {}
    for dtype in ("float32", "bfloat16"):
        grammar = grammar_of("megatron-fsdp-v2", profile, accumulates=True, reduce_dtype=dtype)
        assert grammar is not None
        found[dtype] = {*grammar.triples}
    finest = profile.mesh.levels
    assert found["bfloat16"] == {triple for triple in found["float32"] if triple.grad == finest}
    assert Levels(0, finest, finest) in found["bfloat16"]


def test_megatron_fsdp_v2_reduces_one_unit_at_a_time() -> None:
    profile = Profile.load(ROOT / "plans" / "profiles" / "gpt-small-4.json")
    grammar = grammar_of("megatron-fsdp-v2", profile, accumulates=True)
    assert grammar is not None
    asked = [Pace(1, 1), Pace(1, 2), Pace(1, 9), Pace(2, 3), Pace(1, 2, message_bytes=1 << 20)]
    assert grammar.paces(asked, 9) == [Pace(1, 2), Pace(2, 2)]
    assert grammar.paces(asked, 1) == [Pace(1, 1), Pace(2, 1)]
    model = CostModel(profile)
    found = paces(model, (1, 2, 3), grammar)
    assert [(pace.prefetch, pace.gradient_buffers) for pace in found] == [(1, 2), (2, 2), (3, 2)]


@pytest.mark.parametrize("name", ["gpt-small-4", "gpt-tiny-2x2", "gpt-tiny-2x2x2"])
def test_what_a_target_is_told_is_what_its_export_says(name: str) -> None:
    """Two places know the levels of a scheme: who searches, and who writes."""
    plan = Plan.load(ROOT / "plans" / f"{name}.json")
    profile = Profile.load(ROOT / "plans" / "profiles" / f"{name}.json")
    for target, known in (("deepspeed", deepspeed.schemes), ("megatron-fsdp", megatron_fsdp.schemes)):
        grammar = grammar_of(target, profile, accumulates=True)
        assert grammar is not None and {*grammar.triples} == {*known(plan)}, target
