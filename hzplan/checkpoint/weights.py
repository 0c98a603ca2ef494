"""Weights as safetensors in Hugging Face's layout: out of a checkpoint, and into a sharded model.

``model.safetensors``, or several files and ``model.safetensors.index.json``, which says where each tensor is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hzplan.checkpoint.data import fill
from hzplan.checkpoint.dcp_source import is_one
from hzplan.checkpoint.entries import Entry, aliases, buffers, parameters, whole
from hzplan.checkpoint.from_dcp import take_weights
from hzplan.checkpoint.together import together
from hzplan.core.layout import boxes
from hzplan.errors import UserError, one_line
from hzplan.formats.base import file_mode, read_json, write_text
from hzplan.formats.checkpoint import MODEL, Checkpoint
from hzplan.runtime.optimizer import ShardedOptimizer

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
EXPORTED = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""Names of files with weights, as they are written here."""
MOST_BYTES = 5 * 10**9
"""Of one file, as Hugging Face splits them."""


def export(
    path: Path,
    index: Checkpoint,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    most_bytes: int = MOST_BYTES,
    progress: Callable[[str, float], None] = lambda text, fraction: None,
) -> int:
    """Write a checkpoint's weights into a folder; returns their bytes.

    ``dtype``: of the floating tensors (default: as they are). One file's tensors are in memory at a time.
    Tensors with several names are written under the first. UserError when the folder cannot be written.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        groups = list(_groups(index, dtype, most_bytes))
        places: dict[str, str] = {}
        total = 0
        for number, names in enumerate(groups, start=1):
            file = ONE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            progress(file, (number - 1) / len(groups))
            tensors = _read(path, index, names, dtype)
            total += sum(tensor.nbytes for tensor in tensors.values())
            beside = target / f".{file}.partial"
            try:
                save_file(tensors, beside, metadata={"format": "pt"})
                os.chmod(beside, file_mode())
                os.replace(beside, target / file)
            finally:
                beside.unlink(missing_ok=True)
            places |= dict.fromkeys(tensors, file)
        if len(groups) > 1:
            listed = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            write_text(target / INDEX, json.dumps(listed, indent=2) + "\n")
        else:
            (target / INDEX).unlink(missing_ok=True)
        for other in target.iterdir():  # of an export before, which would be read instead
            if EXPORTED.fullmatch(other.name) and other.name not in places.values():
                other.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror})") from None
    except SafetensorError as error:
        raise UserError(f"{target}: cannot be written ({one_line(error)})") from None
    progress("written", 1.0)
    return total


def _groups(index: Checkpoint, dtype: torch.dtype | None, most_bytes: int) -> Iterator[list[str]]:
    """The names of the tensors of each file."""
    group: list[str] = []
    size = 0
    for name, tensor in index.tensors.items():
        if not name.startswith(MODEL) or index.first_name(name) != name:
            continue
        nbytes = tensor.numel * _cast(getattr(torch, tensor.dtype), dtype).itemsize
        if group and size + nbytes > most_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += nbytes
    yield group


def _cast(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and stored.is_floating_point else stored


def _read(path: Path, index: Checkpoint, names: list[str], dtype: torch.dtype | None) -> dict[str, Tensor]:
    tensors = {
        name: torch.zeros(stored.shape, dtype=_cast(getattr(torch, stored.dtype), dtype))
        for name in names
        for stored in [index.tensors[name]]
    }
    fill(path, index, [whole(name, tensor) for name, tensor in tensors.items()])
    return {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}


def take(path: Path, model: nn.Module, optimizer: ShardedOptimizer) -> list[str]:
    """Give a sharded model the weights of a file or folder; every rank calls it, and reads its slices alone.

    Returns the names in the files that the model does not have. A folder may also be a checkpoint of
    torch.distributed.checkpoint. UserError when one of the model's is missing or has another shape.
    """
    if is_one(path):
        return take_weights(path, model, optimizer)
    engine = optimizer.engine
    engine.synchronize()
    unused = together(engine, lambda: _taken(path, model, optimizer))
    engine.refresh_parameters()
    return unused


def _taken(path: Path, model: nn.Module, optimizer: ShardedOptimizer) -> list[str]:
    """Fill this rank's slices; returns the names that the model does not have."""
    files = _files(path)
    names = _names(model)
    chosen = {}
    for first, its_names in names.items():
        there = [name for name in its_names if name in files]
        if not there:
            raise UserError(f"{path}: {first} is not in it; these are another model's weights")
        chosen[first] = there[0]
    opened: dict[Path, Any] = {}
    for entry in [*parameters(optimizer.engine.units.values(), once=False), *buffers(model)]:
        name = chosen[entry.name.removeprefix(MODEL)]
        file = files[name]
        if file not in opened:
            opened[file] = _open(file)
        _copy(opened[file], file, name, entry)
    return sorted(set(files) - {name for its_names in names.values() for name in its_names})


def _names(model: nn.Module) -> dict[str, list[str]]:
    """What a model's tensors may be called, by the first name of each."""
    found = {name: [name] for name, _ in model.named_parameters()}
    found |= {name: [name] for name in (entry.name.removeprefix(MODEL) for entry in buffers(model))}
    for alias, first in aliases(model).items():
        found[first.removeprefix(MODEL)].append(alias.removeprefix(MODEL))
    return found


def _copy(opened: Any, file: Path, name: str, entry: Entry) -> None:
    try:
        part = opened.get_slice(name)
    except SafetensorError as error:
        raise UserError(f"{file}: {one_line(error)}") from None
    shape = tuple(part.get_shape())
    if shape != entry.shape:
        raise UserError(f"{file}: {name} is {list(shape)}, and {list(entry.shape)} in this model")
    taken = 0
    for offsets, sizes in boxes(shape, entry.start, entry.end):
        box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        values = part[box] if box else opened.get_tensor(name)
        if values.is_floating_point() != entry.values.is_floating_point():
            raise UserError(f"{file}: {name} is {values.dtype}, and {entry.values.dtype} in this model")
        count = values.numel()
        target = entry.values if count == entry.values.numel() else entry.values[taken : taken + count]
        with torch.no_grad():
            target.copy_(values.view(target.shape))
        taken += count


def _files(path: Path) -> Mapping[str, Path]:
    """Where every tensor is."""
    path = path.parent if path.name == INDEX else path
    folder = path if path.is_dir() else path.parent
    if path.is_dir() and (path / INDEX).is_file():
        listed = read_json(path / INDEX)
        places = listed.get("weight_map") if isinstance(listed, dict) else None
        if not isinstance(places, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in places.values()
        ):
            raise UserError(
                f"{path / INDEX}: field weight_map: must give a file of the folder for each tensor"
            )
        return {name: folder / file for name, file in places.items()}
    file = path / ONE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{path}: no safetensors there; give a file, or a folder with {ONE} or {INDEX}")
    return dict.fromkeys(_open(file).keys(), file)


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a safetensors file that can be read ({one_line(error)})") from None
