"""The request behind ``hzplan run``: its checks, its preparation, and its work on every rank."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hzplan.errors import JobFailed, UserError

if TYPE_CHECKING:
    from torch import nn

    from hzplan.formats.plan import Plan
    from hzplan.models.workload import Workload
    from hzplan.show.trace import Span
    from hzplan.training.data import Corpus
    from hzplan.training.run import Saving

MOST_TIMEOUT_S = 1e6
"""Upper limit of --timeout, seconds."""

MOST_PATIENCE = 0.4
"""Of --timeout, for --patience."""

TRACED_STEPS = 5
"""How many steps a trace shows."""


@dataclass(frozen=True)
class Prepared:
    """Plan, model and data of a run, checked against each other."""

    plan: Plan
    workload: Workload
    corpus: Corpus | None
    peers: Mapping[str, Plan | None]


@dataclass(frozen=True)
class RunRequest:
    """The options of ``hzplan run``, and every check that needs no other rank."""

    plan: Path
    model: str | None
    data: Path | None
    steps: int
    lr: float
    seed: int
    metrics: Path | None
    log: tuple[str, ...]
    evaluate_every: int | None
    trace: Path | None
    against: str | None
    round_steps: int
    checkpoint: Path | None
    checkpoint_every: int
    keep: int
    resume: bool
    weights: Path | None
    from_dcp: Path | None
    check_replicas: int | None
    skip_nonfinite: bool
    timeout_s: float
    group: int | None = None
    meet: str | None = None
    patience_s: float = 120.0
    replans: bool = False

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
        if self.evaluate_every is not None and self.evaluate_every < 1:
            raise UserError(f"--evaluate-every {self.evaluate_every}: at least 1 step")
        if self.checkpoint_every < 1:
            raise UserError(f"--checkpoint-every {self.checkpoint_every}: at least 1 step")
        if self.keep < 1:
            raise UserError(f"--keep {self.keep}: at least 1 checkpoint")
        if self.check_replicas is not None and self.check_replicas < 1:
            raise UserError(f"--check-replicas {self.check_replicas}: at least 1 step")
        if self.weights is not None and self.from_dcp is not None:
            raise UserError("--weights and --from-dcp: a run begins with one of them; leave the other out")
        if (self.group is None) != (self.meet is None):
            raise UserError("--group and --meet: give both, or none of them to start all groups here")
        if self.resume and self.checkpoint is None:
            raise UserError("--resume: say from where with --checkpoint DIR")
        of_one = {
            "--metrics": self.metrics,
            "--log": self.log or None,
            "--evaluate-every": self.evaluate_every,
            "--trace": self.trace,
            "--checkpoint": self.checkpoint,
            "--weights": self.weights,
            "--from-dcp": self.from_dcp,
        }
        for option, given in of_one.items():
            if self.against is not None and given is not None:
                raise UserError(f"{option} is for a run of the plan alone; leave it or --against out")

    def of_group(self, world: int, groups: int) -> int:
        """How many of a job's ranks each group has; UserError where they do not come out even."""
        if world % groups:
            raise UserError(
                f"{world} ranks: {self.plan} is for {groups} groups of as many ranks; start all of them, or "
                "each group by itself with --group and --meet"
            )
        return world // groups

    def as_group(self) -> RunRequest:
        """The same in a group of several, whose number the environment has: files of groups lie apart."""
        from hzplan.runtime.relaxed.meeting import GROUP

        if GROUP not in os.environ or self.of_plan().relaxed is None:
            return self
        group, together = int(os.environ[GROUP]), self.group is None
        metrics = self.metrics
        if metrics is not None and group and together:
            metrics = metrics.with_name(f"{metrics.stem}.group{group}{metrics.suffix}")
        return replace(
            self,
            group=group,
            metrics=metrics,
            log=() if group and together else self.log,
            trace=None if group and together else self.trace,
            checkpoint=None if self.checkpoint is None else self.checkpoint / f"group-{group}",
        )

    def of_plan(self) -> Plan:
        """The plan's file, read."""
        from hzplan.formats.plan import Plan

        return Plan.load(self.plan)

    def groups_of(self) -> int:
        """How many groups this job has ranks of: 1 where it is one of them, or the plan has no groups. What
        options say of groups goes into the environment."""
        from hzplan.runtime.relaxed.meeting import GROUP, MEET, PATIENCE, here

        plan = self.of_plan()
        if plan.relaxed is None:
            if self.group is not None:
                raise UserError(f"--group: under {self.plan} all ranks wait for each other; leave it out")
            return 1
        if not 1 <= self.patience_s <= self.timeout_s * MOST_PATIENCE:
            raise UserError(
                f"--patience {self.patience_s:g}: from 1 second to {MOST_PATIENCE:.0%} of --timeout "
                f"{self.timeout_s:g}, for a group's ranks wait for each other while one waits for others"
            )
        if self.replans:
            raise UserError("--replan: groups of other sizes do not fit each other; solve with --allow-stale")
        if self.against is not None:
            raise UserError("--against: peers wait for each other; measure this plan by itself")
        os.environ[PATIENCE] = str(self.patience_s)
        if self.group is None or self.meet is None:
            return plan.relaxed.groups
        os.environ |= {GROUP: str(self.group), MEET: self.meet}
        here(plan.relaxed.groups, 1.0)
        return 1

    def check_places(self) -> None:
        """UserError when something cannot be written where it should be."""
        from hzplan.cli.paths import check_writable
        from hzplan.training.trackers import check_tracker

        for tracker in self.log:
            check_tracker(tracker)
        for path in (self.metrics, self.trace):
            if path is not None:
                check_writable(path, keep=[self.plan])
        if self.checkpoint is not None:
            self._check_folder(self.checkpoint)

    def prepare(self, world: int | None) -> Prepared:
        """Plan, model and data; UserError when one is missing or does not fit the others or the world."""
        from hzplan.peers import check_peers

        plan = self._plan(world)
        if self.skip_nonfinite and not plan.clip:
            raise UserError(
                f"--skip-nonfinite: {self.plan} was solved without clipping, so parameters are updated in "
                "backward; solve with --clip"
            )
        from hzplan.training.batches import corpus_of

        peers = {} if self.against is None else check_peers(self.against, plan)
        workload = self._workload(plan)
        return Prepared(plan, workload, corpus_of(self.data, workload), peers)

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

    def replanned(self, world: int, *, solves: bool) -> RunRequest:
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

        from hzplan.cli import console
        from hzplan.formats.source import profile_of
        from hzplan.profiler.session.ranks import Ranks

        pairs = []
        backend = Ranks.here().backend
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

    def train(self, ready: Prepared, *, shown: bool, writes: bool, as_json: bool) -> None:
        """Train under the plan; on every rank of the job. ``shown``: this rank prints what becomes of it;
        ``writes``: it writes the metrics of its group."""
        from hzplan.cli.run_report import RunReport
        from hzplan.formats.base import write_text
        from hzplan.show.trace import document
        from hzplan.training.loop import NothingLeft, train
        from hzplan.training.run import RunOptions

        options = RunOptions(
            steps=self.steps,
            lr=self.lr,
            seed=self.seed,
            record_steps=TRACED_STEPS if self.trace else 0,
            evaluate_every=self.evaluate_every,
            skip_nonfinite=self.skip_nonfinite,
            saving=self._saving(),
            check_replicas=self.check_replicas,
            weights=self.weights,
            from_dcp=self.from_dcp,
        )
        try:
            with RunReport(
                ready.plan, self.steps, ready.corpus, self.metrics, self.log, shown=shown, writes=writes
            ) as report:
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
        from hzplan.training.run import Saving

        if self.checkpoint is None:
            return None
        return Saving(self.checkpoint, self.checkpoint_every, self.keep, self.resume)

    def _predicted(self, plan: Plan) -> dict[str, list[Span]]:
        """What the simulator says of a step, to be shown above what was; empty without the plan's profile."""
        from hzplan.cli import console
        from hzplan.formats.base import has_fingerprint
        from hzplan.formats.source import profile_of
        from hzplan.show.trace import predicted
        from hzplan.solver.evaluate import replay

        try:
            profile = profile_of(self.plan, plan)
            if not has_fingerprint(profile, plan.source.profile_sha256):
                raise UserError(f"{plan.source.profile} is not the profile that the plan was solved from")
            found = replay(plan, profile, self.plan)
        except UserError as error:
            console.remark(f"{self.trace} shows no prediction: {error}")
            return {}
        return {"predicted": predicted(found.schedule, found.predicted)}

    def compare(self, ready: Prepared, *, shown: bool, as_json: bool) -> None:
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
        from hzplan.cli.trust import check_alone, check_named
        from hzplan.formats.plan import Plan

        plan = Plan.load(self.plan)
        check_alone(self.plan, plan, "run")
        if world is not None and world != plan.mesh.world:
            raise UserError(
                f"{self.plan}: field cluster.mesh: the plan is for {plan.mesh.world} ranks, this job has "
                f"{world}; start {plan.mesh.world}, solve for {world}, or let --replan do it"
            )
        check_named(self.plan, plan, self.model, "run")
        return plan

    def _workload(self, plan: Plan) -> Workload:
        from hzplan.models.workload import load
        from hzplan.profiler.model.optimizer import optimizer_named

        try:
            optimizer_named(plan.optimizer)
            workload = load(self.model or plan.model.name, seq_len=plan.model.seq_len)
            model = _checked_model(workload, plan)
        except UserError as error:
            raise UserError(f"{self.plan}: {error}") from None
        if self.resume and self.checkpoint is not None:
            _check_checkpoint(self.checkpoint, model)
        return workload


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
    """The plan's model; on the meta device where it is built in.

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
