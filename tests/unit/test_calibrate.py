"""A run that another profile predicts exactly: calibration must lead there."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from hzplan.errors import UserError
from hzplan.formats.metrics import Measured, read_metrics
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile
from hzplan.solver.calibrate import NOISE, Factors, calibrate
from hzplan.solver.emit import emit
from hzplan.solver.evaluate import replay
from hzplan.solver.solve import Request, Solved, solve
from tests.instances import random_profile

PATH = Path("plan.json")


def planned() -> tuple[Profile, Plan]:
    """A profile and a plan for it."""
    profile = random_profile(random.Random(3), micro_batches=(1,))
    request = Request(2**30, profile.mesh.world)
    solved = solve(profile, request)
    assert isinstance(solved, Solved)
    plan = emit(profile, request, solved, profile_path=Path("p.json"), plan_path=PATH)
    return profile, plan


@pytest.mark.parametrize("seed", range(12))
def test_predicts_what_was_measured(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, micro_batches=(1,))
    request = Request(2**30, profile.mesh.world * 2, depths=(1, 2))
    solved = solve(profile, request)
    assert isinstance(solved, Solved)
    plan = emit(profile, request, solved, profile_path=Path("p.json"), plan_path=PATH)
    hidden = Factors(
        rng.uniform(0.7, 1.6), tuple(rng.uniform(0.7, 2.0) for _ in profile.mesh.tiers), rng.uniform(0.7, 1.5)
    )
    truth = replay(plan, hidden.on(profile), PATH)
    measured = Measured(10, truth.step_s, truth.waits_s)
    found = calibrate(plan, profile, PATH, measured)
    before = abs(found.before.step_s / truth.step_s - 1)
    after = abs(found.after.step_s / truth.step_s - 1)
    assert after <= max(0.025, before / 4)
    apart = [
        [abs(waited - measured.exposed_s[name]) for name, waited in one.waits_s.items()]
        for one in (found.before, found.after)
    ]
    assert max(apart[1]) <= 2 * NOISE * truth.step_s
    assert sum(apart[1]) <= sum(apart[0]) + 0.01 * truth.step_s
    assert found.profile.calibrated is not None and found.profile.calibrated.steps == 10
    assert found.profile.units == profile.units


def test_nothing_changes_when_nothing_is_wrong() -> None:
    profile, plan = planned()
    same = replay(plan, profile, PATH)
    found = calibrate(plan, profile, PATH, Measured(5, same.step_s, same.waits_s))
    assert found.after.step_s == pytest.approx(same.step_s, rel=2e-3)
    assert found.factors.compute == pytest.approx(1.0, rel=2e-2)


def test_a_tier_that_hardly_matters_is_not_moved_far() -> None:
    """One odd wait is no reason to think a link four times as slow; a slow link is."""
    profile, plan = planned()
    same = replay(plan, profile, PATH)
    waits, step_s = same.waits_s, same.step_s
    name = max(profile.cluster.tier_names, key=lambda name: waits[name])
    odd = {**waits, name: waits[name] + 0.03 * step_s}
    factors = calibrate(plan, profile, PATH, Measured(5, step_s, odd)).factors
    assert all(0.8 < factor < 1.25 for factor in factors.tiers)
    slow = replay(plan, Factors(1.0, (3.0,) * len(factors.tiers), 1.0).on(profile), PATH)
    measured = Measured(5, slow.step_s, slow.waits_s)
    assert max(calibrate(plan, profile, PATH, measured).factors.tiers) > 2


def _line(step: int, **changed: object) -> str:
    fields = {
        "step": step,
        "loss": 1.0,
        "step_s": 0.1 + step,
        "exposed_comm_s": {"node": 0.01},
        "tokens": 5,
        "peak_memory_bytes": 7,
        "skipped": "",
    }
    return json.dumps(fields | changed)


def test_metrics_are_medians_of_the_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join([*map(_line, range(6)), _line(6, skipped="unit x", step_s=99.0)]) + "\n")
    found = read_metrics(path)
    assert (found.steps, found.step_s, found.exposed_s) == (3, 4.1, {"node": 0.01})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no step after the first 3"),
        (_line(1), "no step after the first 3"),
        ("{", "line 1: not JSON"),
        (_line(4) + "\n" + _line(5, step_s=-1), "line 2: field step_s"),
        (_line(4, loss="x"), "line 1: field loss"),
        (_line(4, more=1), "line 1: field more"),
        ("\x00", "line 1: not JSON"),
    ],
)
def test_other_files_are_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        read_metrics(path)
    assert str(path) in str(caught.value)
