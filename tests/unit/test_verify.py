"""A plan's group structure, in threads, against one process; and that a wrong one is noticed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.recompute import WAYS, Recomputed
from hzplan.errors import UserError
from hzplan.formats.plan import Plan
from hzplan.models.hf import known_configs
from hzplan.models.workload import load, narrow
from hzplan.runtime.backends.exchange import RingGather
from hzplan.training.verify import small, verify
from tests.cli.command import ROOT, hzplan
from tests.plans import make_plan


@pytest.mark.parametrize("whole", [False, True])
def test_a_golden_plan_trains_like_one_process(whole: bool) -> None:
    """``hzplan check plans/ --verify``, which CI runs, looks at all of them."""
    found = verify(Plan.load(ROOT / "plans" / "gpt-tiny-2x2.json"), whole=whole)
    assert found.ok, found


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), mesh=st.sampled_from(["2|2", "2,2|2", "4|2,2", "8", "2|1|3"]))
def test_random_choices_train_like_one_process(seed: int, mesh: str) -> None:
    chance = random.Random(seed)
    triples = [levels for levels in Mesh.parse(mesh).triples() if isinstance(levels, Levels)]
    plan = make_plan(
        "gpt:nano",
        mesh=mesh,
        levels=lambda unit: chance.choice(triples),
        accumulation=chance.choice([1, 2]),
        prefetch=chance.choice([1, 3]),
        clip=chance.choice([True, False]),
        recompute=Recomputed(
            {unit: chance.choice(WAYS) for unit in ("layers.0", "layers.1", "head") if chance.random() < 0.4}
        ),
        offload=[unit for unit in ("embed", "layers.0", "layers.1", "norm") if chance.random() < 0.4],
    )
    found = verify(plan, steps=2)
    assert found.ok and found.mesh == str(small(Mesh.parse(mesh)))


@pytest.mark.long
def test_64_ranks() -> None:
    plan = make_plan("gpt:nano", mesh="2,2,2|4,2,2", levels=Levels(2, 3, 6))
    found = verify(plan, steps=2)
    assert found.ok and Mesh.parse(found.mesh).world == 64


def spoil(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Slices in another order."""
    return parts[::-1]


@pytest.fixture
def wrong_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gathers put what arrives in the wrong places."""
    made = RingGather.__init__

    def wrong(self: RingGather, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        if len(self.receives) > 1:
            views = spoil([message[0][0] for message in self.receives])
            self.receives = [([view], peer) for view, (_, peer) in zip(views, self.receives, strict=True)]

    monkeypatch.setattr(RingGather, "__init__", wrong)
    yield


@pytest.mark.usefixtures("wrong_order")
def test_a_wrong_order_of_slices_is_noticed() -> None:
    found = verify(make_plan("gpt:nano", mesh="2,2"), steps=2)
    assert not found.ok and found.loss_error > 1e-6


def test_a_rank_that_fails_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("out of order")

    monkeypatch.setattr(torch.optim.AdamW, "step", broken)
    with pytest.raises(Exception, match=r"out of order|another rank has failed"):
        verify(make_plan("gpt:nano", mesh="2"), steps=1)


@pytest.mark.parametrize(
    "name", [name for name in known_configs() if "405b" not in name and "175b" not in name]
)
def test_narrow_copies_have_the_tensors_of_the_model(name: str) -> None:
    workload = load(f"hf:{name}")
    with torch.device("meta"):
        whole, copy = workload.build(), narrow(workload).build()
    assert [n for n, _ in whole.named_parameters()] == [n for n, _ in copy.named_parameters()]
    assert sum(p.numel() for p in copy.parameters()) < 10e6
    assert {p.dim() for p in whole.parameters()} == {p.dim() for p in copy.parameters()}


def test_the_command(tmp_path: Path) -> None:
    make_plan("gpt:nano", mesh="2|2").save(tmp_path / "plan.json")
    done = hzplan("verify", "plan.json", "--json", cwd=tmp_path)
    assert done.code == 0 and '"ok": true' in done.stdout, done.stderr
    with pytest.raises(UserError, match=r"is not the plan's model: .* is in one of them only"):
        verify(make_plan("gpt:nano", mesh="2"), "gpt:tiny")
