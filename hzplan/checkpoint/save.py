"""Saving beside training: what a rank holds is copied between two steps, and written by a thread."""

from __future__ import annotations

import queue
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hzplan.checkpoint import folder as folders
from hzplan.checkpoint.data import write
from hzplan.checkpoint.entries import Entry, aliases, buffers, parameters, random_state, state
from hzplan.checkpoint.entries import own as entry_of_own
from hzplan.checkpoint.extra import packed
from hzplan.checkpoint.groups import groups_of
from hzplan.checkpoint.position import Position
from hzplan.checkpoint.slices import lay_out_file, ranges_of
from hzplan.checkpoint.staging import Staging
from hzplan.core.hierarchy import Mesh
from hzplan.core.layout import BucketLayout
from hzplan.errors import UserError, last_cause, one_line
from hzplan.formats.checkpoint import (
    STATE,
    Checkpoint,
    StoredBucket,
    StoredFile,
    StoredGroup,
    StoredTensor,
    StoredValue,
    data_file,
    ends_of_slices,
    sliced,
)
from hzplan.runtime.backends.groups import job_timeout
from hzplan.runtime.optimizer import ShardedOptimizer

KEEP = 2
"""How many checkpoints stay: a newest one, and one more should that turn out to be damaged."""


@dataclass(frozen=True)
class Outcome:
    """What became of a save. ``problem``: None where all is well, else why there is no checkpoint."""

    step: int
    path: Path
    seconds: float
    problem: str | None


@dataclass(frozen=True)
class _Snapshot:
    """What is saved: this rank's part, how buckets are laid out, where the run is; and what rank 0 notes.

    ``rank``: in ``mesh``, and so in the names of files. ``buffers``: names of entries that are any values.
    """

    entries: list[Entry]
    layouts: tuple[BucketLayout, ...]
    mesh: Mesh
    rank: int
    also: dict[str, str]
    position: Position
    extra: dict[str, Any]
    optimizer: str
    buffers: frozenset[str]
    groups: tuple[StoredGroup, ...]
    wire: str | None


@dataclass(frozen=True)
class _Written:
    """A rank's file, and the tensors in it that no bucket has. ``groups``: of the optimizer, as this rank
    has them: none where it updates nothing."""

    rank: int
    file: StoredFile
    values: dict[str, StoredValue]
    groups: tuple[StoredGroup, ...]


@dataclass
class Saver:
    """Writes a model's checkpoints into a folder that every rank sees; every rank makes one, and calls it.

    ``keep``: how many to leave there, of those that this object has written or that ``known`` lists. It has
    communicators of its own, over gloo, so that saving and training do not meet.
    """

    folder: Path
    keep: int = KEEP
    known: list[int] = field(default_factory=list)
    model_name: str = ""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise UserError(f"{self.keep} checkpoints to keep: at least 1")
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._rank, self._world = (0, 1) if self._alone else (dist.get_rank(), dist.get_world_size())
        self._group = None if self._alone else dist.new_group(backend="gloo", timeout=_patience())
        self._staging = Staging()
        self._lock: folders.Lock | None = None  # rank 0's, from the first save on
        self._thread: threading.Thread | None = None
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def move_to(self, folder: Path) -> None:
        """Write to another folder from now on, all of whose checkpoints are known."""
        self.wait()
        self.folder, self._lock = folder, None
        self.known = [folders.step_of(path) for path in folders.listed(folder)] if self._rank == 0 else []

    def save(
        self,
        model: nn.Module,
        optimizer: ShardedOptimizer,
        position: Position,
        extra: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        """Between two steps: copy what this rank holds, and return while it is written.

        Waits for a save that is still under way. ``extra``: see ``checkpoint.extra``; rank 0's is kept.
        ``own``: what this rank keeps for itself. UserError for what cannot be kept so.
        """
        packed_extra = packed(extra or {})
        self.wait()
        optimizer.engine.synchronize()
        entries = [*parameters(optimizer.engine.units.values(), once=True), *state(optimizer.updates)]
        engine, rank = optimizer.engine, optimizer.engine.world.rank
        entries += random_state(rank, engine.device)
        entries += [] if own is None else [entry_of_own(rank, own)]
        of_model = buffers(model) if rank == 0 else []
        entries += of_model
        snapshot = _Snapshot(
            entries=self._staging.copies(entries),
            layouts=tuple(bucket.layout for unit in engine.units.values() for bucket in unit.buckets),
            mesh=engine.mesh,
            rank=rank,
            also=aliases(model),
            position=position,
            extra=packed_extra,
            optimizer=optimizer.updates.class_name,
            buffers=frozenset(entry.name for entry in of_model),
            groups=groups_of(optimizer),
            wire=engine.rounding.said,
        )
        self._thread = threading.Thread(
            target=self._save, args=(snapshot,), name="hzplan checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def outcomes(self) -> list[Outcome]:
        """What became of the saves that have ended since the last call."""
        found = []
        while not self._outcomes.empty():
            found.append(self._outcomes.get())
        return found

    def _save(self, snapshot: _Snapshot) -> None:
        began, problem = time.perf_counter(), None
        try:
            self._write(snapshot)
        except BaseException as error:  # torch's own is no Exception; training must hear of any
            problem = said(error)
            if self._lock is not None:  # else it is not ours
                folders.discard(self.folder, snapshot.position.step)
        path = folders.place_of(self.folder, snapshot.position.step)
        self._outcomes.put(Outcome(snapshot.position.step, path, time.perf_counter() - began, problem))

    def _write(self, snapshot: _Snapshot) -> None:
        """All ranks together; an error on one is an error on all."""
        step = snapshot.position.step
        kept = self.together(lambda: _state_kept(snapshot))
        buckets = lay_out_file(snapshot.layouts, snapshot.mesh, _union(kept))
        self.together(lambda: self._begin(step) if self._rank == 0 else None)
        path = folders.partial_of(self.folder, step)
        mine, problem = _tried(lambda: _write_file(path, snapshot, buckets))
        written = self._gather_to_first(mine)

        def end() -> None:
            if problem is not None:
                raise UserError(problem)
            if self._rank == 0 and None not in written:
                self._end(buckets, written, snapshot)

        self.together(end)

    def _end(self, buckets: tuple[StoredBucket, ...], written: list[_Written], snapshot: _Snapshot) -> None:
        """On rank 0: everything is there; write what says so, and give it its name.

        UserError where this rank does not see all files, or could not read back what it has written: then
        the checkpoint gets no name, and older ones stay.
        """
        step = snapshot.position.step
        path = folders.partial_of(self.folder, step)
        written = sorted(written, key=lambda of_rank: of_rank.rank)
        for of_rank in written:
            file = path / data_file(of_rank.rank)
            if not file.exists() or file.stat().st_size != of_rank.file.nbytes:
                raise UserError(
                    f"{self.folder}: rank 0 does not see {file.name} there; all ranks must share it"
                )
        Checkpoint(
            step=step,
            samples=snapshot.position.samples,
            mesh=str(snapshot.mesh),
            model=self.model_name,
            optimizer=snapshot.optimizer,
            torch=torch.__version__,
            extra=snapshot.extra,
            files=tuple(of_rank.file for of_rank in written),
            buckets=buckets,
            values={name: value for of_rank in written for name, value in of_rank.values.items()},
            aliases=snapshot.also,
            groups=next((of_rank.groups for of_rank in written if of_rank.groups), ()),
            wire=snapshot.wire,
        ).save(path)
        Checkpoint.load(path)
        folders.publish(self.folder, step)
        self.known = [*(known for known in self.known if known != step), step]
        folders.prune(self.folder, self.keep, self.known, spared=step)

    def _begin(self, step: int) -> None:
        """On rank 0: an empty folder to write to, which nobody else does."""
        if self._lock is None:
            self._lock = folders.Lock(self.folder)
        folders.begin(self.folder, step)

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """What ``work`` gives on every rank; UserError on all of them where it fails on one."""
        everyone = self.gather(_tried(work))
        for rank, (_, problem) in enumerate(everyone):
            if problem is not None:
                raise UserError(f"rank {rank}: {problem}" if self._world > 1 else problem)
        return [found for found, _ in everyone]

    def gather(self, mine: Any) -> list[Any]:
        """What every rank has, on every rank."""
        if self._alone:
            return [mine]
        found: list[Any] = [None] * self._world
        dist.all_gather_object(found, mine, group=self._group)
        return found

    def _gather_to_first(self, mine: Any) -> list[Any]:
        """What every rank has, on rank 0 alone: all of it would be much for every rank of a large world."""
        if self._alone:
            return [mine]
        found: list[Any] = [None] * self._world if self._rank == 0 else []
        dist.gather_object(mine, found if self._rank == 0 else None, dst=0, group=self._group)
        return found


def _tried(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """What ``work`` gives, or why it gives nothing."""
    try:
        return work(), None
    except Exception as error:
        return None, said(error)


SAVES = 4
"""How many times as long as for a collective ranks wait for each other's disks."""


def _patience() -> timedelta | None:
    """From the job's own; None: torch's default."""
    given = job_timeout()
    return None if given is None else SAVES * given


def _state_kept(snapshot: _Snapshot) -> dict[tuple[str, str], bytes]:
    """What this rank has of the optimizer's state: numbers of parameters, as in ``slices.State``, but packed,
    because every rank is told of every rank's. UserError for values that are not finite."""
    _check_finite(snapshot)
    number_of = {
        tensor.name: number
        for number, tensor in enumerate(tensor for layout in snapshot.layouts for tensor in layout.tensors)
    }
    found: dict[tuple[str, str], array[int]] = {}
    for entry in snapshot.entries:
        if entry.sliced and entry.name.startswith(STATE):
            owner, _, key = entry.name.removeprefix(STATE).rpartition(".")
            found.setdefault((key, _name(entry.values.dtype)), array("I")).append(number_of[owner])
    return {of: numbers.tobytes() for of, numbers in found.items()}


def _union(kept: Iterable[Mapping[tuple[str, str], bytes]]) -> dict[str, dict[str, list[int]]]:
    """What all ranks together have of the optimizer's state, as ``slices.State``."""
    found: dict[tuple[str, str], set[int]] = {}
    for of_rank in kept:
        for both, numbers in of_rank.items():
            found.setdefault(both, set()).update(array("I", numbers))
    state: dict[str, dict[str, list[int]]] = {}
    for (key, dtype), tensors in found.items():
        state.setdefault(key, {})[dtype] = sorted(tensors)
    return state


def _write_file(folder: Path, snapshot: _Snapshot, buckets: Sequence[StoredBucket]) -> _Written:
    """Write this rank's file: its slices of buckets, and behind them what it has alone.

    UserError where its values are not exactly those that its slices need: ranks then differ in the state
    that their optimizers keep.
    """
    rank, tensors = snapshot.rank, sliced(buckets, snapshot.mesh)
    end = ends_of_slices(buckets, snapshot.mesh.world)[rank]
    missing = ranges_of(buckets, snapshot.mesh, rank)
    placed, values = [], {}
    for entry in snapshot.entries:
        if entry.sliced:
            missing.discard((entry.name, entry.start, entry.end))
            placed.append((_first_byte(tensors[entry.name], entry, rank), entry.values))
        else:
            value = StoredValue(dtype=_name(entry.values.dtype), shape=entry.shape, rank=rank, first_byte=end)
            values[entry.name], end = value, value.end
            placed.append((value.first_byte, entry.values))
    if missing:
        raise UserError(
            f"{min(missing)[0]}: other ranks keep it for their part of the parameter, this one not"
        )
    return _Written(rank, write(folder / data_file(rank), placed, end), values, snapshot.groups)


def _first_byte(stored: StoredTensor, entry: Entry, rank: int) -> int:
    (part,) = stored.parts(entry.start, entry.end)
    assert part.rank == rank and stored.dtype == _name(entry.values.dtype)
    return part.first_byte


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_finite(snapshot: _Snapshot) -> None:
    """UserError for values that no training goes on from. Buffers may hold any: masks are of infinities."""
    for entry in snapshot.entries:
        checked = entry.values.dtype in FINITE and entry.name not in snapshot.buffers
        if checked and not bool(entry.values.isfinite().all()):
            raise UserError(f"{entry.name} is not finite")


FINITE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def said(error: BaseException) -> str:
    """The reason of a failed save, in a line."""
    cause = last_cause(error)
    if isinstance(cause, OSError) and cause.strerror:
        return f"{cause.filename or 'checkpoint'}: {cause.strerror}"
    return str(cause) if isinstance(cause, UserError) else one_line(cause)
