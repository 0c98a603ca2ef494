"""Optimizer state in the host's memory: what it costs, when it is chosen, and where it lies."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from hzplan.core.buffers import assign_slots
from hzplan.core.schedule import OFFLOAD_SLOTS
from hzplan.cost.memory import memory
from hzplan.cost.model import CostModel, tensors_of
from hzplan.cost.unit import UnitCost
from hzplan.errors import UserError
from hzplan.formats.profile import Profile
from hzplan.profiler.network.host import measure_host
from hzplan.profiler.session.ranks import Ranks
from hzplan.runtime.offload import state_keys
from hzplan.runtime.updates import ELEMENTWISE
from hzplan.solver.conflict import moved_to_host
from hzplan.solver.evaluate import Modes, evaluate, unit_costs
from hzplan.solver.explain import alternatives
from hzplan.solver.solve import Infeasible, Request, Solved, solve
from tests.instances import random_profile


def with_host(seed: int, dtype: str = "bfloat16") -> Profile:
    """A random profile that knows a link to the host's memory."""
    while (profile := random_profile(random.Random(seed), micro_batches=(1,), dtype=dtype)).host is None:
        seed += 1000
    return profile


@pytest.mark.parametrize("seed", range(8))
def test_what_moves_leaves_the_device_but_for_its_slots(seed: int) -> None:
    profile = with_host(seed)
    model = CostModel(profile)
    tensors = tensors_of(profile)
    triples = model.mesh.triples()
    rng = random.Random(seed)
    levels = {unit: tuple(rng.choice(triples) for _ in of) for unit, of in tensors.items() if of}
    schedule = model.schedule(prefetch=1, accumulation=1, clip=True, offload=True)
    slots = assign_slots(schedule, tensors)
    here = unit_costs(model, levels)
    everywhere = unit_costs(model, levels, Modes(offload=frozenset(tensors)))
    moved = {unit: cost.master_bytes + cost.optim_bytes for unit, cost in here.items()}
    before, after = memory(here, slots, schedule, 0), memory(everywhere, slots, schedule, 0)
    assert after.host == sum(moved.values()) and before.host == 0
    assert after.master == 0 and set(schedule.offload_slots.values()) <= set(range(OFFLOAD_SLOTS))
    assert after.optimizer == sum(
        max((moved[unit] for unit, at in schedule.offload_slots.items() if at == slot), default=0)
        for slot in range(OFFLOAD_SLOTS)
    )
    for unit, cost in everywhere.items():
        assert (cost.master_bytes, cost.optim_bytes, cost.host_bytes) == (0, 0, moved[unit])
        assert replace(cost, copy_ns=0).update_ns == here[unit].update_ns


@pytest.mark.parametrize("seed", range(8))
def test_more_of_the_hosts_memory_is_never_slower_and_lets_more_fit(seed: int) -> None:
    profile = with_host(seed)
    request = Request(2**40, profile.mesh.world, gap=0.0, depths=(1,), recompute="none")
    loose = solve(profile, request)
    assert isinstance(loose, Solved) and not loose.best.modes.offload  # nobody asked
    nothing = solve(profile, replace(request, memory_bytes=1))
    assert isinstance(nothing, Infeasible)
    least = nothing.smallest.memory.peak
    with_all = moved_to_host(profile, replace(request, memory_bytes=1))
    bounds = []
    for host in (0, 5_000, 50_000, 2**40):
        outcome = solve(profile, replace(request, memory_bytes=least, host_bytes=host))
        assert isinstance(outcome, Solved) and outcome.best.memory.host <= host
        bounds.append(outcome.bound_ns)
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(bounds))
    if with_all is not None:
        assert with_all < least
        tight = solve(profile, replace(request, memory_bytes=with_all, host_bytes=2**40))
        assert isinstance(tight, Solved) and tight.best.modes.offload
        assert tight.best.memory.peak <= with_all


def test_the_link_is_never_carried_more_than_a_period() -> None:
    """Copies alone may decide how long a step takes, however many steps it takes compute to notice."""
    profile = with_host(3)
    slow = {"points": [{"bytes": 1, "seconds": 1.0, "spread": 0.0}]}
    profile = Profile.model_validate(profile.model_dump() | {"host": slow})
    model = CostModel(profile)
    units = [unit for unit, of in tensors_of(profile).items() if any(t.trainable for t in of)]
    levels = {unit: tuple([model.mesh.triples()[0]] * len(of)) for unit, of in tensors_of(profile).items()}
    for clip in (False, True):
        schedule = model.schedule(prefetch=1, accumulation=1, clip=clip, offload=True)
        found = evaluate(model, levels, schedule, 1, modes=Modes(offload=frozenset(units)))
        copied = sum(found.units[unit].copy_ns for unit in schedule.offload_slots)
        assert found.objective_ns >= copied > 0
        assert found.predicted.period_ns >= found.objective_ns * (1 - 1e-9)


def test_a_unit_may_lie_elsewhere_or_be_recomputed() -> None:
    profile = with_host(5)
    outcome = solve(profile, Request(2**40, profile.mesh.world, host_bytes=2**40, gap=0.0))
    assert isinstance(outcome, Solved)
    unit = next(unit.name for unit in profile.units if any(t.trainable for t in unit.tensors))
    others = alternatives(outcome.best, unit, 2**40, 2**40)
    said = {other.what for other in others if other.levels is None}
    assert said & {"offloaded", "state on the device"}
    refused = alternatives(outcome.best, unit, 2**40, 0)
    assert all(not other.fits for other in refused if other.what == "offloaded")


def test_without_a_link_nothing_is_moved() -> None:
    profile = with_host(1).model_copy(update={"host": None})
    with pytest.raises(UserError, match="--host-memory: the profile knows no link"):
        solve(profile, Request(2**30, profile.mesh.world, host_bytes=1))
    assert moved_to_host(profile, Request(1, profile.mesh.world)) is None


def test_a_unit_without_state_stays() -> None:
    profile = with_host(2, dtype="float32")
    optimizer = profile.optimizer.model_copy(update={"state_per_element": 0})
    model = CostModel(profile.model_copy(update={"optimizer": optimizer}))
    levels = {unit: tuple([model.mesh.triples()[0]] * len(of)) for unit, of in tensors_of(profile).items()}
    schedule = model.schedule(prefetch=1, accumulation=1, clip=True, offload=True)
    found = evaluate(model, levels, schedule, 1, modes=Modes(offload=frozenset(levels)))
    assert found.modes.offload == frozenset() and found.memory.host == 0
    assert all(isinstance(cost, UnitCost) and cost.copy_ns == 0 for cost in found.units.values())


def test_every_optimizer_says_what_it_keeps() -> None:
    kept = {}
    for name in ELEMENTWISE:
        arguments = {"lr": 0.1} | ({"momentum": 0.9} if name == "SGD" else {})
        made = getattr(torch.optim, name)
        keys = state_keys(
            lambda params, m=made, a=arguments: m(params, **a), torch.float32, torch.device("cpu")
        )
        assert all(dtype is torch.float32 for dtype in keys.values())
        kept[name] = set(keys)
    assert kept["AdamW"] == {"exp_avg", "exp_avg_sq"} and kept["SGD"] == {"momentum_buffer"}
    assert kept["Adagrad"] == {"sum"} and "step" not in kept["NAdam"]


def test_the_link_is_measured() -> None:
    found = measure_host(Ranks.here(), lambda fraction: None, largest_bytes=1 << 20)
    sizes = [point.bytes for point in found.points]
    assert sizes == sorted(sizes) and sizes[0] <= 1 << 16 and sizes[-1] >= 1 << 20
    seconds = [point.seconds for point in found.points]
    assert seconds == sorted(seconds) and seconds[0] > 0
