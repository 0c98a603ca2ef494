"""The collectives of communication tasks: prepared when a task is run first, then run as often as needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

from torch import Tensor

from hzplan.core.hierarchy import Stage
from hzplan.core.schedule import Kind, Task
from hzplan.core.stages import GROUP_OF
from hzplan.runtime.backends.base import Buffers, Collectives, Groups, Reductions
from hzplan.runtime.backends.packing import Form
from hzplan.runtime.joined import joined
from hzplan.runtime.unit import UnitState


@dataclass(frozen=True)
class _Prepared:
    """A task's collectives: those that begin in one order on every rank, which go first, then reductions one
    after the other, and last the others, together. No bucket has two of them."""

    in_order: list[Collectives]
    reductions: list[Reductions]
    together: list[Collectives]

    def begin(self, tag: int) -> None:
        for one in self.in_order:
            one.begin(tag)

    def end(self, tag: int, *, accumulate: bool) -> None:
        for reductions in self.reductions:
            reductions.run(accumulate=accumulate, tag=tag)
        for one in self.together:
            one.begin(tag)
        for one in (*self.in_order, *self.together):
            one.end()


class Messages:
    """What one rank sends and receives in the tasks of a step. Called on the streams' threads, where autograd
    does not record."""

    def __init__(
        self,
        units: Mapping[str, UnitState],
        groups: Groups,
        scratch: Sequence[Sequence[Tensor]],
        micro_batch: int,
    ) -> None:
        """``scratch``: by tier and number, memory to receive into; ``micro_batch``: uses in one, so that
        tasks at later positions add to what there is."""
        self._units, self._groups, self._scratch = units, groups, scratch
        self._micro_batch = micro_batch
        self._known: dict[tuple[Kind, tuple[str, ...], int, int], _Prepared] = {}

    def forget(self) -> None:
        """Prepare anew from now on, as values travel in other forms; nothing is under way."""
        self._known.clear()

    def begin(self, task: Task, scratch: int) -> Callable[[], None] | None:
        """Begin what is only handed over and has to begin in one order; returns what does the rest of the
        task. None where there is nothing of the kind."""
        if task.kind is not Kind.FINAL_REDUCE or not (prepared := self._prepared(task, scratch)).in_order:
            return None
        return self._begun(prepared, task)

    def run(self, task: Task, scratch: int) -> None:
        """Do a task's work."""
        self._begun(self._prepared(task, scratch), task)()

    def _begun(self, prepared: _Prepared, task: Task) -> Callable[[], None]:
        tag = task.index + 1  # tells messages apart that are under way at once on a stream
        prepared.begin(tag)
        return partial(prepared.end, tag, accumulate=task.position >= self._micro_batch)

    def _prepared(self, task: Task, scratch: int) -> _Prepared:
        key = task.kind, task.units, task.tier, scratch
        if (prepared := self._known.get(key)) is None:
            reduces = task.kind in (Kind.REDUCE, Kind.FINAL_REDUCE)
            prepared = self._known[key] = (
                self._reductions(task, self._scratch[task.tier][scratch]) if reduces else self._gathers(task)
            )
        return prepared

    def _reductions(self, task: Task, received: Tensor) -> _Prepared:
        buckets = [bucket for name in task.units for bucket in self._units[name].buckets]
        listed = [found for bucket in buckets for found in bucket.reductions(task.kind, task.tier)]
        prepared, kind = _Prepared([], [], []), GROUP_OF[task.kind]
        # All-reduces are under way at once, so those of a group and a form are one collective.
        summed: dict[tuple[Stage, Form | None], list[Buffers]] = {}
        for (operation, stage), buffers in listed:
            if operation == "all_reduce":
                summed.setdefault((stage, buffers.narrow), []).append(buffers)
        for (stage, _), each in summed.items():
            group = self._groups[kind, stage]
            sums = group.all_reduce(joined(each, group.place, group.size), received)
            (prepared.in_order if sums.in_order else prepared.together).append(sums)
        scattered = (pair for pair in listed if pair[0].operation != "all_reduce")
        for (_, stage), run in itertools.groupby(scattered, key=itemgetter(0)):
            each = [buffers for _, buffers in run]
            prepared.reductions.append(self._groups[kind, stage].reduce_scatter(each, received))
        return prepared

    def _gathers(self, task: Task) -> _Prepared:
        gathers: dict[Stage, list[Buffers]] = {}
        for bucket in (bucket for name in task.units for bucket in self._units[name].buckets):
            for stage, buffers in bucket.gathers(task.kind, task.tier):
                gathers.setdefault(stage, []).append(buffers)
        kind = GROUP_OF[task.kind]
        return _Prepared([], [], [self._groups[kind, at].all_gather(one) for at, one in gathers.items()])
