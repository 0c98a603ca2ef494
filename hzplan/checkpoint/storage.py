"""Checkpoints for torch.distributed.checkpoint: any program with DCP reads them, without hzplan's runtime."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from hzplan.checkpoint.data import fill
from hzplan.checkpoint.entries import Entry
from hzplan.formats.checkpoint import Checkpoint


class Reader(StorageReader):
    """Reads one checkpoint's folder, under any sharding that the state dict to be loaded has::

        state = {"model": model.state_dict()}
        torch.distributed.checkpoint.load(state, storage_reader=Reader("checkpoints/step-00000100"))

    To DCP every tensor is one chunk, so that what it knows does not grow with the ranks that saved. Checksums
    of values are not compared; ``folder.whole_at`` does that. UserError when the index cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._index = Checkpoint.load(self.path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another folder, where one is given."""
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
            self._index = Checkpoint.load(self.path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Every tensor, as one chunk."""
        tensors: dict[str, Any] = {}
        for name, stored in self._index.tensors.items():
            size = torch.Size(stored.shape)
            chunk = dcp.ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
            properties = dcp.TensorProperties(dtype=getattr(torch, stored.dtype))
            tensors[name] = dcp.TensorStorageMetadata(properties, size, [chunk])
        return dcp.Metadata(state_dict_metadata=tensors)

    def set_up_storage_reader(
        self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing: the index is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads for itself."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every box that the plan asks for."""
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self.box(item).view(target.shape))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def box(self, item: ReadItem) -> torch.Tensor:
        """A box of a tensor: the whole rows that it touches are read, and cut."""
        name = item.storage_index.fqn
        stored = self._index.tensors[name]
        dtype = getattr(torch, stored.dtype)
        if not stored.shape:
            rows = torch.empty((), dtype=dtype)
            fill(self.path, self._index, [Entry(name, (), 0, rows)])
            return rows
        first, count = item.storage_offsets[0], item.lengths[0]
        row = torch.Size(stored.shape[1:])
        rows = torch.empty(count * row.numel(), dtype=dtype)
        fill(self.path, self._index, [Entry(name, stored.shape, first * row.numel(), rows)])
        box = rows.view(count, *row)
        for dim in range(1, len(stored.shape)):
            box = box.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        return box

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a folder."""
        return Path(checkpoint_id).is_dir()
