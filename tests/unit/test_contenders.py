"""Who takes part in a comparison on a device of a size."""

from __future__ import annotations

import pytest

import hzplan.peers as peers
from hzplan.cli.against_report import show, summary
from hzplan.formats.plan import Plan
from hzplan.models.workload import load
from hzplan.peers.compare import compare
from hzplan.peers.contender import Contender, Setting
from hzplan.training.batches import SyntheticBatches
from tests.plans import make_plan


def setting_of(plan: Plan) -> Setting:
    workload = load(plan.model.name)
    return Setting(plan, workload, SyntheticBatches(workload, plan.batch.micro_batch, 0), lr=1e-3, seed=0)


def test_replicas_need_room_for_three_of_them() -> None:
    plan = make_plan(mesh="1")
    needed = 3 * 16 * plan.model.parameters + 3 * plan.predicted.peak_memory_bytes
    assert peers.no_room(plan, 2, needed) is None
    assert peers.no_room(plan, 2, None) is None
    assert "the device has" in str(peers.no_room(plan, 2, needed - 1))


def test_without_room_for_replicas_the_plan_is_its_own_control(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "_device_bytes", lambda setting: 1)
    setting = setting_of(make_plan(mesh="1"))
    found = compare(
        peers.makers(setting, {"one-stream": None}), rounds=2, steps_per_round=1, alone=(peers.LOCAL,)
    )
    said = summary(setting, found)
    assert [entry["name"] for entry in said["contenders"]] == ["hzplan", "hzplan again", "one-stream"]
    assert set(said["absent"]) == {"ddp", "ddp again", "alone"}
    assert all(entry["losses_agree"] and entry["exposed_comm_s"] is None for entry in said["contenders"])
    show(setting, found, as_json=False)
    out = " ".join(capsys.readouterr().out.split())
    assert "the plan against itself" in out and "ddp took no part: three replicas" in out


def test_who_fails_takes_no_part_but_for_the_plan() -> None:
    setting = setting_of(make_plan(mesh="1"))
    made = {name: peers.makers(setting, {})[name] for name in (peers.OURS, peers.LOCAL)}

    def fails() -> Contender:
        raise ValueError("no submesh\nof that name")

    found = compare(made | {"theirs": fails}, rounds=1, steps_per_round=1, alone=(peers.LOCAL,))
    assert found.absent == {"theirs": "ValueError: no submesh of that name"} and set(found.entries) == {*made}
    with pytest.raises(ValueError, match="no submesh"):
        compare({peers.OURS: fails}, rounds=1, steps_per_round=1)


def test_without_any_control_the_table_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    setting = setting_of(make_plan(mesh="1"))
    made = peers.makers(setting, {})
    found = compare({peers.OURS: made[peers.OURS]}, rounds=1, steps_per_round=1)
    assert summary(setting, found)["control"] is None
    show(setting, found, as_json=False)
    assert "It has no control" in capsys.readouterr().out
