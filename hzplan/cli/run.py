"""``hzplan run``: train with a plan."""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hzplan.cli.run_request import TRACED_STEPS, RunRequest
from hzplan.launch.job import TIMEOUT_S

if TYPE_CHECKING:
    from hzplan.formats.plan import Plan


def command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan, as hzplan solve wrote it.")],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="The model; by default the plan's, which must then be built in."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Text to train on, a file or folder, or tokens in a .npy, .bin (uint16) or .uint32.bin "
            "file; by default Python's own library."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 100,
    nproc: Annotated[
        int | None, typer.Option(help="Ranks to start on this machine; by default the plan's.")
    ] = None,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="For initial weights and the order of the data.")] = 0,
    metrics: Annotated[
        Path | None, typer.Option(help="Write a JSON line for every step to this file.")
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRACKER",
            help="Send every step's figures to tensorboard:FOLDER, wandb:PROJECT or mlflow:EXPERIMENT. May "
            "be repeated.",
        ),
    ] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option(help="Steps between held-out losses; by default one at the end."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help=f"Write what every stream of every rank did in the last {TRACED_STEPS} steps to this file, "
            "for ui.perfetto.dev."
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="PEERS",
            help="Measure the plan beside others, in turns of a few steps: ddp, zero1, fsdp2, fsdp2-keep, "
            "fsdp2-offload, hsdp, tp-dp, deepspeed1, deepspeed3, megatron-fsdp, one-stream, no-threads, or "
            "other plans' files, with commas between; under Muon also owners, owners-size, owners-work (DDP "
            "whose ranks update matrices whole), pytorch-optimizer (its DistributedMuon). ddp@3: in 3 "
            "buckets (zero1, tp-dp); fsdp2@2: 2 blocks gathered ahead (fsdp2-keep, fsdp2-offload, hsdp).",
        ),
    ] = None,
    round_steps: Annotated[int, typer.Option(help="With --against: steps of a turn.")] = 5,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Save checkpoints to this folder, which every rank must see."),
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps between checkpoints; the end, and SIGTERM, make one too.")
    ] = 100,
    keep: Annotated[int, typer.Option(help="How many checkpoints to keep.")] = 2,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest whole checkpoint, if there is one.")
    ] = False,
    replan: Annotated[
        bool,
        typer.Option(
            "--replan",
            help="On another number of ranks, train with a plan for them: one beside PLAN, or solved anew.",
        ),
    ] = False,
    weights: Annotated[
        Path | None,
        typer.Option(help="Begin with these weights: a safetensors file, or a Hugging Face folder of them."),
    ] = None,
    from_dcp: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Go on from a checkpoint of torch.distributed.checkpoint, as FSDP2 programs save them: "
            "weights, optimizer state, and the step that it counts.",
        ),
    ] = None,
    check_replicas: Annotated[
        int | None, typer.Option(help="Every so many steps, compare what ranks hold in common.")
    ] = None,
    skip_nonfinite: Annotated[
        bool, typer.Option(help="Leave out steps whose gradients are not finite, instead of stopping.")
    ] = False,
    group: Annotated[
        int | None,
        typer.Option(
            help="Under a plan whose groups do not wait for each other: which group this job is, from 0 "
            "on; by default all of them start here."
        ),
    ] = None,
    meet: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="With --group: where the groups meet, as hzplan meet says."),
    ] = None,
    patience: Annotated[
        float, typer.Option(help="With --group: seconds that another group's late result is waited for.")
    ] = 120.0,
    timeout: Annotated[
        float, typer.Option(help="Seconds that ranks wait for each other before they give the job up.")
    ] = TIMEOUT_S,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Train a model as a plan says, and compare what was predicted with what is measured.

    Inside a job that torchrun or srun started it trains there, else it starts the plan's ranks here.

    Example: hzplan run plan.json --steps 200 --metrics metrics.jsonl
    Example: hzplan run plan.json --steps 10000 --checkpoint checkpoints --resume
    Example: hzplan run plan.json --from-dcp fsdp2/step-40000 --steps 50000
    Example: hzplan run plan.json --against ddp,fsdp2,hsdp --steps 60
    """
    from hzplan.cli import ranks

    here = ranks.this_rank(nproc)
    request = RunRequest(
        plan=plan,
        model=model,
        data=data,
        steps=steps,
        lr=lr,
        seed=seed,
        metrics=metrics,
        log=tuple(log or ()),
        evaluate_every=evaluate_every,
        trace=trace,
        against=against,
        round_steps=round_steps,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        keep=keep,
        resume=resume,
        weights=weights,
        from_dcp=from_dcp,
        check_replicas=check_replicas,
        skip_nonfinite=skip_nonfinite,
        timeout_s=timeout,
        group=group,
        meet=meet,
        patience_s=patience,
        replans=replan,
    )
    request.check_options()
    groups = request.groups_of()
    if here is None:  # what is wrong is said before ranks start
        if replan and nproc is not None:
            request = request.replanned(nproc, solves=True)
        request.check_places()
        each = None if nproc is None else request.of_group(nproc, groups)
        ranks.start_here(request.prepare(each).plan.mesh.world * groups)
        return

    from hzplan.launch import job

    request.of_group(here.world, groups)
    with job.join(here, timeout_s=timeout, groups=groups) as joined:
        here, request = joined.info, request.as_group()
        if replan:  # the first rank solves, if it must be, and the others find what it wrote
            joined.first(partial(request.replan, here.world))
            request = joined.agree(partial(request.replanned, here.world, solves=False))
        joined.first(request.check_places)
        ready = joined.agree(partial(request.prepare, here.world))
        first = here.rank == 0 and (groups == 1 or request.group == 0)
        if first:
            request.compare_provenance(ready.plan)
        if here.rank == 0 and ready.plan.relaxed is None:
            ranks.say_how_on_a_cluster(here, nodes=_nodes(ready.plan))
        if against is None:
            request.train(ready, shown=first, writes=here.rank == 0, as_json=as_json)
        else:
            request.compare(ready, shown=first, as_json=as_json)


def _nodes(plan: Plan) -> int:
    """As many as the slowest tier connects."""
    return prod(plan.mesh.tiers[-1]) if len(plan.mesh.tiers) > 1 else 1
