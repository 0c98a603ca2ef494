"""The benchmark's regimes: what was written down covers what it says."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.regimes import COUNT, DRAWN, FACTORS, draw, draw_more, load, load_drawn, uncovered


def test_every_pair_of_values_occurs() -> None:
    regimes = load()
    assert len(set(regimes)) == COUNT
    assert not uncovered(regimes)
    for regime in regimes:
        assert all(getattr(regime, factor) in values for factor, values in FACTORS.items())


def test_a_missing_pair_is_seen() -> None:
    without = [r for r in load() if (r.model, r.network) != ("deep", "2gbit")]
    assert (("model", "deep"), ("network", "2gbit")) in uncovered(without)


def test_the_file_is_what_was_drawn_before_the_first_measurement() -> None:
    assert [replace(regime, quick=False) for regime in load()] == draw()


def test_meshes_and_rates_are_those_of_the_commands() -> None:
    regime = next(r for r in load() if r.tiers == "2x2x2" and r.network == "100mbit")
    assert regime.rates == "none,400mbit,100mbit"
    assert regime.mesh == "2|2|2"


def test_regimes_that_chance_has_drawn_are_those_written_down() -> None:
    assert list(load_drawn()) == draw_more() and len({*load_drawn()} - {*load()}) == DRAWN
    alone = next(regime for regime in load_drawn() if regime.tiers == "4")
    assert (alone.rates, alone.mesh, alone.world) == ("none", "2,2", 4)
