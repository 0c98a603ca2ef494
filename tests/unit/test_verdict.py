"""What the benchmark says of figures: classes, bars, the share of the way to the bound."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.measure import near, settings_of
from benchmarks.report import markdown
from benchmarks.verdict import judge

BUDGET = 1 << 20
ROUNDS = (1.00, 1.01, 0.99, 1.02, 0.98, 1.00)


def entry(name: str, step_s: float, *, fits: bool = True, agree: bool = True) -> dict[str, Any]:
    rounds = [step_s * noise for noise in ROUNDS]
    return {
        "name": name,
        "step_s": {"median": step_s, "min": min(rounds), "max": max(rounds)},
        "ratio": {"value": step_s, "low": step_s, "high": step_s},
        "peak_memory_bytes": BUDGET if fits else 2 * BUDGET,
        "losses_agree": agree,
        "round_s": rounds,
    }


def result(*contenders: dict[str, Any], network_s: float = 0.5, alone_s: float = 0.2) -> dict[str, Any]:
    regime = {
        "model": "deep",
        "tiers": "2x2",
        "network": "100mbit",
        "budget_percent": 70,
        "accumulation": 1,
        "dtype": "fp32",
        "quick": True,
    }
    named = {c["name"] for c in contenders}
    extra = [entry(name, 2.0, fits=False) for name in ("ddp", "ddp again") if name not in named]
    everyone = [entry("hzplan", 1.0), *contenders, *extra, entry("alone", alone_s)]
    return {
        "regime": regime,
        "ablations": False,
        "network_s": network_s,
        "budget_bytes": BUDGET,
        "predicted": {"step_s": 0.9},
        "commit": "abc",
        "comparison": {"contenders": everyone},
    }


def test_the_class_follows_from_who_fits() -> None:
    both = [entry("ddp", 1.5), entry("ddp again", 1.5)]
    found = judge(result(*both, entry("hsdp", 1.6), entry("fsdp2", 3)))
    assert found and (found.group, found.peer, found.bar) == ("DDP fits", "ddp", 0.97)
    found = judge(result(entry("hsdp", 1.6), entry("fsdp2", 3)))
    assert found and (found.group, found.peer, found.bar) == ("parts fit", "hsdp", 1.0)
    found = judge(result(entry("hsdp", 1.6, fits=False), entry("fsdp2", 3)))
    assert found and (found.group, found.peer, found.bar) == ("full shard only", "fsdp2", 1.0)
    looked = {"look": [entry("hsdp", 1.6), entry("zero1", 1.6, fits=False)]}  # too slow to be measured again
    found = judge(result(entry("fsdp2", 3)) | looked)
    assert found and (found.group, found.peer) == ("parts fit", "fsdp2")


def test_what_fits_and_is_near_the_fastest_is_measured_in_three_settings() -> None:
    look = [entry("ddp", 1.0, fits=False), entry("hsdp", 1.2), entry("fsdp2", 1.5), entry("deepspeed3", 1.3)]
    peers = near(look, ("hsdp", "fsdp2", "deepspeed3"), BUDGET)
    assert peers == ["hsdp", "fsdp2", "deepspeed3"]
    assert near([*look, entry("zero1", 1.1)], ("hsdp", "fsdp2", "zero1"), BUDGET) == ["hsdp", "zero1"]
    assert near(look[:1], ("hsdp",), BUDGET) == ["ddp"]
    assert settings_of(["hsdp", "deepspeed3"]) == ["hsdp@1", "hsdp@0", "hsdp@2", "deepspeed3"]


def test_who_trains_something_else_or_does_not_fit_is_no_peer() -> None:
    found = judge(result(entry("hsdp", 1.1, agree=False), entry("zero1", 1.2, fits=False), entry("fsdp2", 3)))
    assert found and found.peer == "fsdp2"
    found = judge(result(entry("fsdp2", 3, fits=False)))
    assert found and found.peer is None and found.passed is None


def test_lost_is_what_lies_wholly_below_the_bar() -> None:
    control = [entry("ddp", 2, fits=False), entry("ddp again", 2, fits=False)]
    slower = judge(result(entry("hsdp", 0.98), *control))
    assert slower and slower.margin == pytest.approx(0, abs=1e-9) and not slower.passed
    noisy = entry("hsdp", 0.98) | {"round_s": [0.9, 1.1, 0.95, 1.05, 0.9, 1.02]}
    unsure = judge(result(noisy, *control))
    assert unsure and unsure.ratio < unsure.bar <= unsure.high and unsure.passed


def test_a_peer_in_another_setting_is_of_its_kind() -> None:
    both = [entry("ddp", 1.5), entry("ddp again", 1.5)]
    found = judge(result(*both, entry("ddp@3", 1.4), entry("fsdp2@0", 3)))
    assert found and (found.group, found.peer) == ("DDP fits", "ddp@3")
    found = judge(result(entry("fsdp2@2", 3)))
    assert found and found.group == "full shard only"


def test_the_share_is_asked_only_where_the_network_binds() -> None:
    bound = judge(result(entry("hsdp", 1.5), network_s=0.5, alone_s=0.2))
    assert bound and bound.network_binds and bound.share == pytest.approx((1.5 - 1.0) / (1.5 - 0.5))
    free = judge(result(entry("hsdp", 1.5), network_s=0.1, alone_s=0.2))
    assert free and not free.network_binds and free.share is None and free.share_passed


def test_tables_have_a_row_per_regime_and_say_what_is_missing() -> None:
    results = {
        "date": "2026-01-01",
        "commit": "abc",
        "command": "python -m benchmarks",
        "machine": {"cpus": 2, "cpu": "c", "torch": "t"},
        "regimes": [result(entry("hsdp", 1.6)), result(entry("fsdp2", 3)) | {"no_plan_in_bytes": 2_000_000}],
        "failed": [{"regime": "r", "why": "w"}],
    }
    text = markdown(results)
    assert "| deep-2x2-100mbit-70%-x1-fp32 | parts fit | 1.000 s | hsdp 1.600 s | 1.60 (1.60–1.60)" in text
    assert "no plan fits 2.0 MB, and the smallest is measured. MB needed: hzplan 1.0, fsdp2 1.0." in text
    assert "| deep-2x2-100mbit-70%-x1-fp32 | no plan fits | 1.000 s | fsdp2 3.000 s" in text
    assert "not measured: r: w" in text


def test_a_plan_that_trains_something_else_or_exceeds_its_budget_never_passes() -> None:
    for wrong in ({"losses_agree": False}, {"peak_memory_bytes": BUDGET + BUDGET // 500}):
        measured = result(entry("hsdp", 3), network_s=0.1)
        measured["comparison"]["contenders"][0] |= wrong
        found = judge(measured)
        assert found and found.peer == "hsdp" and found.passed is False
