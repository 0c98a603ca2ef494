"""What a rank holds of the model and its optimizer, and so which ranges of which tensors it saves and reads,
under names that any other plan knows them by. In which files these ranges lie: ``formats.checkpoint``.

``model.<parameter>`` and ``model.<buffer>``, in the model's shapes; ``optimizer.state.<parameter>.<key>``, in
the parameter's shape, or a single number for all of it; ``rng.<device>.<rank>``; ``own.<rank>``, bytes of
what the loop of a rank keeps for itself. The first two are the names under which torch's own distributed
checkpoints flatten ``{"model": …, "optimizer": …}``.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hzplan.errors import UserError, one_line
from hzplan.formats.checkpoint import MODEL, OWN, RNG, STATE
from hzplan.runtime.bucket import Bucket
from hzplan.runtime.unit import UnitState
from hzplan.runtime.updates import Updates


@dataclass(frozen=True)
class Entry:
    """Elements from ``start`` on of a named tensor of ``shape``, row-major.

    ``values`` may be read or written; it is flat, or has the shape where it is all of the tensor. ``sliced``:
    whether it lies in a slice of a bucket, or is a tensor that one rank has alone.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    values: Tensor
    sliced: bool = True

    @property
    def end(self) -> int:
        """The first element of the tensor behind it."""
        return self.start + self.values.numel()


def whole(name: str, values: Tensor) -> Entry:
    """A tensor that is not sharded."""
    return Entry(name, tuple(values.shape), 0, values, sliced=False)


def buffers(model: nn.Module) -> list[Entry]:
    """The buffers that a state dict of the model has."""
    left_out = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return [whole(f"{MODEL}{name}", value) for name, value in model.named_buffers() if name not in left_out]


def aliases(model: nn.Module) -> dict[str, str]:
    """Other names of parameters that a model uses in several places, and the first name of each."""
    first: dict[int, str] = {}
    found = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(value), name) != name:
            found[f"{MODEL}{name}"] = f"{MODEL}{first[id(value)]}"
    return found


def random_state(rank: int, device: torch.device) -> list[Entry]:
    """A rank's generators: torch's own, and its device's."""
    found = [whole(f"{RNG}cpu.{rank}", torch.get_rng_state())]
    if device.type == "cuda":
        found.append(whole(f"{RNG}cuda.{rank}", torch.cuda.get_rng_state(device)))
    return found


def set_random_state(states: Iterable[Entry], device: torch.device) -> None:
    """The inverse of ``random_state``."""
    for entry in states:
        if entry.name.startswith(f"{RNG}cuda."):
            torch.cuda.set_rng_state(entry.values, device)
        else:
            torch.set_rng_state(entry.values)


def own(rank: int, kept: Mapping[str, Any]) -> Entry:
    """What a rank's loop keeps for itself, as torch saves it. UserError for what torch would not load again
    without executing anything: objects of classes."""
    file = io.BytesIO()
    try:
        torch.save(tree_map_only(Tensor, torch.clone, dict(kept)), file)  # views have large storages
        own_of(file.getvalue())
    except Exception as error:
        what = one_line(error).partition("\x1b")[0]
        raise UserError(f"own: only numbers, texts, tensors, and what holds them ({what})") from None
    return whole(f"{OWN}{rank}", torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8))


def own_of(content: bytes) -> dict[str, Any]:
    """The inverse of ``own``."""
    found: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    return found


def parameters(units: Iterable[UnitState], *, once: bool) -> Iterator[Entry]:
    """Parameters as exactly as this rank keeps them: master weights, where there are any.

    ``once``: every element from one of the ranks that hold it only.
    """
    for unit in units:
        for bucket in unit.buckets:
            held, level = _kept(bucket)
            if once and bucket.layout.trainable:
                held, level = bucket.within(held, level, bucket.mesh.levels), bucket.mesh.levels
            elif once and bucket.rank >= bucket.mesh.shards[level]:
                continue
            start, end = bucket.bounds(level)
            for index, low, high in bucket.layout.pieces(start, end):
                tensor = bucket.layout.tensors[index]
                part = held[low - start : high - start]
                yield Entry(f"{MODEL}{tensor.name}", tensor.shape, low - bucket.layout.offsets[index], part)


def _kept(bucket: Bucket) -> tuple[Tensor, int]:
    """What lasts of a bucket, and the level whose slice it is."""
    levels = bucket.layout.levels
    return (bucket.master, levels.optim) if bucket.layout.trainable else (bucket.param, levels.param)


def state(updates: Updates) -> Iterator[Entry]:
    """The optimizer's state, each element from one rank.

    UserError for an optimizer whose state is neither a tensor of the parameter's size nor a number in one.
    """
    for piece in updates.pieces:
        bucket = piece.bucket
        start, end = bucket.bounds(bucket.mesh.levels)
        low, high = max(start, piece.low), min(end, piece.high)
        if low >= high:
            continue
        tensor, origin = bucket.layout.tensors[piece.index], bucket.layout.offsets[piece.index]
        for key, value in updates.state_of(piece).items():
            name = f"{STATE}{tensor.name}.{key}"
            if value is None:  # as SGD without momentum has it
                continue
            if not isinstance(value, Tensor):
                raise UserError(
                    f"optimizer state {key!r} of {tensor.name} is a {type(value).__name__}, not a tensor; it "
                    "cannot be saved"
                )
            if value.dim() == 0:
                if low == origin:
                    yield whole(name, value)
            else:
                yield Entry(name, tensor.shape, low - origin, value[low - piece.low : high - piece.low])


def state_to_fill(
    updates: Updates, stored: Callable[[str], dict[str, tuple[torch.dtype, bool]]]
) -> Iterator[Entry]:
    """Room for all state of this rank's pieces, which are given it.

    ``stored``: of a parameter's name, the keys that were saved: dtype, and whether it is one number for all.
    """
    for piece in updates.pieces:
        layout, made = piece.bucket.layout, {}
        tensor = layout.tensors[piece.index]
        for key, (dtype, single) in stored(tensor.name).items():
            name = f"{STATE}{tensor.name}.{key}"
            if single:
                made[key] = torch.zeros((), dtype=dtype, device=updates.device_of_numbers(piece))
                yield whole(name, made[key])
            else:
                made[key] = updates.room_for(piece, key, dtype)
                yield Entry(name, tensor.shape, piece.low - layout.offsets[piece.index], made[key])
        updates.set_state_of(piece, made)
