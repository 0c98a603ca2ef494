"""Ties a model's hooks to a schedule: a micro-batch follows the recorded uses, or is run unscheduled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hzplan.core.hierarchy import Mesh
from hzplan.core.schedule import Kind, Schedule, Task, Use
from hzplan.errors import UserError
from hzplan.models.hooks import Phase, backward_is_running
from hzplan.runtime.backends.groups import job_timeout
from hzplan.runtime.evaluation import Evaluation
from hzplan.runtime.executor import Executor, Streams
from hzplan.runtime.faults import named
from hzplan.runtime.hang_watch import SHARE, HangWatch, end_process
from hzplan.runtime.launcher import Device, Launcher
from hzplan.runtime.relaxed.sync import GroupSync
from hzplan.runtime.rounding import MOST_ERROR, RoundingGuard
from hzplan.runtime.step_state import StepState
from hzplan.runtime.tasks import Tasks
from hzplan.runtime.turns import Called, Turns, completions, copies, turns
from hzplan.runtime.unit import UnitState
from hzplan.runtime.world import MAX, SUM, World

UPDATING = (
    *(Kind.FETCH, Kind.UPDATE, Kind.STORE),
    *(Kind.ASSEMBLE, Kind.ORTHOGONALIZE, Kind.RETURN, Kind.APPLY),
)
"""The kinds of tasks that update parameters."""

MOST_UNFOLLOWED = 3
"""Steps in a row that follow nothing of the schedule, until that is said."""
ROUNDING = "comparing what rounding costs"
THROUGH_NO_OUTPUT = (
    "a backward brought gradients that came through no output of the model, as a penalty on its parameters "
    "brings them: add it to the loss, before one backward()"
)
BETWEEN_STEPS = "parameters can be read between steps only: after step(), before the next forward"


class Engine:
    """One rank's side of a plan. Implements ``hzplan.models.hooks.Listener``; used by the compute thread."""

    def __init__(
        self,
        tasks: Tasks,
        mesh: Mesh,
        device: torch.device,
        world: World,
        rounding: RoundingGuard,
        streams: Streams = Streams.TIERS,
        tier_names: tuple[str, ...] = (),
        queues: Device | None = None,
    ) -> None:
        """``queues``: the device where it queues work; else background tasks run on threads."""
        self.tasks, self.rounding = tasks, rounding
        self.units, self.updates, self.schedule = tasks.units, tasks.updates, tasks.schedule
        units, schedule = tasks.units.values(), tasks.schedule
        self.mesh, self.device, self.world, self._tier_names = mesh, device, world, tier_names
        self.detach: Callable[[], None] = lambda: None
        self._streams, self._queues = streams, queues
        self._watch = self._hang_watch() if queues is not None else None
        self.executor = self._new_executor(schedule)
        self._evaluation: Evaluation | None = None  # made for the first forward without gradients
        self._unit_of = {
            id(parameter): unit for unit in units for b in unit.buckets for parameter in b.parameters
        }
        self._needs = [schedule.reads(schedule.use(task)) for task in schedule.compute]  # by position
        reductions = (task for task in schedule.tasks if task.kind in (Kind.REDUCE, Kind.FINAL_REDUCE))
        self._reduced_at = {task.position: task.units for task in reductions}
        self._keep_whole = {name for name, unit in self.units.items() if not unit.grad_sharded}
        self._completed_at = completions(schedule, self._keep_whole, self.executor.launches)
        backwards = (number for number, use in enumerate(schedule.uses) if use.phase == "backward")
        self._first_backward = next(backwards, -1)  # of a micro-batch: all units it reads have been read
        self._released_at, self._allocated_after = copies(schedule)
        self._turns = self._new_turns()
        self._passed_over: frozenset[Called] = frozenset()
        self._trainable = tuple(u for units in schedule.completed_at.values() for u in units)
        self._with_sums = [name for name in self._trainable if self.units[name].has_sums]
        self._new_step()
        self._calls_outside = 0  # of modules, since the schedule was left; of those that take collectives
        self._is_sharded = any(bucket.sharded for unit in units for bucket in unit.buckets)
        self._step_task = next(task for task in schedule.tasks if task.kind is Kind.STEP)
        self._update_tasks = [task for task in schedule.tasks if task.kind is Kind.UPDATE]
        self._updating_tasks = [task for task in schedule.tasks if task.kind in UPDATING]
        self._unfollowed = 0  # steps in a row
        self._all_before_step = False  # whether all forwards that may go back are from before a step
        self._warned = False  # of a step with fewer micro-batches than planned
        gathers = [
            task for task in schedule.tasks if task.kind is Kind.PARAM_GATHER and not self.tasks.idle(task)
        ]
        # Where the next step gathers what this one updates, until then parameters are partly old.
        self._last_param_gather = gathers[-1] if schedule.order is not None and gathers else None
        self._parameters_are_old = False

    def route_to(self, ranks: Sequence[int]) -> str:
        """Names of the network tiers between this rank and ``ranks``, as a phrase for messages."""
        if self.world.is_part:  # the job numbers its ranks otherwise
            return ""
        tiers = sorted({self.mesh.tier_between(self.world.rank, rank) for rank in ranks})
        return f" (over {' and '.join(self._tier_names[tier] for tier in tiers)})" if self._tier_names else ""

    def _new_executor(self, schedule: Schedule) -> Executor | Launcher:
        if self._queues is not None:
            return Launcher(
                *(schedule, self.tasks.run, self.tasks.idle, self._queues, self._streams),
                *(self._tier_names, self._watch),
            )
        depth = self.tasks.most_in_flight if self._streams is Streams.TIERS else 1
        return Executor(
            *(schedule, self.tasks.run, self.tasks.idle, self._streams, depth, self._tier_names),
            begin=self.tasks.messages.begin,
        )

    def _new_turns(self, *, all_of_them: bool = False) -> Turns:
        """The turns at whose begin or end there is something to do."""
        schedule = self.schedule
        begins = {*self._released_at}
        ends = {*self._completed_at, *self._allocated_after}
        for task in schedule.compute:
            sharded = (self.units[unit].is_sharded for unit in self._needs[task.position])
            if self.executor.waits(task) or task.index == schedule.options_read or any(sharded):
                begins.add(task.position)
            if self.executor.launches(task) or any(sharded):
                ends.add(task.position)
        return turns(schedule.uses, schedule.accumulation, begins, ends, all_of_them=all_of_them)

    def follow_every_use(self) -> None:
        """Look at all uses from the next step on, for who wants to see them; between steps."""
        if any(self._turns.passed_over):
            self._turns = self._new_turns(all_of_them=True)

    def passes_over(self, unit: str, phase: Phase) -> bool:
        """Whether nothing follows from a unit's call in this micro-batch."""
        return (unit, phase) in self._passed_over

    def _hang_watch(self) -> HangWatch | None:
        """A watch over the device's tasks, where the job has a timeout."""
        if self.world.size == 1 or (timeout := job_timeout()) is None:
            return None
        watch = HangWatch(SHARE * timeout.total_seconds(), partial(end_process, route=self.route_to))
        watch.start()
        return watch

    def all_reduce(self, values: Tensor, purpose: str, operation: Any = SUM) -> None:
        """The sum, or what ``operation`` is, of all ranks' values on every rank, in place; errors say
        ``purpose`` and the way to the ranks that are missing."""
        with named(f"{purpose}: all-reduce", self.route_to):
            self.world.all_reduce(values, operation)

    def copies_in_time(self, unit: str) -> bool:
        """Whether tasks copy the activations of a unit's forward that is under way."""
        return (turn := self.turn) is not None and turn.unit == unit

    @property
    def turn(self) -> Use | None:
        """The recorded use whose turn it is, or was before others that have none; None outside of the
        schedule."""
        if not self.step_state.in_turn:
            return None
        return self.schedule.use(self.schedule.compute[self.step_state.position])

    @property
    def turn_after(self) -> Use | None:
        """The use with the next turn, where uses between have none."""
        position = self.step_state.position
        following = self._turns.following[position]
        if following == position + 1 or following == len(self.schedule.compute):
            return None
        return self.schedule.use(self.schedule.compute[following])

    # What the hooks report.

    def enter(self, unit: str, phase: Phase) -> None:
        """A unit's turn begins: end the turn before, wait until the unit is unsharded."""
        if phase == "forward" and self.step_state.in_backward and not backward_is_running():
            warnings.warn("a backward pass did not end: the gradients of this step are dropped", stacklevel=2)
            self.abandon_step()
        step = self.step_state
        training = torch.is_grad_enabled() or phase == "backward"
        if phase == "backward" and self._all_before_step:
            raise RuntimeError(
                "a backward pass of a forward from before optimizer.step(), which has changed the parameters "
                "since; call backward first"
            )
        if training:
            self._all_before_step = False
            if phase == "forward":
                self._require_seen()
        if training and step.micro_batch >= self.schedule.accumulation:
            raise RuntimeError(f"call optimizer.step() after {self.schedule.accumulation} backward passes")
        step.in_backward |= phase == "backward"
        if training and not step.in_micro_batch and not step.micro_batch:
            self.meet_groups()
        following = self._turns.following[step.position]  # before a micro-batch's first use it says nothing
        if training and not step.in_micro_batch:
            step.in_micro_batch = True
            following = step.micro_batch * len(self.schedule.uses)
            if not step.scheduled and self._expected(following, unit, phase):
                self._enter_schedule(following)
        # Also a unit that is called without gradients between others with them.
        if (training or step.in_micro_batch) and step.scheduled and self._expected(following, unit, phase):
            self._end_turn()
            self._begin_turn(following)
        else:
            self._enter_unscheduled(unit, training=training)

    def gradient(self, parameter: nn.Parameter) -> None:
        """A gradient is complete: it goes to its bucket, where that is its unit's own for now.

        A buffer that units share may be another one's before the turn after which all of a unit's gradients
        are there: an early gradient stays in ``parameter.grad``.
        """
        unit, step = self._unit_of[id(parameter)], self.step_state
        step.in_backward = True
        if step.micro_batch >= self.schedule.accumulation:  # what is being sent must not change
            raise RuntimeError(THROUGH_NO_OUTPUT)
        if unit.name in step.complete or unit.name not in self._trainable:
            self._require_expected(unit)
        in_backward = step.position % len(self.schedule.uses) >= self._first_backward
        is_own = unit.name in self._keep_whole and in_backward  # who read the last step's has, by then
        if step.scheduled and (is_own or unit.name in self._completed_at.get(step.position, ())):
            # A backward inside of the backward, as a checkpoint's, brings a part of the gradient by itself.
            again = id(parameter) in step.delivered
            unit.take_gradient(parameter, accumulate=step.micro_batch > 0, again=again)
            step.delivered.add(id(parameter))
            step.used.add(id(parameter))

    def comes_by_itself(self, parameter: Tensor) -> bool:
        """Whether ``gradient`` need not be called for a trained parameter."""
        return self._unit_of[id(parameter)].comes_by_itself(parameter)

    def backward_end(self) -> None:
        """A micro-batch is over."""
        step = self.step_state
        self._passed_over = frozenset()
        if step.scheduled and step.position == (step.micro_batch + 1) * len(self.schedule.uses) - 1:
            self._end_turn()
        else:
            if step.scheduled:
                self._call_outside(training=True)
            self._leave_schedule()
            self._reduce_unscheduled()
        for trained in self._trainable:
            self._complete(trained)
        for unit in self.units.values():
            if unit.left_over():
                self._require_expected(unit)
            if (name := unit.unfrozen()) is not None:
                raise RuntimeError(
                    f"{name} has a gradient, and was frozen when the plan was made; profile and solve again"
                )
        step.end_micro_batch()

    def abandon_step(self) -> None:
        """Drop the gradients of the step that is open, if there are any, and be between steps again.

        Every rank calls it, or none. Units that were updated in backward cannot be taken back: UserError.
        """
        step = self.step_state
        if not (step.micro_batch or step.in_backward or self._backward_was_unseen):
            return  # loops call zero_grad() at any place before backward
        if self._updated_in_backward():
            raise UserError(
                "the step's gradients cannot be dropped: under a plan without clipping backward has updated "
                "units with them already; start again from a checkpoint, or solve with --clip"
            )
        self.world.meet("throwing a step away, which every rank does or none")
        self._leave_schedule()
        self._unshard_only(())
        self.executor.skip_step()
        # Who has sent what others never will waits for it above, and is named here.
        self.world.meet("going on after a step that was thrown away")
        for unit in self.units.values():
            unit.drop_gradients()
        self._end_step()

    def _require_expected(self, unit: UnitState) -> None:
        """A gradient has come: the schedule must have a place for it, and not have sent it yet."""
        if unit.name not in self._trainable:
            raise RuntimeError(
                f"unit {unit.name!r} has a gradient, but took no part when the model was recorded; "
                "profile and solve with a step that uses it, or set requires_grad=False"
            )
        if unit.name in self.step_state.complete:
            raise RuntimeError(
                f"a gradient of unit {unit.name!r} came after the turn that completed it when the model was "
                "recorded; profile and solve again"
            )

    def wait_gradients(self) -> None:
        """Return when every gradient of this step is reduced."""
        self._require_complete()
        self._require_clip("gradients are clipped")
        self._start_step_task()

    @property
    def unused_here(self) -> list[int]:
        """Of the parameters without a gradient in this step, on this rank: places in ``updates.trained``."""
        used = self.step_state.used
        return [place for place, one in enumerate(self.updates.trained) if id(one) not in used]

    def step(self) -> None:
        """The user's optimizer.step(): launch updates and the gathering of parameters."""
        self._require_complete()
        self._start_step_task()
        if self._updated_in_backward():
            self.updates.check_options()
        else:
            self.updates.take_over_options()
        if self.step_state.scheduled:
            self.executor.end(self._step_task)
            self._parameters_are_old = self._last_param_gather is not None
        else:
            self._update_unscheduled()
        self.updates.steps += 1
        self._unfollowed = 0 if self.step_state.followed else self._unfollowed + 1
        if self._unfollowed == MOST_UNFOLLOWED:
            warnings.warn(
                f"{MOST_UNFOLLOWED} steps followed nothing of the plan's schedule: they are right, and no "
                "message is beside compute. Profile the model as it is called now, and solve again; what is "
                "called first under torch.no_grad(), as a frozen part, leave out of the plan's model",
                stacklevel=5,  # of the loop's call
            )
        self._end_step()
        self._all_before_step = True
        if self.relaxed is not None:
            self.relaxed.after_step(self.updates.steps, self.synchronize, self.refresh_parameters)
        if self.rounding.due(self.updates.steps):
            self._look_at_rounding()

    def _look_at_rounding(self) -> None:
        """Give up what is rounded too coarsely, on all ranks at once: of what is under way every rank ends
        what it has begun, in the form that it had."""
        self.executor.synchronize()
        if not self.rounding.look(self.device, partial(self.all_reduce, purpose=ROUNDING, operation=MAX)):
            return
        self.tasks.messages.forget()
        assert self.rounding.given_up is not None
        tier, error = self.rounding.given_up
        if self.world.rank == 0:
            name = self._tier_names[tier] if self._tier_names else f"tier {tier}"
            warnings.warn(
                f"rounding of what travels on the {name} has an error of {error:.0%} of the values, at most "
                f"{MOST_ERROR:.0%} is borne: from now on everything travels exactly, and steps take longer "
                "than planned",
                stacklevel=5,  # of the loop's call
            )

    def skip_step(self) -> None:
        """Instead of ``step``: gradients are left unused."""
        self._require_complete()
        self._require_clip("a step is skipped")
        self._start_step_task()
        self._unshard_only(())
        self.executor.skip_step()
        self._end_step()
        if self.relaxed is not None:  # rounds go on as if it had been a step
            self.updates.tell_groups_of_skip()
            self.refresh_parameters()
            self.relaxed.after_step(self.updates.steps, self.synchronize, self.refresh_parameters)

    def _end_step(self) -> None:
        self.updates.drop_clipping()
        self._new_step()

    def _new_step(self) -> None:
        self.step_state, self._passed_over = StepState(), frozenset()
        self.updates.used_here = self.step_state.used

    def _require_clip(self, what: str) -> None:
        if not self.schedule.clip:
            raise UserError(
                f"{what}, but the plan was solved without clipping and updates units during backward; solve "
                "with --clip"
            )

    def _start_step_task(self) -> None:
        """Wait for the gradients; unscheduled they have been reduced already."""
        if self.step_state.scheduled and not self.step_state.step_task_started:
            self.executor.start(self._step_task)
            self.step_state.step_task_started = True

    def _updated_in_backward(self) -> set[str]:
        """The units whose updates this step has launched already, as plans without clipping do."""
        if self.schedule.clip:
            return set()
        return {name for task in self._update_tasks if self.executor.ran(task) for name in task.units}

    def _require_complete(self) -> None:
        """All gradients of this step are sent; fewer micro-batches than planned will do."""
        wanted, step = self.schedule.accumulation, self.step_state
        self._require_seen()
        if step.in_backward:
            raise RuntimeError("the last backward pass did not end; call optimizer.zero_grad() first")
        if not step.micro_batch:
            raise RuntimeError(f"step() without a backward pass; the plan accumulates {wanted}")
        if any(unit.left_over() for unit in self.units.values()):
            raise RuntimeError(THROUGH_NO_OUTPUT)
        if step.micro_batch < wanted and not self._warned:
            self._warned = True
            warnings.warn(
                f"step() after {step.micro_batch} backward passes, but the plan accumulates {wanted}: right "
                "for the rest of an epoch, and slower than planned; for all steps solve again",
                stacklevel=5,  # of the loop's call
            )
        if step.micro_batch < wanted:
            step.micro_batch = wanted - 1
            self.backward_end()  # as of one more that brings nothing

    @property
    def _backward_was_unseen(self) -> bool:
        """Whether a backward of this micro-batch is over that told nothing: it raised, or went through a part
        of the model in which uses have no turns."""
        step = self.step_state
        return (
            (step.in_micro_batch and not step.in_backward)
            and not backward_is_running()
            and any(unit.left_over() for unit in self.units.values())
        )

    def _require_seen(self) -> None:
        """What a backward left that nobody knows the end of is no micro-batch's gradient."""
        if self._backward_was_unseen:
            raise RuntimeError(
                "gradients are left of a backward that raised, or that went through a part of the model "
                "alone: call optimizer.zero_grad() after the first, and bring the loss of a part into the "
                "one backward() of its micro-batch"
            )

    # Scheduled micro-batches.

    def _expected(self, position: int, unit: str, phase: str) -> bool:
        uses = self.schedule.uses
        if position // len(uses) != self.step_state.micro_batch:
            return False
        use = uses[position % len(uses)]
        return use.unit == unit and use.phase == phase

    def _enter_schedule(self, position: int) -> None:
        """Begin the step at position 0, or go on with a later micro-batch after something unscheduled.

        Units that the schedule would have prefetched before this micro-batch are unsharded here.
        """
        if self._calls_outside:
            calls, self._calls_outside = self._calls_outside, 0
            self.world.meet(f"going on with the schedule after {calls} calls of modules outside of it")
        self._unshard_only(())
        if position == 0:
            self.executor.begin_step()
        else:
            compute = self.schedule.compute[position]
            self.executor.resume(compute)
            gathered_later = {
                (name, task.position)
                for task in self.schedule.tasks[compute.index :]
                if task.kind is Kind.UNSHARD
                for name in task.units
            }
            next_read: dict[str, int] = {}
            for reading in range(position, len(self._needs)):
                for name in self._needs[reading]:
                    next_read.setdefault(name, reading)
            self._unshard_only([name for name, at in next_read.items() if (name, at) not in gathered_later])
        self.step_state.open = self.step_state.scheduled = True

    def _begin_turn(self, position: int) -> None:
        task = self.schedule.compute[position]
        self.executor.start(task)
        if task.index == self.schedule.options_read:
            self.updates.take_over_options()
        for name in self._needs[position]:
            self.units[name].to_unsharded()
        for name in self._released_at.get(position, ()):
            if name in self.tasks.saved:
                self.tasks.saved[name].release()
        micro_batch, use = divmod(position, len(self.schedule.uses))
        if use == 0:
            self._passed_over = self._turns.passed_over[micro_batch]
        if use == self._first_backward and not torch.is_grad_enabled():
            for name in self._with_sums:  # a backward that is to be differentiated adds up elsewhere
                self._begin_gradients(name)
                self.units[name].offer_sums()
        self.step_state.position, self.step_state.in_turn = position, True
        self.step_state.followed = True

    def _end_turn(self) -> None:
        """Reshard the units that the window does not keep, complete the gradients that are reduced now."""
        step = self.step_state
        if not step.in_turn:
            return
        position, step.in_turn = step.position, False
        kept = self._needs[position + 1] if position + 1 < len(self._needs) else ()
        for name in self._needs[position]:
            if name not in kept:
                self.units[name].to_sharded()
        for name in self._completed_at.get(position, ()):
            self._complete(name)
        step.reduced.update(self._reduced_at.get(position, ()))
        for name in self._allocated_after.get(position, ()):
            if name in self.tasks.saved:
                self.tasks.saved[name].allocate()
        self.executor.end(self.schedule.compute[position])

    def _complete(self, name: str) -> None:
        """Nothing more comes: the gradients of a unit that are not in its buckets yet go there."""
        step, unit = self.step_state, self.units[name]
        if name not in step.complete:
            self._begin_gradients(name)
            step.used |= unit.take_rest(step.delivered, accumulate=step.micro_batch > 0)
            step.complete.add(name)
            if step.micro_batch == self.schedule.accumulation - 1:
                unit.end_gradients(step.used)

    def _begin_gradients(self, name: str) -> None:
        """Once in a step; whoever read gradients of the step before has, once compute has read the unit."""
        if name not in self.step_state.begun:
            self.step_state.begun.add(name)
            self.units[name].begin_gradients()

    # Unscheduled: everything on the compute thread, in program order, which is the same on every rank.

    def _leave_schedule(self) -> None:
        """Run the rest of this micro-batch, or until the next one begins, unscheduled."""
        self.executor.synchronize()
        self._gather_old_parameters()
        self._passed_over = frozenset()
        self.step_state.scheduled = self.step_state.in_turn = False

    def _gather_old_parameters(self) -> None:
        """Gather what the last step has updated, unless this step's tasks have done it; nothing is under
        way."""
        if self._gathers_old:
            for name in self._trainable:
                self._run_on_tiers(Kind.PARAM_GATHER, name)
        self._parameters_are_old = False

    @property
    def _gathers_old(self) -> bool:
        """Whether parameters are partly old, and no task of this step has gathered them."""
        task = self._last_param_gather
        ran = task is not None and self.step_state.scheduled and self.executor.ran(task)
        return self._parameters_are_old and not ran

    def _call_outside(self, *, training: bool) -> None:
        """A module is called outside of the schedule: on every rank or none where collectives follow.

        Else a rank's collectives could meet other ones of the same size that other ranks' schedules launch.
        """
        if training or self._is_sharded or self._gathers_old:
            if not self._calls_outside:
                self.world.meet("leaving the schedule, which every rank does or none")
            self._calls_outside += 1

    def _enter_unscheduled(self, unit: str, *, training: bool) -> None:
        self._call_outside(training=training)
        if not training and self._is_sharded and self._evaluates(unit):
            return
        if training or self._is_sharded:
            self._leave_schedule()
        else:  # a rank may look at whole parameters by itself, and goes on with the schedule
            self.executor.synchronize()
            self._gather_old_parameters()
        if training and not self.step_state.open:
            self.executor.step += 1
            self.step_state.open = True
        wanted = self.schedule.requires.get(unit, (unit,))
        updated = self._updated_in_backward() if self.step_state.open else set()
        for name in wanted:
            if name in updated:
                raise UserError(
                    f"unit {name!r} is used between its last backward and step(), but under a plan without "
                    "clipping it has been updated already; evaluate after step(), or solve with --clip"
                )
        self._unshard_only(wanted)

    def _evaluates(self, unit: str) -> bool:
        """Whether a call without gradients is one of a recorded forward, which prefetches as a step does."""
        if self._evaluation is None:
            self._evaluation = Evaluation(self.schedule, self.units, self._new_executor)
        if self._evaluation.follows(unit):
            self._evaluation.go_on()
            return True
        if not self._evaluation.begins_with(unit) or (self.step_state.open and self._updated_in_backward()):
            return False
        self._leave_schedule()
        self._unshard_only(())
        self._evaluation.begin()
        return True

    def _unshard_only(self, names: Iterable[str]) -> None:
        if self._evaluation is not None:
            self._evaluation.end()
        wanted = list(names)
        for name, unit in self.units.items():
            if name not in wanted:
                unit.to_sharded()
        for name in wanted:
            unit = self.units[name]
            if not unit.is_unsharded:
                self._run_on_tiers(Kind.UNSHARD, name)
                unit.to_unsharded()

    def _reduce_unscheduled(self) -> None:
        """Reduce this micro-batch's gradients that the schedule has not reduced.

        In the order in which they are completed, the same on all ranks: so the units with gradients already
        in their buffer go first, and nobody else uses it until they are reduced.
        """
        self._unshard_only(())
        step = self.step_state
        final = step.micro_batch == self.schedule.accumulation - 1
        kind = Kind.FINAL_REDUCE if final else Kind.REDUCE
        position = step.micro_batch * len(self.schedule.uses)
        for name in [name for name in self._trainable if name not in step.reduced]:
            self._complete(name)
            self._run_on_tiers(kind, name, position)
            if final:
                self._run_on_tiers(Kind.GRAD_GATHER, name, position)

    @torch.no_grad()
    def _update_unscheduled(self) -> None:
        self._unshard_only(())  # an evaluation may have left old values unsharded
        for task in self._updating_tasks:
            if not self.executor.ran(task) and not self.tasks.idle(task):
                self.tasks.run(task)
        for name in self._trainable:
            self._run_on_tiers(Kind.PARAM_GATHER, name)
        self.executor.skip_step()

    @torch.inference_mode(False)  # what is allocated meanwhile is used in training, too
    @torch.no_grad()
    def _run_on_tiers(self, kind: Kind, name: str, position: int = 0) -> None:
        """Reductions go from the first tier to the last, gathers back."""
        tiers = range(len(self.mesh.tiers))
        for tier in tiers if kind in (Kind.REDUCE, Kind.FINAL_REDUCE) else reversed(tiers):
            self.tasks.run(Task(-1, kind, "", (name,), tier, position))

    def synchronize(self) -> None:
        """Return when everything that the last step launched is done; RuntimeError inside of a step."""
        if self.step_state.open:
            raise RuntimeError(BETWEEN_STEPS)
        self.executor.synchronize()
        self._gather_old_parameters()

    @torch.no_grad()
    def refresh_parameters(self) -> None:
        """Gather parameters from master weights that were written to from outside; every rank calls it."""
        self.synchronize()
        self._unshard_only(())
        for name in self._trainable:
            for bucket in self.units[name].trainable_buckets:
                bucket.copy_master_to_model()
            self._run_on_tiers(Kind.PARAM_GATHER, name)

    @property
    def relaxed(self) -> GroupSync | None:
        """This rank's part in a tier that nobody waits for."""
        return self.updates.relaxed

    def meet_groups(self, done: int = 0) -> int:
        """Come in to the other groups of a relaxed tier, if there is one, once; every rank calls it, between
        steps. ``done``: steps that this group has done before, unless a checkpoint of such a run was loaded.
        Returns how many updates the group has done, as its timetable counts: those of the others,
        whose parameters it takes, where they train already."""
        if (relaxed := self.relaxed) is None:
            return 0
        if not relaxed.entered:
            self.synchronize()
            relaxed.enter(done, self.refresh_parameters)
        return relaxed.base + self.updates.steps

    def close(self) -> None:
        """End the threads. The model is not usable afterwards."""
        self.detach()
        if self.relaxed is not None:
            self.executor.synchronize()
            self.relaxed.close()
        if self._evaluation is not None:
            self._evaluation.executor.close()
        self.executor.close()

    @contextmanager
    def unsharded(self, unit: str) -> Iterator[UnitState]:
        """A unit whose parameters are unsharded inside the block; between steps only."""
        self.synchronize()
        self._unshard_only([unit])
        yield self.units[unit]
        self._unshard_only(())
