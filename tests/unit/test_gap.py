"""The parts of a gap: they add up, and each is of what it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from hzplan.core.schedule import MessageOrder
from hzplan.cost.interference import Interference
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile
from hzplan.solver.evaluate import Evaluation, evaluate, replay
from hzplan.solver.gap import described, parts
from tests.cli.command import ROOT


def golden(name: str) -> tuple[Plan, Evaluation]:
    path = ROOT / "plans" / f"{name}.json"
    plan = Plan.load(path)
    return plan, replay(plan, Profile.load(path.parent / Path(plan.source.profile)), path)


@pytest.mark.parametrize("name", ["gpt-small-2x2-500mbit", "mixtral-8x7b-h100-16"])
def test_parts_add_up_to_the_gap(name: str) -> None:
    plan, one = golden(name)
    found = parts(one, (plan.proof.in_order_bound_s or plan.proof.bound_s) * 1e9)
    assert sum(part.share for part in found) == pytest.approx(plan.proof.gap, abs=1e-5)
    assert described(found).startswith(max(found).cause)


def test_late_ranks_alone_leave_nothing_between_bound_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of a tier one after another: the replay of late ranks is the longest path through them."""
    _, one = golden("gpt-tiny-2x2x2")
    monkeypatch.setitem(one.model.__dict__, "interference", Interference.none(one.schedule.tiers))
    one.model._graphs.clear()
    ordered = one.model.schedule(
        **one.schedule.pace._asdict(),
        accumulation=one.schedule.accumulation,
        clip=one.schedule.clip,
        order=MessageOrder(tuple((unit.name, (1, 1)) for unit in one.model.profile.units), 1),
    )
    fresh = evaluate(one.model, one.levels, ordered, one.micro_batch, modes=one.modes)
    assert fresh.predicted.period_ns > 1.05 * fresh.undisturbed.period_ns  # ranks are late indeed
    assert fresh.predicted.period_ns == pytest.approx(fresh.in_order_ns, rel=1e-6)


def test_without_interference_and_wake_ups_sharing_and_the_search_are_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And in a message order nothing is shared: the replay is the objective."""
    _, one = golden("llama3-70b-h100-16")
    monkeypatch.setitem(one.model.__dict__, "interference", Interference.none(one.schedule.tiers))
    assert one.schedule.shared is not None
    for schedule in (one.schedule, one.schedule.shared):
        fresh = evaluate(one.model, one.levels, schedule, one.micro_batch, modes=one.modes)
        found = parts(fresh, fresh.in_order_ns)
        shares = {part.cause: part.share for part in found}
        sharing = shares.pop("messages that share a link")
        assert (sharing > 0.01) if schedule.order is None else (abs(sharing) < 1e-4)
        assert shares == pytest.approx(dict.fromkeys(shares, 0.0), abs=1e-9)
        assert described(found).count("%") == (schedule.order is None)
