"""The hierarchy's promises, over random meshes: slices tile and nest, groups partition, stages invert."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hzplan.core.hierarchy import SPLIT_LEVELS, Levels, Mesh, Stage
from tests.unit.meshes import meshes

Buffer = NDArray[np.int64]


def spans(mesh: Mesh) -> st.SearchStrategy[Stage]:
    """Any two levels ``low`` ≤ ``high``, across tiers too."""
    return st.tuples(st.integers(0, mesh.levels), st.integers(0, mesh.levels)).map(
        lambda pair: Stage(min(pair), max(pair))
    )


# ---- slices ------------------------------------------------------------------------------------------------


@given(meshes(), st.integers(1, 3), st.data())
def test_slices_of_a_level_tile_the_buffer_once_per_group(mesh: Mesh, unit: int, data: st.DataObject) -> None:
    numel = unit * mesh.world
    level = data.draw(st.integers(0, mesh.levels))
    shards = prod(mesh.dims[:level])
    assert mesh.shards[level] == shards
    # "over groups of S_k neighbouring ranks; W/S_k replicas"
    for first in range(0, mesh.world, shards):
        bounds = sorted(mesh.slice_bounds(rank, level, numel) for rank in range(first, first + shards))
        assert [bound for pair in bounds for bound in pair] == [
            edge for k in range(shards) for edge in (k * numel // shards, (k + 1) * numel // shards)
        ]
    replicas = [mesh.slice_index(rank, level) for rank in range(mesh.world)]
    holders = [mesh.holder(index, level) for index in range(shards)]
    assert sorted(holders) == [*range(shards)]
    assert [replicas[rank] for rank in holders] == [*range(shards)]
    assert all(replicas.count(index) == mesh.world // shards for index in range(shards))


@given(meshes(), st.integers(1, 3))
def test_a_slice_of_a_finer_level_lies_inside_that_of_the_coarser(mesh: Mesh, unit: int) -> None:
    numel = unit * mesh.world
    for rank in range(mesh.world):
        bounds = [mesh.slice_bounds(rank, level, numel) for level in range(mesh.levels + 1)]
        assert bounds[0] == (0, numel)
        for (outer_start, outer_end), (start, end) in itertools.pairwise(bounds):
            assert outer_start <= start < end <= outer_end


def test_the_fastest_dimension_is_the_most_significant_digit() -> None:
    mesh = Mesh.parse("2|4")
    assert [mesh.slice_index(rank, 2) for rank in range(8)] == [0, 4, 1, 5, 2, 6, 3, 7]
    assert [mesh.slice_index(rank, 1) for rank in range(8)] == [0, 1] * 4
    assert mesh.slice_bounds(3, 2, 80) == (50, 60)
    assert mesh.slice_bounds(3, 1, 80) == (40, 80)


@given(meshes(), st.data())
def test_a_buffer_that_does_not_divide_is_refused(mesh: Mesh, data: st.DataObject) -> None:
    level = data.draw(st.integers(0, mesh.levels))
    numel = data.draw(st.integers(1, 4 * mesh.world))
    if numel % mesh.shards[level]:
        with pytest.raises(ValueError, match="do not divide"):
            mesh.slice_bounds(0, level, numel)
    else:
        start, end = mesh.slice_bounds(mesh.world - 1, level, numel)
        assert (end - start) * mesh.shards[level] == numel


@given(meshes(), st.data())
def test_the_way_to_a_rank_is_the_tier_whose_group_first_holds_both(mesh: Mesh, data: st.DataObject) -> None:
    rank, other = (data.draw(st.integers(0, mesh.world - 1)) for _ in range(2))
    tier = mesh.tier_between(rank, other)
    assert mesh.tier_between(other, rank) == tier
    inside = [other in mesh.group(rank, Stage(0, high)) for _, high in mesh.tier_bounds]
    assert inside.index(True) == tier


@given(meshes())
def test_coordinates_and_ranks_are_one_to_one(mesh: Mesh) -> None:
    seen = [mesh.coordinates(rank) for rank in range(mesh.world)]
    assert [mesh.rank_at(coordinates) for coordinates in seen] == list(range(mesh.world))
    assert len(set(seen)) == mesh.world
    assert all(0 <= digit < size for c in seen for digit, size in zip(c, mesh.dims, strict=True))
    # The fastest dimension joins neighbours.
    assert all(c[0] == rank % mesh.dims[0] for rank, c in enumerate(seen))
    for outside in (-1, mesh.world):
        with pytest.raises(ValueError, match="outside"):
            mesh.coordinates(outside)


# ---- groups ------------------------------------------------------------------------------------------------


@given(meshes(), st.data())
def test_groups_partition_the_world(mesh: Mesh, data: st.DataObject) -> None:
    stage = data.draw(spans(mesh))
    groups = mesh.groups(stage)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
    for group in groups:
        assert len(group) == mesh.group_size(stage) == prod(mesh.dims[stage.low : stage.high])
        assert all(mesh.group(rank, stage) == group for rank in (group[0], group[-1]))


@given(meshes(), st.data())
def test_members_share_the_coarse_slice_and_tile_it_in_group_order(mesh: Mesh, data: st.DataObject) -> None:
    stage = data.draw(spans(mesh))
    numel = mesh.world
    for group in mesh.groups(stage):
        (outer,) = {mesh.slice_bounds(rank, stage.low, numel) for rank in group}
        inner = [mesh.slice_bounds(rank, stage.high, numel) for rank in group]
        assert inner[0][0] == outer[0] and inner[-1][1] == outer[1]
        assert all(left[1] == right[0] for left, right in itertools.pairwise(inner))


# ---- walking the hierarchy ---------------------------------------------------------------------------------


def walk(mesh: Mesh, low: int, high: int) -> list[Stage]:
    """The in-tier stages between two levels, innermost tier first."""
    found = [mesh.stage_in_tier(tier, low, high) for tier in range(len(mesh.tiers))]
    return [stage for stage in found if stage is not None]


def gather(mesh: Mesh, held: list[Buffer], stage: Stage) -> list[Buffer]:
    """Every rank of every group receives its members' buffers, in group order."""
    return [
        np.concatenate([held[member] for member in mesh.group(rank, stage)]) for rank in range(mesh.world)
    ]


def scatter(mesh: Mesh, held: list[Buffer], stage: Stage) -> list[Buffer]:
    """Every rank receives its part of the sum of its group's buffers."""
    result = []
    for rank in range(mesh.world):
        group = mesh.group(rank, stage)
        total = np.sum([held[member] for member in group], axis=0)
        result.append(np.split(total, len(group))[group.index(rank)])
    return result


@given(meshes(max_world=64), st.integers(1, 2), st.data())
def test_unshard_rebuilds_the_coarser_slice_from_the_finer(
    mesh: Mesh, unit: int, data: st.DataObject
) -> None:
    span = data.draw(spans(mesh))
    whole = np.arange(unit * mesh.world)

    def held(level: int) -> list[Buffer]:
        return [
            whole[slice(*mesh.slice_bounds(rank, level, len(whole)))].copy() for rank in range(mesh.world)
        ]

    buffers = held(span.high)
    for stage in reversed(walk(mesh, *span)):  # from the outermost tier inwards
        buffers = gather(mesh, buffers, stage)
    for buffer, expected in zip(buffers, held(span.low), strict=True):
        np.testing.assert_array_equal(buffer, expected)


@given(meshes(max_world=64), st.integers(1, 2), st.data())
def test_scatter_leaves_every_rank_its_slice_of_the_groups_sum(
    mesh: Mesh, unit: int, data: st.DataObject
) -> None:
    """From low to high over tiers; then unshard gives all members of the span the whole sum."""
    span = data.draw(spans(mesh))
    numel = unit * mesh.world
    rng = np.random.default_rng(mesh.world)
    gradients = rng.integers(0, 1000, (mesh.world, numel))  # every rank's own, whole

    def own(rank: int, level: int) -> slice:
        return slice(*mesh.slice_bounds(rank, level, numel))

    buffers = [gradients[rank][own(rank, span.low)].copy() for rank in range(mesh.world)]
    for stage in walk(mesh, *span):  # from the innermost tier outwards
        buffers = scatter(mesh, buffers, stage)
    sums = [gradients[list(mesh.group(rank, span))].sum(axis=0) for rank in range(mesh.world)]
    for rank, buffer in enumerate(buffers):
        np.testing.assert_array_equal(buffer, sums[rank][own(rank, span.high)])
    for stage in reversed(walk(mesh, *span)):
        buffers = gather(mesh, buffers, stage)
    for rank, buffer in enumerate(buffers):
        np.testing.assert_array_equal(buffer, sums[rank][own(rank, span.low)])


@given(meshes(), st.data())
def test_in_tier_stages_cover_a_span_and_nothing_else(mesh: Mesh, data: st.DataObject) -> None:
    span = data.draw(spans(mesh))
    stages = walk(mesh, *span)
    assert prod(mesh.group_size(stage) for stage in stages) == mesh.group_size(span)
    assert all(span.low <= stage.low < stage.high <= span.high for stage in stages)
    assert all(left.high <= right.low for left, right in itertools.pairwise(stages))
    assert all(mesh.group_size(stage) > 1 for stage in stages)
    assert set(stages) <= set(mesh.stages())


@given(meshes())
def test_stages_are_the_spans_inside_a_tier_that_join_several_ranks(mesh: Mesh) -> None:
    tier_of = [tier for tier, dims in enumerate(mesh.tiers) for _ in dims]
    expected = {
        Stage(low, high)
        for low, high in itertools.combinations(range(mesh.levels + 1), 2)
        if tier_of[low] == tier_of[high - 1] and prod(mesh.dims[low:high]) > 1
    }
    stages = mesh.stages()
    assert set(stages) == expected and len(stages) == len(expected)


# ---- text and construction ---------------------------------------------------------------------------------


@given(meshes())
def test_text_and_mesh_are_inverse(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh
    assert Mesh.parse(f" [ {str(mesh).replace(',', ' , ').replace('|', ' | ')} ] ") == mesh
    assert mesh.world == prod(mesh.dims) == prod(size for tier in mesh.tiers for size in tier)
    assert [mesh.dims[low:high] for low, high in mesh.tier_bounds] == list(mesh.tiers)


@pytest.mark.parametrize(
    "text", ["", "|", "2|", ",", "2,,2", "a", "2x2", "2.5", "0", "2|0", "-4", "1,2,3|", "[]"]
)
def test_text_that_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="mesh"):
        Mesh.parse(text)


def test_what_is_no_mesh_is_refused() -> None:
    for tiers in ((), ((),), ((2,), ())):
        with pytest.raises(ValueError, match="at least one"):
            Mesh(tiers)
    with pytest.raises(ValueError, match="at most 8"):
        Mesh(((1,) * 5, (1,) * 4))
    assert Mesh(((1,) * 4, (2,) * 4)).world == 16


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=4))
def test_of_tiers_keeps_the_sizes_and_splits_them_as_far_as_levels_allow(sizes: list[int]) -> None:
    mesh = Mesh.of_tiers(*sizes)
    assert [prod(tier) for tier in mesh.tiers] == sizes
    assert mesh.levels <= SPLIT_LEVELS
    if mesh.levels < SPLIT_LEVELS:  # nothing had to be merged
        for size in mesh.dims:
            assert all(size % divisor for divisor in range(2, int(size**0.5) + 1))
    assert all(size > 1 or tier == (1,) for tier in mesh.tiers for size in tier)


def test_of_tiers_by_example() -> None:
    assert str(Mesh.of_tiers(8, 16)) == "2,4|4,4"
    assert str(Mesh.of_tiers(1, 3)) == "1|3"
    assert str(Mesh.of_tiers(8, 64)) == "8|4,4,4"
    with pytest.raises(ValueError, match="at least 1"):
        Mesh.of_tiers(8, 0)
    with pytest.raises(ValueError, match="at least one tier"):
        Mesh.of_tiers()


# ---- levels ------------------------------------------------------------------------------------------------


@given(meshes())
def test_level_of_is_the_coarsest_level_with_so_many_shards(mesh: Mesh) -> None:
    for level, shards in enumerate(mesh.shards):
        found = mesh.level_of(shards)
        assert found <= level and mesh.shards[found] == shards
        assert found == 0 or mesh.shards[found - 1] < shards
    with pytest.raises(ValueError, match="no level with"):
        mesh.level_of(mesh.world + 1)


@given(meshes())
def test_triples_are_legal_and_complete(mesh: Mesh) -> None:
    triples = mesh.triples()
    assert len(set(triples)) == len(triples)
    assert all(t.legal and max(t.three) <= mesh.levels for t in triples)
    as_shards = [t.shards(mesh) for t in triples]
    assert len(set(as_shards)) == len(as_shards)  # no two say the same
    counts = sorted(set(mesh.shards))
    assert set(as_shards) == {
        (param, grad, optim)
        for param, grad, optim in itertools.product(counts, repeat=3)
        if param <= optim and grad <= optim
    }
    assert all(mesh.level_of(mesh.shards[level]) == level for t in triples for level in t.three)


def test_known_schemes_are_legal_and_what_is_not_is_not() -> None:
    finest = 3
    for scheme in [(0, 0, 0), (0, 0, finest), (0, finest, finest), (finest,) * 3, (2, 2, 2), (2, 2, finest)]:
        assert Levels(*scheme).legal
    assert Levels(2, 1, 3).legal and Levels(1, 0, 1).legal  # ℓg < ℓp: scatter once
    for illegal in [(1, 0, 0), (0, 1, 0), (2, 1, 1), (-1, 0, 0), (0, -1, 0)]:
        assert not Levels(*illegal).legal
