"""Timelines in the Chrome trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process of the trace is a rank, or the simulator; a thread is a stream. What was measured and what was
predicted have one form, so that the two can be opened one above the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hzplan.core.schedule import COMPUTE_STREAM, OPTIM_STREAM, Schedule, Task
from hzplan.cost.simulate import Timeline

WAITS = "waiting"
"""Name of the row below ``compute`` with the waits of compute."""


@dataclass(frozen=True)
class Span:
    """A task on a stream, in seconds since the beginning of the trace."""

    stream: str
    name: str
    start_s: float
    end_s: float
    nbytes: int = 0


def document(processes: Mapping[str, Iterable[Span]]) -> str:
    """A trace file's text. ``processes``: spans by the name of who did them, in the order to be shown."""
    events: list[dict[str, object]] = []
    for pid, (name, spans) in enumerate(processes.items()):
        listed = list(spans)
        rows = sorted({span.stream for span in listed}, key=_row)
        events.append(_named("process_name", pid, 0, name))
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        )
        for tid, row in enumerate(rows):
            events.append(_named("thread_name", pid, tid, row))
        events += [
            {
                "ph": "X",
                "name": span.name,
                "pid": pid,
                "tid": rows.index(span.stream),
                "ts": round(span.start_s * 1e6, 3),
                "dur": round((span.end_s - span.start_s) * 1e6, 3),
                "args": {"bytes": span.nbytes} if span.nbytes else {},
            }
            for span in listed
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)


def predicted(schedule: Schedule, timeline: Timeline) -> list[Span]:
    """The simulator's steady step as spans."""
    return [
        span_of(task, start / 1e9, end / 1e9)
        for task, start, end in zip(schedule.tasks, timeline.start_ns, timeline.end_ns, strict=True)
        if end > start
    ]


def span_of(task: Task, start_s: float, end_s: float, nbytes: int = 0) -> Span:
    """A schedule's task as a span."""
    return Span(task.stream, str(task), start_s, end_s, nbytes)


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _row(stream: str) -> tuple[int, str]:
    """Compute first, then what it waits for, the optimizer, and communication by kind and tier."""
    first = (COMPUTE_STREAM, WAITS, OPTIM_STREAM)
    return (first.index(stream), "") if stream in first else (len(first), stream)
