"""Steps in which parameters and gradients travel narrow: replicas stay alike, and it is what one process with
the same rounding computes."""

from __future__ import annotations

import copy
import itertools
import time
import warnings

import pytest
import torch
from torch import Tensor, nn

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.layout import Dtype, TensorSpec, bucketise, marked
from hzplan.core.schedule import Kind
from hzplan.core.wire import BLOCK, KEPT, Admitted, Format, Wire
from hzplan.errors import UserError
from hzplan.formats.cluster import find_cluster
from hzplan.formats.plan import Plan
from hzplan.formats.profile import (
    CollectiveCurve,
    CollectivePoint,
    Profile,
    RoundingEntry,
    RoundingPoint,
)
from hzplan.models.workload import load
from hzplan.profiler.analytic import analyse
from hzplan.runtime import rounding
from hzplan.runtime.apply import full_parameters
from hzplan.runtime.backends.packing import form_of
from hzplan.runtime.optimizer import ShardedOptimizer
from hzplan.solver.solve import Outcome, Request, Solved, solve
from hzplan.solver.wire import solve_in
from tests.plans import make_plan
from tests.threads import in_threads
from tests.unit.test_packing import rounded

STEPS = 3
MODEL = "gpt:nano"


def wire_of(tiers: int, param: Format, grad: Format) -> Wire:
    """The same on every tier."""
    return Wire((param,) * tiers, (grad,) * tiers)


Values = dict[str, Tensor]


def trained(plan: Plan) -> list[list[Values]]:
    """By rank and step every parameter as it is computed with in the next forward."""
    workload = load(MODEL)

    def rank(number: int, model: nn.Module, sharded: ShardedOptimizer) -> list[Values]:
        generator = torch.Generator().manual_seed(number)
        found = []
        for _ in range(STEPS):
            for _ in range(plan.batch.accumulation):
                loss = workload.loss(model, workload.batch(plan.batch.micro_batch, generator))
                (loss / plan.batch.accumulation).backward()
            sharded.step()
            values: Values = {}
            for unit in sharded.engine.units:
                with sharded.engine.unsharded(unit) as state:
                    for bucket in state.buckets:
                        named = zip(bucket.layout.tensors, bucket.param_views, strict=True)
                        values |= {tensor.name: view.detach().clone() for tensor, view in named}
            found.append(values)
        return found

    torch.manual_seed(0)
    return in_threads(plan, load(MODEL).build(), rank)


LEVELS = [
    Levels(0, 0, 0),
    Levels(0, 0, 2),
    Levels(1, 1, 2),
    Levels(2, 2, 2),
    Levels(0, 2, 2),
    Levels(1, 0, 1),
]


@pytest.mark.parametrize("levels", LEVELS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("param", "grad"), [("int8", "int8"), ("fp8", "bf16")])
def test_replicas_are_the_same_to_the_bit_after_every_step(
    levels: Levels, dtype: Dtype, param: Format, grad: Format
) -> None:
    plan = make_plan(
        MODEL, mesh="2|2", levels=levels, dtype=dtype, accumulation=2, wire=wire_of(2, param, grad)
    )
    first, *others = trained(plan)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    exact, *_ = trained(plan.model_copy(update={"wire": None}))
    mine, theirs = (torch.cat([of[-1][n].flatten().float() for n in sorted(of[-1])]) for of in (first, exact))
    apart = float((mine - theirs).norm() / theirs.norm())
    assert 0 < apart < (0.05 if param == "fp8" else 0.02)


def test_parameters_are_those_of_one_process_that_rounds_them() -> None:
    """Everything sharded: each forward reads rounded values, and the optimizer updates exact ones."""
    plan = make_plan(MODEL, mesh="2", dtype="float32", wire=Wire(("int8",), ("exact",)))
    mine, _ = trained(plan)
    workload = load(MODEL)
    torch.manual_seed(0)
    model = workload.build()
    seen = copy.deepcopy(model)
    wire, mesh = plan.wire.formats if plan.wire else None, Mesh.parse("2")
    levels = Levels(1, 1, 1)
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]

    def take_over() -> None:
        """The rounded values into what is computed with, bucket by bucket."""
        own, others = dict(model.named_parameters()), dict(seen.named_parameters())
        for unit in plan.units:
            names = [name for bucket in unit.buckets for name in bucket.tensors]
            specs = marked((TensorSpec(n, tuple(own[n].shape), "float32") for n in names), wire)
            for bucket in bucketise([(spec, levels) for spec in specs], mesh):
                flat = torch.zeros(bucket.numel)
                for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True):
                    flat[offset : offset + spec.numel] = own[spec.name].detach().flatten()
                if bucket.narrow and bucket.numel // 2 % BLOCK == 0:
                    flat = rounded("int8", flat)
                for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True):
                    values = flat[offset : offset + spec.numel].view(spec.shape)
                    others[spec.name].data.copy_(values)

    for step in range(STEPS):
        take_over()
        seen.zero_grad()
        for generator in generators:
            (workload.loss(seen, workload.batch(2, generator)) / 2).backward()
        for own, other in zip(model.parameters(), seen.parameters(), strict=True):
            own.data.sub_(0.1 * other.grad)  # type: ignore[operator]
        take_over()
        differs = 0
        for name, value in mine[step].items():
            rounded_here, exact = (dict(of.named_parameters())[name].detach() for of in (seen, model))
            same = torch.isclose(value, rounded_here, rtol=1e-5, atol=1e-7)
            # A code is the next one where the last digit of a gradient differs.
            assert float(same.float().mean()) > 0.995, name
            differs += int((value - exact).abs().max() > 1e-5)
        assert differs > 3, "the matrices were rounded"


def test_norms_biases_and_embeddings_travel_exactly() -> None:
    wire = wire_of(1, "int8", "int8")
    narrow = {
        spec.name
        for spec in marked(
            (TensorSpec(n, tuple(p.shape), "float32") for n, p in load(MODEL).build().named_parameters()),
            wire,
        )
        if spec.narrow
    }
    assert narrow and all("weight" in name and "norm" not in name and "emb" not in name for name in narrow)


def test_no_shard_cuts_a_block() -> None:
    for numbers, mesh in itertools.product(
        [(40_000,), (3, 900_000, 7)], [Mesh.parse("2|3"), Mesh.parse("8|4")]
    ):
        specs = [TensorSpec(f"t{i}", (n, 1), "float32", narrow=True) for i, n in enumerate(numbers)]
        (bucket,) = bucketise([(spec, Levels(1, 1, mesh.levels)) for spec in specs], mesh)
        assert bucket.numel // mesh.world % BLOCK == 0
        assert all(offset % BLOCK == 0 for offset in bucket.offsets)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("exact", ((), ())),
        ("safe", (("int8",), ("bf16", "int8"))),
        ("param=int8,grad=bf16,grad=int8", (("int8",), ("bf16", "int8"))),
        ("grad=bf16", ((), ("bf16",))),
        ("grad=exact", ((), ())),
    ],
)
def test_admitted(text: str, found: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
    assert Admitted.parse(text) == (*found, KEPT)


@pytest.mark.parametrize("tiers", [("int8", "exact"), ("exact", "int8")])
def test_what_a_plan_has_can_be_asked_for(tiers: tuple[Format, ...]) -> None:
    wire = Wire(tiers, ("bf16", "int8"))
    assert Admitted.parse(wire.admitting) == (("int8",), ("bf16", "int8"), KEPT)


@pytest.mark.parametrize("text", ["", "int8", "grad=fp8", "param=int4", "optim=int8", "param"])
def test_what_nobody_knows_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"write exact|travels in"):
        Admitted.parse(text)


def test_what_is_rounded_too_coarsely_is_given_up_on_all_ranks_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the first step after the look nothing is rounded: updates are those of the exact plan."""
    monkeypatch.setattr(rounding, "MOST_ERROR", 1e-4)
    monkeypatch.setattr(rounding, "FIRST", (2,))
    plan = make_plan(MODEL, mesh="2", wire=Wire(("exact",), ("int8",)))
    workload = load(MODEL)

    def rank(number: int, model: nn.Module, sharded: ShardedOptimizer) -> list[object]:
        generator = torch.Generator().manual_seed(number)
        guard, said, sent = sharded.engine.rounding, [], []
        for _ in range(4):
            workload.loss(model, workload.batch(2, generator)).backward()
            sharded.step()
            said.append(guard.said)
            reduces = [task for task in sharded.engine.schedule.tasks if task.kind is Kind.FINAL_REDUCE]
            sent.append(sum(map(sharded.engine.tasks.nbytes, reduces)))
        assert guard.given_up is not None and guard.given_up[0] == 0
        return [said, sent[0] < sent[1] == sent[2], guard.given_up]

    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        first, second = in_threads(plan, load(MODEL).build(), rank)
    assert first == second
    assert first[0] == ["gradients in int8", None, None, None] and first[1]
    assert sum("everything travels exactly" in str(one.message) for one in seen) == 1  # one rank says it


def test_what_is_rounded_well_goes_on_and_is_measured() -> None:
    plan = make_plan(MODEL, mesh="2|2", wire=Wire(("exact", "int8"), ("bf16", "int8")))
    workload = load(MODEL)

    def rank(number: int, model: nn.Module, sharded: ShardedOptimizer) -> dict[int, float]:
        workload.loss(model, workload.batch(2, torch.Generator().manual_seed(number))).backward()
        sharded.step()
        assert sharded.engine.rounding.said == "parameters in exact|int8, gradients in bf16|int8"
        return sharded.engine.rounding.largest

    first, *others = in_threads(plan, load(MODEL).build(), rank)
    assert first.keys() == {1} and 0 < first[1] < rounding.MOST_ERROR
    assert all(other == first for other in others)


def test_a_gradient_that_is_not_finite_is_seen_on_every_rank() -> None:
    """As without rounding: the norm is not finite, and the step can be left out."""
    plan = make_plan(MODEL, mesh="2", clip=True, wire=Wire(("int8",), ("int8",)))
    workload = load(MODEL)

    def rank(number: int, model: nn.Module, sharded: ShardedOptimizer) -> bool:
        loss = workload.loss(model, workload.batch(2, torch.Generator().manual_seed(number)))
        (loss * (float("nan") if number == 1 else 1.0)).backward()
        norm = sharded.clip_grad_norm_(1.0, skip_nonfinite=True)
        sharded.step()
        return bool(norm.isfinite())

    assert in_threads(plan, load(MODEL).build(), rank) == [False, False]


def profile_with(rates: tuple[float, ...], pack_s: float) -> Profile:
    """Two tiers of two ranks with links of these bytes per second; rounding takes so many seconds a value."""
    workload = load("gpt:nano")
    cluster, device = find_cluster("h100-8x400g")
    profile = analyse(
        *(workload, cluster, device),
        mesh=Mesh.of_tiers(2, 2),
        micro_batches=(2,),
        dtype="float32",
        optimizer="adamw",
    )
    curves = [
        CollectiveCurve(
            operation=curve.operation,
            low=curve.low,
            high=curve.high,
            points=tuple(
                CollectivePoint(bytes=n, seconds=1e-6 + n / rates[curve.low], spread=0.0)
                for n in (1, 1_000_000)
            ),
        )
        for curve in profile.collectives
    ]
    points = tuple(
        RoundingPoint(elements=n, pack_seconds=n * pack_s, unpack_seconds=n * pack_s) for n in (1, 1_000_000)
    )
    entries = tuple(RoundingEntry(format=form, points=points) for form in ("bf16", "int8", "fp8"))
    return profile.replaced(collectives=tuple(curves), interference=(), rounding=entries)


def asked(profile: Profile, text: str) -> tuple[Request, Outcome]:
    request = Request(1 << 40, 4 * profile.data_ranks, time_limit_s=20)
    return solve_in(Admitted.parse(text), profile, request, lambda one: (one, solve(profile, one)))


@pytest.mark.long
def test_formats_go_where_they_make_the_step_shorter() -> None:
    """A slow outer link and a fast inner one; rounding that costs nothing, and one that costs too much."""
    slow = profile_with((1e12, 1e7), pack_s=1e-12)
    request, outcome = asked(slow, "safe")
    assert isinstance(outcome, Solved) and outcome.best.model.wire is not None
    assert request.wire is not None and request.wire.grad == ("exact", "int8")
    assert request.wire.param == ("exact", "exact")  # replicas gather nothing
    exact = asked(slow, "exact")[1]
    assert isinstance(exact, Solved) and outcome.best.step_s < 0.5 * exact.best.step_s
    request, outcome = asked(profile_with((1e12, 1e7), pack_s=1e-6), "safe")
    assert request.wire is None and isinstance(outcome, Solved)
    assert outcome.best.step_s == pytest.approx(exact.best.step_s)
    request, _ = asked(profile_with((1e15, 1e15), pack_s=0.0), "safe")
    assert request.wire is None  # shorter messages that no step is shorter for


def test_a_profile_without_rounding_is_refused_in_a_line() -> None:
    profile = profile_with((1e9, 1e9), 0.0).replaced(rounding=None)
    with pytest.raises(UserError, match="profile again"):
        asked(profile, "safe")
    assert asked(profile, "exact")[0].wire is None


def test_what_is_under_way_ends_in_the_form_that_it_began_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given up after the first step, while updated parameters are still gathered, on ranks that are late."""
    monkeypatch.setattr(rounding, "MOST_ERROR", 1e-4)
    plan = make_plan(
        MODEL, mesh="2|2", levels=Levels(0, 0, 2), dtype="bfloat16", wire=Wire(("int8",) * 2, ("int8",) * 2)
    )
    workload = load(MODEL)

    def rank(number: int, model: nn.Module, sharded: ShardedOptimizer) -> list[float]:
        generator, losses = torch.Generator().manual_seed(0), []
        for _ in range(3):
            time.sleep(0.02 * number)
            loss = workload.loss(model, workload.batch(2, generator))
            loss.backward()
            sharded.step()
            losses.append(float(loss.detach()))
        assert sharded.engine.rounding.given_up is not None
        return losses

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, *others = in_threads(plan, load(MODEL).build(), rank)
    assert all(other == first for other in others)  # the same batches, on the same parameters


def test_copies_of_parameters_are_not_rounded() -> None:
    """In float32 the slices are the only exact values, and what is saved as the model is made of them."""
    plan = make_plan(MODEL, mesh="2|2", wire=Wire(("int8",) * 2, ("exact",) * 2))
    initial = load(MODEL).build()

    def rank(number: int, model: nn.Module, sharded: ShardedOptimizer) -> Values:
        return full_parameters(sharded)

    for found in in_threads(plan, initial, rank):
        assert all(torch.equal(found[name], p.detach()) for name, p in initial.named_parameters())


@pytest.mark.parametrize("grad", ["bf16", "int8"])
def test_the_mark_of_no_gradient_travels(grad: Format) -> None:
    """−0.0 everywhere says that no rank had one, and it is left alone (``runtime.unit.ABSENT``)."""
    values, form = torch.full((3 * BLOCK,), -0.0), form_of(grad, dithered=True)
    values[BLOCK : 2 * BLOCK] = torch.randn(BLOCK)
    values[2 * BLOCK + 5] = 0.0
    packed = torch.zeros(form.units(len(values)), dtype=form.dtype)
    form.pack(values, packed).run()
    found = torch.ones(len(values))
    form.unpack(packed, found).run()
    assert torch.signbit(found[:BLOCK]).all() and not found[:BLOCK].any()
    last = torch.signbit(found[2 * BLOCK :])
    assert not last[5] and int(last.sum()) == BLOCK - 1 and not found[2 * BLOCK :].any()


def test_on_fewer_tiers() -> None:
    """As a run goes on that on fewer nodes."""
    wire = Wire(("exact", "int8"), ("bf16", "int8"))
    assert wire.on_tiers(1) == Wire(("exact",), ("bf16",))
    assert Wire(("exact", "int8"), ("exact", "int8")).on_tiers(1) is None
