"""Muon's plans beside what one would run without: gathered and repeated, owners in turn, by size, by work."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.commands import best_of, last_line, measured, ratio_text, step_s, write_section
from benchmarks.regimes import Regime
from hzplan.cost.model import CostModel
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile

REGIMES = (
    Regime("deep", "2x2", "2gbit", 0, 1, "fp32"),
    Regime("deep", "1x4", "500mbit", 0, 1, "bf16"),
    Regime("llama", "2x2", "1gbit", 0, 1, "fp32"),
    Regime("llama", "4", "none", 0, 1, "bf16"),
    Regime("wide", "1x4", "2gbit", 0, 2, "fp32"),
    Regime("tall", "2x2", "500mbit", 0, 1, "fp32"),
)
"""Shapes, clusters and links of the other benchmark, by hand, before the first was measured; without a
budget, which replicas would not fit."""

ABOUT = (
    "Made by `python -m benchmarks.muon --docs docs/muon.md`: emulated clusters on one machine of 2 cores, "
    "every row profiled, solved and run by the README's commands, all contenders in turns of a few steps. A "
    "ratio is a peer's step over the plan's, paired by round, with its 95% interval. *Repeated*: the best of "
    "DDP, FSDP2, and FSDP2 that keeps parameters, every rank orthogonalising every matrix; *owners*: the "
    "best of ZeRO-1 (ZeroRedundancyOptimizer), DDP whose ranks own matrices in turn, by size or by work, and "
    "broadcast them, and DDP with DistributedMuon of the package pytorch-optimizer. *Share*: of a step that "
    "orthogonalising all matrices on one rank would take."
)

REPEATED = ("ddp", "fsdp2@1", "fsdp2-keep@1")
OWNERS = ("zero1", "owners", "owners-size", "owners-work", "pytorch-optimizer")
TITLE = "# Muon: plans beside owners, and beside gathering and repeating"
MICRO_BATCH = 2
STEPS = 60


def main(
    output: Annotated[
        Path, typer.Option(help="Results, JSON; regimes that are there are not measured.")
    ] = Path("build/muon.json"),
    docs: Annotated[Path | None, typer.Option(help="Where to write the table.")] = None,
) -> None:
    """Measure every regime with the commands that a user has, about four minutes each on two quiet cores.

    Example: python -m benchmarks.muon --docs docs/muon.md
    """
    names = [regime.name for regime in REGIMES]
    found = measured(names, lambda number, folder: _measure(REGIMES[number], folder), _row, output)
    if docs is not None:
        write_section(docs, TITLE, _page(found))


def _measure(regime: Regime, folder: Path) -> dict[str, Any]:
    model, profile, plan = f"benchmarks.models:{regime.model}", folder / "profile.json", folder / "plan.json"
    box = ["emulate", "--tiers", regime.tiers, "--rates", regime.rates, "--"]
    sizes = ["--micro-batch", str(MICRO_BATCH), "--dtype", regime.dtype, "--mesh", regime.mesh]
    last_line([*box, "hzplan", "profile", model, *sizes, "--optimizer", "muon", "-o", str(profile)])
    batch = regime.world * MICRO_BATCH * regime.accumulation
    last_line(["solve", str(profile), "-o", str(plan), "--global-batch", str(batch)])
    peers = ",".join([*REPEATED, *OWNERS])
    how = ["--steps", str(STEPS), "--lr", "1e-4", "--json", "--against", peers]
    said = last_line([*box, "hzplan", "run", str(plan), model, *how])
    chosen, measured = Plan.load(plan), Profile.load(profile)
    costs = CostModel(measured).matrices
    assert costs is not None
    matrices = [t.spec for unit in measured.units for t in unit.tensors if t.matrix]
    alone = sum(costs.orthogonalize_ns(*tensor.shape) for tensor in matrices) / 1e9
    return {
        "comparison": json.loads(said)["contenders"],
        "predicted_s": chosen.predicted.step_s,
        "gap": chosen.proof.gap,
        "orthogonalize_s": alone,
        "ways": sorted({b.matrix for unit in chosen.units for b in unit.buckets if b.matrix}),
    }


def _plain(name: str) -> str:
    """A regime's name without its budget: there is none."""
    return name.replace("-0%", "")


def _row(result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"failed: {result['failed']}"
    parts = [f"{step_s(result['comparison']) * 1e3:.0f} ms, predicted {result['predicted_s'] * 1e3:.0f}"]
    for what, names in (("repeated", REPEATED), ("owners", OWNERS)):
        parts.append(f"{what}: {ratio_text(best_of(result['comparison'], names))}")
    return "; ".join(parts)


def _page(found: dict[str, Any]) -> str:
    rows, errors, owners = [], [], []
    for name, result in ((_plain(name), of) for name, of in found.items()):
        if "failed" in result:
            rows.append(f"| {name} | {result['failed']} | | | | | |")
            continue
        ours_s = step_s(result["comparison"])
        best = [best_of(result["comparison"], names) for names in (REPEATED, OWNERS)]
        cells = [ratio_text(ratio) for ratio in best]
        owners += [ratio for one in best[1:] if one is not None for ratio in one[1:2]]
        errors.append(abs(result["predicted_s"] / ours_s - 1))
        rows.append(
            f"| {name} | {ours_s * 1e3:.0f} ms | {result['predicted_s'] * 1e3:.0f} ms | "
            f"{result['orthogonalize_s'] / ours_s:.0%} | {', '.join(result['ways'])} | {cells[0]} | "
            f"{cells[1]} |"
        )
    return "\n".join(
        [
            TITLE,
            "",
            ABOUT,
            "",
            "| regime | step | predicted | share | ways chosen | best repeated | best owners |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
            f"{len(owners)} of {len(REGIMES)} regimes are measured. Median over the best owners: "
            f"{statistics.median(owners):.2f}. Prediction: mean |error| {statistics.mean(errors):.1%}, "
            f"at most {max(errors):.1%}."
            if owners
            else "Nothing was measured.",
            "",
        ]
    )


if __name__ == "__main__":
    typer.run(main)
