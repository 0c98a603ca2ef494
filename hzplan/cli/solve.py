"""``hzplan solve``: choose levels per tensor, prefetch and micro-batch for a profile and a memory budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from hzplan.errors import Infeasible, JobFailed, UserError

if TYPE_CHECKING:
    from hzplan.formats.parallel import ModelParallel
    from hzplan.formats.profile import Profile
    from hzplan.solver.solve import Infeasible as NothingFits
    from hzplan.solver.solve import Request, Solved

RESERVED = 0.05
"""The share of a device's memory that is left free when no budget is given."""


def command(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="What hzplan profile wrote.")],
    global_batch: Annotated[int, typer.Option(help="Sequences per step, over all ranks.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The plan to write.")] = Path("plan.json"),
    memory: Annotated[
        str | None, typer.Option(help="Budget per rank, as in 72GiB; by default the device's, less 5%.")
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="How much of the host's memory a rank may take for optimizer state, as in 100GiB; by "
            "default none."
        ),
    ] = None,
    gap: Annotated[float, typer.Option(help="How far from the best possible is good enough.")] = 0.005,
    time_limit: Annotated[float, typer.Option(help="Seconds to search at most.")] = 60.0,
    clip: Annotated[bool, typer.Option(help="Whether gradients are clipped by their global norm.")] = True,
    reduce_dtype: Annotated[
        str | None,
        typer.Option(help="What gradients travel in, fp32 or bf16 (which NCCL sums in); by default fp32."),
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TENSOR=P,G,O",
            help="Shards of parameter, gradient and optimizer state of tensors by name, wildcards allowed, "
            "* for any number: 'embed.*=1,1,*'. May be repeated.",
        ),
    ] = None,
    recompute: Annotated[
        str,
        typer.Option(
            metavar="choose|none|all",
            help="Which units compute their forward again in backward instead of keeping activations.",
        ),
    ] = "choose",
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=VALUES",
            help="Solve at several points: memory=40GiB,60GiB,80GiB or nodes=8,16,32 (of a modelled "
            "profile), each a plan of its own beside OUTPUT, or network=0.5,1,2, times as fast as profiled.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Also draw what --sweep finds.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(help="On so many nodes; of a modelled profile, which is then written beside OUTPUT."),
    ] = None,
    model_parallel: Annotated[
        str | None,
        typer.Option(
            metavar="tp=N,pp=N,cp=N",
            help="Given tensor, pipeline and context parallelism: plan one rank's share of the model, over "
            "the ranks that are left. Its profile is written beside OUTPUT.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Choose how each tensor is sharded, what is recomputed, how deep to prefetch, and the micro-batch size.

    Writes a plan, says how far from the best possible it can be, and compares it with the known schemes.
    Where nothing fits the budget it exits with 3 and names the smallest memory that would.

    Example: hzplan solve profile.json --memory 72GiB --global-batch 512 -o plan.json
    """
    from hzplan.cli import console
    from hzplan.cli import sweep as sweeping
    from hzplan.cli.paths import check_writable
    from hzplan.cli.quantities import parse_bytes, parse_dtype
    from hzplan.formats.parallel import ModelParallel
    from hzplan.formats.plan import Recompute
    from hzplan.formats.profile import Profile
    from hzplan.solver.solve import Request

    if not 0 <= gap < float("inf") or not 0 < time_limit < float("inf"):
        raise UserError("--gap must be a number of at least 0, --time-limit one above 0")
    if recompute not in get_args(Recompute):
        raise UserError(f"--recompute {recompute}: write {', '.join(get_args(Recompute))}")
    if plot is not None and sweep is None:
        raise UserError("--plot draws what --sweep finds; give that too")
    loaded = Profile.load(profile)
    parallel = None if model_parallel is None else ModelParallel.parse(model_parallel)
    read, at_each_point = profile, (sweep or "").startswith("nodes")
    if at_each_point and nodes is not None:
        raise UserError(f"--sweep {sweep} says how many nodes; leave --nodes out")
    if nodes is not None or (parallel is not None and not at_each_point):
        loaded, profile = _derived(loaded, nodes, parallel, profile, output)
    check_writable(output, keep=[read, profile])
    request = Request(
        parse_bytes(memory, "--memory") if memory else int(loaded.cluster.memory_bytes * (1 - RESERVED)),
        global_batch,
        gap=gap,
        time_limit_s=time_limit,
        clip=clip,
        reduce_dtype=None if reduce_dtype is None else parse_dtype(reduce_dtype, "--reduce-dtype"),
        pins=tuple(pin or ()),
        recompute=cast(Recompute, recompute),
        host_bytes=parse_bytes(host_memory, "--host-memory") if host_memory else 0,
    )
    if recompute == "all" and not any(cost.recomputed for use in loaded.uses for cost in use.costs):
        console.remark(f"{profile}: no unit can be recomputed, or it was not measured; profile again")
    if sweep is not None:
        sweeping.run(
            *(sweep, loaded, request, profile, output),
            keep=[read],
            parallel=parallel if at_each_point else None,
            plot=plot,
            as_json=as_json,
        )
    else:
        _solve(loaded, request, profile, output, as_json=as_json)


def _derived(
    loaded: Profile, nodes: int | None, parallel: ModelParallel | None, profile: Path, output: Path
) -> tuple[Profile, Path]:
    """The profile on so many nodes, or of a rank's share, and where it is written for the plan to name."""
    from hzplan.cli.paths import check_writable
    from hzplan.parallel import share
    from hzplan.rings import with_nodes

    check_writable(output, keep=[profile])
    moved = loaded if nodes is None else with_nodes(loaded, nodes)
    moved = moved if parallel is None else share(moved, parallel)
    path = output.with_name(f"{output.stem}.profile.json")
    check_writable(path, keep=[profile])
    moved.save(path)
    return moved, path


def _solve(loaded: Profile, request: Request, profile: Path, output: Path, *, as_json: bool) -> None:
    from hzplan.cli import console
    from hzplan.solver.solve import Failed, Standing, solve
    from hzplan.solver.solve import Infeasible as NothingFits

    with console.Bar("solve") as bar:

        def show(standing: Standing) -> None:
            bar.update(str(standing), min(1.0, standing.seconds / request.time_limit_s))

        outcome = solve(loaded, request, show, interruptible=True)
    if isinstance(outcome, NothingFits):
        raise Infeasible(_nothing_fits(loaded, request, outcome, as_json=as_json))
    if isinstance(outcome, Failed):
        raise JobFailed(outcome.reason)
    _write(loaded, request, outcome, profile, output, as_json=as_json)


def _nothing_fits(profile: Profile, request: Request, outcome: NothingFits, *, as_json: bool) -> str:
    """The smallest memory that would, what takes it, and which pins are in the way."""
    from hzplan.cli import console
    from hzplan.solver.conflict import conflict, decided, more_nodes, moved_to_host

    smallest = outcome.smallest
    least = smallest.memory.peak
    here = {name: nbytes for name, nbytes in smallest.memory.by_category().items() if name != "host"}
    found = conflict(profile, request) if decided(profile, request) else None
    nodes, host = more_nodes(profile, request), moved_to_host(profile, request)
    if as_json:
        answer: dict[str, object] = {
            "status": "infeasible",
            "smallest_memory_bytes": least,
            "solve_s": outcome.seconds,
        }
        answer |= {"smallest_memory_by_category": here}
        if found is not None:
            answer |= {"conflict": found.groups, "smallest_memory_without": found.relief}
        if nodes is not None:
            answer |= {"smallest_memory_on_nodes": {nodes[0]: nodes[1]}}
        if host is not None:
            answer |= {"smallest_memory_with_host": host}
        print(json.dumps(answer))
    largest = max(here.items(), key=lambda item: item[1])
    said = (
        f"--memory {console.size(request.memory_bytes)}: no plan fits; the smallest memory that would is "
        f"{least} B ({console.size(least)}), at micro-batch {smallest.micro_batch}; "
        f"{console.size(largest[1])} of it is {largest[0].replace('_', ' ')}"
    )
    if nodes is not None:
        said += f"; on {nodes[0]} nodes it is {console.size(nodes[1])}"
    if host is not None:
        said += f"; with optimizer state in the host's memory (--host-memory) it is {console.size(host)}"
    if found is None or not found.relief:
        return said
    without = ", ".join(f"{console.size(of)} without {what}" for what, of in found.relief.items())
    return f"{said}; in conflict are {' and '.join(found.groups)}: it would be {without}"


def _write(
    profile: Profile, request: Request, solved: Solved, profile_path: Path, output: Path, *, as_json: bool
) -> None:
    from hzplan.cli import solve_report
    from hzplan.cost import CostModel
    from hzplan.solver.emit import emit
    from hzplan.solver.evaluate import baselines

    plan = emit(profile, request, solved, profile_path=profile_path, plan_path=output)
    known = baselines(
        CostModel(profile, request.reduce_dtype),
        global_batch=request.global_batch,
        clip=request.clip,
        depths=request.depths,
        memory_bytes=request.memory_bytes,
        recompute=request.recompute,
    )
    plan.save(output)
    report = solve_report.Report(profile, request, solved, plan, known, output)
    print(report.as_json()) if as_json else report.show()
