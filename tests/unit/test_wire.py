"""Steps in which parameters and gradients travel narrow: replicas stay alike, and it is what one process with
the same rounding computes."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.layout import Dtype, TensorSpec, bucketise, marked
from hzplan.core.wire import BLOCK, KEPT, Admitted, Format, Wire
from hzplan.formats.plan import Plan
from hzplan.models.workload import load
from hzplan.runtime.optimizer import ShardedOptimizer
from tests.plans import make_plan
from tests.threads import in_threads
from tests.unit.test_packing import rounded

STEPS = 3
MODEL = "gpt:nano"


def wire_of(tiers: int, param: Format, grad: Format) -> Wire:
    """The same on every tier."""
    return Wire((param,) * tiers, (grad,) * tiers)


def trained(plan: Plan, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> list[list[list[Tensor]]]:
    """By rank and step every parameter as it is computed with in the next forward."""
    workload = load(MODEL)

    def rank(number: int, model: nn.Module, sharded: ShardedOptimizer) -> list[list[Tensor]]:
        generator = torch.Generator().manual_seed(number)
        found = []
        for _ in range(STEPS):
            for _ in range(plan.batch.accumulation):
                loss = workload.loss(model, workload.batch(plan.batch.micro_batch, generator))
                (loss / plan.batch.accumulation).backward()
            sharded.step()
            values = []
            for name in sharded.engine.units:
                with sharded.engine.unsharded(name):
                    values += [p.detach().clone() for p in dict(model.named_parameters()).values() if _is(p)]
            found.append(values)
        return found

    torch.manual_seed(0)
    return in_threads(plan, load(MODEL).build(), rank, optimizer)


def _is(parameter: Tensor) -> bool:
    return not bool(parameter.isnan().all())


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
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    exact, *_ = trained(plan.model_copy(update={"wire": None}))
    mine, theirs = (torch.cat([p.flatten().float() for p in of[-1]]) for of in (first, exact))
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
        by_shape = [p.detach() for p in seen.parameters()]
        assert sum(v.numel() for v in mine[step]) == sum(p.numel() for p in by_shape)
        for value in mine[step]:
            near = min(float((value - p).abs().max()) for p in by_shape if p.shape == value.shape)
            assert near < 2e-3  # a code may be the next one where a gradient's last digit differs


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


@pytest.mark.parametrize("text", ["", "int8", "grad=fp8", "param=int4", "optim=int8", "param"])
def test_what_nobody_knows_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"write exact|travels in"):
        Admitted.parse(text)
