"""The prediction of a row, by the code that ``hzplan profile --analytic`` and ``hzplan solve`` run."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace
from math import exp, log
from pathlib import Path

import torch

from benchmarks.published.parameters import Values, models
from benchmarks.published.settings import Scheme, Setting, workload
from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.layout import ITEM_BYTES
from hzplan.core.recompute import NOTHING, Recomputed
from hzplan.cost.memory import budget_bytes
from hzplan.cost.model import CostModel
from hzplan.cost.parallel import share
from hzplan.profiler.analytic import modelled
from hzplan.profiler.model.kernels import Pricing
from hzplan.profiler.model.selective import Recompute as Again
from hzplan.profiler.model.shapes import Shapes, trace_shapes
from hzplan.solver.evaluate import Evaluation, Modes, evaluate, uniform
from hzplan.solver.schemes import RecomputeOptions


@dataclass
class Traces:
    """Models as they were traced, each once; kept in ``folder`` between runs where one is given."""

    folder: Path | None = None
    _known: dict[tuple[object, ...], Shapes] = field(default_factory=dict)

    def of(self, setting: Setting) -> Shapes:
        """The shapes of a row's model at its micro-batch."""
        key = setting.shape
        if key not in self._known:
            self._known[key] = self._read(key) or self._trace(setting)
        return self._known[key]

    def _path(self, key: tuple[object, ...]) -> Path | None:
        return self.folder / ("-".join(map(str, key)) + ".pickle") if self.folder else None

    def _read(self, key: tuple[object, ...]) -> Shapes | None:
        path = self._path(key)
        return pickle.loads(path.read_bytes()) if path and path.exists() else None

    def _trace(self, setting: Setting) -> Shapes:
        with torch.device("meta"):
            model = workload(setting)
        shapes = trace_shapes(model, torch.bfloat16, [setting.micro_batch], 1)
        if path := self._path(setting.shape):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pickle.dumps(shapes))
        return shapes


@dataclass(frozen=True)
class Prediction:
    """What the model says of a row. ``low``, ``high``: over what the row leaves open."""

    step_s: float
    tokens_per_s: float
    low: float
    high: float
    compute_s: float
    exposed_s: float
    peak_bytes: int
    parameters: int
    fits: bool
    fits_budget: bool


MOST_QUICK = 2
"""Micro-batches of a step that is predicted for derivatives only."""


def predict(options: list[Setting], traces: Traces, values: Values, *, quick: bool = False) -> Prediction:
    """The prediction of a row that may have run in several ways: the geometric middle of those that fit.

    ``quick``: of a step of at most ``MOST_QUICK`` micro-batches.
    """
    if quick:
        options = [replace(one, accumulation=min(one.accumulation, MOST_QUICK)) for one in options[:1]]
    found = [_one(setting, traces.of(setting), values) for setting in options]
    found = [one for one in found if one.fits] or found[:1]
    rates = [one.tokens_per_s for one in found]
    middle = exp((log(min(rates)) + log(max(rates))) / 2)
    first = found[0]
    return replace(
        first, tokens_per_s=middle, step_s=options[0].tokens / middle, low=min(rates), high=max(rates)
    )


def evaluated(setting: Setting, shapes: Shapes, values: Values, *, prefetch: int = 1) -> Evaluation:
    """A row's run, evaluated: its scheme, under one prefetch, as its frameworks do."""
    cluster, device = models(setting, values)
    mesh = Mesh.of_tiers(setting.per_node, setting.nodes)
    over_all = setting.nodes > 1 and not setting.inside and setting.scheme != "ddp"
    again: Again = "full" if setting.recompute == "none" else setting.recompute
    profile = modelled(
        workload(setting),
        shapes,
        cluster,
        Pricing(device, "bfloat16", setting.kernels, setting.attention, again),
        mesh=mesh,
        optimizer="adamw",
        flat=over_all,
    )
    if setting.parallel is not None:
        profile = share(profile, setting.parallel)
        mesh = profile.mesh
    model = CostModel(profile, setting.reduce)
    schedule = model.schedule(prefetch=prefetch, accumulation=setting.accumulation, clip=True)
    offered = RecomputeOptions.of(model)
    units = NOTHING
    if setting.recompute != "none":
        units = Recomputed.of(offered.blocks) if setting.every == 1 else offered.every(setting.every)
    levels = uniform(profile, _levels(setting.scheme, mesh, inside=setting.inside))
    return evaluate(model, levels, schedule, setting.micro_batch, modes=Modes(units))


def step_of(found: Evaluation) -> tuple[float, float]:
    """Seconds of a step, and of waits for communication in it.

    Other frameworks' optimizers run after backward and before the next forward, beside nothing. A pipeline
    that is not interleaved adds its bubble (Narayanan et al. 2021, §2.2).
    """
    waits = found.waits_s
    parallel, accumulation = found.model.profile.parallel, found.schedule.accumulation
    bubble = (parallel.pipeline - 1) / accumulation if parallel is not None else 0.0
    update = sum(unit.update_ns for unit in found.units.values()) / 1e9
    optimizer = waits.get("optim", 0.0)
    step = found.step_s * (1 + bubble) + max(0.0, update - optimizer)
    return step, sum(waits.values()) - optimizer


def _copied_out_s(setting: Setting, found: Evaluation, values: Values) -> float:
    """Seconds of a step in which gathered parameters are read and written once more, beside nothing, in
    forward and in backward (torch's split_with_sizes_copy); 0 where they are used where they arrive."""
    if not setting.copies_out or setting.scheme != "zero3":
        return 0.0
    _, device = models(setting, values)
    profile = found.model.profile
    nbytes = 2 * 2 * profile.model.parameters * ITEM_BYTES[profile.model.dtype]
    rate = device.bytes_per_s.value * device.bytes_share.value
    return setting.accumulation * nbytes / rate


def _one(setting: Setting, shapes: Shapes, values: Values) -> Prediction:
    found = evaluated(setting, shapes, values)
    step, exposed = step_of(found)
    step += _copied_out_s(setting, found, values)
    rate = setting.tokens / step
    gradients = found.memory.gradients // 2 if setting.reduce else 0  # kept in 16 bits, not in 32
    peak = found.memory.peak - gradients
    return Prediction(
        *(step, rate, rate, rate, step - exposed, exposed),
        peak,
        found.model.profile.model.parameters,
        fits=peak <= found.model.profile.cluster.memory_bytes,
        fits_budget=peak <= budget_bytes(found.model.profile.cluster),
    )


def _levels(scheme: Scheme, mesh: Mesh, *, inside: bool) -> Levels:
    finest = mesh.tier_bounds[0][1] if inside else mesh.levels
    return {
        "ddp": Levels(0, 0, 0),
        "zero1": Levels(0, 0, finest),
        "zero2": Levels(0, finest, finest),
        "zero3": Levels(finest, finest, finest),
    }[scheme]
