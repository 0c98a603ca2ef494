"""``hzplan run``: train with a plan."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hzplan.errors import JobFailed, UserError
from hzplan.job import TIMEOUT_S

if TYPE_CHECKING:
    from torch import nn

    from hzplan.formats.plan import Plan
    from hzplan.models.workload import Workload
    from hzplan.show.trace import Span
    from hzplan.training.data import Corpus
    from hzplan.training.keeper import Saving

MOST_TIMEOUT_S = 1e6

TRACED_STEPS = 5
"""How many steps a trace shows."""


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
            help="Text to train on, a file or folder, or tokens in a .npy or .bin (uint16) file; by default "
            "Python's own library."
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
            "hsdp, tp-dp, deepspeed1, deepspeed3, one-stream, no-threads, or other plans' files, with commas "
            "between.",
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
    check_replicas: Annotated[
        int | None, typer.Option(help="Every so many steps, compare what ranks hold in common.")
    ] = None,
    skip_nonfinite: Annotated[
        bool, typer.Option(help="Leave out steps whose gradients are not finite, instead of stopping.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds that ranks wait for each other before they give the job up.")
    ] = TIMEOUT_S,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Train a model as a plan says, and compare what was predicted with what is measured.

    Inside a job that torchrun or srun started it trains there, else it starts the plan's ranks here.

    Example: hzplan run plan.json --steps 200 --metrics metrics.jsonl
    Example: hzplan run plan.json --steps 10000 --checkpoint checkpoints --resume
    Example: hzplan run plan.json --against ddp,fsdp2,hsdp --steps 60
    """
    from hzplan.cli import ranks

    here = ranks.this_rank(nproc)
    request = _Request(
        plan=plan,
        model=model,
        data=data,
        steps=steps,
        lr=lr,
        seed=seed,
        metrics=metrics,
        trace=trace,
        against=against,
        round_steps=round_steps,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        keep=keep,
        resume=resume,
        weights=weights,
        check_replicas=check_replicas,
        skip_nonfinite=skip_nonfinite,
        timeout_s=timeout,
    )
    request.check_options()
    if here is None:  # what is wrong is said before ranks start
        if replan and nproc is not None:
            request = request.replanned(nproc, solves=True)
        request.check_places()
        ranks.start_here(request.prepare(nproc).plan.mesh.world)
        return

    from hzplan import job

    with job.join(here, timeout_s=timeout) as joined:
        if replan:  # the first rank solves, if it must be, and the others find what it wrote
            joined.first(partial(request.replan, here.world))
            request = joined.agree(partial(request.replanned, here.world, solves=False))
        joined.first(request.check_places)
        ready = joined.agree(partial(request.prepare, here.world))
        if here.rank == 0:
            request.compare_provenance(ready.plan)
            ranks.say_how_on_a_cluster(here, nodes=_nodes(ready.plan))
        work = request.train if against is None else request.compare
        work(ready, shown=here.rank == 0, as_json=as_json)


@dataclass(frozen=True)
class _Prepared:
    plan: Plan
    workload: Workload
    corpus: Corpus | None
    peers: Mapping[str, Plan | None]


@dataclass(frozen=True)
class _Request:
    """What to train, and every check that needs no other rank."""

    plan: Path
    model: str | None
    data: Path | None
    steps: int
    lr: float
    seed: int
    metrics: Path | None
    trace: Path | None
    against: str | None
    round_steps: int
    checkpoint: Path | None
    checkpoint_every: int
    keep: int
    resume: bool
    weights: Path | None
    check_replicas: int | None
    skip_nonfinite: bool
    timeout_s: float

    def check_options(self) -> None:
        """UserError for numbers that make no sense."""
        if self.steps < 1:
            raise UserError(f"--steps {self.steps}: a run has at least 1 step")
        if not 0 < self.lr < float("inf"):
            raise UserError(f"--lr {self.lr}: must be a number above 0")
        if self.round_steps < 1:
            raise UserError(f"--round-steps {self.round_steps}: a turn has at least 1 step")
        if not 1 <= self.timeout_s <= MOST_TIMEOUT_S:
            raise UserError(f"--timeout {self.timeout_s}: between 1 and {MOST_TIMEOUT_S:.0f} seconds")
        if self.against is not None and self.skip_nonfinite:
            raise UserError("--skip-nonfinite is for a run of the plan alone; leave it or --against out")
        if self.checkpoint_every < 1:
            raise UserError(f"--checkpoint-every {self.checkpoint_every}: at least 1 step")
        if self.keep < 1:
            raise UserError(f"--keep {self.keep}: at least 1 checkpoint")
        if self.check_replicas is not None and self.check_replicas < 1:
            raise UserError(f"--check-replicas {self.check_replicas}: at least 1 step")
        if self.resume and self.checkpoint is None:
            raise UserError("--resume: say from where with --checkpoint DIR")
        of_one = {
            "--metrics": self.metrics,
            "--trace": self.trace,
            "--checkpoint": self.checkpoint,
            "--weights": self.weights,
        }
        for option, given in of_one.items():
            if self.against is not None and given is not None:
                raise UserError(f"{option} is for a run of the plan alone; leave it or --against out")

    def check_places(self) -> None:
        """UserError when something cannot be written where it should be."""
        from hzplan.cli.paths import check_writable

        for path in (self.metrics, self.trace):
            if path is not None:
                check_writable(path, keep=[self.plan])
        if self.checkpoint is not None:
            self._check_folder(self.checkpoint)

    def prepare(self, world: int | None) -> _Prepared:
        """Plan, model and data; UserError when one is missing or does not fit the others or the world."""
        from hzplan.peers import check_peers

        plan = self._plan(world)
        if self.skip_nonfinite and not plan.clip:
            raise UserError(
                f"--skip-nonfinite: {self.plan} was solved without clipping, so parameters are updated in "
                "backward; solve with --clip"
            )
        peers = {} if self.against is None else check_peers(self.against, plan)
        workload = self._workload(plan)
        return _Prepared(plan, workload, self._corpus(workload), peers)

    def _check_folder(self, folder: Path) -> None:
        """UserError when checkpoints cannot go there, or are there and are not asked for."""
        from hzplan.checkpoint.folder import listed

        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--checkpoint {folder}: cannot be made ({error.strerror})") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"--checkpoint {folder}: cannot be written (permission denied)")
        if not self.resume and listed(folder):
            raise UserError(
                f"--checkpoint {folder}: has checkpoints of another run; go on from them with --resume, or "
                "give another folder"
            )

    def replan(self, world: int) -> None:
        """See to it that there is a plan for that many ranks."""
        self.replanned(world, solves=True)

    def replanned(self, world: int, *, solves: bool) -> _Request:
        """The same with a plan for that many ranks; ``solves``: and says so, where it is another."""
        from hzplan.cli import console
        from hzplan.cli.replan import beside, solved

        plan = beside(self.plan, world)
        if plan is None and solves:
            console.remark(f"{self.plan} is not for {world} ranks: solving for them")
            plan = solved(self.plan, world)
        if plan is None:
            raise UserError(f"{self.plan}: this rank does not see the plan for {world} ranks beside it")
        if solves and plan != self.plan:
            console.remark(f"training with {plan}")
        return replace(self, plan=plan)

    def compare_provenance(self, plan: Plan) -> None:
        """Say when the plan's figures were measured with another torch or backend than runs here."""
        import torch
        import torch.distributed as dist

        from hzplan.cli import console
        from hzplan.formats.source import profile_of

        pairs = []
        backend = str(dist.get_backend()) if dist.is_initialized() else "none"
        if plan.cluster.backend not in ("none", backend):
            pairs.append((plan.cluster.backend, backend))
        try:
            profile = profile_of(self.plan, plan)
        except UserError:  # a plan may travel alone
            profile = None
        if profile is not None and profile.modelled is None and profile.provenance.torch != torch.__version__:
            pairs.append((f"torch {profile.provenance.torch}", f"torch {torch.__version__}"))
        for then, now in pairs:
            console.remark(
                f"{self.plan}: profiled with {then}, and this is {now}: predictions may be off; profile again"
            )

    def train(self, ready: _Prepared, *, shown: bool, as_json: bool) -> None:
        """Train under the plan; on every rank of the job."""
        from hzplan.cli.run_report import Report
        from hzplan.formats.base import write_text
        from hzplan.show.trace import document
        from hzplan.training.loop import NothingLeft, RunOptions, train

        options = RunOptions(
            steps=self.steps,
            lr=self.lr,
            seed=self.seed,
            record_steps=TRACED_STEPS if self.trace else 0,
            skip_nonfinite=self.skip_nonfinite,
            saving=self._saving(),
            check_replicas=self.check_replicas,
            weights=self.weights,
        )
        try:
            with Report(ready.plan, self.steps, ready.corpus, self.metrics, shown=shown) as report:
                result = train(ready.plan, ready.workload, ready.corpus, options, report)
        except NothingLeft as over:
            if shown:
                print(
                    json.dumps({"steps": 0, "resumed_from": over.steps})
                    if as_json
                    else f"Nothing to do: {over}."
                )
            return
        if shown:
            if self.trace is not None:
                write_text(self.trace, document({**self._predicted(ready.plan), **result.recorded}))
            report.show(result, as_json=as_json)
        if result.unsaved is not None:
            raise JobFailed(f"the last checkpoint was not saved: {result.unsaved}")

    def _saving(self) -> Saving | None:
        from hzplan.training.keeper import Saving

        if self.checkpoint is None:
            return None
        return Saving(self.checkpoint, self.checkpoint_every, self.keep, self.resume)

    def _predicted(self, plan: Plan) -> dict[str, list[Span]]:
        """What the simulator says of a step, to be shown above what was; empty without the plan's profile."""
        from hzplan.cli import console
        from hzplan.formats.base import fingerprint
        from hzplan.formats.source import profile_of
        from hzplan.show.trace import predicted
        from hzplan.solver.evaluate import replay

        try:
            profile = profile_of(self.plan, plan)
            if fingerprint(profile) != plan.source.profile_sha256:
                raise UserError(f"{plan.source.profile} is not the profile that the plan was solved from")
            found = replay(plan, profile, self.plan)
        except UserError as error:
            console.remark(f"{self.trace} shows no prediction: {error}")
            return {}
        return {"predicted": predicted(found.schedule, found.predicted)}

    def compare(self, ready: _Prepared, *, shown: bool, as_json: bool) -> None:
        """Let the plan and its peers take turns; on every rank of the job."""
        from hzplan.cli import console
        from hzplan.cli.against_report import show
        from hzplan.peers import LOCAL, makers
        from hzplan.peers.compare import compare
        from hzplan.peers.contender import Setting
        from hzplan.peers.paired import MIN_ROUNDS
        from hzplan.training.batches import batches

        plan = ready.plan
        data = batches(ready.workload, ready.corpus, plan, seed=self.seed)
        setting = Setting(plan, ready.workload, data, lr=self.lr, seed=self.seed, text=self.data)
        with console.Bar("compare", shown=shown) as bar:
            found = compare(
                makers(setting, ready.peers),
                rounds=max(MIN_ROUNDS, self.steps // self.round_steps),
                steps_per_round=self.round_steps,
                alone=(LOCAL,),
                seed=self.seed,
                progress=bar.update,
            )
        if shown:
            show(setting, found, as_json=as_json)

    def _plan(self, world: int | None) -> Plan:
        from hzplan.cli.trust import check_named
        from hzplan.formats.plan import Plan

        plan = Plan.load(self.plan)
        if world is not None and world != plan.mesh.world:
            raise UserError(
                f"{self.plan}: field cluster.mesh: the plan is for {plan.mesh.world} ranks, this job has "
                f"{world}; start {plan.mesh.world}, solve for {world}, or let --replan do it"
            )
        check_named(self.plan, plan, self.model, "run")
        return plan

    def _workload(self, plan: Plan) -> Workload:
        from hzplan.models.workload import load
        from hzplan.training.loop import check_optimizer

        try:
            check_optimizer(plan)
            workload = load(self.model or plan.model.name, seq_len=plan.model.seq_len)
            model = _checked_model(workload, plan)
        except UserError as error:
            raise UserError(f"{self.plan}: {error}") from None
        if self.resume and self.checkpoint is not None:
            _check_checkpoint(self.checkpoint, model)
        return workload

    def _corpus(self, workload: Workload) -> Corpus | None:
        from hzplan.training.batches import reads_bytes, reads_tokens
        from hzplan.training.data import TOKEN_FILES, load_corpus, load_tokens

        if self.data is not None and self.data.suffix in TOKEN_FILES:
            if workload.vocab is None or not reads_tokens(workload):
                raise UserError(
                    f"--data {self.data}: {workload.name} does not read windows of tokens; leave --data out"
                )
            return load_tokens(self.data, vocab=workload.vocab, seq_len=workload.seq_len)
        if reads_bytes(workload):
            return load_corpus(self.data, seq_len=workload.seq_len)
        if self.data is not None:
            raise UserError(
                f"--data {self.data}: {workload.name} does not read bytes (its vocabulary is "
                f"{workload.vocab or 'not known'}, 256 are needed); leave --data out"
            )
        return None


def _nodes(plan: Plan) -> int:
    """As many as the slowest tier connects."""
    return prod(plan.mesh.tiers[-1]) if len(plan.mesh.tiers) > 1 else 1


def _check_checkpoint(folder: Path, model: nn.Module) -> None:
    """UserError when the newest one that can be read is of another model; ranks look at its files."""
    from hzplan.checkpoint.fits import check_fits
    from hzplan.checkpoint.folder import listed
    from hzplan.formats.checkpoint import Checkpoint

    for path in listed(folder):
        try:
            index = Checkpoint.load(path)
        except UserError:
            continue
        check_fits(path, index, model)
        return


def _checked_model(workload: Workload, plan: Plan) -> nn.Module:
    """What the plan is for; on no device where it is built in.

    UserError when the plan was made for another model.
    """
    import torch

    from hzplan.models.units import master_dtype_of
    from hzplan.models.workload import BUILT_IN
    from hzplan.runtime.apply import check_model

    built_in = workload.name.startswith(BUILT_IN)
    with torch.random.fork_rng(devices=[]), torch.device("meta" if built_in else "cpu"):
        model = workload.build()
    model = model.to(master_dtype_of(getattr(torch, plan.model.dtype)))
    check_model(model, plan)
    return model
