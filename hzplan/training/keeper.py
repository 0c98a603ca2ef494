"""A run's checkpoints: where it begins, saving now and then, and saving when the run must end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from torch import nn

from hzplan.checkpoint.checkpoints import Checkpoints
from hzplan.checkpoint.from_dcp import load_dcp
from hzplan.checkpoint.position import START, Position
from hzplan.checkpoint.weights import take as take_weights
from hzplan.errors import JobFailed, Preempted
from hzplan.formats.plan import Plan
from hzplan.runtime.optimizer import ShardedOptimizer
from hzplan.training.run import RunOptions


class Keeper:
    """One rank's part in the checkpoints of a run; without ``options.saving`` there are none."""

    def __init__(self, options: RunOptions, plan: Plan, remark: Callable[[str], None]) -> None:
        self._options, self._plan, self._remark = options, plan, remark
        self._saving = saving = options.saving
        self._checkpoints = (
            None
            if saving is None
            else Checkpoints(saving.folder, keep=saving.keep, model_name=plan.model.name)
        )
        self._start = START
        self._failed: str | None = None  # why the newest save is none
        self._saves, self._kept = 0, False  # saves that were begun; whether there is any to go on from
        self.asked_to_end = False
        """Whether SIGTERM has come to this rank."""
        if saving is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._end)

    def _end(self, number: int, frame: object) -> None:
        self.asked_to_end = True

    def begin(self, model: nn.Module, optimizer: ShardedOptimizer) -> Position:
        """Where the run begins; the model and its optimizer are as they were there, or as the options have a
        run begin."""
        self._start = self._resume(model, optimizer)
        weights, from_dcp = self._options.weights, self._options.from_dcp
        if from_dcp is not None and self._start == START:
            step = load_dcp(from_dcp, model, optimizer)
            self._start = Position(step, step * self._plan.batch.global_batch)
            self._remark(
                f"going on from {from_dcp}, after {step} steps; data as after so many of this plan's, "
                f"{self._start.samples} sequences"
            )
        if weights is not None and self._start == START:
            unused = take_weights(weights, model, optimizer)
            more = f" and {len(unused) - 2} more" if len(unused) > 2 else ""
            left = f", without {', '.join(unused[:2])}{more}, which this model does not have"
            self._remark(f"beginning with the weights of {weights}{left if unused else ''}")
        return self._start

    def _resume(self, model: nn.Module, optimizer: ShardedOptimizer) -> Position:
        if self._checkpoints is None or self._saving is None or not self._saving.resume:
            return START
        loaded = self._checkpoints.load(model, optimizer)
        if loaded is None:
            self._remark(f"{self._saving.folder} has no checkpoint yet: starting from the beginning")
            return START
        for line in loaded.passed_over:
            self._remark(f"passed over: {line}")
        self._kept = True
        world = "" if loaded.same_world else " (of another world size: dropout and the like draw anew)"
        self._remark(f"going on from {loaded.path}{world}")
        if loaded.other_wire:
            self._remark(
                f"it was trained with {loaded.other_wire} between ranks, which this plan does not have: "
                "losses will not be those that the same run would have had"
            )
        return loaded.position

    def go_on_after(self, steps: int) -> Position:
        """Where the run begins when other groups have done so many steps."""
        self._start = Position(steps, steps * self._plan.batch.global_batch)
        return self._start

    def due(self, step: int) -> bool:
        """Whether the state after ``step`` steps is to be saved."""
        return self._saving is not None and (step == self._options.steps or step % self._saving.every == 0)

    def save(self, model: nn.Module, optimizer: ShardedOptimizer, step: int) -> None:
        """Between two steps, after ``step`` of them; a failed save is a remark, and training goes on where
        there is an earlier one. JobFailed where the first one has failed: a run would end with nothing."""
        if self._checkpoints is not None:
            if self._saves and not self._kept:  # at the second one all ranks know of the first
                self._checkpoints.settle()
                self.report()
                if not self._kept:
                    raise JobFailed(
                        f"the first checkpoint was not saved ({self._failed}), and there is no earlier one "
                        "to go on from; mend that, or train without --checkpoint"
                    )
            self._saves += 1
            samples = self._start.samples + (step - self._start.step) * self._plan.batch.global_batch
            self._checkpoints.save(model, optimizer, step, samples=samples)
            self.report()

    def report(self) -> None:
        """Say what became of saves that have ended."""
        for outcome in self._checkpoints.outcomes() if self._checkpoints is not None else ():
            self._failed = outcome.problem
            self._kept |= outcome.problem is None
            if outcome.problem is not None:
                self._remark(
                    f"the checkpoint after step {outcome.step} was not saved ({outcome.problem}); older ones "
                    "stay as they are"
                )

    def finish(self) -> str | None:
        """Return when nothing is being written: why the newest save is none, None where all is well."""
        if self._checkpoints is not None:
            self._checkpoints.settle()
            self.report()
        return self._failed

    def leave(self, step: int) -> None:
        """After the save after ``step`` steps: end the run, because SIGTERM has come to a rank."""
        assert self._saving is not None
        failed = self.finish()
        if failed:
            raise JobFailed(
                f"SIGTERM: the run has ended after {step} steps, which could not be saved: {failed}"
            )
        raise Preempted(
            f"SIGTERM: the run has ended after {step} steps and is saved in {self._saving.folder}; go on "
            "with --resume"
        )
