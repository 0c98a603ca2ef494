"""What folders of torch.distributed.checkpoint have, and reading ranges of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hzplan.checkpoint.dcp_list import LIST, read_list
from hzplan.checkpoint.entries import Entry
from hzplan.core.layout import boxes
from hzplan.errors import UserError, one_line

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What wrapping modules put into the names of parameters."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a folder, under the name that the folder has for it."""

    folder: Path
    name: str
    metadata: dcp.TensorStorageMetadata


@dataclass(frozen=True)
class Source:
    """The tensors of one or several folders by name, without what wrappers put in; and each folder's list."""

    path: Path
    tensors: Mapping[str, Stored]
    lists: Mapping[Path, dcp.Metadata]


def is_one(path: str | Path) -> bool:
    """Whether a folder, or one right in it, is a checkpoint of torch.distributed.checkpoint."""
    return bool(_folders(path))


def open_source(path: str | Path) -> Source:
    """What a folder has, or the folders right in it, as trainers keep weights and optimizer apart.

    UserError when there is none, or a list cannot be read.
    """
    folders = _folders(path)
    if not folders:
        raise UserError(f"{path}: no checkpoint of torch.distributed.checkpoint there (no file {LIST})")
    lists = {folder: read_list(folder) for folder in folders}
    tensors: dict[str, Stored] = {}
    for folder, listed in lists.items():
        for name, found in listed.state_dict_metadata.items():
            if not isinstance(found, dcp.TensorStorageMetadata):
                continue
            other = tensors.setdefault(_plain(name), Stored(folder, name, found))
            if (other.folder, other.name) != (folder, name):
                where = (
                    folder / LIST
                    if other.folder == folder
                    else f"{path}: {other.folder.name} and {folder.name}"
                )
                raise UserError(f"{where}: {_plain(name)} is there twice; name one checkpoint's folder")
    return Source(Path(path), tensors, lists)


def _folders(path: str | Path) -> list[Path]:
    path = Path(path)
    if (path / LIST).is_file():
        return [path]
    return sorted(found.parent for found in path.glob(f"*/{LIST}")) if path.is_dir() else []


def _plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def check_shapes(source: Source, wanted: Iterable[tuple[Stored, Entry]]) -> None:
    """UserError for the first tensor of another shape, or of whole numbers for floating ones."""
    for stored, entry in wanted:
        shape = tuple(stored.metadata.size)
        if shape != entry.shape:
            raise UserError(
                f"{source.path}: {stored.name} is {list(shape)}, and {list(entry.shape)} in this model"
            )
        floats = stored.metadata.properties.dtype.is_floating_point
        if floats != entry.values.is_floating_point():
            raise UserError(
                f"{source.path}: {stored.name} is {stored.metadata.properties.dtype}, and "
                f"{entry.values.dtype} in this model"
            )


def fill(source: Source, wanted: Iterable[tuple[Stored, Entry]]) -> None:
    """Read all entries' values; UserError where shapes differ or a part is missing, or a file is damaged."""
    wanted = [*wanted]
    check_shapes(source, wanted)
    by_folder: dict[Path, list[tuple[Stored, Entry]]] = {}
    for stored, entry in wanted:
        by_folder.setdefault(stored.folder, []).append((stored, entry))
    for folder, of_folder in by_folder.items():
        planner = _Boxes()
        items = [item for stored, entry in of_folder for item in planner.items(stored, entry)]
        reader = FileSystemReader(folder)
        reader.set_up_storage_reader(source.lists[folder], is_coordinator=False)
        try:
            with torch.no_grad():
                reader.read_data(LoadPlan(items), planner)
        except Exception as error:  # whatever is wrong with a file of others
            raise UserError(f"{folder}: cannot be read ({one_line(error)})") from None


class _Boxes(LoadPlanner):
    """Where each item that is read goes: the number of its box is in its index."""

    def __init__(self) -> None:
        self._targets: list[Tensor] = []

    def items(self, stored: Stored, entry: Entry) -> Iterator[ReadItem]:
        """What is to be read for an entry: its boxes, cut as the chunks of the folder are."""
        taken = 0
        for offsets, sizes in boxes(entry.shape, entry.start, entry.end):
            count = prod(sizes)
            values = entry.values
            if tuple(values.shape) != entry.shape:
                values = values[taken : taken + count]
            self._targets.append(values.view(sizes))
            taken += count
            wanted = dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            read = 0
            for item in create_read_items_for_chunk_list(stored.name, stored.metadata, [wanted]):
                read += prod(item.lengths)
                place = dcp.MetadataIndex(stored.name, offset=None, index=len(self._targets) - 1)
                yield replace(item, dest_index=place)
            if read != count:
                raise UserError(f"{stored.folder}: a part of {stored.name} is not in it")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of a box that an item fills."""
        assert read_item.dest_index.index is not None
        target = self._targets[read_item.dest_index.index]
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: it was read where it belongs."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Not asked for."""

    def set_up_planner(self, *arguments: Any, **keywords: Any) -> None:
        """Nothing: items are given."""

    def create_local_plan(self) -> LoadPlan:
        """Not asked for."""
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return central_plan
