"""One rank of a plan's world, alone on this device: everything is real but what comes over the links."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from hzplan.cost.model import CostModel
from hzplan.errors import UserError
from hzplan.formats.plan import Plan
from hzplan.models.workload import Workload
from hzplan.profiler.model.optimizer import optimizer_named
from hzplan.profiler.session.ranks import Ranks
from hzplan.runtime.apply import Choice, apply, check_model
from hzplan.runtime.backends.rate_limited import RateLimitedWorld
from hzplan.runtime.optimizer import ShardedOptimizer
from hzplan.runtime.out_of_memory import explain_out_of_memory
from hzplan.show.trace import Span
from hzplan.training.batches import SyntheticBatches
from hzplan.training.measure import peak_memory_bytes
from hzplan.training.recording import Recording
from hzplan.training.step import forward_backward

WARM_UP_STEPS = 2
TRACED_STEPS = 3
LEARNING_RATE = 1e-5
"""What arrives is made up, so nothing is learnt: only that values stay finite matters."""


@dataclass(frozen=True)
class Rehearsed:
    """``step_s``: seconds of every step; ``waits_s``: what compute waited for in each, by tier's name or
    "optim"; ``peak_memory_bytes``: of a whole step; ``spans``: what the streams did in the last ones."""

    rank: int
    step_s: tuple[float, ...]
    waits_s: tuple[dict[str, float], ...]
    peak_memory_bytes: int
    spans: tuple[Span, ...]

    @property
    def median_s(self) -> float:
        """Of a step."""
        return statistics.median(self.step_s)

    def waited_s(self, name: str) -> float:
        """The median step's wait."""
        return statistics.median(waits.get(name, 0.0) for waits in self.waits_s)

    @property
    def busy_s(self) -> float:
        """The median step without its waits."""
        both = zip(self.step_s, self.waits_s, strict=True)
        return statistics.median(step - sum(waits.values()) for step, waits in both)


def rehearse(
    plan: Plan,
    costs: CostModel,
    workload: Workload,
    *,
    rank: int = 0,
    steps: int = 8,
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda text, fraction: None,
) -> Rehearsed:
    """Train as a rank of the plan's world on synthetic batches; every collective takes as long as ``costs``,
    those that the plan was solved with, say that it takes.

    Raises UserError for a rank that the plan does not have, and where model or optimizer are not the plan's;
    OutOfMemory where the device has not the room.
    """
    world, cluster = plan.mesh.world, costs.profile.cluster
    if not 0 <= rank < world:
        raise UserError(f"--rank {rank}: the plan's ranks are 0 to {world - 1}")
    if steps < 1:
        raise UserError(f"--steps {steps}: rehearse at least 1")
    torch.manual_seed(seed)
    limited = RateLimitedWorld(
        plan.mesh,
        rank,
        lambda operation, stage, nbytes: costs.collective_ns(operation, stage, nbytes) / 1e9,
        exchanges=cluster.reduce_scatter_by_exchange,
        contention=costs.interference.contention,
        norm_s=cluster.norm_seconds or 0.0,
    )
    made: list[ShardedOptimizer] = []
    with explain_out_of_memory(plan, lambda: made[0].engine if made else None):
        progress("making the model", 0.0)
        device = Ranks.here().device
        model = workload.made(device, plan.model.dtype)
        check_model(model, plan)
        made_by = optimizer_named(plan.optimizer)
        model, optimizer = apply(
            model, Choice.of(plan), made_by.func, world=limited, lr=LEARNING_RATE, **made_by.keywords
        )
        made.append(optimizer)
        data = SyntheticBatches(workload, plan.batch.micro_batch, seed)
        accumulation = plan.batch.accumulation

        def train(step: int) -> None:
            forward_backward(model, workload, data, step=step, accumulation=accumulation, rank=rank)
            if plan.clip:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()

        optimizer.engine.executor.time_every_step()
        for step in range(WARM_UP_STEPS):
            progress("warming up", 0.0)
            train(step)
        optimizer.engine.executor.synchronize()
        traced = partial(train, WARM_UP_STEPS)
        peak = peak_memory_bytes(traced, device, ignore=optimizer.engine.tasks.on_host)
        train(WARM_UP_STEPS + 1)  # after the tracing, which takes time
        recording = Recording(optimizer.engine, TRACED_STEPS)
        names = dict(enumerate(plan.cluster.tier_names))
        seconds, waits = [], []
        ended = time.perf_counter()
        for step in range(steps):
            progress(f"step {step + 1} of {steps}", (step + 1) / (steps + 1))
            train(WARM_UP_STEPS + 2 + step)
            now = time.perf_counter()
            seconds.append(now - ended)
            exposed = optimizer.engine.executor.record.exposed_s
            waits.append({_named(cause, names): waited for cause, waited in exposed.items()})
            ended = now
        optimizer.engine.follow_every_use()  # to see them takes a little longer
        for step in range(TRACED_STEPS + 2):  # a device's record is of the last step but one
            train(WARM_UP_STEPS + 2 + steps + step)
            recording.note()
        spans = recording.spans()
    optimizer.engine.close()
    progress("rehearsed", 1.0)
    return Rehearsed(rank, tuple(seconds), tuple(waits), peak, tuple(spans))


def _named(cause: str, tiers: dict[int, str]) -> str:
    return next((name for tier, name in tiers.items() if cause == f"tier {tier}"), cause)
