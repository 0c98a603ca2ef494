"""Saving beside training: what a rank holds is copied between two steps, and written by a thread."""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from hzplan.checkpoint import folder as folders
from hzplan.checkpoint.entries import Entry, aliases, buffers, parameters, random_state, state
from hzplan.checkpoint.planners import SavingPlanner
from hzplan.checkpoint.position import Position
from hzplan.checkpoint.storage import Writer, tensors_of
from hzplan.errors import UserError, last_cause, one_line
from hzplan.formats.checkpoint import Checkpoint, StoredFile
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
    """What is saved: this rank's part, other names of tensors, where the run is; and what rank 0 notes."""

    entries: list[Entry]
    also: dict[str, str]
    position: Position
    extra: dict[str, Any]
    optimizer: str
    buffers: frozenset[str]


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
        self._lock: folders.Lock | None = None  # rank 0's, from the first save on
        self._thread: threading.Thread | None = None
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def save(
        self,
        model: nn.Module,
        optimizer: ShardedOptimizer,
        position: Position,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Between two steps: copy what this rank holds, and return while it is written.

        Waits for a save that is still under way. ``extra``: what JSON can say; rank 0's is kept. UserError
        when JSON cannot.
        """
        said_extra = _as_json(extra or {})
        self.wait()
        optimizer.engine.synchronize()
        entries = [*parameters(optimizer.engine.units.values(), once=True), *state(optimizer.updates)]
        entries += random_state(self._rank, optimizer.engine.device)
        of_model = buffers(model) if self._rank == 0 else []
        entries += of_model
        staged = [entry.staged() for entry in entries]
        snapshot = _Snapshot(
            *(staged, aliases(model), position, said_extra, optimizer.updates.class_name),
            buffers=frozenset(entry.name for entry in of_model),
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
        self._together(lambda: _check_finite(snapshot))
        self._together(lambda: self._begin(step) if self._rank == 0 else None)
        path = folders.partial_of(self.folder, step)
        writer = Writer(path, snapshot.also)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(
                {},
                storage_writer=writer,
                planner=SavingPlanner(snapshot.entries),
                process_group=self._group,
                no_dist=self._alone,
            )
        names = [f"__{self._rank}_0.distcp", *([".metadata"] if self._rank == 0 else [])]
        of_ranks = self._together(lambda: [_stored(path, name) for name in names])
        files = tuple(file for of_rank in of_ranks for file in of_rank if file is not None)
        self._together(lambda: self._end(writer, files, snapshot) if self._rank == 0 else None)

    def _end(self, writer: Writer, files: tuple[StoredFile, ...], snapshot: _Snapshot) -> None:
        """On rank 0: everything is there; write what says so, and give it its name."""
        assert writer.metadata is not None
        path = folders.partial_of(self.folder, snapshot.position.step)
        for file in files:
            if not (path / file.name).exists():
                raise UserError(
                    f"{self.folder}: rank 0 does not see {file.name} there; all ranks must share it"
                )
        Checkpoint(
            step=snapshot.position.step,
            samples=snapshot.position.samples,
            world=self._world,
            model=self.model_name,
            optimizer=snapshot.optimizer,
            torch=torch.__version__,
            extra=snapshot.extra,
            files=files,
            tensors=tensors_of(writer.metadata, files),
        ).save(path)
        folders.publish(self.folder, snapshot.position.step)
        step = snapshot.position.step
        self.known = [*(known for known in self.known if known != step), step]
        folders.prune(self.folder, self.keep, self.known, spared=step)

    def _begin(self, step: int) -> None:
        """On rank 0: an empty folder to write to, which nobody else does."""
        if self._lock is None:
            self._lock = folders.Lock(self.folder)
        folders.begin(self.folder, step)

    def _together(self, work: Any) -> list[Any]:
        """What ``work`` gives on every rank; UserError on all of them where it fails on one."""
        try:
            mine: tuple[Any, str | None] = (work(), None)
        except Exception as error:
            mine = (None, said(error))
        everyone = self.gather(mine)
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


SAVES = 4
"""How many times as long as for a collective ranks wait for each other's disks."""


def _patience() -> timedelta | None:
    """From the job's own; None: torch's default."""
    given = job_timeout()
    return None if given is None else SAVES * given


def _as_json(extra: Mapping[str, Any]) -> dict[str, Any]:
    """A copy as it will be loaded; UserError for what JSON does not have."""
    try:
        copied: dict[str, Any] = json.loads(json.dumps(dict(extra), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UserError(f"extra: JSON cannot say it ({one_line(error)})") from None
    if copied != dict(extra):
        raise UserError("extra: JSON would change it (a tuple to a list, a number that is a key to a text)")
    return copied


def _check_finite(snapshot: _Snapshot) -> None:
    """UserError for values that no training goes on from. Buffers may hold any: masks are of infinities."""
    for entry in snapshot.entries:
        checked = entry.values.dtype in FINITE and entry.name not in snapshot.buffers
        if checked and not bool(entry.values.isfinite().all()):
            raise UserError(f"{entry.name} is not finite")


FINITE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _stored(folder: Path, name: str) -> StoredFile | None:
    """A file's size and checksum; None where this rank had nothing to write."""
    path = folder / name
    if not path.exists():
        return None
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return StoredFile(name=name, nbytes=path.stat().st_size, sha256=digest)


def said(error: BaseException) -> str:
    """The reason of a failed save, without torch's account of every rank."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (first, _) = min(failures.items())
        return f"rank {rank}: {said(first)}"
    cause = last_cause(error)
    if isinstance(cause, OSError) and cause.strerror:
        return f"{cause.filename or 'checkpoint'}: {cause.strerror}"
    if "inline_container" in str(cause):  # torch's writer of zip files hides what the system said
        return "a file could not be written whole: No space left on device, or it fails"
    return str(cause) if isinstance(cause, UserError) else one_line(cause)
