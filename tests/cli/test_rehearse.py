"""``hzplan rehearse``: memory is what it will be, time no shorter than links allow, bad input named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hzplan.cost.simulate import tier_loads_ns
from hzplan.formats.plan import Plan
from hzplan.formats.source import profile_of
from hzplan.solver.evaluate import replay
from tests.cli.command import ROOT, hzplan

TINY = ROOT / "plans" / "gpt-tiny-2x2x2.json"


def test_a_rank_of_eight_alone(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    done = hzplan("rehearse", TINY, "--rank", "5", "--steps", "3", "--trace", trace, "--json", cwd=ROOT)
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout)
    plan = Plan.load(TINY)
    assert (found["rank"], found["world"]) == (5, plan.mesh.world)
    memory = found["peak_memory_bytes"]
    assert memory["predicted"] == plan.predicted.peak_memory_bytes
    assert memory["rehearsed"] == pytest.approx(memory["predicted"], rel=0.02)
    evaluated = replay(plan, profile_of(TINY, plan), TINY)
    loads = tier_loads_ns(evaluated.schedule, evaluated.durations_ns)
    assert found["step_s"]["rehearsed"] > max(loads) / 1e9 * 0.95
    assert len(found["step_s"]["rounds"]) == 3
    assert found["step_s"]["predicted_on_the_cluster"] == pytest.approx(plan.predicted.step_s, rel=1e-6)
    events = json.loads(trace.read_text())["traceEvents"]
    shown = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert shown == ["predicted", "rank 5, rehearsed"]
    streams = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert any(stream.startswith(("reduce.", "link.")) for stream in streams)


def test_people_get_a_table() -> None:
    done = hzplan("rehearse", TINY, "--steps", "1", cwd=ROOT)
    assert done.code == 0, done.stderr
    assert "Rank 0 of 8 alone, steps timed: 1" in done.stdout and "memory at the peak" in done.stdout
    table = done.stdout.partition("Next:")[0]
    assert all(len(line) <= 80 for line in table.splitlines())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--rank", "8"], "--rank 8: the plan's ranks are 0 to 7"),
        (["--steps", "0"], "--steps 0: rehearse at least 1"),
        (["gpt:nano"], "the plan is for another model"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], why: str) -> None:
    done = hzplan("rehearse", TINY, *arguments, cwd=ROOT)
    assert done.code == 2 and why in done.stderr and len(done.stderr.strip().splitlines()) <= 2
