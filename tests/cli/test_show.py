"""``hzplan show``: why a plan takes as long as it does."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from hzplan.cost.simulate import floor_ns
from hzplan.cost.simulate import replay as longest
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile
from hzplan.solver.evaluate import replay
from hzplan.solver.explain import longest_chain, tier_shares
from tests.cli.command import ROOT, hzplan
from tests.instances import random_profile

TINY = ROOT / "plans" / "gpt-tiny-2x2.json"


@pytest.mark.parametrize("path", sorted((ROOT / "plans").glob("*.json")), ids=lambda path: path.stem)
def test_the_chain_is_the_objective(path: Path) -> None:
    plan = Plan.load(path)
    found = replay(plan, Profile.load(path.parent / plan.source.profile), path)
    chain = longest_chain(found, plan.cluster.tier_names)
    period = longest(found.schedule, found.durations_ns).period_ns / 1e9
    if found.model.event_graph(found.schedule, found.micro_batch).plain:
        assert chain.seconds == pytest.approx(period, rel=1e-6)
    assert chain.seconds >= period * (1 - 1e-6)
    assert sum(part.seconds for part in chain.parts) == pytest.approx(chain.seconds, rel=1e-9)
    known = found.model.interference, found.processor_ns
    floor = floor_ns(found.schedule, found.durations_ns, *known) / 1e9
    if chain.binding is None:
        assert chain.seconds == pytest.approx(found.in_order_ns / 1e9, rel=1e-6)
    else:
        assert chain.binding.seconds == pytest.approx(floor, rel=1e-6) and floor > chain.seconds
    assert all(0 <= share <= 1 + 1e-9 for share in tier_shares(found))


def test_everything_at_once_as_json() -> None:
    unit = "layers.0"
    done = hzplan("show", TINY, "--unit", unit, "--against", "zero3", "--what-if", "--json", cwd=ROOT)
    assert done.code == 0, done.stderr
    answer = json.loads(done.stdout)
    plan = Plan.load(TINY)
    assert answer["step_s"] == pytest.approx(plan.predicted.step_s, rel=1e-6)
    assert set(answer["busy"]) == set(plan.cluster.tier_names)
    assert answer["against"]["step_s"] > 0
    others = answer["alternatives"]
    fitting = [other["step_s"] for other in others if other["fits"] and other["step_s"] is not None]
    assert fitting == sorted(fitting) and fitting
    budget = plan.source.memory_budget_bytes
    assert all(other["fits"] == (other["peak_bytes"] <= budget) for other in others)
    same, more, faster = answer["what_if"]
    assert same["step_s"] == pytest.approx(answer["step_s"], rel=1e-6)
    assert more["step_s"] <= same["step_s"] * 1.01 and faster["step_s"] <= same["step_s"] * 1.01


def test_the_predicted_step_as_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    done = hzplan("show", TINY, "--trace", trace, cwd=ROOT)
    assert done.code == 0, done.stderr
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    end = max(event["ts"] + event["dur"] for event in spans) / 1e6
    assert end >= Plan.load(TINY).predicted.step_s
    before = TINY.read_bytes()
    refused = hzplan("show", TINY, "--trace", TINY, cwd=ROOT)
    assert refused.code == 2 and TINY.read_bytes() == before


def test_shown_in_80_columns(tmp_path: Path) -> None:
    done = hzplan("show", TINY, "--unit", "layers.0", "--against", "ddp", cwd=ROOT)
    assert done.code == 0
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert "waits for, one after the other" in done.stdout and "layers.0 otherwise" in done.stdout
    profile = random_profile(random.Random(4))
    profile.save(tmp_path / "profile.json")
    batch = profile.mesh.world * 2
    assert hzplan("solve", "profile.json", "--global-batch", batch, "-o", "plan.json", cwd=tmp_path).code == 0
    assert hzplan("show", "plan.json", cwd=tmp_path).code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--unit", "nobody"], "--unit nobody: the plan has no such unit with tensors; one is 'embed'"),
        (["--against", "fsdp"], "--against fsdp: choose one of zero3, hpz, hsdp, zero2, zero1, ddp"),
    ],
)
def test_what_is_not_there_is_one_line(options: list[str], said: str) -> None:
    done = hzplan("show", TINY, *options, cwd=ROOT)
    assert done.code == 2 and done.stderr.strip() == f"hzplan: {said}"


def test_the_same_question_at_other_points(tmp_path: Path) -> None:
    figure = tmp_path / "front.svg"
    asked = ("show", TINY, "--sweep", "memory=28MiB,40MiB", "--plot", figure)
    done = hzplan(*asked, "--json", cwd=ROOT)
    assert done.code == 0, done.stderr
    own, tight, loose = json.loads(done.stdout)["sweep"]
    plan = Plan.load(TINY)
    assert own["point"] == "this plan" and own["step_s"] == pytest.approx(plan.predicted.step_s, rel=1e-6)
    assert tight["peak_memory_bytes"] <= 28 * 2**20 and loose["step_s"] <= tight["step_s"] * 1.01
    assert "<svg" in figure.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["front.svg"]  # plans are solve's to write
    alone = hzplan("show", TINY, "--plot", figure, cwd=ROOT)
    assert alone.code == 2 and "--plot draws what --sweep finds" in alone.stderr
    kept = hzplan("show", TINY, "--sweep", "memory=40MiB", "--plot", TINY, cwd=ROOT)
    assert kept.code == 2 and Plan.load(TINY) == plan
