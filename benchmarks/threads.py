"""A plan trained by ranks that are threads of one process, with the runtime's own steps."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.plans import given
from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.wire import Wire
from hzplan.cost.model import CostModel
from hzplan.formats.cluster import find_cluster
from hzplan.formats.plan import Plan
from hzplan.models.workload import Workload
from hzplan.profiler.analytic import analyse
from hzplan.runtime.apply import Choice, apply
from hzplan.runtime.backends.threads import Post, ThreadWorld
from hzplan.runtime.optimizer import ShardedOptimizer
from hzplan.solver.evaluate import evaluate, uniform
from hzplan.solver.search import Request
from hzplan.training.batches import batches
from hzplan.training.data import load_corpus

RANKS, CLIP = 2, 1.0


class Trained(NamedTuple):
    """The mean loss of every step, over the ranks, and seconds of all steps."""

    losses: list[float]
    seconds: float


def plan_of(
    workload: Workload,
    levels: Levels,
    micro_batch: int,
    *,
    optimizer: str = "adamw",
    wire: Wire | None = None,
) -> Plan:
    """Everything at the same levels over RANKS ranks, in float32; times are of no cluster that is here."""
    cluster, device = find_cluster("h100-8x400g")
    profile = analyse(
        *(workload, cluster, device),
        mesh=Mesh(((RANKS,), (1,))),
        micro_batches=(micro_batch,),
        dtype="float32",
        optimizer=optimizer,
    )
    profile = profile.replaced(
        cluster=profile.cluster.model_copy(update={"mesh": str(RANKS), "tier_names": ("node",)}),
        interference=(),
        collectives=tuple(curve for curve in profile.collectives if curve.high <= 1),
    )
    costs = CostModel(profile, wire=wire)
    schedule = costs.schedule(prefetch=1, accumulation=1, clip=True)
    chosen = evaluate(costs, uniform(profile, levels), schedule, micro_batch)
    return given(profile, Path("profile.json"), chosen, Request(1 << 40, RANKS * micro_batch))


def train(
    workload: Workload,
    plan: Plan,
    optimizer_class: Callable[..., Optimizer],
    steps: int,
    seed: int,
    **options: Any,
) -> Trained:
    """Train from new weights; ``options``: the optimizer's.

    The seed decides initial weights and batches, so runs of one seed are paired.
    """
    post = Post(RANKS)
    data = batches(workload, load_corpus(None, seq_len=workload.seq_len), plan, seed=seed)
    torch.manual_seed(seed)
    initial = [workload.build()]
    initial += [workload.build() for _ in range(RANKS - 1)]
    for other in initial[1:]:
        other.load_state_dict(initial[0].state_dict())
    losses: list[list[float]] = [[] for _ in range(RANKS)]
    begun = [0.0] * RANKS
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            world = ThreadWorld(post, number)
            made: tuple[nn.Module, ShardedOptimizer] = apply(
                *(initial[number], Choice.of(plan), optimizer_class), world=world, **options
            )
            trained, optimizer = made
            begun[number] = time.perf_counter()
            for step in range(steps):
                loss = workload.loss(trained, data.train(step, 0, number))
                loss.backward()
                optimizer.clip_grad_norm_(CLIP)
                optimizer.step()
                losses[number].append(float(loss.detach()))
            optimizer.engine.close()
        except BaseException as error:
            post.failed.set()
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return Trained(
        [statistics.fmean(of) for of in zip(*losses, strict=True)], time.perf_counter() - max(begun)
    )
