"""Explaining a plan: its critical cycle, and the cost of other choices for one unit. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hzplan.core.hierarchy import Levels
from hzplan.core.schedule import Kind
from hzplan.cost.model import REDUCED_TOGETHER, tensors_of
from hzplan.cost.simulate import tier_loads_ns
from hzplan.errors import UserError
from hzplan.show import readable
from hzplan.show.report import PathPart
from hzplan.solver.evaluate import Evaluation, Modes, evaluate
from hzplan.solver.paths import Network
from hzplan.solver.patterns import DurationKey, recompute_names

MOST_SIMULATED = 8
"""Alternatives of a unit that are simulated, those of the least objective first."""

DOING: Mapping[Kind, str] = {
    Kind.UNSHARD: "gathering parameters",
    Kind.REDUCE: "reducing gradients",
    Kind.FINAL_REDUCE: "reducing gradients",
    Kind.GRAD_GATHER: "gathering gradients to replicas",
    Kind.PARAM_GATHER: "gathering updated parameters",
    Kind.UPDATE: "optimizer",
    Kind.ASSEMBLE: "bringing matrices together",
    Kind.ORTHOGONALIZE: "orthogonalising matrices",
    Kind.RETURN: "returning updates of matrices",
    Kind.APPLY: "applying updates of matrices",
    Kind.FETCH: "fetching optimizer state from the host",
    Kind.STORE: "storing optimizer state on the host",
    Kind.SAVE: "saving activations on the host",
    Kind.LOAD: "loading activations from the host",
    Kind.COMPUTE: "activation recomputation",
    Kind.STEP: "summing the gradient norm over ranks",
}


@dataclass(frozen=True)
class Chain:
    """The critical cycle of a step's schedule, by kind of work.

    ``binding``: the load that takes longer than the cycle and so decides the objective; None without one.
    """

    seconds: float
    parts: tuple[PathPart, ...]
    binding: PathPart | None


def longest_chain(found: Evaluation, tier_names: tuple[str, ...]) -> Chain:
    """The critical cycle of a plan's durations, links not shared."""
    binaries = recompute_names(found.model)
    names = [*found.units, *binaries.values()]
    network = Network(found.model, found.schedule, found.schedule, names, found.micro_batch, binaries)
    durations = network.durations(found.units)
    for task in found.schedule.tasks:  # where bounds count the mean of what units pay once, the largest
        if task.kind in REDUCED_TOGETHER and len(task.units) > 1:
            rows = [network.rows[unit] for unit in task.units]
            column = network.columns[DurationKey(task.kind, task.tier, once=True)]
            if (paid := durations[rows, column]).any():
                durations[rows, column] = paid * (paid.max() / paid.mean())
    lengths = network.lengths(durations)
    cycle = max(network.graph.cycles(lengths), key=lambda one: one.at(lengths))
    spent = network.row(cycle).weights * durations
    spent[:, [key.sends for key in network.columns]] = 0.0  # of how late ranks are, which goes to compute
    unit_of = {name: unit for unit, name in binaries.items()}
    names = [unit_of.get(name, name) for name in names]
    sums: dict[str, np.ndarray] = {}
    for column, key in enumerate(network.columns):
        where = f" over {tier_names[key.tier]}" if key.tier >= 0 else ""
        what = f"{DOING[key.kind]}{where}"
        sums[what] = sums.get(what, np.zeros(len(names))) + spent[:, column]
    parts = [PathPart("compute", (cycle.at(lengths) - float(spent.sum())) / 1e3)]
    for what, by_unit in sums.items():
        if by_unit.sum() > 0:
            most = [names[row] for row in np.argsort(-by_unit, kind="stable")[:3] if by_unit[row] > 0]
            parts.append(PathPart(what, float(by_unit.sum()) / 1e3, tuple(most)))
    parts.sort(key=lambda part: -part.seconds)
    loads = [capacity.at(durations) for capacity in network.capacities]
    labels = [f"all that is sent over {name}" for name in tier_names]
    labels += ["all that is fetched from the host", "all that is stored there"] * bool(
        found.schedule.offload_slots
    )
    labels += ["compute and communication, as they slow each other"] * len(network.energies)
    labels += ["the processors that ranks share"] * len(network.processors)
    longest = int(np.argmax(loads))
    seconds = cycle.at(lengths)
    binding = (
        PathPart(labels[longest], loads[longest] / 1e3) if loads[longest] > seconds * (1 + 1e-9) else None
    )
    return Chain(seconds / 1e3, tuple(parts), binding)


@dataclass(frozen=True)
class Alternative:
    """The plan's cost with one other choice for a unit: another triple for all of its tensors (``levels``),
    or another mode (``levels`` None); ``what`` says it in words."""

    levels: Levels | None
    what: str
    objective_s: float
    step_s: float | None  # None: not simulated, because the objectives of others are less
    peak_bytes: int
    fits: bool


def alternatives(found: Evaluation, unit: str, budget_bytes: int, host_bytes: int = 0) -> list[Alternative]:
    """Every other triple and mode for a unit, the fastest that fits first; UserError without such a unit."""
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

    for triple in found.model.triples:
        what = " ".join(filter(None, (readable.shards(*triple.shards(found.model.mesh)), triple.matrix)))
        of = tuple(triple.of(trainable=t.trainable, matrix=t.matrix) for t in tensors[unit])
        attempt(triple, what, of, found.modes)
    recompute, offload = found.modes
    for way in (None, *found.model.ways.get(unit, ())):
        attempt(None, readable.way(way), found.levels[unit], Modes(recompute.with_([unit], way), offload))
    if unit in found.schedule.offload_slots and found.model.profile.host is not None:
        what = "state on the device" if unit in offload else "offloaded"
        attempt(None, what, found.levels[unit], Modes(recompute, offload ^ {unit}))
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
    """For every tier the share of the predicted step that its messages take, its link not shared."""
    step = found.predicted.period_ns
    return [load / step if step else 0.0 for load in tier_loads_ns(found.schedule, found.durations_ns)]


def sharing_s(found: Evaluation) -> float:
    """Seconds that sharing links and processors, and wake-up latency, add to the objective in the plan's
    order."""
    return (found.predicted.period_ns - found.in_order_ns) / 1e9
