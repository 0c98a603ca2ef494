"""Mixtures of experts: the routing, counts by closed form, and training under a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.formats.cluster import find_cluster
from hzplan.models.moe import PRESETS, Experts, MoE, MoEConfig, closed_form_parameters, evenly_routed
from hzplan.models.workload import load
from hzplan.profiler.analytic import analyse
from hzplan.training.verify import verify
from tests.plans import make_plan

TINY = PRESETS["tiny"]


def one_by_one(moe: MoE, x: Tensor) -> Tensor:
    """Every token through its experts, in a loop."""
    rows = []
    for row in x.flatten(0, 1):
        probabilities = moe.router(row).softmax(-1)
        best = probabilities.topk(moe.active).indices
        out = sum((expert(row) for expert in moe.shared), torch.zeros_like(row))
        for expert in best:
            up, down = moe.experts.up[expert], moe.experts.down[expert]
            out = out + probabilities[expert] / probabilities[best].sum() * (down @ F.gelu(up @ row))
        rows.append(out)
    return torch.stack(rows).view_as(x)


def test_every_token_goes_through_its_experts() -> None:
    torch.manual_seed(0)
    moe = MoE(TINY).double()
    for parameter in moe.parameters():
        nn.init.normal_(parameter, std=0.1)
    x = torch.randn(2, 5, TINY.width, dtype=torch.float64, requires_grad=True)
    out, _ = moe(x)
    torch.testing.assert_close(out, one_by_one(moe, x))
    wanted = torch.autograd.grad(one_by_one(moe, x).square().sum(), [x, *moe.parameters()])
    found = torch.autograd.grad(out.square().sum(), [x, *moe.parameters()])
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_balancing_loss_is_one_where_routing_is_even_and_more_where_it_is_not() -> None:
    moe = MoE(TINY).double()
    nn.init.zeros_(moe.router.weight)
    x = torch.randn(4, 16, TINY.width, dtype=torch.float64)
    assert float(moe(x)[1].detach()) == pytest.approx(1.0)
    with torch.no_grad():
        moe.router.weight[0] = 10.0
    assert float(moe(x.abs())[1].detach()) > 3


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    config = MoEConfig(vocab=8, layers=1, width=16, heads=2, seq_len=8, experts=4, active=1, expert_width=8)
    experts = Experts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    chosen, weights = torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1)
    experts(torch.randn(6, 16), chosen, weights).sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad is not None and parameter.grad[0].abs().sum() > 0
        assert parameter.grad[1:].abs().sum() == 0


@pytest.mark.parametrize("name", ["nano", "tiny", "small"])
def test_parameters_are_those_of_the_closed_form(name: str) -> None:
    model = load(f"moe:{name}").build()
    everything, routed = closed_form_parameters(PRESETS[name])
    assert sum(p.numel() for p in model.parameters()) == everything
    assert sum(p.numel() for n, p in model.named_parameters() if ".experts." in n) == routed


def test_flops_in_shapes_are_those_of_the_active_experts() -> None:
    workload = load("moe:tiny")
    cluster, device = find_cluster("h100-8x400g")
    profile = analyse(
        *(workload, cluster, device),
        mesh=Mesh.parse("2|1"),
        micro_batches=[2],
        dtype="float32",
        optimizer="adamw",
        progress=lambda text, done: None,
    )
    w, s, config = TINY.width, TINY.seq_len, TINY
    per_token = 4 * w * w + config.experts * w + 2 * config.active * w * config.expert_width
    per_token += config.shared * 2 * config.mlp_ratio * w * w
    forward = 2 * 2 * s * (config.layers * (per_token + 2 * s * w) + config.vocab * w)
    found = sum(cost.flops for use in profile.uses for cost in use.costs)
    assert found == pytest.approx(3 * forward, rel=0.02)  # a first layer's input has no gradient


def test_the_balancing_loss_is_for_training_only() -> None:
    workload = load("moe:nano")
    torch.manual_seed(0)
    model, batch = workload.build(), workload.batch(2, torch.Generator().manual_seed(0))
    training = float(workload.loss(model, batch))
    assert training - float(workload.loss(model.eval(), batch)) == pytest.approx(0.01, rel=0.5)


@pytest.mark.parametrize(
    ("field", "value"), [("active", 9), ("shared", -1), ("expert_width", 0), ("balance", -1.0)]
)
def test_sizes_that_make_no_sense_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"MoEConfig.*{field}"):
        replace(TINY, **{field: value})


def test_even_routing_is_a_context() -> None:
    experts = Experts(TINY)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    chosen, weights = torch.zeros(16, 2, dtype=torch.int64), torch.ones(16, 2)
    x = torch.randn(16, TINY.width)
    before = experts(x, chosen, weights)
    with evenly_routed():
        assert not torch.allclose(experts(x, chosen, weights), before)
    assert torch.equal(experts(x, chosen, weights), before)


@pytest.mark.parametrize("levels", [(2, 2, 2), (0, 1, 2)])
def test_a_mixture_trains_as_in_one_process(levels: tuple[int, int, int]) -> None:
    plan = make_plan("moe:tiny", mesh="2|2", levels=Levels(*levels), clip=True, accumulation=2)
    found = verify(plan)
    assert found.ok, found
