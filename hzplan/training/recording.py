"""What every rank's streams did in the last steps of a run."""

from __future__ import annotations

import time
from collections import deque

import torch.distributed as dist

from hzplan.runtime.engine import Engine
from hzplan.runtime.executor import StepRecord
from hzplan.show.trace import WAITS, Span, span_of

LEAD = 4
"""Steps between asking for times and the first record that has them, and one more."""


class Recording:
    """The records of the last ``steps`` steps of one rank's engine."""

    def __init__(self, engine: Engine, steps: int) -> None:
        self._engine = engine
        self._records: deque[StepRecord] = deque(maxlen=steps)

    def note(self) -> None:
        """A step was launched; what is still under way is added to its record when it ends."""
        if self._engine.executor.record.timed:
            self._records.append(self._engine.executor.record)

    def begin(self, left: int) -> None:
        """So many steps are left, before the next one: of the last ones every one is timed."""
        if self._records.maxlen and left <= self._records.maxlen + LEAD:
            self._engine.executor.time_every_step()
            self._engine.follow_every_use()

    def gather(self) -> dict[str, list[Span]]:
        """Every rank's spans, by "rank r"; on all ranks, which call it together, after everything is done.

        Clocks of nodes differ: each rank's zero is the end of a barrier, so ranks are aligned to about a
        message's latency. The first event of all is then put at 0.
        """
        self._engine.executor.synchronize()
        world = self._engine.mesh.world
        if world > 1:
            dist.barrier()
        zero = time.perf_counter()
        spans = [self._moved(span, -zero) for span in self._all_spans()]
        everyone: list[list[Span]] = [spans]
        if world > 1:
            everyone = [[] for _ in range(world)]
            dist.all_gather_object(everyone, spans)
        first = min((span.start_s for of_rank in everyone for span in of_rank), default=0.0)
        return {
            f"rank {rank}": [self._moved(span, -first) for span in of_rank]
            for rank, of_rank in enumerate(everyone)
        }

    def spans(self) -> list[Span]:
        """This rank's, after everything is done; the first event is at 0."""
        self._engine.executor.synchronize()
        spans = self._all_spans()
        first = min((span.start_s for span in spans), default=0.0)
        return [self._moved(span, -first) for span in spans]

    def _all_spans(self) -> list[Span]:
        return [span for record in self._records for span in self._spans(record)]

    @staticmethod
    def _moved(span: Span, seconds: float) -> Span:
        return Span(span.stream, span.name, span.start_s + seconds, span.end_s + seconds, span.nbytes)

    def _spans(self, record: StepRecord) -> list[Span]:
        engine = self._engine
        done = [
            span_of(task, record.start_s[task.index], record.end_s[task.index], engine.tasks.nbytes(task))
            for task in engine.schedule.tasks
            if task.index in record.start_s and task.index in record.end_s
        ]
        return done + [Span(WAITS, cause, start, end) for start, end, cause in record.waits]
