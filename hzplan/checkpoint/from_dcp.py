"""Checkpoints of torch.distributed.checkpoint, as FSDP2's users have them, into a sharded model.

Every rank reads the boxes of its own slices. The list of tensors is a pickle: here only the classes that
torch writes there are made of it, and no function that it names is called.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.serialization import _get_layout

from hzplan.checkpoint.entries import Entry, aliases, buffers, parameters, state_to_fill, whole
from hzplan.checkpoint.restore import NUMBERS
from hzplan.core.layout import boxes
from hzplan.errors import UserError, one_line
from hzplan.formats.checkpoint import MODEL, STATE
from hzplan.runtime.engine import Engine
from hzplan.runtime.optimizer import ShardedOptimizer
from hzplan.runtime.world import MAX

LIST = ".metadata"
"""The file that makes a folder one of torch.distributed.checkpoint's."""
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
    lists = {folder: _read_list(folder) for folder in folders}
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


def take_weights(path: str | Path, model: nn.Module, optimizer: ShardedOptimizer) -> list[str]:
    """Give a sharded model the weights of a folder; every rank calls it, and reads its slices alone.

    Returns the names of its weights that the model does not have. UserError when one of the model's is
    missing or has another shape.
    """
    source = open_source(path)
    engine = optimizer.engine
    engine.synchronize()
    names = _Names(source, model)
    found = names.weights()
    _fill(source, [(found[e.name.removeprefix(MODEL)], e) for e in _weights(model, optimizer)])
    engine.refresh_parameters()
    known = (*names.buffers, *(name for of in names.firsts.values() for name in of))
    of_state = tuple(f"{name}." for name in names.firsts)  # keys of an optimizer's follow the parameter
    return sorted(
        name
        for name in source.tensors
        if not name.endswith(known) and not any(part in name for part in of_state)
    )


def load_dcp(path: str | Path, model: nn.Module, optimizer: ShardedOptimizer) -> int:
    """Give a sharded model and its optimizer what a folder has of them, and return after how many steps it
    was saved, as the optimizer counts them: 0 for one that does not.

    Every rank calls it, and reads its slices alone. UserError, before anything is changed, when something is
    missing or has another shape.
    """
    engine, updates = optimizer.engine, optimizer.updates
    engine.synchronize()
    prepared: list[_Prepared] = []
    _together(engine, path, lambda: prepared.append(_prepare(path, model, optimizer)))
    source, weights, states, wanted = prepared[0]
    dtypes = {piece.bucket.layout.tensors[piece.index].name: piece.param.dtype for piece in updates.pieces}
    filled = state_to_fill(updates, lambda name: _keys(weights[name], states[name], dtypes[name]))
    wanted += [(states[owner][key], e) for e in filled for owner, key in [_owner_and_key(e.name)]]
    counted = [of["step"] for of in states.values() if "step" in of]
    steps = [torch.zeros(tuple(of.metadata.size), dtype=torch.float64) for of in counted]
    wanted += [(of, whole(of.name, number)) for of, number in zip(counted, steps, strict=True)]
    _together(engine, path, lambda: _fill(source, wanted))
    engine.refresh_parameters()
    return max((int(number.max()) for number in steps), default=0)


class _Prepared(NamedTuple):
    """What is there, checked; ``wanted``: of the weights."""

    source: Source
    weights: dict[str, Stored]
    states: dict[str, dict[str, Stored]]
    wanted: list[tuple[Stored, Entry]]


def _prepare(path: str | Path, model: nn.Module, optimizer: ShardedOptimizer) -> _Prepared:
    source, updates = open_source(path), optimizer.updates
    names = _Names(source, model)
    weights = names.weights()
    trained = [name for name in names.firsts if model.get_parameter(name).requires_grad]
    states = names.states(trained, sorted(updates.state_keys), updates.class_name)
    wanted = [
        (weights[e.name.removeprefix(MODEL)], e) for e in _weights(model, optimizer) if e.values.numel()
    ]
    _check_shapes(source, wanted)
    for name in trained:
        for stored in states[name].values():
            if tuple(stored.metadata.size) not in {(), tuple(weights[name].metadata.size)}:
                raise UserError(
                    f"{path}: {stored.name} is {list(stored.metadata.size)}, not as its parameter"
                )
            dtype = stored.metadata.properties.dtype
            if not dtype.is_floating_point:
                raise UserError(f"{path}: {stored.name} is {dtype}, no dtype of an optimizer's state")
    for stored in (*weights.values(), *(of for some in states.values() for of in some.values())):
        if sum(prod(chunk.sizes) for chunk in stored.metadata.chunks) < prod(stored.metadata.size):
            raise UserError(f"{stored.folder}: a part of {stored.name} is not in it")
    return _Prepared(source, weights, states, wanted)


def _together(engine: Engine, path: str | Path, work: Callable[[], None]) -> None:
    """Do it on every rank; UserError on all of them where it fails on one."""
    problem: UserError | None = None
    try:
        work()
    except UserError as error:
        problem = error
    failed = torch.tensor(float(problem is not None), dtype=torch.float64, device=engine.device)
    engine.all_reduce(failed, "reading a checkpoint", MAX)
    if problem is not None:
        raise problem
    if failed:
        raise UserError(f"{path}: another rank cannot read it; its message says why")


class _Names:
    """Under which names a source has what a model has."""

    def __init__(self, source: Source, model: nn.Module) -> None:
        self.source = source
        # What has no elements, nobody saves.
        self.firsts = {name: [name] for name, value in model.named_parameters() if value.numel()}
        self.buffers = [entry.name.removeprefix(MODEL) for entry in buffers(model)]
        for alias, first in aliases(model).items():
            if first.removeprefix(MODEL) in self.firsts:
                self.firsts[first.removeprefix(MODEL)].append(alias.removeprefix(MODEL))

    def weights(self) -> dict[str, Stored]:
        """By parameter and buffer; UserError naming the first that is missing."""
        wanted = {**self.firsts, **{name: [name] for name in self.buffers}}
        return self._under(wanted, "is not in it; this is another model's checkpoint", ("model.", ""))

    def states(
        self, trained: Sequence[str], keys: Sequence[str], optimizer: str
    ) -> dict[str, dict[str, Stored]]:
        """By trained parameter, the state that the source has for it: none for one that had no gradient yet.
        UserError where a key is missing."""
        if not trained:
            return {}
        if not keys:
            if other := next(
                (there for there in self.source.tensors if f"state.{trained[0]}." in there), None
            ):
                raise UserError(
                    f"{self.source.path}: has {other}, and {optimizer} keeps no state with these options; "
                    "begin with the weights alone: hzplan run --weights"
                )
            return {name: {} for name in trained}
        found = {
            key: self._under(
                {name: [f"{other}.{key}" for other in self.firsts[name]] for name in trained},
                None,
                ("optimizer.state.", "state.", "optim.state."),
            )
            for key in keys
        }
        if not any(found.values()):
            raise UserError(
                f"{self.source.path}: no state of the optimizer by the parameters' names (it is saved with "
                "torch.distributed.checkpoint.state_dict.get_state_dict); begin with the weights alone: "
                "hzplan run --weights"
            )
        states = {name: {key: of[name] for key, of in found.items() if name in of} for name in trained}
        for name, of in states.items():
            missing = next((key for key in keys if key not in of), None)
            if of and missing is not None:
                raise UserError(
                    f"{self.source.path}: {name}.{missing} is not in it, and {optimizer} keeps it with these "
                    "options"
                )
        return states

    def _under(
        self, wanted: Mapping[str, Sequence[str]], why: str | None, usual: Sequence[str]
    ) -> dict[str, Stored]:
        """Each of ``wanted``, under the one prefix that has most of them; of several with as many the
        ``usual`` one, as beside a model there may be its average or a second one. UserError where that does
        not decide, and, with a reason ``why``, for the first that is missing."""
        tensors = self.source.tensors
        found: dict[str, dict[str, Stored]] = {}
        for prefix in self._prefixes([name for names in wanted.values() for name in names]):
            found[prefix] = {
                name: tensors[prefix + next(n for n in names if prefix + n in tensors)]
                for name, names in wanted.items()
                if any(prefix + n in tensors for n in names)
            }
        most = max(map(len, found.values()), default=0)
        best = [prefix for prefix, there in found.items() if len(there) == most]
        chosen = next((prefix for prefix in usual if prefix in best), None)
        if len(best) > 1 and chosen is None:
            raise UserError(
                f"{self.source.path}: several models or optimizers have the names: "
                f"{', '.join(map(repr, best))}; save the one to go on with as 'model' and 'optimizer'"
            )
        there = found[chosen if chosen is not None else best[0]] if best else {}
        missing = next((name for name in wanted if name not in there), None)
        if why is not None and missing is not None:
            raise UserError(f"{self.source.path}: {missing} {why}")
        return there

    def _prefixes(self, names: Collection[str]) -> list[str]:
        """What stands before one of the names in the source, the shortest first."""
        looked_for, found = frozenset(names), set[str]()
        for there in self.source.tensors:
            parts = there.split(".")
            for at in range(len(parts)):
                if ".".join(parts[at:]) in looked_for:
                    found.add("".join(f"{part}." for part in parts[:at]))
        return sorted(found, key=lambda prefix: (len(prefix), prefix))


def _weights(model: nn.Module, optimizer: ShardedOptimizer) -> list[Entry]:
    return [*parameters(optimizer.engine.units.values(), once=False), *buffers(model)]


def _owner_and_key(name: str) -> tuple[str, str]:
    owner, _, key = name.removeprefix(STATE).rpartition(".")
    return owner, key


def _keys(
    weight: Stored, state: Mapping[str, Stored], dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, bool]]:
    """Of a parameter's state: dtype, that of what is updated where it is elementwise, and whether it is one
    number for all elements."""
    shape = tuple(weight.metadata.size)
    single = {
        key: tuple(stored.metadata.size) == () and (shape != () or key in NUMBERS)
        for key, stored in state.items()
    }
    return {
        key: (stored.metadata.properties.dtype if single[key] else dtype, single[key])
        for key, stored in state.items()
    }


def _folders(path: str | Path) -> list[Path]:
    path = Path(path)
    if (path / LIST).is_file():
        return [path]
    return sorted(found.parent for found in path.glob(f"*/{LIST}")) if path.is_dir() else []


def _plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


# Reading


def _check_shapes(source: Source, wanted: Iterable[tuple[Stored, Entry]]) -> None:
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


def _fill(source: Source, wanted: Iterable[tuple[Stored, Entry]]) -> None:
    """Read all entries' values; UserError where shapes differ or a part is missing, or a file is damaged."""
    wanted = [*wanted]
    _check_shapes(source, wanted)
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


# The list of tensors


class _Fixed(type):
    """Of classes that a pickle may make: it cannot change them."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it would change {cls.__name__}")


class _Metadata(dcp.Metadata, metaclass=_Fixed):
    pass


class _Index(dcp.MetadataIndex, metaclass=_Fixed):
    pass


class _Tensor(dcp.TensorStorageMetadata, metaclass=_Fixed):
    pass


class _Chunk(dcp.ChunkStorageMetadata, metaclass=_Fixed):
    pass


class _Bytes(dcp.BytesStorageMetadata, metaclass=_Fixed):
    pass


class _Meta(dcp.StorageMeta, metaclass=_Fixed):
    pass


class _Place(_StorageInfo, metaclass=_Fixed):
    pass


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


_STAND_INS: Mapping[type, Any] = {
    dcp.Metadata: _Metadata,
    dcp.MetadataIndex: _Index,
    dcp.TensorStorageMetadata: _Tensor,
    dcp.ChunkStorageMetadata: _Chunk,
    dcp.BytesStorageMetadata: _Bytes,
    dcp.StorageMeta: _Meta,
    dcp.TensorProperties: _Properties,
    dcp._MEM_FORMAT_ENCODING: _call(int),
    _StorageInfo: _Place,
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


def _read_list(folder: Path) -> dcp.Metadata:
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
