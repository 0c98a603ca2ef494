"""Tensors in buckets, buckets in slices, buffers in slots."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hzplan.core.buffers import assign_buffers, slot_sizes
from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.layout import ALIGNMENT_BYTES, ITEM_BYTES, BucketLayout, TensorSpec, bucketise, lay_out
from hzplan.core.schedule import Interval
from tests.unit.meshes import levels_of, meshes

shapes = st.lists(st.integers(1, 40), max_size=3).map(tuple)


def specs(min_size: int = 1) -> st.SearchStrategy[list[TensorSpec]]:
    """Tensors that can share a bucket."""
    return st.tuples(
        st.lists(shapes, min_size=min_size, max_size=6), st.sampled_from(list(ITEM_BYTES)), st.booleans()
    ).map(lambda drawn: [TensorSpec(f"t{i}", shape, *drawn[1:]) for i, shape in enumerate(drawn[0])])


@st.composite
def buckets(draw: st.DrawFn) -> tuple[Mesh, BucketLayout]:
    mesh = draw(meshes(max_world=64))
    tensors = draw(specs())
    levels = draw(levels_of(mesh))
    if not tensors[0].trainable:
        levels = Levels(levels.param, levels.param, levels.param)
    return mesh, lay_out(tensors, levels, mesh)


# ---- buckets -----------------------------------------------------------------------------------------------


@given(buckets())
def test_tensors_start_aligned_and_do_not_overlap(drawn: tuple[Mesh, BucketLayout]) -> None:
    _, layout = drawn
    item = ITEM_BYTES[layout.dtype]
    assert layout.offsets[0] == 0
    assert all(offset * item % ALIGNMENT_BYTES == 0 for offset in layout.offsets)
    ends = [offset + tensor.numel for offset, tensor in zip(layout.offsets, layout.tensors, strict=True)]
    for end, start in zip(ends, layout.offsets[1:], strict=False):
        assert end <= start < end + ALIGNMENT_BYTES // item  # no larger gap than alignment needs
    assert ends[-1] <= layout.numel
    assert layout.nbytes == layout.numel * item


@given(buckets())
def test_the_padding_is_the_least_that_divides(drawn: tuple[Mesh, BucketLayout]) -> None:
    """A trained bucket walks down to the finest level of the mesh, a frozen one to its parameter level."""
    mesh, layout = drawn
    slices = mesh.world if layout.trainable else mesh.shards[layout.levels.param]
    end = layout.offsets[-1] + layout.tensors[-1].numel
    multiple = slices * (128 if -(-end // slices) * ITEM_BYTES[layout.dtype] >= 1 << 16 else 8)
    assert layout.numel % multiple == 0
    assert layout.numel - end < multiple
    for level in layout.levels.three:
        assert layout.numel % mesh.shards[level] == 0


@given(buckets(), st.data())
def test_pieces_cover_every_tensor_once_over_the_slices_of_a_level(
    drawn: tuple[Mesh, BucketLayout], data: st.DataObject
) -> None:
    mesh, layout = drawn
    finest = mesh.levels if layout.trainable else layout.levels.param
    level = data.draw(st.integers(0, finest))
    covered: list[list[tuple[int, int]]] = [[] for _ in layout.tensors]
    for rank in range(mesh.shards[level]):  # a group: one rank per slice
        start, end = mesh.slice_bounds(rank, level, layout.numel)
        for index, low, high in layout.pieces(start, end):
            assert start <= low < high <= end
            covered[index].append((low, high))
    for parts, tensor, offset in zip(covered, layout.tensors, layout.offsets, strict=True):
        parts.sort()
        assert parts[0][0] == offset and parts[-1][1] == offset + tensor.numel
        assert all(left[1] == right[0] for left, right in itertools.pairwise(parts))


def test_a_bucket_by_example() -> None:
    tensors = [
        TensorSpec("a", (3, 5), "float32"),
        TensorSpec("b", (64,), "float32"),
        TensorSpec("c", (), "float32"),
    ]
    layout = lay_out(tensors, Levels(0, 0, 0), Mesh.parse("3"))
    assert layout.offsets == (0, 64, 128)  # 256 bytes are 64 elements
    assert layout.numel == 144 and layout.nbytes == 576  # three slices of 48
    assert layout.pieces(10, 65) == [(0, 10, 15), (1, 64, 65)]
    assert layout.pieces(15, 64) == []
    frozen = [TensorSpec("a", (5,), "bfloat16", trainable=False)]
    assert lay_out(frozen, Levels(0, 0, 0), Mesh.parse("4")).numel == 8
    assert lay_out(frozen, Levels(1, 1, 1), Mesh.parse("4")).numel == 32


@pytest.mark.parametrize("mesh", ["8|3", "8|6", "8|12", "8|125", "2|2|2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(sizes=st.lists(st.integers(1, 5_000_000), min_size=1, max_size=4), frozen=st.booleans())
def test_slices_of_all_levels_begin_aligned(mesh: str, dtype: str, sizes: list[int], frozen: bool) -> None:
    """At 16 bytes, and at 256 where they have 64 KiB; at the price of at most 0.4 % there."""
    parsed = Mesh.parse(mesh)
    tensors = [TensorSpec(f"t{i}", (size,), dtype, not frozen) for i, size in enumerate(sizes)]
    layout = lay_out(tensors, Levels(*[parsed.levels] * 3), parsed)
    finest = layout.numel // parsed.world
    aligned = 256 if finest * ITEM_BYTES[dtype] >= 1 << 16 else 16
    for level in range(parsed.levels + 1):
        for rank in range(parsed.world):
            start, _ = parsed.slice_bounds(rank, level, layout.numel)
            assert start * ITEM_BYTES["bfloat16"] % aligned == 0
    if aligned == 256:
        end = layout.offsets[-1] + layout.tensors[-1].numel
        assert layout.numel - end <= 0.004 * layout.numel + 128 * parsed.world - 1


def test_what_a_bucket_is_trained_in() -> None:
    mesh, levels = Mesh.parse("4"), Levels(1, 1, 1)
    for dtype, item, master, kept in (
        ("float64", 8, 8, False),
        ("float32", 4, 4, False),
        ("bfloat16", 2, 4, True),
    ):
        layout = lay_out([TensorSpec("a", (6,), dtype), TensorSpec("b", (3,), dtype)], levels, mesh)
        assert layout.nbytes == layout.numel * item and layout.master_nbytes == layout.numel * master
        assert layout.keeps_master == kept
    assert not lay_out([TensorSpec("a", (6,), "bfloat16", trainable=False)], levels, mesh).keeps_master


def test_only_what_holds_master_weights_is_cast() -> None:
    def cast(dtype: str, to: str) -> str:
        return TensorSpec("t", (2,), dtype).computed_in(to).dtype

    assert cast("float32", "bfloat16") == "bfloat16"
    assert cast("bfloat16", "bfloat16") == "bfloat16"
    assert cast("float64", "bfloat16") == "float64"
    assert cast("float32", "float32") == "float32"
    assert cast("float64", "float32") == "float64"


@given(st.sampled_from(list(ITEM_BYTES)), shapes)
def test_the_bytes_of_a_tensor(dtype: str, shape: tuple[int, ...]) -> None:
    import torch

    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    spec = TensorSpec("t", shape, dtype)
    assert spec.numel == tensor.numel() and spec.nbytes == tensor.numel() * tensor.element_size()


@given(meshes(max_world=16), st.data())
def test_buckets_are_the_tensors_that_agree_in_levels_dtype_and_training(
    mesh: Mesh, data: st.DataObject
) -> None:
    choices = [
        (
            TensorSpec(
                f"t{i}", data.draw(shapes), data.draw(st.sampled_from(["float32", "bfloat16"])), trained
            ),
            data.draw(levels_of(mesh)),
        )
        for i, trained in enumerate(data.draw(st.lists(st.booleans(), max_size=8)))
    ]
    made = bucketise(choices, mesh)
    wanted: dict[object, list[str]] = {}
    for tensor, levels in choices:
        state = levels.three if tensor.trainable else (levels.param,) * 3
        wanted.setdefault((state, tensor.dtype, tensor.trainable), []).append(tensor.name)
    found = {(b.levels.three, b.dtype, b.trainable): [t.name for t in b.tensors] for b in made}
    assert found == wanted
    assert list(found) == list(wanted)  # in order of first appearance
    assert all(layout == lay_out(layout.tensors, layout.levels, mesh) for layout in made)


# ---- slots -------------------------------------------------------------------------------------------------


@st.composite
def lives_and_sizes(draw: st.DrawFn) -> tuple[dict[str, tuple[Interval, ...]], dict[str, int]]:
    """Up to nine buffers, each in use in up to three intervals of twenty positions."""
    lives: dict[str, tuple[Interval, ...]] = {}
    for index in range(draw(st.integers(0, 9))):
        edges = sorted(draw(st.lists(st.integers(0, 20), min_size=2, max_size=6)))
        lives[f"b{index}"] = tuple(zip(edges[::2], edges[1::2], strict=False))
    return lives, {name: draw(st.integers(0, 1000)) for name in lives}


@given(lives_and_sizes())
def test_buffers_in_use_at_the_same_time_have_different_slots(
    drawn: tuple[dict[str, tuple[Interval, ...]], dict[str, int]],
) -> None:
    lives, sizes = drawn
    slots = assign_buffers(lives, sizes)
    assert set(slots) == set(lives)
    for position in range(21):  # closed intervals: both ends count
        held = [slots[name] for name, spans in lives.items() if any(a <= position <= b for a, b in spans)]
        assert len(held) == len(set(held))
    assert slot_sizes(slots, sizes) == [
        max(sizes[name] for name in slots if slots[name] == slot) for slot in range(len(set(slots.values())))
    ]


@given(lives_and_sizes())
def test_slots_depend_on_nothing_but_the_arguments_and_are_never_wasted(
    drawn: tuple[dict[str, tuple[Interval, ...]], dict[str, int]],
) -> None:
    lives, sizes = drawn
    slots = assign_buffers(lives, sizes)
    assert assign_buffers(dict(lives), dict(sizes)) == slots
    assert sorted(set(slots.values())) == list(range(len(set(slots.values()))))
    assert sum(slot_sizes(slots, sizes)) <= sum(sizes.values())


def test_a_chain_takes_as_many_slots_as_live_at_once() -> None:
    """d + 1 buffers for prefetch depth d, however many units there are."""
    for depth in (1, 2, 3):
        lives = {i: ((max(0, i - depth), i), (40 - i - depth, 40 - i)) for i in range(15)}
        assert len(set(assign_buffers(lives, dict.fromkeys(lives, 1)).values())) == depth + 1


def test_buffers_that_only_touch_do_not_share() -> None:
    assert assign_buffers({"a": ((0, 2),), "b": ((2, 3),)}, {"a": 1, "b": 1}) in (
        {"a": 0, "b": 1},
        {"a": 1, "b": 0},
    )
    assert assign_buffers({"a": ((0, 2),), "b": ((3, 4),)}, {"a": 1, "b": 1}) == {"a": 0, "b": 0}
    assert assign_buffers({}, {}) == {} and slot_sizes({}, {}) == []


@pytest.mark.parametrize("dtype", ["int8", "complex64", "float16"])
def test_other_dtypes_have_no_size(dtype: str) -> None:
    with pytest.raises(KeyError):
        _ = TensorSpec("t", (2,), dtype).nbytes
