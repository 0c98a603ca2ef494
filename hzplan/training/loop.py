"""The training loop of ``hzplan run``: a plan, a workload and data in; losses and measured times out."""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from hzplan.errors import JobFailed, UserError
from hzplan.formats.plan import Plan
from hzplan.models.workload import Workload
from hzplan.profiler.model.optimizer import optimizer_named
from hzplan.profiler.session.ranks import Ranks
from hzplan.runtime.apply import parallelize
from hzplan.runtime.executor import StepRecord
from hzplan.runtime.faults import named
from hzplan.runtime.out_of_memory import explain_out_of_memory
from hzplan.runtime.replicas import diverged
from hzplan.training.batches import Batches, batches
from hzplan.training.data import Corpus
from hzplan.training.keeper import Keeper
from hzplan.training.measure import peak_memory_bytes
from hzplan.training.recording import Recording
from hzplan.training.run import GroupsResult, RunOptions, RunResult, StepStats, Watcher
from hzplan.training.step import forward_backward, on_device
from hzplan.training.watch import Watch, hosts, memory_in_use

WARM_UP_STEPS = 3
"""Steps at the beginning whose times do not count."""

MOST_TIMED = 1000
"""Steps whose times are kept, the last ones."""

TRACED_STEP = 1
"""The step whose memory is traced: the first one in which the optimizer's state is there from the start."""


ANOTHER_SEED = 1_000_003
"""Added for each group: groups see texts of their own."""

MOST_SKIPPED = 20
"""As many steps in a row without a finite gradient are no accident."""


class NothingLeft(Exception):
    """The run that is to go on is over."""

    def __init__(self, steps: int) -> None:
        super().__init__(f"all {steps} steps were trained before; for more, give a larger number")
        self.steps = steps


def train(
    plan: Plan, workload: Workload, corpus: Corpus | None, options: RunOptions, watcher: Watcher | None = None
) -> RunResult:
    """Train a workload as a plan says; every rank of the plan's world calls it, with the same arguments.

    Without a corpus the workload's synthetic batches are used.

    Raises NothingLeft when the checkpoint that it goes on from has all the steps already; UserError when
    world, model or optimizer do not fit the plan, or the loss is no longer finite; Preempted when SIGTERM
    came to a rank, and all have saved.
    """
    if options.steps < 1:
        raise UserError(f"{options.steps} steps: a run has at least 1")
    trainer: _Trainer | None = None
    with explain_out_of_memory(plan, lambda: trainer.optimizer.engine if trainer else None):
        trainer = _Trainer(plan, workload, corpus, options, watcher or Watcher())
        result = trainer.train()
    trainer.optimizer.engine.close()  # not after an error: it would wait for ranks that may be gone
    return result


class _Trainer:
    def __init__(
        self, plan: Plan, workload: Workload, corpus: Corpus | None, options: RunOptions, watcher: Watcher
    ) -> None:
        self.plan, self.workload, self.corpus = plan, workload, corpus
        self.options, self.watcher = options, watcher
        self.world = plan.mesh.world
        self.rank = dist.get_rank() if self.world > 1 else 0
        torch.manual_seed(options.seed)
        self.device = Ranks.here().device
        made = optimizer_named(plan.optimizer)
        model = workload.made(self.device, plan.model.dtype)
        self.model, self.optimizer = parallelize(model, plan, made.func, lr=options.lr, **made.keywords)
        self.keeper = Keeper(options, plan, watcher.on_remark)
        relaxed = self.optimizer.engine.relaxed
        self.group = 0 if relaxed is None else relaxed.group
        # Dropout differs between ranks.
        torch.manual_seed(options.seed + self.rank + self.group * self.world)
        self.start = self.keeper.begin(self.model, self.optimizer)
        if relaxed is not None:
            met = self.optimizer.engine.meet_groups(self.start.step)
            if relaxed.came:
                self.start = self.keeper.go_on_after(met)
                watcher.on_remark(f"the other groups have done {met} steps: going on with their parameters")
        self.ending = False  # whether SIGTERM has come to any rank
        seed = options.seed + self.group * ANOTHER_SEED
        self.data: Batches = batches(workload, corpus, plan, seed=seed, since=self.start)
        self.watch = Watch(hosts())
        self.record: StepRecord = self.optimizer.engine.executor.record
        self.recording = Recording(self.optimizer.engine, options.record_steps)
        self.unplanned = self.looked = 0
        self.skipped: dict[int, str] = {}  # step -> the units concerned
        self.skipped_in_a_row = 0
        self.norm = torch.zeros(())
        self.peak_memory_bytes = 0
        self.losses = array("d")
        self.heldout: list[tuple[int, float]] = []
        self.untimed: set[int] = set()  # steps, the last few and to come, that something else is done in
        self.durations: deque[tuple[int, float]] = deque(
            maxlen=4
        )  # of the last steps, as the executor counts
        self.timed: deque[StepStats] = deque(maxlen=MOST_TIMED)  # not all: a run may have millions

    def train(self) -> RunResult:
        pending: _Pending | None = None
        self.watcher.on_start(self.start.step)
        if self.start.step >= self.options.steps:
            raise NothingLeft(self.start.step)
        ended = time.perf_counter()
        for step in self._steps():
            self.recording.begin(self.options.steps - step)
            loss = self.traced_step(step) if self._traces(step) else self.step(step)
            now = time.perf_counter()
            exposed, busy = self.waits(step, now - ended)
            said = _Said(float(self.keeper.asked_to_end), busy, memory_in_use(self.device))
            following = _Pending(
                *(step, loss, now - ended, exposed, said, self.rank, self.world),
                route=self.optimizer.engine.route_to,
                norm=self.norm,
                norms=self.optimizer.norms,
                rounding=self._rounding(),
            )
            if pending:
                self.finish(pending)
            pending, ended = following, now
            self.compare_replicas(step)
            if self.ending or self.keeper.due(step + 1):
                self.finish(pending)  # first: what it says may end the run
                pending = None
                self.keeper.save(self.model, self.optimizer, step + 1)
                self.untimed.add(step + 1)
                if self.ending:
                    self.keeper.leave(step + 1)
            self.keeper.report()
            if self._traces(step):
                self.untimed |= {step, step + 1}
            if self._evaluates_after(step):
                if pending:
                    self.finish(pending)
                pending = None
                self.evaluate(step)
                self.untimed.add(step + 1)
                ended = time.perf_counter()
        self.unsaved = self.keeper.finish()
        return self.result()

    def _steps(self) -> Iterator[int]:
        """The steps to train; of a group that comes in again those from where the others are."""
        step = self.start.step
        while step < self.options.steps:
            yield step
            met = self.optimizer.engine.meet_groups()
            if met > step + 1:
                self.watcher.on_remark(f"step {step}: the others went on without this group, to step {met}")
                self.untimed |= {*range(step + 1, met + 1)}
            step = max(step + 1, min(met, self.options.steps - 1))  # the last one saves and evaluates

    def compare_replicas(self, step: int) -> None:
        """JobFailed naming units and ranks when what should be equal is not; before every save too."""
        every = self.options.check_replicas
        if every is None:
            return
        if self.ending or self.keeper.due(step + 1) or (step + 1) % every == 0:
            found = diverged(self.optimizer.engine)
            if found:
                more = f" (and {len(found) - 1} more units)" if len(found) > 1 else ""
                raise JobFailed(
                    f"step {step}: {found[0]}{more}; a device or a link changed what it should not have: "
                    "take it out, and go on from a checkpoint"
                )

    def _traces(self, step: int) -> bool:
        return step == min(self.start.step + TRACED_STEP, self.options.steps - 1)

    def _evaluates_after(self, step: int) -> bool:
        every = self.options.evaluate_every
        return step + 1 == self.options.steps or (every is not None and (step + 1) % every == 0)

    def step(self, step: int) -> Tensor:
        """Run one step; returns its mean loss on this rank."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.options)
        total = forward_backward(
            self.model,
            self.workload,
            self.data,
            step=step,
            accumulation=self.plan.batch.accumulation,
            rank=self.rank,
        )
        if self.plan.clip:
            self.norm = self.optimizer.clip_grad_norm_(self.options.clip_norm, skip_nonfinite=True)
        self.optimizer.step()
        return total.to(self.device)

    def _rounding(self) -> dict[str, float]:
        """What ranks have just found that rounding costs, by tier name."""
        guard = self.optimizer.engine.rounding
        names = self.plan.cluster.tier_names
        found = {names[tier]: error for tier, error in guard.largest.items()}
        looked, self.looked = self.looked, guard.looks
        return found if guard.looks > looked else {}

    def note_norm(self, step: int, norm: Tensor, norms: Tensor) -> None:
        """A step's gradients are not finite, and it was left out: note it, or say so and stop."""
        if norm.isfinite():
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        self.skipped[step] = units = _units(self.optimizer.nonfinite_units(norms))
        if not self.options.skip_nonfinite or self.skipped_in_a_row > MOST_SKIPPED:
            times = "" if self.skipped_in_a_row == 1 else f" ({self.skipped_in_a_row} steps in a row)"
            raise UserError(
                f"step {step}: gradients of {units} are not finite{times}; try a lower --lr"
                + ("" if self.options.skip_nonfinite else ", or --skip-nonfinite")
            )

    def blamed(self) -> str:
        """Why a loss is not finite, as far as gradients show it."""
        found = None if self.plan.clip else self.optimizer.first_nonfinite()
        if found is None:
            return ""
        return f" (gradients of {_units(found[1])} are not finite since step {found[0]})"

    def traced_step(self, step: int) -> Tensor:
        """The same, and note the most memory that it takes on any rank."""
        losses: list[Tensor] = []
        self.optimizer.engine.executor.synchronize()  # so that the first update has made its state
        ignore = [] if self.corpus is None else [self.corpus.train, self.corpus.heldout]
        ignore += self.optimizer.engine.tasks.on_host
        peak = peak_memory_bytes(lambda: losses.append(self.step(step)), self.device, ignore=ignore)
        self.peak_memory_bytes = int(self.over_ranks([peak], dist.ReduceOp.MAX)[0])
        return losses[0]

    def waits(self, step: int, step_s: float) -> tuple[dict[str, float], float]:
        """What the compute stream waited for in the step that has last been recorded, by tier name, and the
        seconds that it did not wait.

        That is this step, or the last but one on a device that queues work. Nothing, and -1, where its times
        are not known, or something else was done in it.
        """
        executor = self.optimizer.engine.executor
        record, before = executor.record, self.record
        self.unplanned += record is before
        self.recording.note()
        self.record = record
        self.durations.append((executor.step, step_s))
        of_record = step - (executor.step - record.step)
        seconds = dict(self.durations).get(record.step)
        if record is before or not record.timed or of_record in self.untimed or seconds is None:
            return {}, -1.0
        waits = {
            name: record.exposed_s.get(f"tier {tier}", 0.0)
            for tier, name in enumerate(self.plan.cluster.tier_names)
        } | {"optim": record.exposed_s.get("optim", 0.0)}
        return waits, max(0.0, seconds - sum(waits.values()))

    def finish(self, pending: _Pending) -> None:
        """A step's loss has arrived from all ranks."""
        loss, said = pending.said()
        self.ending |= any(one.asked_to_end for one in said)
        busy, memory = [one.busy_s for one in said], [one.memory_bytes for one in said]
        for line in self.watch.note(busy, memory):
            self.watcher.on_remark(f"step {pending.step}: {line}")
        if self.plan.clip:
            self.note_norm(pending.step, pending.norm, pending.norms)
        skipped = self.skipped.get(pending.step, "")
        if not math.isfinite(loss) and not skipped:
            raise UserError(f"the loss of step {pending.step} is {loss}{self.blamed()}; try a lower --lr")
        self.losses.append(loss)
        tokens = self.plan.batch.global_batch * self.workload.seq_len
        stats = StepStats(
            *(pending.step, loss, pending.step_s, pending.exposed_comm_s, tokens),
            self.peak_memory_bytes,
            skipped,
            pending.rounding,
        )
        if pending.step >= self.start.step + WARM_UP_STEPS and pending.step not in self.untimed:
            self.timed.append(stats)
        self.untimed.discard(pending.step - len(self.durations))
        self.last = stats
        self.watcher.on_step(stats)

    @torch.no_grad()
    def evaluate(self, step: int) -> None:
        """Mean held-out loss over all ranks, of as many batches each, no more than they trained on."""
        per_batch = self.plan.batch.micro_batch * self.workload.seq_len * self.world
        wanted = -(-self.options.heldout_tokens // per_batch)
        count = max(1, min(wanted, self.options.steps * self.plan.batch.accumulation))
        kept = [module for module in self.model.modules() if not module.training]
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64)
        for batch in self.data.heldout(count, self.rank, self.world):
            total += self.workload.loss(self.model, on_device(batch, self.device)).cpu()
        self.model.train()
        for module in kept:  # in evaluation, as a frozen BatchNorm
            module.training = False
        loss = self.over_ranks([float(total) / count])[0] / self.world
        if not math.isfinite(loss):
            raise UserError(f"the held-out loss after step {step} is {loss}; try a lower --lr")
        self.heldout.append((step, loss))
        self.watcher.on_evaluation(step, loss)

    def over_ranks(
        self, values: list[float], operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> list[float]:
        """Numbers combined over all ranks."""
        if self.world == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        self.optimizer.engine.all_reduce(tensor, "figures of all ranks", operation)
        return tensor.tolist()

    def result(self) -> RunResult:
        timed = self.timed or [self.last]
        recorded = [s.exposed_comm_s for s in timed if s.exposed_comm_s]
        names = list(recorded[0]) if recorded else []
        medians = [statistics.median(s.step_s for s in timed)]
        medians += [statistics.median(waits[name] for waits in recorded) for name in names]
        step_s, *exposed = (total / self.world for total in self.over_ranks(medians))
        return RunResult(
            steps=self.options.steps,
            resumed_from=self.start.step,
            losses=tuple(self.losses),
            step_s=step_s,
            exposed_comm_s=dict(zip(names, exposed, strict=True)),
            tokens_per_s=timed[0].tokens / step_s,
            peak_memory_bytes=self.peak_memory_bytes,
            heldout_losses=tuple(self.heldout),
            unigram_entropy_nats=None if self.corpus is None else self.corpus.unigram_entropy_nats,
            unplanned_steps=self.unplanned,
            skipped_steps=len(self.skipped),
            recorded=self.recording.gather() if self.options.record_steps else {},
            unsaved=self.unsaved,
            groups=self._groups(),
        )

    def _groups(self) -> GroupsResult | None:
        relaxed = self.optimizer.engine.relaxed
        if relaxed is None:
            return None
        self.optimizer.engine.synchronize()
        return GroupsResult(relaxed.group, relaxed.applied, relaxed.missed, relaxed.waited_s)


@dataclass(frozen=True)
class _Said:
    """What a rank tells the others of a step, beside its loss; ``busy_s`` is below 0 where it is not
    known."""

    asked_to_end: float
    busy_s: float
    memory_bytes: float


class _Pending:
    """A step that has ended, while its loss is on its way between ranks.

    One small all-reduce: the sum of losses, and each rank's own numbers in a place of their own.
    """

    def __init__(
        self,
        step: int,
        loss: Tensor,
        step_s: float,
        exposed_comm_s: Mapping[str, float],
        said: _Said,
        rank: int,
        world: int,
        route: Callable[[Sequence[int]], str],
        norm: Tensor,
        norms: Tensor,
        rounding: Mapping[str, float],
    ) -> None:
        """``norm``, ``norms``: of the gradients, and this rank's one by one, which nobody has waited for."""
        self.rounding = rounding
        self.step, self.step_s, self.exposed_comm_s = step, step_s, exposed_comm_s
        mine = torch.zeros(world, 3, dtype=torch.float64)
        mine[rank] = torch.tensor([said.asked_to_end, said.busy_s, said.memory_bytes], dtype=torch.float64)
        self._world, self._route, self.norm, self.norms = world, route, norm, norms
        if loss.is_cuda:  # from other memory the host would wait for all that the device has to do
            mine = mine.pin_memory()
        self._numbers = torch.cat([loss.view(1), mine.view(-1).to(loss.device, non_blocking=True)])
        self._work = dist.all_reduce(self._numbers, async_op=True) if dist.is_initialized() else None
        self._arrives = self._on_its_way(loss.device) if loss.is_cuda else None

    def _on_its_way(self, device: torch.device) -> tuple[Tensor, torch.cuda.Event]:
        """The numbers, and the norm behind them, to the host, beside the steps that follow on this stream:
        who read them here would wait for those."""
        aside = _stream_for(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            if self._work is not None:
                self._work.wait()
            read = [self._numbers, self.norm.double().view(1)] if self.norm.is_cuda else [self._numbers]
            numbers = torch.cat(read)
            arrives = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            arrives.copy_(numbers, non_blocking=True)
            here = torch.cuda.Event()
            here.record(aside)
        return arrives, here

    def said(self) -> tuple[float, list[_Said]]:
        """The mean loss, and every rank's numbers."""
        found = self._numbers
        with named(f"the mean loss of step {self.step}: all-reduce", self._route):
            if self._arrives is not None:
                found, here = self._arrives
                here.synchronize()
            elif self._work is not None:
                self._work.wait()
        if self.norm.is_cuda:
            self.norm = found[-1]
        loss, *numbers = found.tolist()
        return loss / self._world, [_Said(*numbers[at : at + 3]) for at in range(0, 3 * self._world, 3)]


@cache
def _stream_for(device: torch.device) -> torch.cuda.Stream:
    """Of what the host reads of a step while the next one runs."""
    return torch.cuda.Stream(device)


def learning_rate(step: int, options: RunOptions) -> float:
    """Linear warm-up over a tenth of the run (at most 100 steps), then a cosine down to a tenth."""
    warm_up = min(100, max(1, options.steps // 10))
    if step < warm_up:
        return options.lr * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, options.steps - warm_up)
    return options.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


def _units(names: Sequence[str]) -> str:
    """At most three of them by name."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"unit{'s' * (len(names) != 1)} {', '.join(names[:3])}{more}"
