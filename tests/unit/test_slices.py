"""Files of slices: what the ranks of any mesh write is read at any element, and the index does not grow."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from benchmarks.checkpoint_index import index_of as index_of_all
from hzplan.checkpoint.data import fill, write
from hzplan.checkpoint.entries import Entry
from hzplan.checkpoint.folder import whole_at
from hzplan.checkpoint.slices import lay_out_file, ranges_of
from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.layout import BucketLayout, TensorSpec, bucketise
from hzplan.errors import UserError
from hzplan.formats.base import MAX_FILE_BYTES, to_text
from hzplan.formats.checkpoint import (
    FILE,
    Checkpoint,
    StoredBucket,
    StoredFile,
    data_file,
    ends_of_slices,
    sliced,
)


def layouts_of(mesh: Mesh, rng: random.Random) -> list[BucketLayout]:
    """Of some units; a tensor may be frozen, in bf16, of no dimension, or empty."""
    shapes = [(), (0, 3), (5,), (3, 7), (130,), (4, 3, 5), (1, 200)]
    return [
        layout
        for unit in range(3)
        for layout in bucketise(
            [
                (
                    TensorSpec(
                        *(f"{unit}.{number}", rng.choice(shapes)),
                        *(rng.choice(("float32", "bfloat16")), rng.random() < 0.7),
                    ),
                    rng.choice(mesh.triples()),
                )
                for number in range(6)
            ],
            mesh,
        )
    ]


def index_of(mesh: Mesh, buckets: tuple[StoredBucket, ...], files: list[StoredFile]) -> Checkpoint:
    return Checkpoint(
        step=1,
        samples=1,
        mesh=str(mesh),
        model="",
        optimizer="",
        torch="",
        extra={},
        files=tuple(files),
        buckets=buckets,
        values={},
        aliases={},
    )


@pytest.mark.parametrize("text", ["1", "2", "3", "2|2", "2,2", "2|3", "2|2|2", "1,2|3", "5|1", "4,3|2"])
@pytest.mark.parametrize("seed", range(3))
def test_any_element_is_read_from_what_all_ranks_wrote(text: str, seed: int, tmp_path: Path) -> None:
    mesh, rng = Mesh.parse(text), random.Random(f"{text} {seed}")
    layouts = layouts_of(mesh, rng)
    trained = [tensor.trainable for layout in layouts for tensor in layout.tensors]
    kept = [number for number, its in enumerate(trained) if its and rng.random() < 0.8]
    state = {"m": {"float32": kept[::2], "bfloat16": kept[1::2]}, "v": {"float64": kept}}
    buckets = lay_out_file(layouts, mesh, state)
    tensors = sliced(buckets, mesh)
    values = {
        name: torch.randn(stored.numel).to(getattr(torch, stored.dtype)) for name, stored in tensors.items()
    }
    written: dict[str, int] = dict.fromkeys(tensors, 0)
    files = []
    for rank in range(mesh.world):
        placed = []
        for name, low, high in ranges_of(buckets, mesh, rank):
            (part,) = tensors[name].parts(low, high)
            assert part == (rank, part.first_byte, low, high)
            placed.append((part.first_byte, values[name][low:high]))
            written[name] += high - low
        end = ends_of_slices(buckets, mesh.world)[rank]
        files.append(write(tmp_path / data_file(rank), placed, end))
    assert written == {name: stored.numel for name, stored in tensors.items()}  # each element once
    index_of(mesh, buckets, files).save(tmp_path)
    index = whole_at(tmp_path).index
    for name, stored in index.tensors.items():
        low = rng.randrange(stored.numel + 1)
        high = rng.randrange(low, stored.numel + 1)
        for dtype in (values[name].dtype, torch.float64):
            read = torch.full((high - low,), 7.0, dtype=dtype)
            fill(tmp_path, index, [Entry(name, stored.shape, low, read)])
            assert torch.equal(read, values[name][low:high].to(dtype))
    with (tmp_path / data_file(mesh.world - 1)).open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match=rf"{data_file(mesh.world - 1)} has \d+ bytes"):
        whole_at(tmp_path)


def test_what_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    mesh = Mesh.parse("2")
    layouts = bucketise([(TensorSpec("w", (64,), "float32"), Levels(0, 0, 1))], mesh)
    buckets = lay_out_file(layouts, mesh, {})
    files = [write(tmp_path / data_file(rank), [], 128) for rank in range(2)]
    index = index_of(mesh, buckets, files)
    for entry, said in (
        (Entry("model.x", (64,), 0, torch.zeros(64)), "model.x is not in it"),
        (Entry("model.w", (8, 8), 0, torch.zeros(64)), r"model.w is \[64\], and \[8, 8\] in this model"),
    ):
        with pytest.raises(UserError, match=said):
            fill(tmp_path, index, [entry])
    (tmp_path / data_file(1)).write_bytes(b"short")
    with pytest.raises(UserError, match=r"rank-00001.bin: ends before what the index says lies there"):
        fill(tmp_path, index, [Entry("model.w", (64,), 0, torch.zeros(64))])
    (tmp_path / data_file(1)).unlink()
    with pytest.raises(UserError, match=r"rank-00001.bin: cannot be read \(No such file"):
        fill(tmp_path, index, [Entry("model.w", (64,), 30, torch.zeros(5))])


def test_more_ranks_cost_an_index_their_checksums_only() -> None:
    tensors = [TensorSpec(f"layers.{n}.weight", (512, 512), "bfloat16") for n in range(20)]
    sizes = {}
    for text in ("8|8", "8|512"):
        mesh = Mesh.parse(text)
        layouts = bucketise([(tensor, Levels(1, 1, 2)) for tensor in tensors], mesh)
        buckets = lay_out_file(layouts, mesh, {"exp_avg": {"float32": [*range(20)]}})
        files = [StoredFile(nbytes=10**9, sha256="0" * 64)] * mesh.world
        sizes[mesh.world] = len(to_text(index_of(mesh, buckets, files)))
    assert sizes[4096] - sizes[64] < 4032 * 120


def test_the_index_of_sixteen_thousand_ranks_is_written_and_read(tmp_path: Path) -> None:
    """126 layers of 405 B parameters; `python -m benchmarks.checkpoint_index` takes the real model's."""
    mesh = Mesh.parse("8|2048")
    shapes = [(16384, 16384), (1024, 16384), (16384, 53248), (16384,)]
    layouts = tuple(
        layout
        for layer in range(126)
        for layout in bucketise(
            [
                (TensorSpec(f"{layer}.{n}", shape, "bfloat16"), Levels(2, 2, 2))
                for n, shape in enumerate(2 * shapes)
            ],
            mesh,
        )
    )
    everything = [*range(126 * 8)]
    state = {key: {"float32": everything} for key in ("exp_avg", "exp_avg_sq")}
    index = index_of_all("405B", mesh, layouts, lay_out_file(layouts, mesh, state))
    began = time.perf_counter()
    index.save(tmp_path)
    assert Checkpoint.load(tmp_path) == index
    assert time.perf_counter() - began < 60
    assert (tmp_path / FILE).stat().st_size < MAX_FILE_BYTES / 16
