"""Collectives of tasks, carried out on vectors: after them every rank has what its levels promise."""

from __future__ import annotations

from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hzplan.core.hierarchy import Levels, Mesh, Stage
from hzplan.core.layout import TensorSpec, lay_out
from hzplan.core.schedule import Kind
from hzplan.core.stages import Collective, collectives_of, communicators
from tests.unit.meshes import meshes

Values = NDArray[np.int64]


def carry_out(one: Collective, mesh: Mesh, held: list[Values]) -> list[Values]:
    """Everyone's buffer [elements] after a collective in place; what is not promised then is −1."""
    found = []
    for rank, values in enumerate(held):
        members = mesh.group(rank, one.stage)
        low = slice(*mesh.slice_bounds(rank, one.stage.low, len(values)))
        high = slice(*mesh.slice_bounds(rank, one.stage.high, len(values)))
        after = np.full_like(values, -1)
        if one.operation == "all_gather":
            for member in members:
                its = slice(*mesh.slice_bounds(member, one.stage.high, len(values)))
                after[its] = held[member][its]
        else:
            where = low if one.operation == "all_reduce" else high
            after[where] = sum(held[member][where] for member in members)
        found.append(after)
    return found


@st.composite
def places(draw: st.DrawFn) -> tuple[Mesh, Levels]:
    mesh = draw(meshes())
    flat = mesh.whole is not None and draw(st.booleans())
    return mesh, draw(st.sampled_from(mesh.triples(flat=flat)))


@given(places(), st.integers(0, 2**31))
@settings(max_examples=200)
def test_gradients_are_summed_over_all_ranks_for_whoever_updates_with_them(
    place: tuple[Mesh, Levels], seed: int
) -> None:
    mesh, levels = place
    bucket = lay_out([TensorSpec("t", (mesh.world,), "float32")], levels, mesh)
    chance = np.random.default_rng(seed)
    held: list[Values] = [chance.integers(0, 1000, bucket.numel) for _ in range(mesh.world)]
    total = sum(held)
    tiers = range(len(mesh.tiers))
    walk = partial(collectives_of, bucket=bucket, mesh=mesh)
    for tier in tiers:
        of_task = walk(Kind.FINAL_REDUCE, tier)
        assert "all_reduce" not in {one.operation for one in of_task} or len(of_task) == 1
        for one in of_task:
            held = carry_out(one, mesh, held)
    for tier in reversed(tiers):
        for one in walk(Kind.GRAD_GATHER, tier):
            held = carry_out(one, mesh, held)
    for rank, values in enumerate(held):
        own = slice(*mesh.slice_bounds(rank, levels.optim, bucket.numel))
        assert (values[own] == total[own]).all()  # type: ignore[index]


@given(places())
def test_replicas_of_all_ranks_are_one_all_reduce_on_the_slowest_tier(place: tuple[Mesh, Levels]) -> None:
    """Where tiers are one dimension each, and nothing finer than the last one but it is sharded."""
    mesh, levels = place
    bucket = lay_out([TensorSpec("t", (mesh.world,), "float32")], levels, mesh)
    slowest = max(
        (tier for tier in range(len(mesh.tiers)) if mesh.stage_in_tier(tier, 0, mesh.levels)), default=0
    )
    at = mesh.tier_bounds[slowest][0]
    found = collectives_of(Kind.FINAL_REDUCE, slowest, bucket, mesh)
    if mesh.world > 1 and max(levels.grad, levels.optim) <= at:
        assert [one.operation for one in found] == ["all_reduce"]
        assert not collectives_of(Kind.GRAD_GATHER, slowest, bucket, mesh)
    if levels.optim == mesh.levels:
        assert "all_reduce" not in {one.operation for one in found}


def test_shards_of_a_part_of_a_tier_have_communicators_of_their_own() -> None:
    mesh = Mesh.parse("2,2,2")
    tensor = TensorSpec("w", (64,), "float32")
    one, other = (lay_out([tensor], Levels(*[level] * 3), mesh) for level in (1, 3))
    hsdp = {
        ("unshard", Stage(0, 1)),
        ("reduce", Stage(0, 1)),
        ("reduce", Stage(1, 3)),
        ("gather", Stage(1, 3)),
    }
    assert communicators([one], mesh) == hsdp
    assert communicators([one, other], mesh) == hsdp | {("unshard", Stage(0, 3)), ("reduce", Stage(0, 3))}
