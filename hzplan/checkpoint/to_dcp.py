"""A checkpoint as torch.distributed.checkpoint has it, for FSDP2 programs without hzplan: weights and the
optimizer's state under the model's own names, and its groups both as a list and by parameter.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from hzplan.checkpoint.data import fill
from hzplan.checkpoint.entries import whole
from hzplan.errors import UserError, one_line
from hzplan.formats.checkpoint import MODEL, STATE, Checkpoint, StoredGroup


def export(
    path: Path,
    index: Checkpoint,
    target: Path,
    *,
    progress: Callable[[str, float], None] = lambda text, fraction: None,
) -> int:
    """Write it into a new folder; returns bytes of tensors. One tensor at a time is in memory.

    UserError when the folder is there already, or cannot be written.
    """
    if target.exists():
        raise UserError(f"{target}: is there already; name a folder to make")
    beside = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        planner = _OneByOne(path, index, progress)
        quiet = logging.getLogger("torch.distributed.checkpoint")
        before = quiet.level
        quiet.setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            save(
                _state_dict(index),
                storage_writer=FileSystemWriter(beside),
                planner=planner,
                no_dist=True,
            )
        finally:
            quiet.setLevel(before)
        beside.rename(target)
    except CheckpointException as error:  # which is no Exception
        causes = [cause for cause, _ in error.failures.values()]
        cause = next((one for one in causes if isinstance(one, UserError)), causes[0] if causes else error)
        if isinstance(cause, UserError):
            raise cause from None
        raise UserError(f"{target}: cannot be written ({one_line(cause)})") from None
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    progress("written", 1.0)
    return planner.nbytes


def _state_dict(index: Checkpoint) -> dict[str, Any]:
    """The tensors as they are named and sized, without values; and the groups."""

    def empty(name: str) -> Tensor:
        stored = index.tensors[name]
        return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="meta")

    model = {name.removeprefix(MODEL): empty(name) for name in index.tensors if name.startswith(MODEL)}
    state = {
        owner: {key: empty(f"{STATE}{owner}.{key}") for key in keys} for owner, keys in index.states.items()
    }
    groups = [{**_options(group), "params": [*group.names]} for group in index.groups]
    by_name = {
        f"optimizer.param_groups.{name}.{key}": value
        for group in index.groups
        for name in group.names
        for key, value in _options(group).items()
    }
    trained = {name for group in index.groups for name in group.names}
    frozen = [t.name for bucket in index.buckets for t in bucket.tensors if t.name not in trained]
    by_name |= {  # which optimizers that were given all parameters ask for
        f"optimizer.param_groups.{name}.{key}": value
        for group in index.groups[:1]
        for name in frozen
        for key, value in _options(group).items()
    }
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}, **by_name}


def _options(group: StoredGroup) -> Mapping[str, Any]:
    """As torch's optimizers have them: tuples, which JSON has as lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in group.options.items()}


class _OneByOne(DefaultSavePlanner):
    """Reads a tensor when it is written."""

    def __init__(self, path: Path, index: Checkpoint, progress: Callable[[str, float], None]) -> None:
        super().__init__()
        self._path, self._index, self._progress = path, index, progress
        self._all = sum(tensor.numel for tensor in index.tensors.values()) or 1
        self._done = self.nbytes = 0

    def lookup_object(self, index: MetadataIndex) -> Any:
        """A tensor with its values; anything else as it is."""
        found = super().lookup_object(index)
        if not isinstance(found, Tensor):
            return found
        tensor = torch.zeros(found.shape, dtype=found.dtype)
        fill(self._path, self._index, [whole(index.fqn, tensor)])
        self._done += tensor.numel()
        self.nbytes += tensor.nbytes
        self._progress(index.fqn, min(1.0, self._done / self._all))
        return tensor
