"""The data of an HTML report, from a plan's evaluation, known schemes and a run's measurements. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from hzplan.core.recompute import HOST
from hzplan.core.schedule import COMPUTE_STREAM, OPTIM_STREAM, Kind, Pace, Schedule, Task
from hzplan.cost.simulate import critical, tier_loads_ns
from hzplan.formats.metrics import Measured
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile
from hzplan.show.folding import folded
from hzplan.show.occupancy import activations, spike_bytes
from hzplan.show.readable import at_least, at_most, cluster, count, duration, relaxed, size, worker
from hzplan.show.report import (
    Beside,
    Bound,
    Cause,
    ComparedScheme,
    Occupancy,
    PathPart,
    Report,
    Spike,
    TaskSpan,
    Tensor,
    Tier,
    WhatIf,
    Worth,
)
from hzplan.solver.emit import predict
from hzplan.solver.evaluate import Evaluation, sent_bytes, task_bytes
from hzplan.solver.explain import DOING, longest_chain
from hzplan.solver.gain import gain
from hzplan.solver.prefer import distance, margin_of
from hzplan.solver.schemes import RecomputeOptions, Row
from hzplan.solver.search import Request

HOST_WORK = frozenset(DOING[kind] for kind in (Kind.FETCH, Kind.STORE, Kind.SAVE, Kind.LOAD))
"""The kinds of work on the link to the host's memory, in words."""


def build_report(
    path: str,
    plan: Plan,
    profile: Profile,
    found: Evaluation,
    rows: Sequence[Row],
    request: Request,
    measured: Measured | None = None,
    *,
    expected: str | None = None,
    what_if: Sequence[WhatIf] = (),
) -> Report:
    """The report's data.

    ``path``: the plan's, as shown; ``rows``: the known schemes beside it, which answer the ``request``;
    ``expected``: the published error of its prediction, in words; ``what_if``: what was solved again.
    """
    chain = longest_chain(found, plan.cluster.tier_names)
    waits = found.waits_s
    sent = sent_bytes(found)
    loads = tier_loads_ns(found.schedule, found.durations_ns)
    budget = plan.source.memory_budget_bytes
    own = Row("this plan", found, found.memory.peak <= budget, ())
    return Report(
        title=f"{plan.model.name} on {plan.mesh.world} {worker(profile.cluster.device)}s",
        subtitle=f"{path} · {_tiers(plan, profile)} · proof: {_proof(plan)}",
        basis=basis(profile),
        expected=expected,
        facts=_facts(path, plan, profile, found),
        step_s=found.step_s,
        tensors=_tensors(plan, profile),
        spans=_spans(plan, profile, found),
        occupancy=_occupancy(found, budget),
        tiers=[
            Tier(name, sent[tier], loads[tier] / 1e9, waits.get(name, 0.0))
            for tier, name in enumerate(plan.cluster.tier_names)
        ],
        optimizer_exposed_s=waits.get(OPTIM_STREAM, 0.0),
        path=chain.parts,
        path_s=chain.seconds,
        bounds=bounds(chain.parts, plan.cluster.tier_names),
        binding=chain.binding,
        recomputed_s=sum(part.seconds for part in chain.parts if part.what == DOING[Kind.COMPUTE]),
        recompute_asked=plan.source.recompute == "all",
        schemes=[_compared(row, plan, profile) for row in (own, *sorted(rows, key=_fastest_first))],
        worth=worth(found, rows, request),
        what_if=what_if,
        beside=beside(found, measured) if measured else (),
        measured_steps=measured.steps if measured else 0,
    )


def basis(profile: Profile) -> str:
    """Where predicted seconds come from: "modelled" where nobody measured the layers."""
    if profile.modelled is None:
        return "predicted from measured layers and links" + (
            ", calibrated by a run" * bool(profile.calibrated)
        )
    if profile.modelled.device is None:
        return "predicted from measured layers, links modelled"
    return "modelled"


def worth(found: Evaluation, rows: Sequence[Row], request: Request) -> Worth | None:
    """The plan beside the fastest of the rows that fit, and what its gain comes from; None where none fits.

    A row that differs in nothing from the plan is the plan.
    """
    own = [replace(row, found=found) if distance(row.found, found) == 0 else row for row in rows]
    gained = gain(found, own, request)
    if gained is None:
        return None
    over, tie = gained.over, margin_of(request.gap, request.tie, found.model)
    parts = gained.parts if gained.share > tie else ()
    named = [(_cause(part.freedom, found, over.found), part.share) for part in parts]
    causes = [Cause(what, share) for what, share in named if what is not None]
    return Worth(over.name, over.found.step_s, gained.same, tie, causes)


def _cause(freedom: str, mine: Evaluation, other: Evaluation) -> str | None:
    """A freedom, and what the plan chooses there instead of what the other one does; None where both choose
    the same."""
    if freedom == "levels":
        return "sharding" if mine.levels != other.levels else None
    if freedom == "message order":
        return "message order" if mine.schedule.order != other.schedule.order else None
    chosen: dict[str, list[tuple[str, object, object]]] = {
        "recompute": [("recompute", _recompute(mine), _recompute(other))],
        "micro-batch": [("micro-batch", mine.micro_batch, other.micro_batch)],
        "prefetch": [
            (name.replace("_", " "), of_mine, of_other)
            for name, of_mine, of_other in zip(
                Pace._fields, mine.schedule.pace, other.schedule.pace, strict=True
            )
        ],
    }
    differ = [f"{name} {one} instead of {two}" for name, one, two in chosen[freedom] if one != two]
    return ", ".join(differ) or None


def _recompute(found: Evaluation) -> str:
    return RecomputeOptions.of(found.model).name(found.modes.recompute)


def _fastest_first(row: Row) -> tuple[bool, float]:
    """Rows that fit before those that do not."""
    return not row.fits, row.found.step_s


def _compared(row: Row, plan: Plan, profile: Profile) -> ComparedScheme:
    found, again = row.found, _recompute(row.found)
    return ComparedScheme(
        row.name,
        found.step_s,
        sum(found.waits_s.values()),
        sum(sent_bytes(found)),
        found.memory.peak,
        row.fits,
        f"micro-batch {found.micro_batch}" + (f", recompute {again}" if again != "none" else ""),
        row.allowed,
    )


def bounds(parts: Sequence[PathPart], tier_names: Sequence[str]) -> list[Bound]:
    """The critical path by the resource that works, the longest first."""
    sums: dict[str, float] = {}
    for part in parts:
        resource = _resource(part.what, tier_names)
        sums[resource] = sums.get(resource, 0.0) + part.seconds
    return sorted((Bound(*item) for item in sums.items()), key=lambda bound: -bound.seconds)


def _resource(what: str, tier_names: Sequence[str]) -> str:
    """What does a part of the critical path, whose work over a tier ends with that tier's name."""
    for name in tier_names:
        if what.endswith(f" over {name}"):
            return f"communication over {name}"
    if what in HOST_WORK:
        return "the link to the host's memory"
    return "compute" if what == DOING[Kind.COMPUTE] else what


def beside(found: Evaluation, measured: Measured) -> list[Beside]:
    """Predicted and measured step, waits and peak memory, one row each."""
    waits = found.waits_s
    rows = [Beside("step", found.step_s, measured.step_s)]
    for name in dict.fromkeys([*waits, *measured.exposed_s]):
        rows.append(Beside(f"waiting for {name}", waits.get(name, 0.0), measured.exposed_s.get(name, 0.0)))
    if measured.peak_bytes is not None:
        rows.append(Beside("memory at the peak", found.memory.peak, measured.peak_bytes, bytes=True))
    return rows


def _facts(path: str, plan: Plan, profile: Profile, found: Evaluation) -> list[tuple[str, str]]:
    budget, batch = plan.source.memory_budget_bytes, plan.batch
    tiers = ", ".join(plan.cluster.tier_names)
    if profile.modelled is not None:
        origin = profile.modelled.what
    else:
        origin = "measured" + (", calibrated by a run" if profile.calibrated else "")
    tokens = predict(profile, found).tokens_per_s_per_gpu
    on_host = sum(way == HOST for way in plan.recomputed.values())
    of_what = [f"state of {len(plan.offloaded)} units"] * bool(plan.offloaded)
    of_what += [f"activations of {on_host}"] * bool(on_host)
    moved = ", ".join([*of_what, f"{size(found.memory.host)} a rank"]) if of_what else "none"
    pace = plan.prefetch, plan.gradient_buffers, plan.message_bytes or 0
    return [
        ("model", f"{plan.model.name}, {count(plan.model.parameters)} parameters, {plan.model.dtype}"),
        ("cluster", f"{_tiers(plan, profile)} ({tiers}), {plan.cluster.backend}"),
        ("profile", f"{plan.source.profile} ({origin})"),
        ("predicted step", duration(found.step_s)),
        (f"tokens/s per {worker(profile.cluster.device)}", count(tokens)),
        ("memory at the peak", f"{size(found.memory.peak)} of {size(budget)}"),
        (
            "batch",
            f"{batch.global_batch} sequences of {plan.model.seq_len}: "
            f"{plan.data_ranks} ranks × {batch.micro_batch} × {batch.accumulation} forward passes",
        ),
        ("pace", str(Pace(*pace, plan.matrix_units or 0))),
        ("optimizer", f"{plan.optimizer}{', gradients clipped' if plan.clip else ''}"),
        ("gradients travel in", f"{plan.reduce_dtype}{' and are summed in it' if plan.narrow_sums else ''}"),
        *([("whole gradients", "summed over all tiers at once")] if plan.flat_sums else []),
        *((f"narrower on the {name}", text) for name, text in narrower(plan)),
        *(("other groups", relaxed(tier)) for tier in [plan.replica_sync] if not isinstance(tier, str)),
        ("recomputed", f"{len(plan.recomputed)} of {len(plan.units)} units"),
        ("in the host's memory", moved),
    ]


def narrower(plan: Plan) -> Iterator[tuple[str, str]]:
    """By tier with formats of its own, what travels in which."""
    if (wire := plan.wire) is None:
        return
    for name, param, grad in zip(plan.cluster.tier_names, wire.param, wire.grad, strict=True):
        parts = [(what, form) for what, form in (("parameters", param), ("gradients", grad))]
        said = ", ".join(f"{what} in {form}" for what, form in parts if form != "exact")
        if said:
            yield name, said


def _tiers(plan: Plan, profile: Profile) -> str:
    sizes = [prod(tier) for tier in plan.mesh.tiers]
    return cluster(sizes, plan.cluster.tier_names, profile.cluster.device)


def _proof(plan: Plan) -> str:
    proof = plan.proof
    if proof.status == "given":
        return "none: the choice was given"
    if proof.in_order_bound_s is None:
        said = f"no choice searched is predicted below {at_least(proof.bound_s)}"
    else:
        said = (
            f"no choice searched with messages in this order is predicted below "
            f"{at_least(proof.in_order_bound_s)}, in no order below {at_least(proof.bound_s)}"
        )
    return f"gap {at_most(proof.gap)}: {said} ({proof.status})"


def _tensors(plan: Plan, profile: Profile) -> list[Tensor]:
    sizes = {tensor.name: tensor.spec.nbytes for unit in profile.units for tensor in unit.tensors}
    order = {name: place for place, name in enumerate(sizes)}
    listed = [
        Tensor(unit.name, name, sizes[name], (bucket.shards.param, bucket.shards.grad, bucket.shards.optim))
        for unit in plan.units
        for bucket in unit.buckets
        for name in bucket.tensors
    ]
    return sorted(listed, key=lambda tensor: order[tensor.name])


def _spans(plan: Plan, profile: Profile, found: Evaluation) -> list[TaskSpan]:
    """The tasks of the step that take time, in launch order."""
    timeline, schedule = found.predicted, found.schedule
    sent = task_bytes(found)
    names = plan.cluster.tier_names
    chain = critical(schedule, timeline)
    return [
        TaskSpan(
            _stream(task, names),
            _what(task, schedule),
            folded(task.units),
            _stage(task, schedule),
            start / 1e9,
            end / 1e9,
            round(nbytes),
            task.index in chain,
        )
        for task, start, end, nbytes in zip(
            schedule.tasks, timeline.start_ns, timeline.end_ns, sent, strict=True
        )
        if end > start
    ]


def _stream(task: Task, tier_names: tuple[str, ...]) -> str:
    return f"{task.stream.partition('.')[0]} · {tier_names[task.tier]}" if task.tier >= 0 else task.stream


def _what(task: Task, schedule: Schedule) -> str:
    if task.kind is Kind.COMPUTE:
        return schedule.use(task).phase
    return DOING.get(task.kind, task.kind.value)


def _stage(task: Task, schedule: Schedule) -> str:
    if task.position < 0:
        return "end of the step"
    number = f"micro-batch {schedule.micro_batch(task) + 1} of {schedule.accumulation}"
    return number if task.stream == COMPUTE_STREAM else f"{number}, {schedule.use(task)}"


def _occupancy(found: Evaluation, budget_bytes: int) -> Occupancy:
    update = max((cost.update_temporary_bytes for cost in found.units.values()), default=0)
    by_use = found.model.activations.bytes_by_use(
        found.micro_batch, found.modes.recompute, found.schedule.saved
    )
    times, bytes_ = activations(found.schedule, found.predicted, by_use, update)
    static = [
        (name.replace("_", " "), nbytes)
        for name, nbytes in found.memory.by_category().items()
        if name not in ("activations", "host") and nbytes
    ]
    spike = _spike(found, by_use, update if found.schedule.clip else 0)
    return Occupancy(static, times, bytes_, found.memory.peak, budget_bytes, spike)


def _spike(found: Evaluation, by_use: Sequence[int], floor: int) -> Spike | None:
    """The loss' part of the peak: the last unit of the forward is charged with the loss.

    ``by_use``: bytes of activations at every use; ``floor``: of an update that lies beside none.
    """
    unit = [use.unit for use in found.schedule.uses if use.phase == "forward"][-1]
    nbytes = spike_bytes(by_use, [use.unit == unit for use in found.schedule.uses], floor)
    if not nbytes:
        return None
    model, recompute = found.model, found.modes.recompute
    in_chunks = None
    if "chunks" in model.ways.get(unit, ()) and recompute.get(unit) != "chunks":
        chunked = recompute.with_([unit], "chunks")
        lower = model.activations.peak_bytes(found.micro_batch, chunked, found.schedule)
        in_chunks = max(by_use) - max(lower, floor)
    return Spike(unit, nbytes, in_chunks)
