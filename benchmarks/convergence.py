"""``python -m benchmarks.convergence``: small models trained for long in bfloat16, by a plan and by FSDP2.

Not a comparison of speed: final losses of a few seeds, which must not differ more than seeds do.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.measure import ROOT, output_of
from hzplan.formats.base import write_text
from hzplan.formats.plan import Plan

MODELS, RANKS, MICRO_BATCH, LR = ("gpt:tiny", "moe:nano"), 2, 4, 1e-3
TAIL = 200
"""A final loss is the mean of this many last steps."""
EVERY = 50
WHO = ("hzplan", "fsdp2")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    steps: Annotated[int, typer.Option(help="Optimizer steps of a run.")] = 5000,
    seeds: Annotated[int, typer.Option(help="Runs of each.")] = 3,
    model: Annotated[list[str] | None, typer.Option(help="Models; by default all.")] = None,
    output: Annotated[Path, typer.Option(help="Losses of all runs.")] = Path(
        "benchmarks/results/convergence.json"
    ),
    docs: Annotated[Path | None, typer.Option(help="Where to write the tables.")] = None,
    plan: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train and compare.

    Example: python -m benchmarks.convergence --docs docs/convergence.md
    """
    if "RANK" in os.environ:
        assert plan is not None
        _train(plan, steps, seeds, output)
        return
    found = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    for name in model or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            made, result = _make_plan(name, Path(folder)), Path(folder) / "result.json"
            words = ["-m", "benchmarks.convergence", "--steps", steps, "--seeds", seeds, "--output", result]
            job = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]
            command = [sys.executable, *job, *words, "--plan", made]
            subprocess.run([*map(str, command)], cwd=ROOT, env=_environment(), check=True)
            found[name] = json.loads(result.read_text(encoding="utf-8"))
        write_text(output, json.dumps(found, indent=1) + "\n")
    text = _markdown(found)
    if docs is None:
        print(text)
    else:
        write_text(docs, text)


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _make_plan(name: str, folder: Path) -> Path:
    """A plan with sharded parameters: no more memory than twice what the smallest one needs of buffers."""
    profile, plan = folder / "profile.json", folder / "plan.json"
    words = [sys.executable, "-m", "hzplan"]
    shape = ["--nproc", RANKS, "--micro-batch", MICRO_BATCH, "--dtype", "bf16", "-o", profile]
    output_of([*words, "profile", name, *map(str, shape)])
    from hzplan.core.hierarchy import Levels
    from hzplan.cost.model import CostModel
    from hzplan.formats.profile import Profile
    from hzplan.solver.evaluate import evaluate, uniform

    measured = Profile.load(profile)
    costs = CostModel(measured)
    peaks = [
        evaluate(
            costs,
            uniform(measured, Levels(level, level, level)),
            costs.schedule(prefetch=1, accumulation=1, clip=True),
            MICRO_BATCH,
        ).memory.peak
        for level in (0, costs.mesh.levels)
    ]
    batch = ["--memory", f"{sum(peaks) // 2}B", "--global-batch", RANKS * MICRO_BATCH, "-o", plan]
    output_of([*words, "solve", str(profile), *map(str, batch)])
    return plan


def _train(path: Path, steps: int, seeds: int, output: Path) -> None:
    """On every rank: all runs, one after the other."""
    import torch.distributed as dist

    from hzplan.models.workload import load
    from hzplan.peers import makers
    from hzplan.peers.contender import Setting
    from hzplan.training.batches import batches
    from hzplan.training.data import load_corpus

    dist.init_process_group("gloo")
    plan = Plan.load(path)
    workload = load(plan.model.name, seq_len=plan.model.seq_len)
    corpus = load_corpus(None, seq_len=workload.seq_len)
    runs: list[dict[str, Any]] = []
    for seed in range(seeds):
        data = batches(workload, corpus, plan, seed=seed)
        setting = Setting(plan, workload, data, lr=LR, seed=seed)
        for who in WHO:
            began = time.monotonic()
            contender = makers(setting, {name: None for name in WHO if name != "hzplan"})[who]()
            losses: list[float] = []
            for first in range(3, steps, EVERY):  # as many were trained when it was made
                losses += contender.turn(first, min(EVERY, steps - first) - 1).losses
            contender.close()
            everyone: list[list[float]] = [[]] * dist.get_world_size()
            dist.all_gather_object(everyone, losses)
            mean = [statistics.fmean(step) for step in zip(*everyone, strict=True)]
            runs.append({"who": who, "seed": seed, "losses": mean[::EVERY], "final": _final(mean)})
            if dist.get_rank() == 0:
                print(
                    f"{who}, seed {seed}: {runs[-1]['final']:.4f}, {time.monotonic() - began:.0f} s",
                    flush=True,
                )
    if dist.get_rank() == 0:
        about = {"model": plan.model.name, "dtype": plan.model.dtype, "steps": steps, "tail": TAIL}
        write_text(output, json.dumps(about | {"runs": runs}, indent=1) + "\n")
    dist.destroy_process_group()


def _final(losses: Sequence[float]) -> float:
    return statistics.fmean(losses[-TAIL:])


def spread(found: Mapping[str, Any]) -> tuple[float, float]:
    """The largest difference between the two at one seed, and FSDP2's own between seeds."""
    final = {(run["who"], run["seed"]): run["final"] for run in found["runs"]}
    seeds = sorted({seed for _, seed in final})
    apart = max(abs(final["hzplan", seed] - final["fsdp2", seed]) for seed in seeds)
    theirs = [final["fsdp2", seed] for seed in seeds]
    return apart, max(theirs) - min(theirs)


def _markdown(found: Mapping[str, Any]) -> str:
    """``found``: the runs of every model."""
    lines = [
        "# Convergence",
        "",
        f"{RANKS} ranks, constant learning rate {LR}, on the text of Python's own library: the mean loss of "
        f"the last {TAIL} steps, under a plan and under FSDP2 with the same precision. `make convergence`.",
        "",
        "| model | dtype | steps | seed | hzplan | FSDP2 |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        final = {(run["who"], run["seed"]): run["final"] for run in runs["runs"]}
        lines += [
            f"| {name} | {runs['dtype']} | {runs['steps']} | {seed} | {final['hzplan', seed]:.4f} | "
            f"{final['fsdp2', seed]:.4f} |"
            for seed in sorted({seed for _, seed in final})
        ]
    lines.append("")
    for name, runs in found.items():
        apart, between = spread(runs)
        lines.append(
            f"- {name}: at most {apart:.4f} apart at one seed; FSDP2's seeds are {between:.4f} apart."
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    app()
