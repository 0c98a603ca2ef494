"""What a level per tensor is worth on 128 GPUs, by simulation: ``python -m benchmarks.simulated``.

Nothing here is measured. A GPT of 1.3 B parameters in bf16 on 16 nodes of 8 GPUs, described by closed forms:
FLOPs at a sustained rate, collectives as latency plus bytes over bandwidth, activations as in Korthikanti et
al. 2022 (arXiv 2205.05198, §4: 34 bytes per token and unit of width in a layer, its attention recomputed).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.plans import best_by_role, best_single
from hzplan.core.hierarchy import Mesh
from hzplan.cost.model import CostModel
from hzplan.formats.profile import Profile, signature
from hzplan.models.gpt import GPT, PRESETS
from hzplan.models.units import Unit, find_units
from hzplan.solver.evaluate import Evaluation, evaluate, uniform
from hzplan.solver.search import paces
from hzplan.solver.solve import PREFETCH_DEPTHS, Request, Solved, solve

PRESET = "1.3b"
MESH = Mesh(((8,), (16,)))
SUSTAINED_FLOPS = 4e14
NODE_BYTES_PER_S = 3.0e11
"""Of a rank within its node."""
NETWORKS_BYTES_PER_S = (4.5e10, 5.6e9, 1.4e9)
"""Of a rank between nodes: with 400 Gbit/s of its own, an eighth of a node's 400, and of its 100."""
LATENCY_S = (1e-5, 3e-5)
"""Of each of a ring's hops in a tier."""
UPDATE_BYTES_PER_S = 2.5e12
SIZES = tuple(1 << power for power in range(16, 34, 2))
NOTABLE = 0.02
"""Schemes whose steps differ by less than this share are not told apart."""


def profile(network: float) -> Profile:
    """The closed forms as a profile; ``network``: bytes/s between nodes."""
    config = PRESETS[PRESET]
    with torch.device("meta"):
        units = find_units(GPT(config).to(torch.bfloat16))
    tensors = [tensor for unit in units for tensor in unit.tensors]
    uses = [("forward", unit) for unit in units] + [("backward", unit) for unit in reversed(units)]
    return Profile.model_validate(
        {
            "provenance": {"created": "-", "hzplan": "-", "torch": "-", "python": "-", "cpus": 1},
            "model": {
                "name": f"gpt:{PRESET}",
                "parameters": sum(tensor.numel for tensor in tensors),
                "signature": signature(tensors),
                "dtype": "bfloat16",
                "seq_len": config.seq_len,
            },
            "cluster": {
                "mesh": str(MESH),
                "tier_names": ["node", "network"],
                "backend": "nccl",
                "device": "cuda",
                "memory_bytes": 80 << 30,
                "peak_flops": 989e12,
                "reduce_scatter_by_exchange": False,
            },
            "optimizer": {
                "name": "adamw",
                "state_per_element": 2,
                "temporary_per_element": 0.0,
                "points": [
                    {"elements": n, "seconds": 1e-5 + n * 30 / UPDATE_BYTES_PER_S, "spread": 0.0}
                    for n in (1 << 10, 1 << 28)
                ],
            },
            "units": [
                {
                    "name": unit.name,
                    "module": type(unit.module).__name__,
                    "tensors": [
                        {"name": t.name, "shape": t.shape, "dtype": t.dtype, "trainable": True}
                        for t in unit.tensors
                    ],
                    "requires": unit.requires,
                }
                for unit in units
            ],
            "uses": [
                {"unit": unit.name, "phase": phase, "costs": [_use(unit, phase)]} for phase, unit in uses
            ],
            "collectives": [
                {"operation": operation, "low": stage.low, "high": stage.high, "points": points}
                for stage in MESH.stages()
                for points in [_points(stage.low >= 1, MESH.group_size(stage), network)]
                for operation in ("all_gather", "reduce_scatter")
            ],
        }
    )


def _use(unit: Unit, phase: str) -> dict[str, Any]:
    config = PRESETS[PRESET]
    weights = sum(t.numel for t in unit.tensors if len(t.shape) == 2 and not unit.name.startswith("pos"))
    if unit.name == "embed":
        weights = 0  # a look-up; its product belongs to the head, which is tied to it
    if unit.name == "head":
        weights = config.vocab * config.width
    block = unit.name.startswith("layers")
    flops = 2 * config.seq_len * (weights + (2 * config.seq_len * config.width if block else 0))
    if phase == "backward":
        flops *= 2
    kept = 34 * config.seq_len * config.width if block else 0
    logits = 6 * config.seq_len * config.vocab if unit.name == "head" else 0
    return {
        "micro_batch": 1,
        "seconds": 1e-5 + flops / SUSTAINED_FLOPS,
        "spread": 0.0,
        "flops": flops,
        "retained_bytes": kept if phase == "forward" else -kept,
        "peak_bytes": (kept if phase == "forward" else 0) + logits,
    }


def _points(network_tier: bool, group: int, network: float) -> list[dict[str, Any]]:
    rate = network if network_tier else NODE_BYTES_PER_S
    return [
        {
            "bytes": size,
            "seconds": LATENCY_S[network_tier] * (group - 1) + size * (group - 1) / group / rate,
            "spread": 0.0,
        }
        for size in SIZES
    ]


def table() -> Iterator[str]:
    """Markdown: budgets between two schemes; the plan beside the best single triple and the best per role."""
    yield "| network per GPU | budget between | plan | one triple | ratio | a triple per role | ratio | gap |"
    yield "|---|---|---|---|---|---|---|---|"
    for network in NETWORKS_BYTES_PER_S:
        described = profile(network)
        model = CostModel(described)
        for smaller, larger in itertools.pairwise(_front(model)):
            budget = (smaller.memory.peak + larger.memory.peak) // 2
            request = Request(budget, MESH.world)
            outcome, single = solve(described, request), best_single(model, request)
            assert isinstance(outcome, Solved) and single is not None, "the smaller scheme fits"
            chosen, roles = outcome.best.step_s, best_by_role(model, request, single)
            yield (
                f"| {network * 8 / 1e9:.0f} Gbit/s | {_about(smaller)} and {_about(larger)}: "
                f"{budget / 2**30:.1f} GiB | {1e3 * chosen:.0f} ms "
                f"| {1e3 * single.step_s:.0f} ms | {single.step_s / chosen:.2f} "
                f"| {1e3 * roles.step_s:.0f} ms | {roles.step_s / chosen:.2f} | {outcome.objective_gap:.1%} |"
            )


def _front(model: CostModel) -> list[Evaluation]:
    """The single triples, each at every pace, that no other undercuts in memory and time; smallest first."""
    found = [
        evaluate(
            model,
            uniform(model.profile, triple),
            model.schedule(**pace._asdict(), accumulation=1, clip=True),
            1,
        )
        for triple in model.mesh.triples()
        for pace in paces(model, PREFETCH_DEPTHS)
    ]
    found.sort(key=lambda e: (e.memory.peak, e.step_s))
    front: list[Evaluation] = []
    for candidate in found:
        if not front or candidate.step_s < front[-1].step_s * (1 - NOTABLE):
            front.append(candidate)
    return front


def _about(found: Evaluation) -> str:
    """``(8, 8, 128) 61 ms``: shards of parameter, gradient and optimizer state, and the step."""
    triple = next(levels[0] for levels in found.levels.values() if levels)
    shards = ", ".join(map(str, triple.shards(MESH)))
    return f"({shards}) {1e3 * found.step_s:.0f} ms"


if __name__ == "__main__":
    began = time.monotonic()
    for line in table():
        print(line, flush=True)
    print(f"({time.monotonic() - began:.0f} s)")
