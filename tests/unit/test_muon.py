"""Muon in shards against torch's in one process, in every way to bring matrices together."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.matrices import MATRIX_WAYS, MatrixWay
from hzplan.core.schedule import MessageOrder
from hzplan.errors import UserError
from hzplan.formats.plan import Plan
from hzplan.models.matrices import MatrixRule
from hzplan.models.units import find_units
from hzplan.models.workload import Workload, load
from hzplan.runtime.apply import Choice, apply, full_parameters
from hzplan.runtime.backends.threads import Post, ThreadWorld
from hzplan.runtime.muon import Muon, orthogonalized
from hzplan.runtime.optimizer import ShardedOptimizer
from tests.long import shorter
from tests.plans import make_plan
from tests.threads import in_threads

OPTIONS: dict[str, Any] = {"lr": 0.02, "ns_dtype": "float64", "adamw": {"lr": 1e-2, "eps": 1e-4}}
"""Newton–Schulz in float64, as everything else: in bfloat16 it would round the differences away, or up."""


def matrices_of(model: nn.Module) -> set[str]:
    return {name for unit in find_units(model) for name in MatrixRule().of(unit)}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named, own = [*model.named_parameters()], matrices_of(model)
    return [
        {"params": [p for name, p in named if name in own]},
        {"params": [p for name, p in named if name not in own and p.requires_grad], "method": "adamw"},
    ]


def muon_plan(workload: Workload, way: MatrixWay, **more: Any) -> Plan:
    """On four ranks of one tier, one sequence each, optimizer state in four shards."""
    usual = {"mesh": "4", "levels": Levels(0, 0, 1), "micro_batch": 1, "dtype": "float64"}
    return make_plan(workload, optimizer="muon", matrix=way, **{**usual, **more})


def batches(workload: Workload, plan: Plan, steps: int) -> list[list[list[object]]]:
    """By step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(7)
    return [
        [
            [workload.batch(1, generator) for _ in range(plan.mesh.world)]
            for _ in range(plan.batch.accumulation)
        ]
        for _ in range(steps)
    ]


def alone(workload: Workload, initial: nn.Module, plan: Plan, data: list[list[list[object]]]) -> nn.Module:
    model = copy.deepcopy(initial)
    optimizer = Muon(groups_of(model), **OPTIONS)
    for step in data:
        for micro_batch in step:
            for of_rank in micro_batch:
                (workload.loss(model, of_rank) / len(step) / len(micro_batch)).backward()
        if plan.clip:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def sharded(
    workload: Workload, initial: nn.Module, plan: Plan, data: Any, **options: Any
) -> dict[str, Tensor]:
    def rank(number: int, model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, Tensor]:
        for step in data:
            for micro_batch in step:
                (workload.loss(model, micro_batch[number]) / len(step)).backward()
            if plan.clip:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        return full_parameters(optimizer)

    found = in_threads(plan, initial, rank, Muon, **options)
    for other in found[1:]:
        assert all(torch.equal(values, other[name]) for name, values in found[0].items())
    return found[0]


def test_one_process_is_torch_s_muon_beside_its_adamw() -> None:
    torch.manual_seed(0)
    shapes = [(8, 5), (5, 8), (6, 6), (1, 7), (7, 1)]
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    bias, same = nn.Parameter(torch.randn(4)), nn.Parameter(torch.zeros(4))
    same.data.copy_(bias)
    mine = Muon([{"params": ours}, {"params": [bias], "method": "adamw"}], lr=0.1, adamw={"lr": 0.01})
    muon, adamw = torch.optim.Muon(theirs, lr=0.1), torch.optim.AdamW([same], lr=0.01)
    for _ in range(20):
        for one, other in zip([*ours, bias], [*theirs, same], strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in (mine, muon, adamw):
            optimizer.step()
    for one, other in zip([*ours, bias], [*theirs, same], strict=True):
        assert torch.equal(one, other)


def test_a_copy_a_loaded_state_and_an_added_group_go_on() -> None:
    torch.manual_seed(0)
    matrix, bias, more = (nn.Parameter(torch.randn(shape)) for shape in ((4, 3), (4,), (2,)))
    one = Muon(
        [{"params": [matrix]}, {"params": [bias], "method": "adamw"}], lr=0.1, adamw={"betas": (0.8, 0.9)}
    )

    def step(optimizer: Muon) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 0.3)
        optimizer.step()

    step(one)
    copied = copy.deepcopy(one)
    loaded = Muon(
        [
            {"params": [nn.Parameter(matrix.detach().clone())]},
            {"params": [nn.Parameter(bias.detach().clone())], "method": "adamw"},
        ]
    )
    loaded.load_state_dict(copy.deepcopy(one.state_dict()))
    for optimizer in (one, copied, loaded):
        optimizer.add_param_group({"params": [nn.Parameter(more.detach().clone())], "method": "adamw"})
        step(optimizer)
    first, *others = ([p for group in o.param_groups for p in group["params"]] for o in (one, copied, loaded))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first[:2], other[:2], strict=True))
    assert not torch.equal(first[2], more)


def test_a_tensor_as_learning_rate_is_the_number() -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(5, 4)) for _ in range(2))
    pairs = [(ours, Muon([ours], lr=torch.tensor(0.1))), (theirs, torch.optim.Muon([theirs], lr=0.1))]
    for parameter, optimizer in pairs:
        parameter.grad = torch.linspace(-1, 1, 20).view(5, 4)
        optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_a_model_s_groups_are_those_of_its_plans() -> None:
    model = load("gpt:nano").build()
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def matrices(optimizer: Muon) -> set[str]:
        muon, adamw = optimizer.param_groups
        assert (muon["method"], adamw["method"]) == ("muon", "adamw")
        assert len(muon["params"]) + len(adamw["params"]) == len(names)
        return {names[id(parameter)] for parameter in muon["params"]}

    plan = make_plan("gpt:nano", mesh="1", optimizer="muon", matrix="repeated")
    planned = {name for unit in plan.units for b in unit.buckets if b.matrix for name in b.tensors}
    assert planned and matrices(Muon.of(model)) == planned
    (embedding,) = (name for name in names.values() if "embed" in name)
    found = matrices(Muon.of(model, matrices=["*embed*"], others=["*qkv*"]))
    assert found == {embedding, *planned} - {name for name in planned if "qkv" in name}
    with pytest.raises(UserError, match="others=nothing: no parameter is called so"):
        Muon.of(model, others=["nothing"])
    with pytest.raises(UserError, match="no trained matrix inside of a repeated block"):
        Muon.of(nn.Linear(2, 2))
    chosen = make_plan("gpt:nano", mesh="1", optimizer="muon", matrix="owned")
    unit = next(unit for unit in chosen.units if any(b.matrix for b in unit.buckets))
    fewer = unit.model_copy(
        update={"buckets": tuple(b.model_copy(update={"matrix": None}) for b in unit.buckets)}
    )
    units = tuple(fewer if one is unit else one for one in chosen.units)
    own = {name for b in unit.buckets for name in b.tensors}
    wrapped = nn.ModuleDict({"model": model})
    assert matrices(Muon.of(wrapped, plan=chosen.model_copy(update={"units": units}))) == planned - own


def test_a_stack_is_orthogonalised_matrix_by_matrix() -> None:
    group = Muon([nn.Parameter(torch.zeros(1, 1))], ns_dtype="float64").param_groups[0]
    stack = torch.randn(3, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = orthogonalized(stack, group)
    for one, of in zip(stack, whole, strict=True):
        assert torch.equal(orthogonalized(one, group), of)
        singular = torch.linalg.svdvals(of)
        assert singular.min() > 0.5 and singular.max() < 1.3


def _plan(seed: int) -> tuple[Workload, nn.Module, Plan]:
    """Two and three tiers, fewer matrices than ranks and more, experts, frozen blocks, message orders, and
    state in the host's memory where no matrix travels."""
    rng = random.Random(f"muon {seed}")
    workload = load(rng.choice(("gpt:nano", "gpt:nano", "moe:nano")))
    torch.manual_seed(seed)
    initial = workload.build().double()
    if seed % 4 == 1:
        for name, parameter in initial.named_parameters():
            parameter.requires_grad_("layers.1" not in name)
    mesh = Mesh.parse(rng.choice(("2", "4", "8", "2|2", "2,2|2", "2|2|2", "3", "2|3")))
    chosen = {unit.name: rng.choice(mesh.triples()) for unit in find_units(initial)}
    if seed % 3 == 0:
        chosen = dict.fromkeys(chosen, rng.choice([t for t in mesh.triples() if t.optim == mesh.levels]))
    way: MatrixWay = MATRIX_WAYS[seed % len(MATRIX_WAYS)]
    plan = make_plan(
        workload,
        mesh=str(mesh),
        levels=lambda unit: chosen[unit],
        micro_batch=1,
        accumulation=rng.choice((1, 2)),
        clip=rng.random() < 0.5,
        optimizer="muon",
        dtype="float64",
        matrix=way,
        matrix_units=rng.choice((None, 1)),
        offload=[unit for unit in chosen if rng.random() < 0.5] if way == "owned" and seed % 2 else (),
    )
    if rng.random() < 0.4:
        ahead = [(name, tuple(sorted(rng.choice((0, 1, 2)) for _ in mesh.tiers))) for name in chosen]
        order = MessageOrder(tuple(ahead), rng.choice((0, 1)))
        numbers = dict(order.ahead)
        units = tuple(unit.model_copy(update={"ahead": numbers[unit.name]}) for unit in plan.units)
        plan = plan.model_copy(update={"units": units, "sync_ahead": order.sync})
    return workload, initial, plan


@pytest.mark.parametrize("seed", shorter(range(120), without=range(18, 120)))
def test_every_way_trains_as_one_process(seed: int) -> None:
    workload, initial, plan = _plan(seed)
    data = batches(workload, plan, 20)
    expected = alone(workload, initial, plan, data)
    found = sharded(workload, initial, plan, data, **OPTIONS)
    moved = 0.0
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=0, atol=1e-10)
        moved += float((parameter - initial.get_parameter(name)).abs().sum())
    assert moved > 1


@pytest.mark.parametrize("way", MATRIX_WAYS)
def test_bfloat16_with_masters_trains_alike_in_every_way(way: MatrixWay) -> None:
    """Newton–Schulz in bfloat16 as by default: what travels for it has been rounded to that already."""
    workload = load("gpt:nano")
    torch.manual_seed(1)
    initial = workload.build()

    def trained(way: MatrixWay, level: int) -> dict[str, Tensor]:
        plan = muon_plan(workload, way, levels=Levels(0, 0, level), dtype="bfloat16")
        return sharded(workload, initial, plan, batches(workload, plan, 5), lr=0.02)

    one, other = trained("repeated", 0), trained(way, 1)
    for name, values in one.items():
        assert torch.equal(values, other[name]), name


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("way", MATRIX_WAYS)
def test_who_has_no_gradient_is_left_alone(way: MatrixWay, clip: bool) -> None:
    """Also where hosts compute with what their buffers held before: in the second step of three."""
    workload = load("gpt:nano")
    torch.manual_seed(0)
    initial = workload.build().double()
    plan = muon_plan(workload, way, clip=clip)
    data = [micro_batch for [micro_batch] in batches(workload, plan, 3)]

    def step(model: nn.Module, number: int, ranks: range) -> None:
        cut = model.get_submodule("layers.1.mlp").register_forward_hook(lambda *of: of[-1].detach())
        if number != 1:
            cut.remove()
        for rank in ranks:
            (workload.loss(model, data[number][rank]) / len(ranks)).backward()
        cut.remove()

    def rank(number: int, model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, Tensor]:
        for one in range(len(data)):
            step(model, one, range(number, number + 1))
            if clip:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        return full_parameters(optimizer)

    expected = copy.deepcopy(initial)
    optimizer = Muon(groups_of(expected), **OPTIONS)
    for one in range(len(data)):
        step(expected, one, range(4))
        if clip:
            nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for found in in_threads(plan, initial, rank, Muon, **OPTIONS):
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=0, atol=1e-12)


def test_one_line_for_what_does_not_go_together() -> None:
    workload = load("gpt:nano")
    plan = make_plan(workload, mesh="1", optimizer="muon", matrix="repeated")
    with pytest.raises(UserError, match=r"as matrices; give hzplan\.Muon"):
        in_one(plan, workload, torch.optim.AdamW)
    with pytest.raises(
        UserError, match="no tensor as a matrix, and Muon does; profile with --optimizer muon"
    ):
        in_one(make_plan(workload, mesh="1"), workload, Muon)
    with pytest.raises(UserError, match=r"is in a group of the method muon, but the plan has it under adamw"):
        in_one(plan, workload, Muon, grouped=True)
    with pytest.raises(UserError, match="method 'sgd'; known are muon, adamw"):
        Muon([{"params": [nn.Parameter(torch.zeros(2, 2))], "method": "sgd"}])
    with pytest.raises(UserError, match="ns_dtype is 'bf16'; it is one of bfloat16"):
        Muon([nn.Parameter(torch.zeros(2, 2))], ns_dtype="bf16")
    with pytest.raises(UserError, match="adamw has no option betaz"):
        Muon([nn.Parameter(torch.zeros(2, 2))], adamw={"betaz": (0.9, 0.99)})
    vector = nn.Parameter(torch.zeros(3))
    vector.grad = torch.ones(3)
    with pytest.raises(UserError, match="one dimension; give it to AdamW"):
        Muon([vector]).step()


def in_one(plan: Plan, workload: Workload, optimizer_class: Any, *, grouped: bool = False) -> None:
    model = workload.build()
    params = [{"params": [*model.parameters()], "method": "muon"}] if grouped else None
    apply(model, Choice.of(plan), optimizer_class, params=params, world=ThreadWorld(Post(1), 0))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("way", MATRIX_WAYS)
def test_steps_that_leave_the_schedule_update_matrices_too(way: MatrixWay, clip: bool) -> None:
    """A step of fewer micro-batches, one that uses modules twice, and under clipping one that is thrown away
    and one that is skipped; then those that go on."""
    workload = load("gpt:nano")
    torch.manual_seed(0)
    initial = workload.build().double()
    plan = muon_plan(workload, way, accumulation=2, clip=clip, matrix_units=1)
    kinds = ["whole", "fewer", "twice", *(["thrown away", "skipped"] if clip else []), "whole"]
    data = batches(workload, plan, len(kinds))

    def train(model: nn.Module, optimizer: Any, ranks: range) -> None:
        for kind, step in zip(kinds, data, strict=True):
            for index, micro_batch in enumerate(step[:1] if kind in ("fewer", "thrown away") else step):
                for rank in ranks:
                    loss = workload.loss(model, micro_batch[rank])
                    if kind == "twice" and index == 1:
                        loss = loss + workload.loss(model, micro_batch[rank])
                    (loss / 2 / len(ranks)).backward()
            if kind == "thrown away":
                optimizer.zero_grad()
                continue
            if clip and isinstance(optimizer, ShardedOptimizer):
                optimizer.clip_grad_norm_(1.0)
            elif clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if kind != "skipped":
                optimizer.step()
            elif isinstance(optimizer, ShardedOptimizer):
                optimizer.skip_step()
            if not isinstance(optimizer, ShardedOptimizer):
                optimizer.zero_grad()

    def rank(number: int, model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, Tensor]:
        train(model, optimizer, range(number, number + 1))
        return full_parameters(optimizer)

    expected = copy.deepcopy(initial)
    train(expected, Muon(groups_of(expected), **OPTIONS), range(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = in_threads(plan, initial, rank, Muon, **OPTIONS)
    for one in found:
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(one[name], parameter.detach(), rtol=0, atol=1e-12)
