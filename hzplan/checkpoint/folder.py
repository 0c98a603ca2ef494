"""The checkpoints in a folder: which there are, which is the newest whole one, which to keep.

A checkpoint counts from the moment its folder has its own name, which ``publish`` gives it after all files
are written and synced.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hzplan.errors import UserError
from hzplan.formats.base import file_mode
from hzplan.formats.checkpoint import Checkpoint, data_file

NAME = re.compile(r"step-(\d{8,15})")
REPLACED = re.compile(r"\.step-(\d{8,15})\.old")
"""A checkpoint whose name is being given to another one of the same step."""
PARTIAL = re.compile(r"\.step-(\d+)\.(partial|old|pruned)")

Gather = Callable[[Any], list[Any]]
"""What every rank has to say, on every rank, in their order."""


@dataclass(frozen=True)
class Found:
    """A whole checkpoint, and what was passed over for it, in a line each."""

    path: Path
    index: Checkpoint
    passed_over: tuple[str, ...]


def place_of(folder: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` steps lies."""
    return folder / f"step-{step:08d}"


def partial_of(folder: Path, step: int) -> Path:
    """The folder in which the checkpoint of a step is written until it is whole."""
    return folder / f".step-{step:08d}.partial"


def step_of(path: Path) -> int:
    """The step of one of the folders that ``listed`` gives."""
    match = NAME.fullmatch(path.name) or REPLACED.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def listed(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first; none where there is no such folder.

    One that was being replaced when its run was killed, between two renames, is taken under its hidden name;
    the next save gives its own back. Nothing is renamed here: another run may be at work.
    """
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror})") from None
    steps = {int(match[1]): name for name in names if (match := REPLACED.fullmatch(name))}
    steps |= {int(match[1]): name for name in names if (match := NAME.fullmatch(name))}
    return [folder / name for _, name in sorted(steps.items(), reverse=True)]


def newest_whole(
    folder: Path, rank: int, world: int, gather: Gather, *, step: int | None = None
) -> Found | None:
    """The newest checkpoint in which nothing is missing or changed, of those of a ``step`` where one is
    given; None where the folder has none.

    Every rank calls it, and reads its share of the files. UserError when there are some and all are damaged.
    """
    passed_over: list[str] = []
    for path in gather([path for path in listed(folder) if step in (None, step_of(path))])[0]:
        index, problem = _looked_at(path, rank, world)
        problems = [found for found in gather(problem) if found]
        if not problems and index is not None:
            return Found(path, index, tuple(passed_over))
        passed_over.append(problems[0])
    if passed_over:
        more = f" (and {len(passed_over) - 1} older ones are damaged too)" if len(passed_over) > 1 else ""
        raise UserError(
            f"no whole checkpoint: {passed_over[0]}{more}; restore one, or start without --resume"
        )
    return None


def whole_at(path: Path) -> Found:
    """The checkpoint at a place; UserError when there is none or it is damaged."""
    index, problem = _looked_at(path, 0, 1)
    if index is None or problem:
        raise UserError(problem or f"{path}: no checkpoint")
    return Found(path, index, ())


def _looked_at(path: Path, rank: int, world: int) -> tuple[Checkpoint | None, str | None]:
    """A checkpoint's index, and what is wrong with it or with this rank's share of its files."""
    try:
        index = Checkpoint.load(path)
    except UserError as error:
        return None, str(error)
    if NAME.fullmatch(path.name) and index.step != step_of(path):
        return index, f"{path}: field step: {index.step}, which is not the folder's"
    for number in range(rank, len(index.files), world):
        problem = index.files[number].problem(path / data_file(number))
        if problem:
            return index, f"{path}: {problem}"
    return index, None


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write to; what other saves left half-written goes. OSError when there is no room."""
    for entry in [*os.scandir(folder)]:
        if match := PARTIAL.fullmatch(entry.name):
            named = place_of(folder, int(match[1]))
            if match[2] == "old" and not named.exists():  # killed between two renames
                os.replace(entry.path, named)
            else:
                shutil.rmtree(entry.path, ignore_errors=True)
    path = partial_of(folder, step)
    path.mkdir()
    return path


def publish(folder: Path, step: int) -> Path:
    """Give a checkpoint's folder, all of whose files are written, its name; from then on it counts."""
    source, target = partial_of(folder, step), place_of(folder, step)
    before = folder / f".step-{step:08d}.old"
    _sync(source)  # the names of its files, before its own
    if target.exists():  # of an earlier run that went further than the checkpoint it was resumed from
        os.replace(target, before)
    os.replace(source, target)
    _sync(folder)
    shutil.rmtree(before, ignore_errors=True)
    return target


def discard(folder: Path, step: int) -> None:
    """A save has failed: what there is of it takes room that the next one needs."""
    shutil.rmtree(partial_of(folder, step), ignore_errors=True)


def prune(folder: Path, keep: int, steps: Sequence[int], *, spared: int) -> None:
    """Remove all but the newest ``keep`` of the checkpoints after ``steps``: those that this run knows whole.

    ``spared`` stays, whatever its number: it was written last.

    What is removed loses its name first, so that no half of it is taken for a checkpoint.
    """
    for step in sorted(set(steps) - {spared}, reverse=True)[keep - 1 :]:
        hidden = folder / f".step-{step:08d}.pruned"
        try:
            os.replace(place_of(folder, step), hidden)
        except OSError:
            continue
        shutil.rmtree(hidden, ignore_errors=True)


LOCK = ".lock"
"""The file in a folder that is locked by whoever writes there."""


class Lock:
    """A folder that this process alone writes to, until it ends; UserError where another one does."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Of a file: between machines NFS locks no folders.
        self._handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, file_mode())
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another run is saving there; end it, or use another folder") from None
        except OSError:
            return  # a file system without locks

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            os.close(self._handle)


def _sync(folder: Path) -> None:
    """A rename lasts once its folder is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
