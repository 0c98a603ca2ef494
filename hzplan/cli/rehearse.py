"""``hzplan rehearse``: one rank of a plan on this device, beside what is predicted of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hzplan.cost.simulate import Timeline
    from hzplan.formats.plan import Plan
    from hzplan.formats.profile import Profile
    from hzplan.solver.evaluate import Evaluation
    from hzplan.training.rehearse import Rehearsed


def command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan, as hzplan solve wrote it.")],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="The model; by default the plan's, which must then be built in."
        ),
    ] = None,
    rank: Annotated[int, typer.Option(help="Which rank of the plan's world is played.")] = 0,
    steps: Annotated[int, typer.Option(help="How many steps are timed.")] = 8,
    trace: Annotated[
        Path | None,
        typer.Option(help="Also write what the streams did, below the prediction, for ui.perfetto.dev."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Play one rank of a plan on this device, before a cluster is booked: its memory, its time, its trace.

    Compute, buffers, streams, copies and the optimizer are real; a collective takes as long as the profile
    says, shared with what else is on its link, and brings made-up values. So memory is what it will be, and
    time shows whether the streams of this machine do what the simulator says. What ranks wait for each other,
    and what links cost compute, only the cluster can show.

    Example: hzplan rehearse plan.json --trace rehearsal.trace.json
    """
    from hzplan.cli import console
    from hzplan.cli.paths import check_writable
    from hzplan.cli.trust import check_alone, check_named
    from hzplan.formats.base import write_text
    from hzplan.formats.plan import Plan
    from hzplan.formats.source import profile_of, profile_path
    from hzplan.models.workload import load
    from hzplan.show.trace import document, predicted
    from hzplan.solver.evaluate import replay
    from hzplan.training.rehearse import rehearse

    loaded = Plan.load(plan)
    check_alone(plan, loaded, "rehearse")
    check_named(plan, loaded, model, "rehearse")
    profile = profile_of(plan, loaded)
    if trace is not None:
        check_writable(trace, keep=[plan, profile_path(plan, loaded)])
    found = replay(loaded, profile, plan)
    workload = load(model or loaded.model.name, seq_len=loaded.model.seq_len)
    _as_measured(profile)
    with console.Bar("rehearse") as bar:
        rehearsed = rehearse(loaded, found.model, workload, rank=rank, steps=steps, progress=bar.update)
    alone = found.undisturbed
    if trace is not None:
        spans = {"predicted": predicted(found.schedule, alone), f"rank {rank}, rehearsed": rehearsed.spans}
        write_text(trace, document(spans))
    if as_json:
        print(json.dumps(_answer(loaded, found, alone, rehearsed)))
    else:
        _show(plan, loaded, found, alone, rehearsed)


def _as_measured(profile: Profile) -> None:
    """Use as many threads as a measured rank had, and remark where the profile is of another device."""
    import os

    import torch

    from hzplan.cli import console
    from hzplan.launch.job import share_processors
    from hzplan.profiler.session.ranks import Ranks

    shared = profile.provenance.ranks_per_host
    if shared is not None:
        share_processors(shared)
    device = Ranks.here().device.type
    if device != profile.cluster.device:
        console.remark(
            f"the plan is for {profile.cluster.device}, and this is {device}: compute is another's"
        )
    elif device == "cpu" and shared is not None and shared > (os.cpu_count() or shared):
        console.remark(f"{shared} ranks shared the processors when compute was measured; one alone is faster")
    torch.set_flush_denormal(True)  # what arrives is made up


def _answer(plan: Plan, found: Evaluation, alone: Timeline, rehearsed: Rehearsed) -> dict[str, object]:
    waits = alone.waits_s(plan.cluster.tier_names)
    return {
        "rank": rehearsed.rank,
        "world": plan.mesh.world,
        "step_s": {
            "predicted": alone.period_ns / 1e9,
            "rehearsed": rehearsed.median_s,
            "rounds": list(rehearsed.step_s),
            "predicted_on_the_cluster": found.step_s,
        },
        "waits_s": {
            name: {"predicted": waited, "rehearsed": rehearsed.waited_s(name)}
            for name, waited in waits.items()
        },
        "peak_memory_bytes": {"predicted": found.memory.peak, "rehearsed": rehearsed.peak_memory_bytes},
    }


def _show(path: Path, plan: Plan, found: Evaluation, alone: Timeline, rehearsed: Rehearsed) -> None:
    from hzplan.cli import console

    waits = alone.waits_s(plan.cluster.tier_names)
    step_s = alone.period_ns / 1e9
    rows = [("compute", step_s - sum(waits.values()), rehearsed.busy_s)]
    rows += [
        (f"waiting for {name}", waited, rehearsed.waited_s(name))
        for name, waited in waits.items()
        if waited or rehearsed.waited_s(name)
    ]
    rows.append(("step", step_s, rehearsed.median_s))
    title = f"Rank {rehearsed.rank} of {plan.mesh.world} alone, steps timed: {len(rehearsed.step_s)}"
    table = console.table(title, "", "predicted", "rehearsed", "apart")
    for what, one, other in rows:
        table.add_row(what, console.duration(one), console.duration(other), _apart(one, other, step_s))
    peak = rehearsed.peak_memory_bytes
    table.add_row(
        "memory at the peak",
        console.size(found.memory.peak),
        console.size(peak),
        _apart(found.memory.peak, peak, found.memory.peak),
    )
    console.stdout().print(table)
    more = found.step_s - step_s
    if more > 0:
        print(
            f"On the cluster a step is predicted to take {console.duration(more)} more: late ranks, and "
            "what\nlinks and compute cost each other, which a rehearsal has none of."
        )
    budget = plan.source.memory_budget_bytes
    if peak > budget:
        print(f"That is over the plan's {console.size(budget)}: solve with a smaller --memory.")
    print(f"Next: torchrun … -m hzplan run {path}, on the cluster")


def _apart(predicted: float, rehearsed: float, whole: float) -> str:
    """The difference as a share of ``whole``, as text."""
    return f"{(rehearsed - predicted) / whole:+.1%}" if whole else ""
