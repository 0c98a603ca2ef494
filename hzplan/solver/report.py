"""The data of an HTML report, from a plan's evaluation, known schemes and a run's measurements. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from hzplan.core.recompute import HOST
from hzplan.core.schedule import COMPUTE_STREAM, OPTIM_STREAM, Kind, Pace, Schedule, Task
from hzplan.cost.simulate import critical, tier_loads_ns
from hzplan.formats.metrics import Measured
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile
from hzplan.show.occupancy import activations
from hzplan.show.readable import at_least, at_most, cluster, count, duration, size, worker
from hzplan.show.report import Beside, ComparedScheme, Occupancy, Report, TaskSpan, Tensor, Tier
from hzplan.solver.emit import predict
from hzplan.solver.evaluate import Evaluation, sent_bytes, task_bytes
from hzplan.solver.explain import DOING, longest_chain


def build_report(
    path: str,
    plan: Plan,
    profile: Profile,
    found: Evaluation,
    known: Mapping[str, Evaluation],
    measured: Measured | None = None,
) -> Report:
    """The report's data. ``path``: the plan's, as shown; ``known``: by name, the schemes beside it."""
    chain = longest_chain(found, plan.cluster.tier_names)
    waits = found.waits_s
    sent = sent_bytes(found, profile, plan.reduce_dtype)
    loads = tier_loads_ns(found.schedule, found.durations_ns)
    budget = plan.source.memory_budget_bytes
    return Report(
        title=f"{plan.model.name} on {plan.mesh.world} {worker(profile.cluster.device)}s",
        subtitle=f"{path} · {_tiers(plan, profile)} · proof: {_proof(plan)}",
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
        binding=chain.binding,
        schemes=[
            ComparedScheme(
                name,
                one.step_s,
                sum(one.waits_s.values()),
                sum(sent_bytes(one, profile, plan.reduce_dtype)),
                one.memory.peak,
                one.memory.peak <= budget,
            )
            for name, one in {"this plan": found, **known}.items()
        ],
        beside=beside(found, measured) if measured else (),
        measured_steps=measured.steps if measured else 0,
    )


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
        ("pace", str(Pace(plan.prefetch, plan.gradient_buffers, plan.message_bytes or 0))),
        ("optimizer", f"{plan.optimizer}{', gradients clipped' if plan.clip else ''}"),
        ("gradients travel in", plan.reduce_dtype),
        ("recomputed", f"{len(plan.recomputed)} of {len(plan.units)} units"),
        ("in the host's memory", moved),
    ]


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
    sent = task_bytes(found, profile, plan.reduce_dtype)
    names = plan.cluster.tier_names
    chain = critical(schedule, timeline)
    return [
        TaskSpan(
            _stream(task, names),
            _what(task, schedule),
            ", ".join(task.units),
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
    by_use = found.model.activation_bytes(found.micro_batch, found.modes.recompute, found.schedule.saved)
    times, bytes_ = activations(found.schedule, found.predicted, by_use, update)
    static = [
        (name.replace("_", " "), nbytes)
        for name, nbytes in found.memory.by_category().items()
        if name not in ("activations", "host") and nbytes
    ]
    return Occupancy(static, times, bytes_, found.memory.peak, budget_bytes)
