"""Small random planning instances, and the answer by trying everything."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hzplan.core.buffers import assign_slots
from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.layout import TensorSpec, bucketise
from hzplan.core.order import in_order, within
from hzplan.core.recompute import HOST, Recomputed
from hzplan.core.schedule import Pace
from hzplan.core.wire import Wire
from hzplan.cost.memory import memory
from hzplan.cost.model import CostModel
from hzplan.cost.simulate import floor_ns, objective_ns, replay, replay_shared
from hzplan.cost.unit import UnitCost
from hzplan.formats.profile import Profile
from hzplan.solver.evaluate import Evaluation
from hzplan.solver.search import cost_model, paces
from hzplan.solver.solve import Request

MESHES = ("2", "2", "3", "4", "2|2", "2,2")


def random_profile(
    rng: random.Random, *, micro_batches: tuple[int, ...] = (1, 2), dtype: str = "float32"
) -> Profile:
    """Two or three units of one or two tensors; tied, frozen and repeated ones among them."""
    mesh = Mesh.parse(rng.choice(MESHES))
    small = len(mesh.triples()) <= 5  # more triples allow fewer tensors, or trying everything takes too long
    tensors_per_unit = [rng.choice([1, 2]), rng.choice([1, 2]), 1][: rng.choice([2, 3])] if small else [1, 1]
    units: list[dict[str, Any]] = []
    for index, count in enumerate(tensors_per_unit):
        tensors = [
            {
                "name": f"u{index}.t{number}",
                "shape": [rng.randint(50, 5000)],
                "dtype": dtype,
                "trainable": rng.random() < 0.9,
            }
            for number in range(count)
        ]
        tied = [f"u{rng.randrange(index)}"] if index and rng.random() < 0.3 else []
        units.append(
            {"name": f"u{index}", "module": "M", "tensors": tensors, "requires": [f"u{index}", *tied]}
        )
    order = [unit["name"] for unit in units]
    if rng.random() < 0.3:
        order.append(rng.choice(order))
    uses = [
        {"unit": name, "phase": phase, "costs": [_use_cost(rng, size) for size in micro_batches]}
        for phase, names in (("forward", order), ("backward", order[::-1]))
        for name in names
    ]
    _add_recomputation(uses)
    _add_late_ranks(uses)
    _add_partial_ways(uses)
    _add_host_way(uses)
    own = random.Random(json.dumps(units))  # what was drawn before this was added stays as it was
    drawn = Profile.model_validate(
        {
            "provenance": {"created": "-", "hzplan": "-", "torch": "-", "python": "-", "cpus": 1},
            "model": {"name": "random", "parameters": 1, "signature": "-", "dtype": dtype, "seq_len": 8},
            "cluster": {
                "mesh": str(mesh),
                "tier_names": [f"tier {tier}" for tier in range(len(mesh.tiers))],
                "backend": "gloo",
                "device": "cpu",
                "memory_bytes": 2**30,
                "peak_flops": 1e9,
                "reduce_scatter_by_exchange": rng.random() < 0.5,
                "norm_seconds": own.choice([None, own.uniform(1, 100) * 1e-6]),
            },
            "optimizer": {
                "name": "adamw",
                "state_per_element": 2,
                "temporary_per_element": rng.choice([0.0, 2.0]),
                "norm": own.choice([None, [{"elements": 10, "seconds": 3e-7, "spread": 0.0}]]),
                "points": [
                    {"elements": 100, "seconds": 1e-6, "spread": 0.0},
                    {"elements": 5000, "seconds": rng.uniform(1, 100) * 1e-6, "spread": 0.0},
                ],
            },
            "units": units,
            "uses": uses,
            "collectives": [
                {"operation": operation, "low": stage.low, "high": stage.high, "points": _points(rng)}
                for stage in mesh.stages()
                for operation in ("all_gather", "reduce_scatter", "all_reduce")
            ]
            + _over_tiers(mesh, random.Random(f"flat {json.dumps(units)}")),
            "interference": [
                {"compute_loss": rng.uniform(0, 0.7), "communication_slowdown": rng.uniform(1, 3)}
                for _ in mesh.tiers
            ]
            * rng.randint(0, 1),
            "host": _host(own),
        }
    )
    return with_processors(drawn, own) if own.random() < 0.5 else drawn


def with_processors(profile: Profile, rng: random.Random) -> Profile:
    """What compute and messages ask of processors that ranks share."""
    content = profile.model_dump(mode="json")
    content["cluster"]["compute_processor_share"] = rng.choice((0.2, 1.0))
    for point in (point for curve in content["collectives"] for point in curve["points"]):
        point["processor_seconds"] = point["seconds"] * rng.choice((0.1, 0.6, 1.2))
    return Profile.model_validate(content)


def with_matrices(profile: Profile, rng: random.Random) -> Profile:
    """A first tensor of one or two units, of those that are trained, as a matrix to Muon."""
    content = profile.model_dump(mode="json")
    able = [unit for unit in content["units"] if unit["tensors"][0]["trainable"]]
    for unit in rng.sample(able, min(len(able), rng.choice((1, 2)))):
        sides = [rng.randint(8, 70), rng.randint(8, 70)]
        unit["tensors"][0] |= {"shape": sides, "matrix": True}
    points = [{"elements": 5000, "seconds": rng.uniform(1, 60) * 1e-6, "spread": 0.0}]
    content["optimizer"]["matrix"] = {
        "state_per_element": 1,
        "begin": points,
        "finish": points,
        "products": [{"rows": 40, "columns": 40, "seconds": rng.choice((1e-6, 5e-5, 5e-4)), "spread": 0.0}],
    }
    return Profile.model_validate(content)


def with_wire(profile: Profile, rng: random.Random) -> tuple[Profile, Wire]:
    """Larger tensors of two dimensions, most of them, and formats at random on each tier."""
    content = profile.model_dump(mode="json")
    for unit in content["units"]:
        for tensor in unit["tensors"]:
            if rng.random() < 0.8:
                tensor["shape"] = [*tensor["shape"], rng.choice((2, 8))]
    points = [
        {"elements": size, "pack_seconds": size * rng.choice((1e-11, 1e-9)), "unpack_seconds": size * 1e-10}
        for size in (1_000,)
    ]
    content["rounding"] = [{"format": form, "points": points} for form in ("bf16", "int8", "fp8")]
    tiers = len(profile.mesh.tiers)
    wire = Wire(
        tuple(rng.choices(("exact", "bf16", "int8"), k=tiers)),
        tuple(rng.choices(("exact", "bf16", "int8"), k=tiers)),
    )
    return Profile.model_validate(content), wire


def _host(rng: random.Random) -> dict[str, Any] | None:
    """In half of all."""
    if rng.random() < 0.5:
        return None
    rate = rng.choice([1e8, 1e9, 1e10])
    points = [{"bytes": size, "seconds": 1e-6 + size / rate, "spread": 0.0} for size in (1024, 65536)]
    return {"points": points}


def _add_recomputation(uses: list[dict[str, Any]]) -> None:
    """Some units of every other profile can be recomputed. What is drawn depends on the rest alone."""
    rng = random.Random(json.dumps(uses))
    for unit in sorted({use["unit"] for use in uses}) if rng.random() < 0.5 else ():
        if rng.random() < 0.5:
            for use in uses:
                for cost in use["costs"] if use["unit"] == unit else ():
                    longer = rng.uniform(0, 200) * 1e-6 if use["phase"] == "backward" else 0.0
                    cost["recompute"] = {
                        "seconds": longer,
                        "retained_bytes": cost["retained_bytes"] - rng.randint(-500, 4000),
                        "peak_bytes": cost["peak_bytes"] + rng.randint(0, 500),
                    }


def _add_partial_ways(uses: list[dict[str, Any]]) -> None:
    """Half of those units can also compute parts of their forward again."""
    rng = random.Random(f"ways {json.dumps(uses)}")
    for unit in sorted({use["unit"] for use in uses if "recompute" in use["costs"][0]}):
        for way in rng.choice(([], [], ["operations"], ["elementwise", "attention", "products"])):
            for use in uses:
                for cost in use["costs"] if use["unit"] == unit else ():
                    full, share = cost["recompute"], rng.uniform(0, 1)
                    cost.setdefault("partial", {})[way] = {
                        "seconds": full["seconds"] * share,
                        "retained_bytes": cost["retained_bytes"] - rng.randint(-500, 3000),
                        "peak_bytes": cost["peak_bytes"] + rng.randint(0, 500),
                    }


def _add_host_way(uses: list[dict[str, Any]]) -> None:
    """Half of all units can keep their activations on the host, where there is a link to it."""
    rng = random.Random(f"host {json.dumps(uses)}")
    for unit in sorted({use["unit"] for use in uses}):
        if rng.random() < 0.5:
            for use in uses:
                for cost in use["costs"] if use["unit"] == unit else ():
                    away = rng.randint(500, 6000) if use["phase"] == "forward" else 0
                    cost.setdefault("partial", {})["host"] = {
                        "seconds": 0.0,
                        "retained_bytes": cost["retained_bytes"] - away,
                        "peak_bytes": cost["peak_bytes"],
                    }


def _add_late_ranks(uses: list[dict[str, Any]]) -> None:
    """To a third of all profiles. What is drawn depends on the rest alone."""
    rng = random.Random(f"late {json.dumps(uses)}")
    if rng.random() < 1 / 3:
        for cost in (cost for use in uses for cost in use["costs"]):
            cost["straggler_seconds"] = cost["seconds"] * rng.choice([0.0, rng.uniform(0, 1.5)])


def _use_cost(rng: random.Random, size: int) -> dict[str, Any]:
    return {
        "micro_batch": size,
        "seconds": rng.uniform(1, 300) * 1e-6 * size,
        "spread": 0.0,
        "flops": 1,
        "retained_bytes": rng.randint(-2000, 4000),
        "peak_bytes": rng.randint(0, 9000) * size,
    }


def _over_tiers(mesh: Mesh, rng: random.Random) -> list[dict[str, Any]]:
    """A sum over all tiers at once, of some profiles that have several."""
    if mesh.whole is None or rng.random() < 0.5:
        return []
    low, high = mesh.whole
    return [{"operation": "all_reduce", "low": low, "high": high, "points": _points(rng)}]


def _points(rng: random.Random) -> list[dict[str, Any]]:
    latency, bandwidth = rng.uniform(1, 50) * 1e-6, rng.choice([5e6, 5e7, 1e9])
    seconds = sorted(latency + size / bandwidth * rng.uniform(0.8, 1.0) for size in (1024, 4096, 16384))
    return [
        {"bytes": size, "seconds": time, "spread": 0.0}
        for size, time in zip((1024, 4096, 16384), seconds, strict=True)
    ]


@dataclass(frozen=True)
class Truth:
    """The least objective and the shortest replayed step within the budget (None: nothing fits), and the
    least peak memory of all; and the least objective by micro-batch size and pace, where
    something fits. ``step_ns``: None where steps were not replayed, too."""

    objective_ns: float | None
    step_ns: float | None
    smallest_bytes: int
    by_pace: Mapping[tuple[int, Pace], float]


def try_everything(
    profile: Profile, request: Request, like: Evaluation | None = None, *, steps: bool = False
) -> Truth:
    """Every triple for every tensor, every micro-batch size and depth; no ILP, no pruning.

    ``like``: with messages in its order, at other paces as far as prefetch allows. ``steps``: whether steps
    are replayed too.
    """
    model = cost_model(profile, request)
    tensors = model.tensors
    names = [unit for unit, specs in tensors.items() if specs]
    pins = dict(pin.split("=") for pin in request.pins)
    options = [_options(tensors[name], model, pins, offload=request.host_bytes > 0) for name in names]
    nothing = UnitCost.zero(len(model.mesh.tiers))
    best = shortest = float("inf")
    by_pace: dict[tuple[int, Pace], float] = {}
    smallest: int | None = None
    for size, pace in itertools.product(profile.micro_batches, paces(model, request.depths)):
        if request.global_batch % (model.mesh.world * size):
            continue
        accumulation = request.global_batch // (model.mesh.world * size)
        schedule = model.schedule(
            **pace._asdict(),
            accumulation=accumulation,
            clip=request.clip,
            offload=request.host_bytes > 0,
        )
        if like is not None and like.schedule.order is not None:
            same = (like.micro_batch, like.schedule.pace) == (size, schedule.pace)
            order = like.schedule.order if same else within(like.schedule.order, pace.prefetch + 1)
            schedule = in_order(schedule, order)
        slots = assign_slots(schedule, tensors)
        late = model.late_ns(schedule, size)
        graph = model.event_graph(schedule, size)
        for again in _agains(model, request):
            peak = model.activations.peak_bytes(size, again, schedule)
            on_host = model.activations.host_bytes(size, schedule, again)
            costs = [
                [replace(cost, recompute=again.get(name)) for cost in choices]
                for name, choices in zip(names, options, strict=True)
            ]
            for combination in itertools.product(*costs):
                units = dict.fromkeys(tensors, nothing) | dict(zip(names, combination, strict=True))
                taken = memory(units, slots, schedule, peak, on_host)
                if taken.host > request.host_bytes:
                    continue
                needed = taken.peak
                smallest = needed if smallest is None else min(smallest, needed)
                if needed <= request.memory_bytes:
                    durations = model.durations(schedule, units, size)
                    named = size, schedule.pace
                    tried = by_pace.get(named, float("inf"))
                    enough = max(tried, shortest) if steps else tried
                    busy = model.processor_ns(schedule, units, durations)
                    if floor_ns(schedule, durations, model.interference, busy) >= enough:
                        continue
                    part = replay(schedule, durations).period_ns  # of the objective, and of the step
                    if part < tried:
                        objective = objective_ns(schedule, durations, model.interference, graph, busy)
                        best = min(best, objective)
                        by_pace[named] = min(objective, by_pace.get(named, objective))
                    if steps and part < shortest:
                        found = replay_shared(schedule, durations, model.interference, late, busy)
                        shortest = min(found.period_ns, shortest)
    assert smallest is not None
    step = shortest if shortest < float("inf") else None
    return Truth(best if by_pace else None, step, smallest, by_pace)


def _agains(model: CostModel, request: Request) -> list[Recomputed]:
    """Every way to recompute units, or the one that is given."""
    if request.recompute != "choose":
        return [Recomputed.of(model.recomputable if request.recompute == "all" else ())]
    known = [[way for way in of if way != HOST or request.host_bytes] for of in model.ways.values()]
    choices = itertools.product(*([None, *ways] for ways in known))
    return [
        Recomputed({unit: way for unit, way in zip(model.ways, chosen, strict=True) if way is not None})
        for chosen in choices
    ]


def _options(
    specs: tuple[TensorSpec, ...], model: CostModel, pins: dict[str, str], *, offload: bool
) -> list[UnitCost]:
    """``pins``: by a tensor's whole name."""
    found = {}
    several = [
        [triple for triple in model.triples if spec.matrix or triple.matrix in ("", "repeated")]
        for spec in specs
    ]
    for triples in itertools.product(*several):
        levels = tuple(
            triple._replace(matrix=triple.matrix if spec.matrix else "")
            if spec.trainable
            else Levels(triple.param, triple.param, triple.param)
            for triple, spec in zip(triples, specs, strict=True)
        )
        cut = {t.name: triple.shards(model.mesh) for t, triple in zip(specs, levels, strict=True)}
        if all(_as_pinned(of, pins.get(name, "*,*,*")) for name, of in cut.items()):
            found[levels] = model.unit(bucketise(zip(specs, levels, strict=True), model.mesh))
    assembled = {
        levels: any(one.assembles(model.mesh) for one, spec in zip(levels, specs, strict=True) if spec.matrix)
        for levels in found
    }
    moved = [model.offloaded(cost) for levels, cost in found.items() if offload and not assembled[levels]]
    return [*found.values(), *(cost for cost in moved if cost.host_bytes)]


def _as_pinned(shards: tuple[int, ...], pin: str) -> bool:
    return all(wanted in ("*", str(count)) for wanted, count in zip(pin.split(","), shards, strict=True))
