"""The optimizer that a training loop holds: steps, clipping, the search for non-finite gradients."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hzplan.errors import UserError
from hzplan.runtime.clipping import clipping, norms, square_sum
from hzplan.runtime.engine import Engine
from hzplan.runtime.faults import named
from hzplan.runtime.unit import is_absent
from hzplan.runtime.updates import NEVER
from hzplan.runtime.world import MAX, MIN


class ShardedOptimizer(Optimizer):
    """What ``hzplan.parallelize`` returns beside the model; drives an engine's steps.

    ``param_groups`` are the user's groups over this rank's pieces. A learning-rate scheduler changes them,
    and each step takes the values over. State lies in ``updates``, not in ``state``. ``norms``: 2-norms of
    this rank's gradients, one by one, at the last call of ``clip_grad_norm_``, for ``nonfinite_units``.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.updates = engine, engine.updates
        self._clipped = self._skips = False
        self.norms = torch.zeros(0)
        self._counted = [*itertools.chain.from_iterable(self.updates.counted_gradients.values())]
        self._places_of_split: list[Tensor] | None = None
        self._all_used: Tensor | None = None
        super().__init__(self.updates.param_groups, self.updates.defaults)
        self.param_groups = self.updates.param_groups  # the same list: updates see groups that are added

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Launch the update of every unit and the gathering of its parameters, and return.

        The next forward waits for what it needs. Called after the last backward of the plan's accumulation.
        Under a plan without clipping units are updated in that backward, as soon as their gradients are
        there: set learning rates before it. ``closure``, which calls backward, is called first; what it
        returns is returned.
        """
        found = None
        if closure is not None:
            with torch.enable_grad():
                found = closure()
        if self.engine.schedule.clip and not self._clipped:
            warnings.warn(
                "the plan foresees clipping, and step() came without optimizer.clip_grad_norm_ (torch's own "
                "finds no gradients to clip); without clipping solve with --no-clip, which is faster",
                stacklevel=3,  # torch wraps step()
            )
        if not self._clipped:
            self._look_for_unused()
        skips, self._clipped, self._skips = self._skips, False, False
        self.engine.skip_step() if skips else self.engine.step()
        return found

    @torch.no_grad()
    def _look_for_unused(self) -> None:
        """Find the parameters without a gradient where no norm's all-reduce has found them.

        Under a plan without clipping their units were updated in backward, as the reduced gradients said.
        """
        if not self.engine.schedule.clip:
            return
        self.engine.wait_gradients()
        here = self.engine.unused_here
        if self.updates.local_norm:
            self._leave_alone(self._absent(here))
            return
        uses = self._uses(here).clone()
        self.engine.all_reduce(uses, "comparing which parameters have gradients")
        if here:
            self._leave_alone(self._without(here, uses))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw away the gradients of a step that was not taken: of whole micro-batches, and of a backward
        that raised. Every rank calls it, or none. Between a step and the next backward it does nothing.
        ``model.zero_grad()`` does not throw them away: most gradients are in buckets, not in the parameters.

        UserError under a plan without clipping once this step has updated a unit, in backward.
        """
        self.engine.abandon_step()
        self._clipped = self._skips = False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch.amp.GradScaler asks first; refused."""
        raise UserError(
            "torch.amp.GradScaler scales what a plan has reduced and sharded already: train in bfloat16, "
            "which needs none (profile --dtype bf16), or in float32"
        )

    def state_dict(self) -> Any:
        """Refused: it would be this rank's pieces, which nothing could read under another plan."""
        raise UserError("hzplan's optimizer is sharded: save with hzplan.Checkpoints, not state_dict()")

    def load_state_dict(self, state_dict: Any) -> None:
        """Refused, as ``state_dict`` is."""
        raise UserError("hzplan's optimizer is sharded: load with hzplan.Checkpoints, not load_state_dict()")

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, skip_nonfinite: bool = False) -> Tensor:
        """Have the updates of this step scale all gradients so that their joint 2-norm is at most
        ``max_norm``; returns the norm before. Until they do, gradients are as they were reduced.

        ``skip_nonfinite``: where the norm is not finite, ``step()`` leaves parameters and optimizer state as
        they are. Fused optimizers of torch see to that on the device, and the host waits for nothing; for
        others it waits for the norm.

        Each rank takes the norm of the slice it owns at the finest level; their squares are added up over the
        world in float64. Under a plan with ``local_norm`` it takes that of all gradients, which it has. Over
        the ranks of tensor parallelism the squares of what these have in parts are added up.
        UserError under a plan without clipping, where updates wait for no norm.
        """
        self.engine.wait_gradients()
        self._clipped = True
        updates = self.updates
        here, places = self.engine.unused_here, len(updates.splits)
        self.norms = norms(self._counted, self.engine.device)
        squares = torch.stack([square_sum(of_split) for of_split in self._by_split(self.norms)])
        with named("clipping: all-reduce of the norm", self.engine.route_to):
            if updates.local_norm:
                absent = self._absent(here)
            else:
                sums = torch.cat([squares, self._uses(here)])
                self.engine.world.all_reduce(sums)
                squares = sums[:places]
                # Only where some are unused here does the host wait for the sums.
                absent = self._without(here, sums[places:]) if here else []
            for place, groups in enumerate(updates.splits):
                for group in groups:
                    dist.all_reduce(squares[place], group=group)
        self._leave_alone(absent)
        norm = squares.sum().sqrt() * updates.clip_scale  # as a call before this one leaves them
        updates.clip_scale = updates.clip_scale * clipping(norm, max_norm)
        if skip_nonfinite and updates.takes_factor:
            updates.left_out = norm.isfinite().logical_not().float()
        elif skip_nonfinite:
            self._skips = not norm.isfinite()
        return norm

    def _by_split(self, norms: Tensor) -> list[Tensor]:
        """The norms of the gradients that are split over the same groups of tensor parallelism."""
        splits = self.updates.splits
        if len(splits) == 1:
            return [norms]
        if self._places_of_split is None:
            of = [self.updates.split_of[id(gradient)] for gradient in self._counted]
            places = [[place for place, groups in enumerate(of) if groups == one] for one in splits]
            self._places_of_split = [
                torch.tensor(one, dtype=torch.int64, device=norms.device) for one in places
            ]
        return [norms[places] for places in self._places_of_split]

    def _uses(self, unused_here: Sequence[int]) -> Tensor:
        """1 for each trainable parameter with a gradient on this rank, else 0 (float64, on the device)."""
        if self._all_used is None:
            count, device = len(self.updates.trained), self.engine.device
            self._all_used = torch.ones(count, dtype=torch.float64, device=device)
        if not unused_here:
            return self._all_used
        uses = self._all_used.clone()
        uses[torch.tensor(unused_here, device=uses.device)] = 0.0
        return uses

    def _without(self, unused_here: Sequence[int], uses: Tensor) -> list[int]:
        """Those parameters for which no rank has a gradient. ``uses``: the ranks that have one, by parameter;
        what has one here is surely used."""
        found = uses.tolist()
        return [place for place in unused_here if not found[place]]

    def _absent(self, unused_here: Sequence[int]) -> list[int]:
        """The same where this rank has all reduced gradients, which say so themselves."""
        if not unused_here:
            return []
        with_elements = [place for place, one in enumerate(self.updates.trained) if one.numel()]
        gradients = dict(zip(with_elements, self._counted, strict=True))
        return [place for place in unused_here if place in gradients and is_absent(gradients[place])]

    def _leave_alone(self, places: Sequence[int]) -> None:
        """Have the updates leave parameters alone, as torch does where there is no gradient."""
        self.updates.unused = frozenset(id(self.updates.trained[place]) for place in places)

    def skip_step(self) -> None:
        """Instead of ``step``: leave parameters and optimizer state as they are; every rank calls it.

        UserError under a plan without clipping, which has updated them in backward.
        """
        self.engine.skip_step()
        self._clipped = self._skips = False

    def first_nonfinite(self) -> tuple[int, list[str]] | None:
        """Under a plan without clipping: where gradients were not finite first, on any rank; None: nowhere.

        The step, counted from 0, and the units as ``nonfinite_units`` lists them. Every rank calls it,
        between steps.
        """
        self.engine.executor.synchronize()
        names = [*reversed(self.updates.counted_gradients)]
        firsts = torch.stack([self.updates.first_nonfinite[name] for name in names])
        self.engine.all_reduce(firsts, "looking for gradients that are not finite", MIN)
        first = int(firsts.min())
        return (
            None if first == NEVER else (first, [n for n, f in zip(names, firsts, strict=True) if f == first])
        )

    @torch.no_grad()
    def nonfinite_units(self, norms: Tensor | None = None) -> list[str]:
        """The units with a gradient that is infinite or not a number on any rank, the model's last first.

        Backward gets there in that order, so the first one is the nearest to the cause. Every rank calls it,
        for when a norm or a loss is not finite. ``norms``: what ``self.norms`` was in the step in question;
        without them it reads all gradients, and is called after ``clip_grad_norm_`` or between steps.
        """
        counted = self.updates.counted_gradients
        if norms is None:
            self.engine.executor.synchronize()
            bad = [not grad.isfinite().all() for grad in self._counted]
        else:
            bad = norms.isfinite().logical_not().tolist()
        ends = [*itertools.accumulate(map(len, counted.values()))]
        of_unit = {
            name: any(bad[end - len(grads) : end])
            for (name, grads), end in zip(counted.items(), ends, strict=True)
        }
        names = [*reversed(counted)]
        found = torch.tensor([of_unit[name] for name in names], dtype=torch.uint8, device=self.engine.device)
        self.engine.all_reduce(found, "looking for gradients that are not finite", MAX)
        return [name for name, bad in zip(names, found.tolist(), strict=True) if bad]
