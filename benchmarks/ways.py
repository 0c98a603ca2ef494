"""``python -m benchmarks.ways``: what each way of recomputation costs, predicted and measured, beside DDP.

On an emulated cluster, for several levels: no block recomputed, all in each way that the profile has, and
ways that differ from block to block; with the loss in chunks and without. All plans of one kind of levels are
trained in turns, in one job.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import typer

from benchmarks.measure import output_of
from benchmarks.plans import given
from hzplan.core.hierarchy import Levels
from hzplan.core.recompute import NOTHING, Recomputed, Way
from hzplan.cost.model import CostModel
from hzplan.formats.base import write_text
from hzplan.formats.profile import Profile
from hzplan.solver.evaluate import Modes, evaluate, uniform
from hzplan.solver.schemes import RecomputeOptions
from hzplan.solver.solve import Request, searches_of

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

FULL: Way = "full"
MODELS = ("llama",)
MICRO_BATCH, ACCUMULATION = 8, 2
TIERS, RATES, MESH = "2x2", "none,500mbit", "2|2"
LEVELS: Mapping[str, Levels] = {
    "replicas": Levels(0, 0, 0),
    "a node's shards": Levels(1, 1, 1),
    "shards of all": Levels(2, 2, 2),
}
ROUNDS, ROUND_STEPS = 5, 1

ABOUT = f"""
## Predicted and measured

`python -m benchmarks.ways --output benchmarks/results/ways.json`. Four ranks on two emulated nodes at 500
Mbit/s, {ACCUMULATION} micro-batches of {MICRO_BATCH} sequences. All plans of one model and one kind of levels
are trained in turns in one job. *memory*, *step*: predicted, and measured over predicted. *loss*: the largest
relative difference to DDP's.

| model | levels | recomputed | memory | | step | | loss |
|---|---|---|---|---|---|---|---|"""


def choices(profile: Profile) -> Iterator[tuple[str, Recomputed]]:
    """What may be recomputed, by name."""
    request = Request(1 << 40, profile.mesh.world * MICRO_BATCH)
    options = RecomputeOptions.of(searches_of(profile, request)[0].question.model)
    blocks = options.blocks
    found = {"none": NOTHING, **{str(way): Recomputed.of(blocks, way) for way in (*options.partial, FULL)}}
    by_turns = NOTHING
    for block, one in zip(blocks, itertools.cycle((None, *options.partial, FULL)), strict=False):
        by_turns = by_turns.with_([block], one)
    found["by turns"] = by_turns
    heads = [unit for unit, ways in CostModel(profile).ways.items() if "chunks" in ways]
    for name, chosen in found.items():
        yield name, chosen
        if heads:
            yield f"{name}, the loss in chunks", chosen.with_(heads, "chunks")


def measured(model: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of a model."""
    profile_path = folder / "profile.json"
    on_cluster(
        "profile",
        f"benchmarks.models:{model}",
        "--mesh",
        MESH,
        "--micro-batch",
        MICRO_BATCH,
        "-o",
        profile_path,
    )
    profile = Profile.load(profile_path)
    cost = CostModel(profile)
    request = Request(1 << 40, profile.mesh.world * MICRO_BATCH * ACCUMULATION)
    schedule = cost.schedule(prefetch=1, accumulation=ACCUMULATION, clip=True)
    for kind, levels in LEVELS.items():
        plans = {}
        for number, (name, chosen) in enumerate(choices(profile)):
            found = evaluate(
                cost, uniform(profile, levels), schedule, MICRO_BATCH, modes=Modes(chosen, frozenset())
            )
            plan = given(profile, profile_path, found, request)
            plan.save(path := folder / f"{levels.param}-{number}.json")
            plans[path] = name, plan
        first, *others = plans
        printed = on_cluster(
            "run", first, f"benchmarks.models:{model}", "--against", ",".join(map(str, others)),
            "--steps", ROUNDS * ROUND_STEPS, "--round-steps", ROUND_STEPS, "--lr", 1e-4, "--json",
        )  # fmt: skip
        contenders = {entry["name"]: entry for entry in json.loads(printed)["contenders"]}
        for path, (name, plan) in plans.items():
            entry = contenders["hzplan" if path == first else path.stem]
            yield {
                "model": model,
                "levels": kind,
                "recomputed": name,
                "memory_bytes": [plan.predicted.peak_memory_bytes, entry["peak_memory_bytes"]],
                "step_s": [plan.predicted.step_s, entry["step_s"]["median"]],
                "loss_error": entry["loss_error"],
            }


def on_cluster(*command: object) -> str:
    """What a command of hzplan's printed on the emulated cluster."""
    words = [sys.executable, "-m", "hzplan"]
    return output_of(
        [*words, "emulate", "--tiers", TIERS, "--rates", RATES, "--", *words, *map(str, command)]
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown, and their summary."""
    lines = [ABOUT]
    for row in rows:
        (memory, held), (step, took) = row["memory_bytes"], row["step_s"]
        lines.append(
            f"| {row['model']} | {row['levels']} | {row['recomputed']} | {memory / 1e6:.2f} MB "
            f"| {held / memory:.4f} | {step * 1e3:.0f} ms | {took / step:.2f} | {row['loss_error']:.0e} |"
        )
    memory = max(abs(row["memory_bytes"][1] / row["memory_bytes"][0] - 1) for row in rows)
    steps = [abs(row["step_s"][1] / row["step_s"][0] - 1) for row in rows]
    loss = max(row["loss_error"] for row in rows)
    lines.append(
        f"\nMemory within {memory:.2%}; steps {mean(steps):.1%} apart in the mean, {median(steps):.1%} in "
        f"the median, {max(steps):.1%} at most; losses within {loss:.0e}."
    )
    return "\n".join(lines) + "\n"


@app.command()
def main(
    output: Annotated[Path, typer.Option(help="Where results go; models that are there are kept.")],
) -> None:
    """Measure, and print the table.

    Example: python -m benchmarks.ways --output benchmarks/results/ways.json
    """
    rows: list[dict[str, Any]] = json.loads(output.read_text(encoding="utf-8")) if output.exists() else []
    for model in MODELS:
        if not any(row["model"] == model for row in rows):
            with tempfile.TemporaryDirectory() as folder:
                rows += measured(model, Path(folder))
            write_text(output, json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    app()
