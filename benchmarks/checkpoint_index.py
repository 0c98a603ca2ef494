"""What a checkpoint's index costs at scale: ``python -m benchmarks.checkpoint_index [MODEL] [MESH]``.

By default Llama-3-405B on 16,384 ranks: the buckets of its units by the code that lays them out, AdamW's
state, generators and numbers as every rank has them, and checksums of files that are not there. One process
writes the index as rank 0 does, reads it back as every rank does, and asks where some ranks' elements lie.
"""

from __future__ import annotations

import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hzplan.checkpoint.slices import lay_out_file, ranges_of
from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.layout import BucketLayout, bucketise
from hzplan.formats.checkpoint import (
    FILE,
    MODEL,
    RNG,
    STATE,
    Checkpoint,
    StoredBucket,
    StoredFile,
    StoredValue,
    ends_of_slices,
)
from hzplan.models.units import find_units
from hzplan.models.workload import load

GENERATORS = {"cpu": 5056, "cuda": 16}
"""Bytes of the state of torch's generators."""
NEW_WORLD = 1000
"""Ranks of the job that goes on from the checkpoint, whose slices end elsewhere."""


def main(model: str = "hf:llama3-405b", text: str = "8|2048") -> None:
    """Print seconds, bytes and peak memory of each step."""
    mesh = Mesh.parse(text)
    with timed(f"{model}: units and buckets on mesh {mesh}, {mesh.world} ranks"):
        layouts = buckets_of(model, mesh)
        tensors = sum(len(layout.tensors) for layout in layouts)
    with timed("lay out the files"):
        state = {key: {"float32": [*range(tensors)]} for key in ("exp_avg", "exp_avg_sq")}
        buckets = lay_out_file(layouts, mesh, state)
    with timed("the index"):
        index = index_of(model, mesh, layouts, buckets)
    with tempfile.TemporaryDirectory() as folder:
        with timed("written"):
            index.save(Path(folder))
        print(f"{'':8}   {os.stat(Path(folder) / FILE).st_size / 2**20:.1f} MiB")
        with timed("read and checked"):
            read = Checkpoint.load(Path(folder))
    assert read == index
    with timed(f"where lie the elements of a rank of {NEW_WORLD} others, all states"):
        names = [name for name in read.tensors if name.startswith((MODEL, STATE))]
        parts = files = 0
        for name in names:
            stored = read.tensors[name]
            share = -(-stored.numel // NEW_WORLD)
            found = [*stored.parts(7 * share, 8 * share)] if stored.numel > NEW_WORLD else []
            parts, files = parts + len(found), max(files, len(found))
    print(f"{'':8}   {parts} reads, of at most {files} files for one tensor")
    with timed("what three ranks of the same world read"):
        for rank in (0, mesh.world // 3, mesh.world - 1):
            for name, low, high in ranges_of(buckets, mesh, rank):
                (part,) = read.tensors[name].parts(low, high)
                assert part.rank == rank
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print what the body took."""
    began = time.perf_counter()
    yield
    print(f"{time.perf_counter() - began:6.2f} s   {what}")


def buckets_of(model: str, mesh: Mesh) -> tuple[BucketLayout, ...]:
    """In bf16 with fp32 masters, everything sharded over everyone, as ZeRO-3."""
    workload = load(model, seq_len=4096)
    with torch.device("meta"):
        units = find_units(workload.build())
    levels = Levels(mesh.levels, mesh.levels, mesh.levels)
    return tuple(
        layout
        for unit in units
        for layout in bucketise([(tensor, levels) for tensor in unit.computed_in("bfloat16")], mesh)
    )


def index_of(
    model: str, mesh: Mesh, layouts: tuple[BucketLayout, ...], buckets: tuple[StoredBucket, ...]
) -> Checkpoint:
    """As rank 0 makes it of what all ranks say; AdamW's step of a tensor is with its first element."""
    values, ends = {}, ends_of_slices(buckets, mesh.world)

    def add(name: str, rank: int, dtype: str, *shape: int) -> None:
        values[name] = StoredValue(dtype=dtype, shape=shape, rank=rank, first_byte=ends[rank])
        ends[rank] = values[name].end

    for layout in layouts:
        for tensor, offset in zip(layout.tensors, layout.offsets, strict=True):
            owner = mesh.holder(offset // (layout.numel // mesh.world), mesh.levels)
            add(f"{STATE}{tensor.name}.step", owner, "float32")
    for rank in range(mesh.world):
        for device, nbytes in GENERATORS.items():
            add(f"{RNG}{device}.{rank}", rank, "uint8", nbytes)
    rng = random.Random(0)
    return Checkpoint(
        step=1,
        samples=1,
        mesh=str(mesh),
        model=model,
        optimizer="AdamW",
        torch=torch.__version__,
        extra={},
        files=tuple(StoredFile(nbytes=end, sha256=rng.randbytes(32).hex()) for end in ends),
        buckets=buckets,
        values=values,
        aliases={},
    ).sealed()


if __name__ == "__main__":
    main(*sys.argv[1:])
