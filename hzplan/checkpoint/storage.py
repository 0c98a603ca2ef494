"""torch.distributed.checkpoint's files, read by an index of our own, not by their pickle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from hzplan.formats.checkpoint import Checkpoint, StoredFile, StoredTensor


class Writer(FileSystemWriter):
    """Keeps what it wrote where, on the rank that coordinates.

    ``aliases``: names under which tensors are to be found too, with the name that they are written under.
    """

    def __init__(self, path: Path, aliases: Mapping[str, str]) -> None:
        super().__init__(path, sync_files=True)
        self.metadata: dcp.Metadata | None = None
        self._aliases = aliases

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """All ranks have written."""
        tensors = metadata.state_dict_metadata
        tensors.update({alias: tensors[name] for alias, name in self._aliases.items()})
        by_name: dict[str, list[WriteResult]] = {}
        for result in (result for of_rank in results for result in of_rank):
            by_name.setdefault(result.index.fqn, []).append(result)
        again = [
            replace(result, index=replace(result.index, fqn=alias))
            for alias, name in self._aliases.items()
            for result in by_name[name]
        ]
        super().finish(metadata, [*results, again])
        self.metadata = metadata


class Reader(FileSystemReader):
    """Reads what a checked index says, and no pickle."""

    def __init__(self, path: Path, index: Checkpoint) -> None:
        super().__init__(path)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """The index, as torch wants it."""
        return metadata_of(self._index)


def tensors_of(metadata: dcp.Metadata, files: Sequence[StoredFile]) -> dict[str, StoredTensor]:
    """What an index says of the tensors that torch has written."""
    number = {file.name: at for at, file in enumerate(files)}
    found: dict[str, list[tuple[int, ...]]] = {}
    assert isinstance(metadata.storage_data, Mapping)
    for place, info in metadata.storage_data.items():
        stored = metadata.state_dict_metadata[place.fqn]
        assert isinstance(stored, dcp.TensorStorageMetadata)
        assert place.index is not None
        sizes = stored.chunks[place.index].sizes
        chunk = (number[info.relative_path], info.offset, info.length, *place.offset, *sizes)
        found.setdefault(place.fqn, []).append(chunk)
    return {
        name: StoredTensor(
            dtype=str(stored.properties.dtype).removeprefix("torch."),
            shape=tuple(stored.size),
            chunks=tuple(sorted(found.get(name, ()))),
        )
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, dcp.TensorStorageMetadata)
    }


def metadata_of(index: Checkpoint) -> dcp.Metadata:
    """The inverse."""
    tensors: dict[str, Any] = {}
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for name, tensor in index.tensors.items():
        dims, chunks = len(tensor.shape), []
        for number, (file, first, nbytes, *box) in enumerate(tensor.chunks):
            offsets, sizes = torch.Size(box[:dims]), torch.Size(box[dims:])
            chunks.append(dcp.ChunkStorageMetadata(offsets=offsets, sizes=sizes))
            place = dcp.MetadataIndex(name, offsets, number)
            places[place] = _StorageInfo(index.files[file].name, first, nbytes)
        properties = dcp.TensorProperties(dtype=getattr(torch, tensor.dtype))
        tensors[name] = dcp.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    return dcp.Metadata(state_dict_metadata=tensors, storage_data=places)
