"""Saving beside training: what a rank holds is copied between two steps, and written by a thread."""

from __future__ import annotations

import hashlib
import queue
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from hzplan.checkpoint import folder as folders
from hzplan.checkpoint.entries import Entry, aliases, buffers, parameters, random_state, state
from hzplan.checkpoint.planners import Saving
from hzplan.checkpoint.position import Position
from hzplan.checkpoint.storage import Writer, tensors_of
from hzplan.errors import UserError, last_cause, one_line
from hzplan.formats.checkpoint import Checkpoint, StoredFile
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
        self._group = None if self._alone else dist.new_group(backend="gloo")
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

        Waits for a save that is still under way. ``extra``: what JSON can say; rank 0's is kept.
        """
        self.wait()
        optimizer.engine.settle()
        entries = [*parameters(optimizer.engine, once=True), *state(optimizer)]
        entries += random_state(self._rank, optimizer.engine.device)
        entries += buffers(model) if self._rank == 0 else []
        staged = [entry.staged() for entry in entries]
        self._thread = threading.Thread(
            target=self._save,
            args=(staged, aliases(model), position, dict(extra or {})),
            name="hzplan checkpoint",
            daemon=True,
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

    def _save(
        self, entries: list[Entry], also: dict[str, str], position: Position, extra: dict[str, Any]
    ) -> None:
        began, problem = time.perf_counter(), None
        try:
            self._write(entries, also, position, extra)
        except BaseException as error:  # torch's own is no Exception; training must hear of any
            problem = said(error)
            if self._rank == 0:
                folders.discard(self.folder, position.step)
        path = folders.place_of(self.folder, position.step)
        self._outcomes.put(Outcome(position.step, path, time.perf_counter() - began, problem))

    def _write(
        self, entries: list[Entry], also: dict[str, str], position: Position, extra: dict[str, Any]
    ) -> None:
        """All ranks together; an error on one is an error on all."""
        step = position.step
        self._together(lambda: folders.begin(self.folder, step) if self._rank == 0 else None)
        path = folders.partial_of(self.folder, step)
        writer = Writer(path, also)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(
                {},
                storage_writer=writer,
                planner=Saving(entries),
                process_group=self._group,
                no_dist=self._alone,
            )
        names = [f"__{self._rank}_0.distcp", *([".metadata"] if self._rank == 0 else [])]
        of_ranks = self._together(lambda: [_stored(path, name) for name in names])
        files = tuple(file for of_rank in of_ranks for file in of_rank if file is not None)
        self._together(lambda: self._end(writer, files, position, extra) if self._rank == 0 else None)

    def _end(
        self, writer: Writer, files: tuple[StoredFile, ...], position: Position, extra: dict[str, Any]
    ) -> None:
        """On rank 0: everything is there; write what says so, and give it its name."""
        assert writer.metadata is not None
        Checkpoint(
            step=position.step,
            samples=position.samples,
            world=self._world,
            model=self.model_name,
            torch=torch.__version__,
            extra=extra,
            files=files,
            tensors=tensors_of(writer.metadata, files),
        ).save(folders.partial_of(self.folder, position.step))
        folders.publish(self.folder, position.step)
        self.known = [*(known for known in self.known if known != position.step), position.step]
        folders.prune(self.folder, self.keep, self.known)

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
    return str(cause) if isinstance(cause, UserError) else one_line(cause)
