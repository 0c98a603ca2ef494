"""Timelines as trace files."""

from __future__ import annotations

import json

from hzplan.cost.simulate import replay
from hzplan.show.trace import WAITS, Span, document, predicted
from tests.unit.steps import chain


def test_a_trace_has_a_process_per_name_and_a_row_per_stream() -> None:
    spans = [
        Span("reduce.0", "final-reduce.0@3 u0", 0.5, 0.75, 4096),
        Span(WAITS, "tier 0", 0.25, 0.5),
        Span("compute", "compute@0 u0", 0.0, 0.25),
    ]
    events = json.loads(document({"rank 0": spans, "rank 1": spans[:1]}))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(0, 0): "compute", (0, 1): WAITS, (0, 2): "reduce.0", (1, 0): "reduce.0"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "rank 1"]
    (first, *_) = [e for e in events if e["ph"] == "X"]
    assert (first["ts"], first["dur"], first["args"]) == (500000.0, 250000.0, {"bytes": 4096})


def test_what_was_predicted_has_the_names_of_what_is_measured() -> None:
    schedule = chain(2, tiers=2).build()
    timeline = replay(schedule, [10 if task.tier != 1 else 0 for task in schedule.tasks])
    spans = predicted(schedule, timeline)
    names = {str(task) for task in schedule.tasks}
    assert spans and {span.name for span in spans} <= names
    assert all(span.end_s - span.start_s == 1e-8 or span.end_s > span.start_s for span in spans)
    assert not any(span.stream.endswith(".1") for span in spans), "what takes no time is left out"
