"""Measuring a regime with the commands that a user has: emulate, profile, solve, run --against."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.plans import VARIANTS, given, make
from benchmarks.regimes import NoResult, Regime, bits_per_s
from hzplan.core.hierarchy import Levels
from hzplan.cost.model import CostModel
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile
from hzplan.peers import POORER, SETTINGS
from hzplan.peers.compare import within
from hzplan.solver.evaluate import evaluate, uniform
from hzplan.solver.solve import Request

ROOT = Path(__file__).resolve().parents[1]
MICRO_BATCH = 2
ROUNDS = 6
TURN_S = 1.2
"""About what a turn of the plan lasts: fast steps come several at once."""
MOST_STEPS = 5
LEARNING_RATE = 1e-4
"""Low enough that no loss spikes, where equal training in bf16 would part by chaos alone."""
PEERS = ("zero1", "fsdp2", "fsdp2-keep", "hsdp", "tp-dp")
SMALLEST = ("fsdp2", "fsdp2-offload")
"""Peers where no plan fits the budget, and the smallest plan is measured."""
DEEPSPEED = ("deepspeed1", "deepspeed3")
TRIED: Mapping[str, tuple[int, ...]] = {"buckets": (6, 3, 1), "ahead": (1, 0, 2)}
"""What is measured of a peer that may be the best, by what its number sets (``hzplan.peers.SETTINGS``)."""
LOOK_ROUNDS = 2
NEAR = 1.3
"""Steps of the fastest peer that fits, within which another one's may become the fastest."""


def measure(regime: Regime, folder: Path, *, peers: Sequence[str], ablations: bool) -> dict[str, Any]:
    """Everything about a regime. Files go to ``folder``; a profile that is there already is taken.

    Where no plan fits the budget, the budget becomes what the smallest plan needs, and only peers that need
    little are measured. Raises NoResult when a command fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model, profile = factory(regime), profiled(regime, folder.parent)
    global_batch = regime.world * MICRO_BATCH * regime.accumulation
    ddp = ddp_peak_bytes(profile, global_batch, model, folder)
    budget = ddp * regime.budget_percent // 100
    made = make(profile, budget, global_batch, folder)
    result: dict[str, Any] = {"regime": asdict(regime), "ddp_peak_bytes": ddp}
    if isinstance(made, int):
        result |= {"no_plan_in_bytes": budget}
        budget, peers = made, SMALLEST
        made = make(profile, budget, global_batch, folder)
        if isinstance(made, int):
            raise NoResult(f"the smallest plan, of {budget} bytes, is not found")
    result["budget_bytes"] = budget
    plan, variants, infeasible = made
    chosen = Plan.load(plan)
    look = beside(regime, plan, peers, chosen.predicted.step_s, LOOK_ROUNDS)
    few = "no_plan_in_bytes" in result
    tuned = settings_of(SMALLEST if few else near(look["contenders"], peers, budget))
    others = [*tuned, *(*map(str, variants.values()), *POORER)] if ablations else tuned
    compared = beside(regime, plan, others, chosen.predicted.step_s)
    return result | {
        "look": look["contenders"],
        "ablations": ablations,
        "network_s": network_s(chosen, regime),
        "predicted": chosen.predicted.model_dump(),
        "proof": chosen.proof.model_dump(),
        "prefetch": chosen.prefetch,
        "levels": _levels(chosen),
        "same_as_plan": [
            name for name in VARIANTS if ablations and name not in variants and name not in infeasible
        ],
        "infeasible_variants": infeasible,
        "comparison": compared,
    }


def factory(regime: Regime) -> str:
    """The regime's model, as the command line takes it."""
    return f"benchmarks.models:{regime.model}"


def profiled(regime: Regime, work: Path) -> Path:
    """The regime's profile; one that is there already is taken."""
    path = work / f"{regime.model}-{regime.tiers}-{regime.network}-{regime.dtype}.profile.json"
    if not path.exists():
        emulated(
            regime, "profile", factory(regime), "--mesh", regime.mesh, "--micro-batch", MICRO_BATCH,
            "--dtype", regime.dtype, "-o", path,
        )  # fmt: skip
    return path


def beside(
    regime: Regime, plan: Path, others: Sequence[str], step_s: float, rounds: int = ROUNDS
) -> dict[str, Any]:
    """A plan beside peers and other plans, in turns of about TURN_S of a step that takes ``step_s``."""
    steps = max(1, min(MOST_STEPS, round(TURN_S / max(step_s, 1e-3))))
    printed = emulated(
        regime, "run", plan, factory(regime), "--against", ",".join(others), "--steps", rounds * steps,
        "--round-steps", steps, "--lr", LEARNING_RATE, "--json",
    )  # fmt: skip
    found: dict[str, Any] = json.loads(printed)
    return found


def near(entries: Iterable[Mapping[str, Any]], peers: Sequence[str], budget_bytes: int) -> list[str]:
    """The peers that fit and may be the fastest in another setting, DDP among them; DDP where none fits."""
    steps = {
        entry["name"]: entry["step_s"]["median"]
        for entry in entries
        if entry["name"] in ("ddp", *peers) and within(entry["peak_memory_bytes"], budget_bytes)
    }
    least = min(steps.values(), default=inf)
    return [name for name, step_s in steps.items() if step_s <= NEAR * least] or ["ddp"]


def settings_of(peers: Iterable[str]) -> list[str]:
    """Every peer in all settings that are tried of it."""
    return [
        name
        for peer in peers
        for name in ([f"{peer}@{number}" for number in TRIED[SETTINGS[peer]]] if peer in SETTINGS else [peer])
    ]


def network_s(plan: Plan, regime: Regime) -> float:
    """Seconds that the bytes which must cross take on the slowest tier's links.

    Of N groups there, each must send (N − 1)/N of its gradients (fp32) for the sum, and as much of the
    updated parameters: less is impossible (Patarasuk and Yuan 2009, bandwidth-optimal all-reduce).
    """
    groups = int(regime.tiers.split("x")[-1])
    bytes_each = 4 + (2 if plan.model.dtype == "bfloat16" else 4)
    return plan.model.parameters * bytes_each * (groups - 1) / groups * 8 / bits_per_s(regime.network)


def ddp_peak_bytes(profile_path: Path, global_batch: int, model: str, folder: Path) -> int:
    """DDP's measured peak, which depends on the model, its dtype and the batch alone."""
    profile = Profile.load(profile_path)
    cost = CostModel(profile)
    schedule = cost.schedule(
        prefetch=1, accumulation=global_batch // (profile.mesh.world * MICRO_BATCH), clip=True
    )
    replicas = evaluate(cost, uniform(profile, Levels(0, 0, 0)), schedule, MICRO_BATCH)
    plan = folder / "ddp.json"
    given(profile, profile_path, replicas, Request(1 << 40, global_batch)).save(plan)
    return int(output_of([sys.executable, "-m", "benchmarks.peak", str(plan), model]))


def emulated(regime: Regime, *command: object) -> str:
    """Run ``hzplan`` on every rank of the regime's cluster, or as one process; what rank 0 printed."""
    words = [sys.executable, "-m", "hzplan"]
    if regime.tiers == "1":
        return output_of([*words, *map(str, command), "--nproc", "1"])
    return output_of(
        [
            *words,
            "emulate",
            "--tiers",
            regime.tiers,
            "--rates",
            regime.rates,
            "--",
            *words,
            *map(str, command),
        ]
    )


def output_of(command: Sequence[str]) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise NoResult(f"exit code {done.returncode}: {' / '.join(lines[-5:])}")
    return done.stdout


def _levels(plan: Plan) -> dict[str, int]:
    """How many bytes' worth of tensors have which shards: ``{"1/4/4": tensors}``."""
    found: dict[str, int] = {}
    for unit in plan.units:
        for bucket in unit.buckets:
            key = f"{bucket.shards.param}/{bucket.shards.grad}/{bucket.shards.optim}"
            found[key] = found.get(key, 0) + len(bucket.tensors)
    return found
