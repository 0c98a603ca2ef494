"""Profile, plan and train on the ranks of a test: memory as predicted and measured, losses beside FSDP2's."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.cost.model import CostModel
from hzplan.formats.plan import Plan, Proof, Source
from hzplan.formats.profile import Profile
from hzplan.models.workload import load
from hzplan.profiler import measure
from hzplan.runtime.apply import parallelize
from hzplan.runtime.engine import Engine
from hzplan.solver.emit import as_plan
from hzplan.solver.evaluate import Evaluation, evaluate, uniform
from hzplan.solver.solve import Request
from hzplan.training.loop import train
from hzplan.training.run import RunOptions
from tests.plans import make_plan

LEVELS = [(1, 1, 1), (0, 0, 1), (1, 0, 1)]


def quick_profile(dtype: str) -> Profile:
    """Measured with as few repeats as can be: only its memory is looked at."""
    with (
        patch("hzplan.profiler.network.links.MAX_REPEATS", 3),
        patch("hzplan.profiler.network.links.MAX_CALLS", 1),
        patch("hzplan.profiler.model.optimizer.MAX_REPEATS", 3),
        patch("hzplan.profiler.model.time.MAX_BLOCKS", 2),
        patch("hzplan.profiler.session.machine.PEAK_SIZES", (64,)),
    ):
        return measure(
            load("gpt:nano"),
            mesh=Mesh.parse("2"),
            tier_names=("node",),
            micro_batches=[2],
            dtype=dtype,
            optimizer="adamw",
            progress=lambda text, fraction: None,
        )


def planned(profile: Profile, levels: tuple[int, int, int], accumulation: int) -> tuple[Plan, Evaluation]:
    """A plan with the same levels everywhere, and the evaluation behind its prediction."""
    model = CostModel(profile)
    schedule = model.schedule(prefetch=1, accumulation=accumulation, clip=True)
    found = evaluate(model, uniform(profile, Levels(*levels)), schedule, 2)
    proof = Proof(status="given", objective_s=0.1, bound_s=0.1, gap=0.0, solver="none")
    source = Source(profile="-", profile_sha256="-", memory_budget_bytes=1 << 30, asked_gap=0.0)
    request = Request(1 << 30, profile.mesh.world * 2 * accumulation)
    return as_plan(profile, found, request, proof=proof, source=source), found


def memory(_: Any) -> list[dict[str, Any]]:
    """For every dtype and levels: bytes by category as predicted and as allocated, and the peaks."""
    found = []
    for dtype in ("float32", "bfloat16"):
        profile = quick_profile(dtype)
        for levels in LEVELS:
            plan, evaluated = planned(profile, levels, accumulation=2)
            with patch.object(Engine, "close", _count_and_close):
                result = train(plan, load("gpt:nano"), None, RunOptions(steps=3))
            found.append(
                {
                    "case": f"{dtype} {levels}",
                    "predicted": {
                        k: v for k, v in evaluated.memory.by_category().items() if k != "activations"
                    },
                    "allocated": dict(_counted),
                    "predicted_peak": evaluated.memory.peak,
                    "measured_peak": result.peak_memory_bytes,
                }
            )
    return found


_counted: dict[str, int] = {}
_close = Engine.close


def _count_and_close(engine: Engine) -> None:
    """What the engine and the optimizer hold at the end of a run."""
    buckets = [bucket for unit in engine.units.values() for bucket in unit.buckets]
    states = [state for inner in engine.updates._inner.values() for state in inner.state.values()]
    _counted.clear()
    _counted.update(engine.tasks.buffer_bytes)
    _counted["parameters"] = sum(bucket.param.nbytes for bucket in buckets)
    _counted["master"] = sum(
        bucket.master.untyped_storage().nbytes()
        for bucket in buckets
        if bucket.master.untyped_storage().data_ptr() != bucket.param.untyped_storage().data_ptr()
    )
    _counted["gradients"] = sum(bucket.grad.nbytes for bucket in buckets if bucket.grad is not None)
    _counted["optimizer"] = sum(v.nbytes for state in states for v in state.values() if v.dim())
    _close(engine)


# ---- beside FSDP2 ------------------------------------------------------------------------------------------


def beside_fsdp2(steps: int) -> dict[str, list[float]]:
    """The mean losses of every step, of hzplan under two plans and of FSDP2, on the same data."""
    found = {"fsdp2": fsdp2(steps)}
    for levels in ((2, 2, 2), (1, 0, 2)):
        found[f"hzplan {levels}"] = hzplan(steps, levels)
    return found


def hzplan(steps: int, levels: tuple[int, int, int]) -> list[float]:
    plan = make_plan("gpt:nano", mesh="2|2", levels=Levels(*levels), dtype="bfloat16")
    torch.manual_seed(0)
    model, optimizer = parallelize(load("gpt:nano").build(), plan, torch.optim.AdamW, lr=1e-3)
    losses = _train(model, optimizer, steps)
    optimizer.engine.close()
    return losses


def fsdp2(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = load("gpt:nano").build()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return _train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), steps)


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """The same few batches again and again, so that there is something to learn."""
    workload = load("gpt:nano")
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [workload.batch(2, generator) for _ in range(4)]
    losses = torch.zeros(steps)
    for step in range(steps):
        loss = workload.loss(model, batches[step % 4])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()
