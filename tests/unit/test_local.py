"""Local search: no worse than its start, within the budget, and at its end no neighbour is better."""

from __future__ import annotations

import random

import pytest

from hzplan.core.hierarchy import Levels
from hzplan.cost.model import CostModel, tensors_of
from hzplan.solver.evaluate import Evaluation, Modes, evaluate, uniform
from hzplan.solver.local import LEAST_GAIN, Choosable, LevelsByUnit, Surroundings, improve
from tests.instances import random_profile


@pytest.mark.parametrize("seed", range(20))
def test_ends_where_no_tensor_alone_does_better(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hzplan.solver.local.MOST_EVENTS", 10**9)
    profile = random_profile(random.Random(seed), micro_batches=(1,))
    model = CostModel(profile)
    schedules = [model.schedule(prefetch=depth, accumulation=2, clip=True) for depth in (1, 2)]
    replays = [
        lambda levels, modes, s=schedule: evaluate(model, levels, s, 1, modes=modes) for schedule in schedules
    ]
    start = replays[0](uniform(profile, Levels(*[profile.mesh.levels] * 3)), Modes())
    budget = int(start.memory.peak * 1.3)

    def fits(one: Evaluation) -> bool:
        return one.memory.peak <= budget

    tensors = {unit: specs for unit, specs in tensors_of(profile).items() if specs}
    known = {unit: [start.levels[unit]] for unit in tensors}
    recomputable = [Choosable((unit,), (None, *ways)) for unit, ways in model.ways.items()]
    around = Surroundings([[unit] for unit in tensors], tensors, known, model.mesh.triples(), recomputable)
    found = improve(start, replays, around, fits)
    assert fits(found)
    assert found.predicted.period_ns <= start.predicted.period_ns
    assert found.schedule in schedules
    for unit, specs in tensors.items():
        for index in range(len(specs)):
            for triple in model.mesh.triples():
                levels = list(found.levels[unit])
                levels[index] = triple if specs[index].trainable else Levels(*[triple.param] * 3)
                other: LevelsByUnit = {**found.levels, unit: tuple(levels)}
                candidate = evaluate(model, other, found.schedule, 1, modes=found.modes)
                assert (
                    not fits(candidate)
                    or len(set(levels)) > 3
                    or (candidate.predicted.period_ns >= found.predicted.period_ns * (1 - LEAST_GAIN))
                )

    for unit, way in [(unit, way) for unit, ways in model.ways.items() for way in (None, *ways)]:
        again = found.modes._replace(recompute=found.modes.recompute.with_([unit], way))
        candidate = evaluate(model, found.levels, found.schedule, 1, modes=again)
        assert not fits(candidate) or (
            candidate.predicted.period_ns >= found.predicted.period_ns * (1 - LEAST_GAIN)
        )


def test_is_over_when_enough_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hzplan.solver.local.MOST_EVENTS", 0)
    profile = random_profile(random.Random(1), micro_batches=(1,))
    model = CostModel(profile)
    schedule = model.schedule(prefetch=1, accumulation=1, clip=True)
    start = evaluate(model, uniform(profile, Levels(0, 0, 0)), schedule, 1)
    tried = []

    def replay(levels: LevelsByUnit, modes: Modes) -> Evaluation:
        tried.append(levels)
        return evaluate(model, levels, schedule, 1)

    units = [[unit] for unit, specs in tensors_of(profile).items() if specs]
    around = Surroundings(units, tensors_of(profile), {unit: [] for [unit] in units}, model.mesh.triples())
    improve(start, [replay], around, lambda one: True)
    assert len(tried) <= 1
