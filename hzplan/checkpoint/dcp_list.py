"""The list of tensors of a checkpoint of torch.distributed.checkpoint, read as data.

It is a pickle: here only stand-ins of the classes that torch writes there are made of it, which it cannot
change, and no function that it names is called.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.serialization import _get_layout

from hzplan.errors import UserError, one_line

LIST = ".metadata"
"""The file that makes a folder one of torch.distributed.checkpoint's."""


def read_list(folder: Path) -> dcp.Metadata:
    """A folder's list; UserError when it is none, or names files outside of the folder."""
    path = folder / LIST
    try:
        with path.open("rb") as file:
            found = _Data(file).load()
        _check_list(found)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # a pickle that is none can raise anything
        raise UserError(f"{path}: not a list of torch.distributed.checkpoint ({one_line(error)})") from None
    places = {dcp.MetadataIndex(i.fqn, i.offset, i.index): place for i, place in found.storage_data.items()}
    return dcp.Metadata(dict(found.state_dict_metadata), storage_data=places)


def _check_list(found: Any) -> None:
    """ValueError for what does not have the parts of a list, or a file elsewhere."""
    if not isinstance(found, dcp.Metadata) or not isinstance(found.storage_data, dict):
        raise ValueError("no list")
    for name, of in found.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(
            of, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata
        ):
            raise ValueError(f"{name!r} is no tensor")
    for index, place in found.storage_data.items():
        if not isinstance(index, dcp.MetadataIndex) or not isinstance(place, _StorageInfo):
            raise ValueError("a place that is none")
        if not isinstance(place.relative_path, str) or Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"the file {place.relative_path!r} is not in the folder")


class _Fixed(type):
    """Of classes that a pickle may make: it cannot change them."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it would change {cls.__name__}")


class _Properties(dcp.TensorProperties, metaclass=_Fixed):
    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]  # all that is asked of it


def _call(make: Callable[..., Any]) -> Any:
    """A function that a pickle may call, and not change."""

    class Calls:
        __slots__ = ()

        def __call__(self, *arguments: Any) -> Any:
            return make(*arguments)

    return Calls()


_PLAIN = (
    dcp.Metadata,
    dcp.MetadataIndex,
    dcp.TensorStorageMetadata,
    dcp.ChunkStorageMetadata,
    dcp.BytesStorageMetadata,
    dcp.StorageMeta,
    _StorageInfo,
)
_STAND_INS: Mapping[type, Any] = {
    **{of: _Fixed(of.__name__, (of,), {}) for of in _PLAIN},
    dcp.TensorProperties: _Properties,
    dcp._MEM_FORMAT_ENCODING: _call(int),
    torch.Size: _call(torch.Size),
}
_KNOWN: Mapping[tuple[str, str], Any] = {
    **{(of.__module__, of.__qualname__): instead for of, instead in _STAND_INS.items()},
    ("torch.serialization", "_get_layout"): _call(_get_layout),  # of a text, from a table
    ("collections", "OrderedDict"): dict,
    # Where it was saved; a text is enough.
    **{
        (module, name): _call(lambda *parts: "/".join(map(str, parts)))
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "Path", "WindowsPath", "PureWindowsPath")
    },
}


class _Data(pickle.Unpickler):
    """A pickle of data: what torch's lists are made of, and dtypes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """What stands for one of those; UnpicklingError for any other."""
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not of a list of tensors")
