"""torch.distributed.checkpoint's planners for entries: what a rank writes, and where what it reads goes."""

from __future__ import annotations

import io
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hzplan.checkpoint.entries import Entry
from hzplan.errors import UserError


class SavingPlanner(SavePlanner):
    """Writes this rank's entries; no two ranks have the same box."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = {(entry.name, entry.offsets): entry for entry in entries}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the entries are known."""

    def create_local_plan(self) -> SavePlan:
        """An item for each entry."""
        return SavePlan([_write_item(entry) for entry in self._entries.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], dcp.Metadata]:
        """All ranks' items, numbered."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """An entry's values."""
        return self._entries[write_item.index.fqn, tuple(write_item.index.offset or ())].values


def _write_item(entry: Entry) -> WriteItem:
    return WriteItem(
        index=dcp.MetadataIndex(entry.name, torch.Size(entry.offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(entry),
            properties=dcp.TensorProperties(dtype=entry.values.dtype),
            size=torch.Size(entry.shape),
        ),
    )


def _chunk(entry: Entry) -> dcp.ChunkStorageMetadata:
    return dcp.ChunkStorageMetadata(offsets=torch.Size(entry.offsets), sizes=torch.Size(entry.sizes))


class Loading(LoadPlanner):
    """Fills this rank's entries from whatever boxes were written."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries: dict[str, list[Entry]] = {}
        for entry in entries:
            self._entries.setdefault(entry.name, []).append(entry)
        self._by_place = {(e.name, e.offsets): e for listed in self._entries.values() for e in listed}
        self._metadata: dcp.Metadata | None = None

    def set_up_planner(
        self, state_dict: Any, metadata: dcp.Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep what is known of the checkpoint."""
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """The reads that fill every entry; UserError where the checkpoint lacks a part."""
        assert self._metadata is not None
        items: list[ReadItem] = []
        for name, entries in self._entries.items():
            stored = self._metadata.state_dict_metadata.get(name)
            if not isinstance(stored, dcp.TensorStorageMetadata):
                raise UserError(f"{name} is not in the checkpoint")
            reads = create_read_items_for_chunk_list(name, stored, [_chunk(entry) for entry in entries])
            if sum(prod(read.lengths) for read in reads) != sum(entry.values.numel() for entry in entries):
                raise UserError(f"{name}: a part of it is not in the checkpoint")
            items += reads
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """There are only tensors."""
        raise UserError(f"{read_item.dest_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of an entry that a read fills."""
        place = read_item.dest_index
        found = self._by_place[place.fqn, tuple(place.offset or ())].values
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            found = found.narrow(dim, offset, length)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: it was written in place."""
