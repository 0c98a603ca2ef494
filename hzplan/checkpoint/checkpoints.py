"""``hzplan.Checkpoints``: a folder of checkpoints, as a training loop uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hzplan.checkpoint.extra import unpacked
from hzplan.checkpoint.folder import listed, newest_whole, step_of
from hzplan.checkpoint.position import Position
from hzplan.checkpoint.restore import own_at, restore
from hzplan.checkpoint.save import KEEP, Outcome, Saver
from hzplan.core.wire import EXACT
from hzplan.errors import UserError
from hzplan.runtime.optimizer import ShardedOptimizer


@dataclass(frozen=True)
class Loaded:
    """Where training goes on.

    ``extra``: what ``save`` was given; ``own``: likewise, this rank's, None on another number of ranks than
    saved it. ``same_world``: whether random numbers go on where they were; ``passed_over``: newer checkpoints
    that are damaged, in a line each. ``other_wire``: what travelled narrow before, in words, where that is
    not what does now; else empty.
    """

    path: Path
    position: Position
    extra: Mapping[str, Any]
    own: Mapping[str, Any] | None
    same_world: bool
    passed_over: tuple[str, ...]
    other_wire: str = ""


class Checkpoints:
    """Saves a sharded model and its optimizer beside training, and loads them under any plan and world.

    Every rank makes one, and calls its methods in the same order; ``folder`` must be one that all of them
    see. Tensors have the model's own names, shapes and dtypes; ``hzplan.checkpoint.storage.Reader`` reads
    them for torch.distributed.checkpoint::

        checkpoints = hzplan.Checkpoints("checkpoints")
        loaded = checkpoints.load(model, optimizer)
        for step in range(loaded.position.step if loaded else 0, steps):
            ...
            if (step + 1) % 100 == 0:
                checkpoints.save(model, optimizer, step + 1)
        checkpoints.wait()
    """

    def __init__(self, folder: str | Path, *, keep: int = KEEP, model_name: str = "") -> None:
        """``keep``: how many to leave in the folder."""
        self.folder = Path(folder)
        self._saver = Saver(self.folder, keep, model_name=model_name)

    def move_to(self, folder: str | Path) -> None:
        """From now on save to another folder, whose checkpoints are this object's to remove; every rank calls
        it."""
        self.folder = Path(folder)
        self._saver.move_to(self.folder)

    def load(
        self, model: nn.Module, optimizer: ShardedOptimizer, *, step: int | None = None
    ) -> Loaded | None:
        """Go on from the newest whole checkpoint, or from that of a ``step``; None where the folder has none.

        As with torch's optimizers, learning rates and other options of parameter groups are those that were
        saved, where the groups are the same; set others afterwards.

        UserError when all are damaged, or the newest is of another model.
        """
        _check_alone(optimizer)
        saver = self._saver
        world = optimizer.engine.world
        found = newest_whole(self.folder, world.rank, world.size, saver.gather, step=step)
        if found is None:
            return None
        same_world = restore(found, model, optimizer, saver.together)
        steps = [step for step in map(step_of, listed(self.folder)) if step <= found.index.step]
        saver.known = [*steps]
        position = Position(found.index.step, found.index.samples)
        kept: list[Mapping[str, Any] | None] = [None]
        if found.index.world == world.size:
            saver.together(lambda: kept.append(own_at(found.path, found.index, world.rank)))
        before, now = found.index.wire, optimizer.engine.rounding.said
        other = (before or EXACT) if before != now else ""
        extra = unpacked(found.index.extra)
        return Loaded(found.path, position, extra, kept[-1], same_world, found.passed_over, other)

    def save(
        self,
        model: nn.Module,
        optimizer: ShardedOptimizer,
        step: int,
        *,
        samples: int = 0,
        extra: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        """Between two steps, after ``step`` of them: copy what is to be saved, and write it beside training.

        Waits for the save before, if that is still under way. ``samples``: sequences trained on so far;
        ``extra``: numbers, texts, and dicts, lists and tuples of them, a scheduler's state for instance, of
        which the first rank's is kept; ``own``: what each rank keeps for itself, the state of a
        StatefulDataLoader for instance, as numbers, texts, tensors, and dicts and lists of them. A save that
        fails leaves the older checkpoints as they are; ``outcomes`` says so.
        """
        _check_alone(optimizer)
        self._saver.save(model, optimizer, Position(step, samples), extra, own)

    def settle(self) -> None:
        """Return when the last save has ended, well or not: ``outcomes`` says which."""
        self._saver.wait()

    def wait(self) -> None:
        """Return when the last save has ended; UserError when it failed and nobody has asked ``outcomes``."""
        self.settle()
        for outcome in self.outcomes():
            if outcome.problem is not None:
                raise UserError(f"{outcome.path}: not saved: {outcome.problem}")

    def outcomes(self) -> list[Outcome]:
        """What became of the saves that have ended since this was asked last, on this rank."""
        return self._saver.outcomes()


def _check_alone(optimizer: ShardedOptimizer) -> None:
    """UserError beside model parallelism, whose ranks would all write parts of one name."""
    if optimizer.engine.world.is_part:
        raise UserError(
            "hzplan.Checkpoints saves models of data-parallel ranks alone; beside tensor parallelism "
            "save hzplan.full_parameters(optimizer) of each of its ranks"
        )
