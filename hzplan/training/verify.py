"""Does a plan's group structure train like one process? Answered on a small copy of the model, in threads.

The copy has the plan's tensors and levels in a fraction of the width; of many layers with the same levels as
their neighbours two are there (``scaled_down``), and three of more micro-batches. The mesh has the plan's
levels too, two ranks where it has more. Ranks are threads that send each other copies; everything else is the
runtime as it is. In float64, so that a wrong slice is not mistaken for rounding.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hzplan.core.hierarchy import Mesh
from hzplan.core.order import within
from hzplan.core.recompute import Recomputed
from hzplan.core.schedule import MessageOrder
from hzplan.core.wire import ROUNDOFF
from hzplan.errors import UserError
from hzplan.formats.plan import Plan
from hzplan.models.scaled_down import scale_down
from hzplan.models.units import blocks_of, find_units
from hzplan.models.workload import BUILT_IN, Workload, for_training, load, narrow
from hzplan.runtime.apply import Choice, apply, full_parameters
from hzplan.runtime.backends.threads import Post, ThreadWorld
from hzplan.runtime.executor import Streams
from hzplan.runtime.muon import Muon
from hzplan.training.batches import Batches, SyntheticBatches
from hzplan.training.step import forward_backward

MOST_RANKS = 64
STEPS = 2  # the second begins with what the first has updated
MICRO_BATCHES = 3  # the schedule of more repeats the middle one
MOST_BUFFERS = 7
"""Of gradients that a thinned model has layers for; a plan may have one for every layer."""
LEARNING_RATE = 1e-2
CLIP = 0.5
"""Low enough to act."""
TOLERANCE = 1e-9
DTYPE = "float64"


@dataclass(frozen=True)
class Rounded:
    """The same with what travels narrow rounded: how far losses are apart, and how far they may be. That is
    what the plan's formats change of a value (``core.wire.ROUNDOFF``), once in each step."""

    loss_error: float
    most: float


@dataclass(frozen=True)
class Verified:
    """How far a sharded training and one process are apart at most, where everything travels exactly.

    ``loss_error``: relative, over steps and ranks; ``weight_error``: of a tensor, relative to its norm
    (or to the learning rate, which a wrong update is as large as: what has no gradient moves by rounding);
    ``worst``: that tensor. ``rounded``: None where the plan rounds nothing.
    """

    mesh: str
    loss_error: float
    weight_error: float
    worst: str
    rounded: Rounded | None = None

    @property
    def ok(self) -> bool:
        """Whether they are equal but for rounding."""
        equal = self.loss_error <= TOLERANCE and self.weight_error <= TOLERANCE
        return equal and (self.rounded is None or self.rounded.loss_error <= self.rounded.most)


def verify(
    plan: Plan,
    model: str | None = None,
    *,
    steps: int = STEPS,
    seed: int = 0,
    whole: bool = False,
    progress: Callable[[str, float], None] = lambda text, fraction: None,
) -> Verified:
    """Train a few steps under a plan and in one process, and compare.

    ``model``: what the user names; by default the plan's built-in one. A factory's model is taken as it is.
    ``whole``: with all layers and micro-batches. Raises UserError when the model is not the plan's.
    """
    name = model or plan.model.name
    workload = narrow(load(name))
    mesh = small(plan.mesh)
    # A level is a place in the hierarchy, so it stays one in a mesh of as many.
    choice = replace(Choice.of(plan), mesh=mesh, dtype=DTYPE, reduce_dtype=None, wire=None)
    torch.manual_seed(seed)
    initial = for_training(workload.build()).to(torch.float64)
    _check_names(initial, plan, name)
    if not whole:
        # Of few layers, copies of activations that have long would not leave the device at all.
        choice = replace(choice, accumulation=min(choice.accumulation, MICRO_BATCHES), copy_uses=1)
        if name.startswith(BUILT_IN):
            choice = _thinned(initial, plan, choice)
    batches = SyntheticBatches(workload, 1, seed)
    progress("one process", 0.0)
    losses, weights = _alone(initial, workload, choice, batches, steps)
    progress(f"{mesh.world} ranks", 0.3)
    found, theirs = _together(initial, workload, choice, batches, steps)
    loss_error = _farthest(found, losses)
    rounded = None
    if plan.wire is not None:
        progress(f"{mesh.world} ranks, rounding what travels", 0.6)
        wire = plan.wire.formats
        found, _ = _together(initial, workload, replace(choice, wire=wire), batches, steps)
        most = steps * sum(ROUNDOFF[form] for form in (*wire.param, *wire.grad))
        rounded = Rounded(_farthest(found, losses), most)
    errors = {
        tensor: _apart(float((theirs[tensor] - value).norm()), max(float(value.norm()), LEARNING_RATE))
        for tensor, value in weights.items()
    }
    worst = max(errors, key=lambda tensor: errors[tensor])
    progress("compared", 1.0)
    return Verified(str(mesh), loss_error, errors[worst], worst, rounded)


def _farthest(found: Sequence[Sequence[float]], losses: Sequence[Sequence[float]]) -> float:
    """How far losses are apart at most, by rank and step, as a share of them."""
    return max(
        _apart(abs(mine - expected), abs(expected))
        for of_rank, expected_of_rank in zip(found, losses, strict=True)
        for mine, expected in zip(of_rank, expected_of_rank, strict=True)
    )


def small(mesh: Mesh) -> Mesh:
    """The same tiers and levels with two ranks wherever there are more; UserError when that is too many."""
    found = Mesh(tuple(tuple(min(size, 2) for size in tier) for tier in mesh.tiers))
    if found.world > MOST_RANKS:
        raise UserError(f"mesh {mesh} has too many levels to verify: {found.world} ranks even with 2 in each")
    return found


def _thinned(model: nn.Module, plan: Plan, choice: Choice) -> Choice:
    """Fewer layers, and the choice for those."""
    parameters = dict(model.named_parameters())
    names = sorted(tensor for unit in plan.units for bucket in unit.buckets for tensor in bucket.tensors)

    def under(unit: str, layer: str) -> bool:
        return unit == layer or unit.startswith(f"{layer}.")

    def kind(layer: str) -> tuple[object, ...]:
        """Its class; what its tensors are and where; how it is used; what is recomputed, and offloaded."""
        inside = f"{layer}."
        tensors = [
            (name.removeprefix(inside), p.shape, p.requires_grad, choice.levels[name])
            for name in names
            if name.startswith(inside)
            for p in [parameters[name]]
        ]
        uses = [
            (use.phase, use.reads, use.unit.removeprefix(layer))
            for use in choice.uses
            if under(use.unit, layer)
        ]
        modes = [
            tuple(unit.removeprefix(layer) for unit in sorted(units) if under(unit, layer))
            for units in (choice.recompute, choice.offload)
        ]
        ways = [choice.recompute[unit] for unit in sorted(choice.recompute) if under(unit, layer)]
        return type(model.get_submodule(layer)), tuple(tensors), tuple(uses), *modes, tuple(ways)

    # As many that a slot and a gradient buffer are used by more than two.
    buffers = min(choice.gradient_buffers or 0, MOST_BUFFERS)
    renamed = scale_down(
        model, [unit.name for unit in plan.units], kind, max(choice.prefetch + 2, buffers + 1)
    )
    return replace(
        choice,
        levels={new: of for name, of in choice.levels.items() if (new := renamed(name)) is not None},
        uses=tuple(replace(use, unit=new) for use in choice.uses if (new := renamed(use.unit)) is not None),
        requires={
            new: tuple(filter(None, map(renamed, others)))
            for unit, others in choice.requires.items()
            if (new := renamed(unit)) is not None
        },
        recompute=Recomputed({new: way for unit, way in choice.recompute.items() if (new := renamed(unit))}),
        offload=frozenset(filter(None, map(renamed, choice.offload))),
        message_order=_thinned_order(choice, renamed),
    )


def _thinned_order(choice: Choice, renamed: Callable[[str], str | None]) -> MessageOrder | None:
    """The order of the layers that are left. Fewer of them send fewer messages for gradients to wait for: up
    to prefetch + 1 there are always enough."""
    if choice.message_order is None:
        return None
    ahead, sync = choice.message_order
    left = tuple((new, of) for unit, of in ahead if (new := renamed(unit)) is not None)
    return within(MessageOrder(left, sync), choice.prefetch + 1)


def _check_names(model: nn.Module, plan: Plan, name: str) -> None:
    units = find_units(model, blocks_of([unit.name for unit in plan.units]))
    here = {tensor for unit in units for tensor, _ in unit.parameters}
    planned = {tensor for unit in plan.units for bucket in unit.buckets for tensor in bucket.tensors}
    for tensor in sorted(here ^ planned):
        raise UserError(f"{name} is not the plan's model: {tensor} is in one of them only")


def _alone(
    initial: nn.Module, workload: Workload, choice: Choice, batches: Batches, steps: int
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Every rank's loss of every step, and the weights after the last, in one process."""
    model, world = copy.deepcopy(initial), choice.mesh.world
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if choice.levels[name].matrix]
    others = [p for name, p in named if not choice.levels[name].matrix]
    made, arguments = _optimizer(choice)
    params = [{"params": matrices}, {"params": others, "method": "adamw"}] if matrices else others
    optimizer = made(params, **arguments)
    losses: list[list[float]] = [[] for _ in range(world)]
    for step in range(steps):
        for rank in range(world):
            total = 0.0
            for index in range(choice.accumulation):
                loss = workload.loss(model, batches.train(step, index, rank)) / choice.accumulation
                (loss / world).backward()
                total += float(loss.detach())
            losses[rank].append(total)
        if choice.clip:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def _optimizer(choice: Choice) -> tuple[Callable[..., Optimizer], dict[str, Any]]:
    """AdamW, and of matrices Muon, all of it in float64."""
    if any(levels.matrix for levels in choice.levels.values()):
        return Muon, {"lr": LEARNING_RATE, "ns_dtype": DTYPE}
    return torch.optim.AdamW, {"lr": LEARNING_RATE}


def _together(
    initial: nn.Module, workload: Workload, choice: Choice, batches: Batches, steps: int
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """The same of ranks that are threads."""
    world = choice.mesh.world
    post = Post(world)
    losses: list[list[float]] = [[] for _ in range(world)]
    weights: dict[str, Tensor] = {}
    errors: list[BaseException] = []

    def train(rank: int, model: nn.Module) -> None:
        try:
            made, optimizer = apply(
                model,
                choice,
                _optimizer(choice)[0],
                streams=Streams.NONE,
                world=ThreadWorld(post, rank),
                **_optimizer(choice)[1],
            )
            for step in range(steps):
                loss = forward_backward(
                    made, workload, batches, step=step, accumulation=choice.accumulation, rank=rank
                )
                losses[rank].append(float(loss))
                if choice.clip:
                    optimizer.clip_grad_norm_(CLIP)
                optimizer.step()
            found = full_parameters(optimizer)
            if rank == 0:
                weights.update(found)
            optimizer.engine.close()
        except BaseException as error:  # said by the thread that waits for all
            errors.append(error)
            post.failed.set()

    threads = [
        threading.Thread(target=train, args=(rank, copy.deepcopy(initial)), daemon=True)
        for rank in range(world)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return losses, weights


def _apart(difference: float, size: float) -> float:
    """Relative; not a number is infinitely far."""
    apart = difference / max(size, 1e-12)
    return apart if apart == apart else float("inf")
