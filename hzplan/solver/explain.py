"""Why a plan takes as long as it does, and what other choices would cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hzplan.core.hierarchy import Levels
from hzplan.core.schedule import Kind
from hzplan.cost.model import tensors_of
from hzplan.cost.simulate import tier_loads_ns
from hzplan.errors import UserError
from hzplan.show import readable
from hzplan.solver.evaluate import Evaluation, Modes, evaluate
from hzplan.solver.paths import Network
from hzplan.solver.patterns import switch_names

MOST_SIMULATED = 8
"""Alternatives of a unit that are simulated, those of the least objective first."""

DOING: Mapping[Kind, str] = {
    Kind.UNSHARD: "gathering parameters",
    Kind.REDUCE: "reducing gradients",
    Kind.FINAL_REDUCE: "reducing gradients",
    Kind.GRAD_GATHER: "gathering gradients to replicas",
    Kind.PARAM_GATHER: "gathering updated parameters",
    Kind.UPDATE: "optimizer",
    Kind.FETCH: "fetching optimizer state from the host",
    Kind.STORE: "storing optimizer state on the host",
    Kind.COMPUTE: "activation recomputation",
}


@dataclass(frozen=True)
class Part:
    """Seconds of the longest chain that one kind of work takes, and the units that take the most of them."""

    what: str
    seconds: float
    units: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chain:
    """What a step waits for, one after the other: the longest closed walk through the schedule.

    ``binding``: what alone takes longer than the chain, and so decides the objective; else None.
    """

    seconds: float
    parts: tuple[Part, ...]
    binding: Part | None


def longest_chain(found: Evaluation, tier_names: tuple[str, ...]) -> Chain:
    """The chain of a plan's own durations; links are not shared in it."""
    switches = switch_names(found.model)
    names = [*found.units, *switches.values()]
    network = Network(found.model, found.schedule, found.schedule, names, found.micro_batch, switches)
    durations = network.durations(found.units)
    cut = max(network.walks(durations), key=lambda walk: walk.at(durations))
    spent = cut.weights * durations
    unit_of = {name: unit for unit, name in switches.items()}
    names = [unit_of.get(name, name) for name in names]
    sums: dict[str, np.ndarray] = {}
    for column, (kind, tier) in enumerate(network.columns):
        where = f" over {tier_names[tier]}" if tier >= 0 else ""
        what = f"{DOING[kind]}{where}"
        sums[what] = sums.get(what, np.zeros(len(names))) + spent[:, column]
    parts = [Part("compute", cut.constant / 1e3)]
    for what, by_unit in sums.items():
        if by_unit.sum() > 0:
            most = [names[row] for row in np.argsort(-by_unit, kind="stable")[:3] if by_unit[row] > 0]
            parts.append(Part(what, float(by_unit.sum()) / 1e3, tuple(most)))
    parts.sort(key=lambda part: -part.seconds)
    loads = [capacity.at(durations) for capacity in network.capacities]
    labels = [f"all that is sent over {name}" for name in tier_names]
    labels += ["all that is fetched from the host", "all that is stored there"] * bool(
        found.schedule.host_slots
    )
    labels.append("compute, and the speed that communication takes from it")
    longest = int(np.argmax(loads))
    seconds = cut.at(durations)
    binding = Part(labels[longest], loads[longest] / 1e3) if loads[longest] > seconds * (1 + 1e-9) else None
    return Chain(seconds / 1e3, tuple(parts), binding)


@dataclass(frozen=True)
class Alternative:
    """Something else for a unit: another triple for all of its tensors (``levels``), or ``what``: recomputed
    or not, offloaded or not. What the plan would then take."""

    levels: Levels | None
    what: str
    objective_s: float
    step_s: float | None  # None: not simulated, because others are faster
    peak_bytes: int
    fits: bool


def alternatives(found: Evaluation, unit: str, budget_bytes: int, host_bytes: int = 0) -> list[Alternative]:
    """Every triple in the place of a unit's levels, and the other modes that it can have, the fastest that
    fits first.

    UserError when the plan has no such unit.
    """
    tensors = tensors_of(found.model.profile)
    if not tensors.get(unit):
        known = [name for name, of in tensors.items() if of]
        raise UserError(f"--unit {unit}: the plan has no such unit with tensors; one is {known[0]!r}")
    tried: list[tuple[Levels | None, str, Evaluation, bool]] = []

    def attempt(triple: Levels | None, what: str, levels: tuple[Levels, ...], modes: Modes) -> None:
        changed = {**found.levels, unit: levels}
        one = evaluate(found.model, changed, found.schedule, found.micro_batch, found.slots, modes)
        if one.modes != found.modes or levels != found.levels[unit]:
            tried.append((triple, what, one, one.fits(budget_bytes, host_bytes)))

    for triple in found.model.mesh.triples():
        frozen = Levels(triple.param, triple.param, triple.param)
        shards = readable.shards(*(found.model.mesh.shards[level] for level in triple))
        attempt(triple, shards, tuple(triple if t.trainable else frozen for t in tensors[unit]), found.modes)
    again, moved = found.modes
    if unit in found.model.recomputable:
        what = "activations kept" if unit in again else "recomputed"
        attempt(None, what, found.levels[unit], Modes(again ^ {unit}, moved))
    if unit in found.schedule.host_slots and found.model.profile.host is not None:
        what = "state on the device" if unit in moved else "offloaded"
        attempt(None, what, found.levels[unit], Modes(again, moved ^ {unit}))
    tried.sort(key=lambda item: (not item[3], item[2].objective_ns))
    listed = [
        Alternative(
            triple,
            what,
            one.objective_ns / 1e9,
            one.step_s if number < MOST_SIMULATED and fits else None,
            one.memory.peak,
            fits,
        )
        for number, (triple, what, one, fits) in enumerate(tried)
    ]
    return sorted(listed, key=lambda a: (not a.fits, a.step_s is None, a.step_s or 0.0, a.objective_s))


def tier_shares(found: Evaluation) -> list[float]:
    """The share of the predicted step that every tier is at work at least, its link not shared."""
    step = found.predicted.period_ns
    return [load / step if step else 0.0 for load in tier_loads_ns(found.schedule, found.durations_ns)]


def sharing_s(found: Evaluation) -> float:
    """What sharing links and processors, and handing tasks over, add to the objective, in seconds."""
    return (found.predicted.period_ns - found.objective_ns) / 1e9
