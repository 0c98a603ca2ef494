"""``hzplan solve``: choose levels per tensor, prefetch and micro-batch for a profile and a memory budget."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from hzplan.core.wire import KEPT, Admitted
from hzplan.errors import JobFailed, NoPlanFits, UserError

if TYPE_CHECKING:
    from hzplan.formats.parallel import ModelParallel
    from hzplan.formats.plan import Target
    from hzplan.formats.profile import Profile
    from hzplan.solver.baseline import Baseline
    from hzplan.solver.solve import Infeasible, Outcome, Request, Solved


def command(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="What hzplan profile wrote.")],
    global_batch: Annotated[int, typer.Option(help="Sequences per step, over all ranks.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The plan to write.")] = Path("plan.json"),
    memory: Annotated[
        str | None,
        typer.Option(
            help="Budget per rank, as in 72GiB or in bytes; by default what the driver reports, less 5% or "
            "what CUDA and NCCL take."
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="How much of the host's memory a rank may take, for optimizer state and activations, with "
            "--allow-stale for what groups keep of each other, as in 100GiB; by default none."
        ),
    ] = None,
    gap: Annotated[float, typer.Option(help="How far from the best possible is good enough.")] = 0.005,
    tie: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Predicted steps that differ by less are equal, as in 0.5%; of equal plans the leanest, "
            "then the plainest is taken. By default the gap, at most 0.5%; where compute keeps processors "
            "busy that ranks share, a scheme with few messages is taken up to 3% behind.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="PLAN|SETTING",
            help="Your own setting, to be a candidate and a row of the table: a plan file, or as in "
            "zero3,recompute=selective,micro_batch=1,prefetch=2 (selective: every 2nd layer).",
        ),
    ] = None,
    like: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="Of equal plans take the one nearest to this one.")
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds to search at most.")] = 60.0,
    clip: Annotated[bool, typer.Option(help="Whether gradients are clipped by their global norm.")] = True,
    reduce_dtype: Annotated[
        str | None,
        typer.Option(
            help="What gradients travel in, fp32 or bf16, summed in fp32; bf16-sum: summed in bf16 as well, "
            "by NCCL. By default fp32."
        ),
    ] = None,
    wire: Annotated[
        str,
        typer.Option(
            metavar="exact|safe|FORMATS",
            help="Formats that may travel where a tier is slow, with rounding: safe (those that trained as "
            "well as exact ones), or by name, as in param=int8,grad=bf16 (also grad=int8, param=fp8).",
        ),
    ] = "exact",
    wire_exact: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERNS",
            help="With --wire: names of tensors that travel exactly, instead of embeddings and routers, as "
            "in '*embed*,head.*'; norms and biases always do.",
        ),
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TENSOR=P,G,O",
            help="Shards of parameter, gradient and optimizer state of tensors by name, wildcards allowed, "
            "* for any number: 'embed.*=1,1,*'; under Muon also how matrices come together: "
            "'layers.*=1,1,4,owned' (repeated, exchanged). May be repeated.",
        ),
    ] = None,
    recompute: Annotated[
        str,
        typer.Option(
            metavar="choose|none|all",
            help="Activation recomputation: which units compute their forward again in backward.",
        ),
    ] = "choose",
    target: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="fsdp2|deepspeed|megatron-fsdp|megatron-fsdp-v2",
            help="The best plan that this runtime can be told: hzplan export then loses nothing.",
        ),
    ] = None,
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
    allow_stale: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="Let the groups of the slowest tier train without waiting for each other, where that is "
            "faster; other mathematics: periodic (DiLoCo), delta, plain or ema (sparse averages), also as in "
            "periodic,interval=40,fragments=4,delay=5,wire=int8,copies=host.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Choose how each tensor is sharded, what is recomputed, how deep to prefetch, and the micro-batch size.

    Writes a plan, says what it gains over the schemes that are set by hand, from what, and how far from the
    best possible it can be; OUTPUT with .proof in its name's end says why, for hzplan check to multiply out.
    Where a scheme is as fast, it is the plan. Where nothing fits the budget it exits with 3 and names the
    smallest memory that would.

    Example: hzplan solve profile.json --memory 72GiB --global-batch 512 -o plan.json
    """
    from hzplan.cli import console
    from hzplan.cli import sweep as sweeping
    from hzplan.cli.paths import check_writable
    from hzplan.cli.quantities import parse_bytes, parse_dtype, parse_share
    from hzplan.cost.memory import budget_of
    from hzplan.formats.parallel import ModelParallel
    from hzplan.formats.plan import Recompute
    from hzplan.formats.profile import Profile
    from hzplan.solver.solve import Request
    from hzplan.solver.target import TARGETS

    if not 0 <= gap < float("inf") or not 0 < time_limit < float("inf"):
        raise UserError("--gap must be a number of at least 0, --time-limit one above 0")
    if recompute not in get_args(Recompute):
        raise UserError(f"--recompute {recompute}: write {', '.join(get_args(Recompute))}")
    if plot is not None and sweep is None:
        raise UserError("--plot draws what --sweep finds; give that too")
    loaded = Profile.load(profile)
    sums = reduce_dtype == "bf16-sum"
    if reduce_dtype is not None and reduce_dtype.endswith("-sum") and not sums:
        raise UserError(f"--reduce-dtype {reduce_dtype}: fp32, bf16 or bf16-sum")
    if wire_exact is not None and wire == "exact":
        raise UserError("--wire-exact says what travels exactly where other tensors do not; give --wire too")
    if sums and loaded.cluster.reduce_scatter_by_exchange:
        raise UserError("--reduce-dtype bf16-sum: here ranks exchange gradients and sum in fp32; use bf16")
    admitted = _admitted(wire, wire_exact)
    parallel = None if model_parallel is None else ModelParallel.parse(model_parallel)
    read, at_each_point = profile, (sweep or "").startswith("nodes")
    if at_each_point and nodes is not None:
        raise UserError(f"--sweep {sweep} says how many nodes; leave --nodes out")
    if nodes is not None or (parallel is not None and not at_each_point):
        loaded, profile = _derived(loaded, nodes, parallel, profile, output)
    check_writable(output, keep=[read, profile])
    request = Request(
        parse_bytes(memory, "--memory") if memory else budget_of(loaded),
        global_batch,
        gap=gap,
        time_limit_s=time_limit,
        clip=clip,
        reduce_dtype=None
        if reduce_dtype is None
        else parse_dtype(reduce_dtype.removesuffix("-sum"), "--reduce-dtype"),
        narrow_sums=sums or (target is not None and reduce_dtype == "bf16"),  # as all of them do
        pins=tuple(pin or ()),
        recompute=cast(Recompute, recompute),
        tie=None if tie is None else parse_share(tie, "--tie"),
        host_bytes=parse_bytes(host_memory, "--host-memory") if host_memory else 0,
        target=cast("Target | None", target),
    )
    if allow_stale is not None:
        _check_stale(wire, sweep, baseline, like)
    if target is not None and target not in TARGETS:
        raise UserError(f"--for {target}: one of {', '.join(TARGETS)}")
    if wire != "exact" and (target is not None or sweep is not None):
        raise UserError("--wire: no other runtime can be told of formats (--for), and a sweep has none")
    if target is not None and (host_memory is not None or sweep is not None):
        raise UserError(
            "--for: an export has nothing in the host's memory, and answers one question at a time"
        )
    if recompute == "all" and not any(cost.recompute for use in loaded.uses for cost in use.costs):
        console.remark(f"{profile}: no unit can be recomputed, or it was not measured; profile again")
    if sweep is not None and (baseline is not None or like is not None):
        raise UserError("--baseline and --like are for one question; leave them or --sweep out")
    if sweep is not None:
        sweeping.run(
            *(sweep, loaded, request, profile, output),
            keep=[read],
            parallel=parallel if at_each_point else None,
            reserved=memory is None,
            plot=plot,
            as_json=as_json,
        )
    else:
        asked = _Asked(loaded, request, profile, output, reserved=memory is None, admitted=admitted)
        if allow_stale is not None:
            _relax(asked, allow_stale, as_json=as_json)
        else:
            _solve(asked, baseline, like, as_json=as_json)


def _admitted(wire: str, kept: str | None) -> Admitted:
    """The formats that may be chosen."""
    patterns = KEPT if kept is None else tuple(part.strip() for part in kept.split(",") if part.strip())
    try:
        return Admitted.parse(wire, patterns)
    except ValueError as error:
        raise UserError(f"--wire {error}") from None


def _derived(
    loaded: Profile, nodes: int | None, parallel: ModelParallel | None, profile: Path, output: Path
) -> tuple[Profile, Path]:
    """The profile on so many nodes, or of a rank's share, and where it is written for the plan to name."""
    from hzplan.cli.paths import check_writable
    from hzplan.cost.collectives import with_nodes
    from hzplan.cost.parallel import share

    check_writable(output, keep=[profile])
    moved = loaded if nodes is None else with_nodes(loaded, nodes)
    moved = moved if parallel is None else share(moved, parallel)
    path = output.with_name(f"{output.stem}.profile.json")
    check_writable(path, keep=[profile])
    moved.save(path)
    return moved, path


@dataclass(frozen=True)
class _Asked:
    """A question and where its answer goes. ``reserved``: the budget is the device's memory, less the
    reserve; ``admitted``: formats that may travel."""

    profile: Profile
    request: Request
    profile_path: Path
    output: Path
    reserved: bool
    admitted: Admitted


def _solve(asked: _Asked, baseline: str | None, like: Path | None, *, as_json: bool) -> None:
    from hzplan.cli import console
    from hzplan.formats.plan import Plan
    from hzplan.solver.evaluate import replay
    from hzplan.solver.solve import Failed, Infeasible, SearchState, solve_each
    from hzplan.solver.wire import solve_in

    profile, request = asked.profile, asked.request
    near = None if like is None else replay(Plan.load(like), profile, like)
    own = None if baseline is None else own_setting(baseline, profile, request)
    with console.Bar("solve") as bar:

        def show(state: SearchState) -> None:
            bar.update(str(state), min(1.0, state.seconds / request.time_limit_s))

        def answer(question: Request) -> tuple[Request, Outcome]:
            return solve_each(profile, question, show, interruptible=True, baseline=own, like=near)

        answered, outcome = solve_in(asked.admitted, profile, request, answer)
    if isinstance(outcome, Infeasible):
        raise NoPlanFits(nothing_fits(profile, answered, outcome, as_json=as_json))
    if isinstance(outcome, Failed):
        raise JobFailed(outcome.reason)
    _write(replace(asked, request=answered), outcome, as_json=as_json)


def _check_stale(wire: str, sweep: str | None, baseline: str | None, like: Path | None) -> None:
    beside = {"--wire": wire != "exact", "--sweep": sweep, "--baseline": baseline, "--like": like}
    for option, given in beside.items():
        if given:
            raise UserError(
                f"{option}: not with --allow-stale, whose tier has a wire of its own (wire=) and which is "
                "compared with one group and with all waiting; leave it or --allow-stale out"
            )


def _relax(asked: _Asked, text: str, *, as_json: bool) -> None:
    from hzplan.cli import console, relaxed_report
    from hzplan.cli.paths import check_writable
    from hzplan.formats.certificate import save
    from hzplan.solver.certificate import certify
    from hzplan.solver.emit import emit
    from hzplan.solver.relaxed import Allowed, Relaxed, relax
    from hzplan.solver.solve import Failed, Infeasible, SearchState, Solved, solve

    allowed, request, output = Allowed.parse(text), asked.request, asked.output
    with console.Bar("solve") as bar:

        def show(state: SearchState) -> None:
            bar.update(str(state), min(1.0, state.seconds / request.time_limit_s))

        def ask(of: Profile, question: Request) -> Outcome:
            return solve(of, question, show, interruptible=True)

        found = relax(allowed, asked.profile, request, ask)
    if isinstance(found, Infeasible):
        raise NoPlanFits(nothing_fits(asked.profile, request, found, as_json=as_json))
    if isinstance(found, Failed):
        raise JobFailed(found.reason)
    assert isinstance(found, Relaxed)
    if not found.pays:
        console.remark(relaxed_report.declined(found))
        if isinstance(found.together, Solved):
            _write(asked, found.together, as_json=as_json)
            return
    of_profile = output.with_name(f"{output.stem}.profile.json")
    check_writable(of_profile, keep=[asked.profile_path])
    found.profile.save(of_profile)
    plan = emit(found.profile, found.request, found.solved, profile_path=of_profile, plan_path=output)
    plan = plan.model_copy(update={"replica_sync": found.tier})
    save(plan, certify(found.profile, found.solved), output)
    report = relaxed_report.RelaxedReport(found, plan, output)
    print(report.as_json()) if as_json else report.show()


def own_setting(text: str, profile: Profile, request: Request) -> Baseline:
    """The user's own setting: a plan file's, or what is written."""
    from hzplan.formats.plan import Plan
    from hzplan.solver.baseline import Baseline
    from hzplan.solver.evaluate import replay
    from hzplan.solver.search import cost_model

    path = Path(text)
    if not text.endswith(".json"):
        return Baseline.parse(text, cost_model(profile, request))
    plan = Plan.load(path)
    if plan.batch.global_batch != request.global_batch:
        raise UserError(
            f"--baseline {path}: field batch.global_batch is {plan.batch.global_batch}, --global-batch "
            f"{request.global_batch}; ask for the same"
        )
    return Baseline("yours", plan=replay(plan, profile, path))


def nothing_fits(profile: Profile, request: Request, outcome: Infeasible, *, as_json: bool) -> str:
    """The message where nothing fits: the smallest memory that would, its largest part, options in
    conflict."""
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


def _write(asked: _Asked, solved: Solved, *, as_json: bool) -> None:
    from hzplan.cli import console, solve_report
    from hzplan.cli.paths import check_writable
    from hzplan.formats.certificate import save
    from hzplan.solver.alone import one_group
    from hzplan.solver.certificate import certify
    from hzplan.solver.emit import emit
    from hzplan.solver.gain import gain
    from hzplan.solver.solve import SearchState, solve

    profile, request, output = asked.profile, asked.request, asked.output
    plan = emit(profile, request, solved, profile_path=asked.profile_path, plan_path=output)
    save(plan, certify(profile, solved), output)
    gained = gain(solved.best, solved.rows, request)
    with console.Bar("solve") as bar:

        def show(state: SearchState) -> None:
            bar.update(f"one group by itself: {state}", min(1.0, state.seconds / request.time_limit_s))

        def ask(of: Profile, question: Request) -> Outcome:
            return solve(of, question, show, interruptible=True)

        alone = one_group(profile, request, solved, ask)
    beside = None
    if alone is not None:
        beside = output.with_name(f"{output.stem}.alone.json")
        of_profile = output.with_name(f"{output.stem}.alone.profile.json")
        for path in (beside, of_profile):
            check_writable(path, keep=[asked.profile_path, output])
        alone.profile.save(of_profile)
        own = emit(alone.profile, alone.request, alone.solved, profile_path=of_profile, plan_path=beside)
        save(own, certify(alone.profile, alone.solved), beside)
    report = solve_report.SolveReport(
        *(profile, request, solved, gained, plan, output, asked.reserved, alone, beside)
    )
    print(report.as_json()) if as_json else report.show()
