"""``python -m benchmarks.wire``: narrow formats on slow links, beside exact plans and peers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.commands import best_of, last_line, measured, ratio_text, step_s
from benchmarks.regimes import Regime
from hzplan.formats.plan import Plan

REGIMES = (
    Regime("deep", "2x2", "200mbit", 100, 1, "fp32"),
    Regime("deep", "1x4", "500mbit", 100, 1, "fp32"),
    Regime("llama", "2x2", "500mbit", 100, 1, "bf16"),
    Regime("tall", "1x4", "100mbit", 100, 1, "fp32"),
    Regime("wide", "2x2", "200mbit", 100, 1, "fp32"),
    Regime("wide", "1x4", "400mbit", 100, 1, "bf16"),
    Regime("tall", "2x2", "300mbit", 80, 2, "bf16"),
    Regime("llama", "1x4", "400mbit", 80, 1, "fp32"),
    Regime("deep", "2x2", "300mbit", 80, 1, "bf16"),
    Regime("llama", "2x2", "300mbit", 100, 2, "fp32"),
)
"""By hand. ``budget_percent``: of what the plan without a budget takes."""

ABOUT = (
    "Made by `python -m benchmarks.wire --docs docs/wire.md`: emulated clusters on one machine of 2 cores, "
    "every row profiled, solved and run by the README's commands, all contenders in turns of a few steps. A "
    "ratio is a contender's step over the plan's with `--wire safe`, paired by round, with its 95% interval. "
    "*Exact*: the plan of the same question without `--wire`. *Default wire*: the best of DDP, FSDP2 and "
    "HSDP, of those that fit the budget; *bf16*: the best of the same three whose "
    "gradients travel in bfloat16 (DDP's hook, FSDP2's policy)."
)
PEERS = ("ddp", "fsdp2@1", "hsdp@1")
NARROW = ("ddp-bf16", "fsdp2-bf16@1", "hsdp-bf16@1")
MICRO_BATCH = 2
STEPS = 25


def main(
    output: Annotated[
        Path, typer.Option(help="Results, JSON; regimes that are there are not measured.")
    ] = Path("build/wire.json"),
    docs: Annotated[Path | None, typer.Option(help="Where to write the table.")] = None,
) -> None:
    """Measure every regime with the commands that a user has, about five minutes each on two quiet cores.

    Example: python -m benchmarks.wire --docs docs/wire.md
    """
    names = [regime.name for regime in REGIMES]
    found = measured(names, lambda number, folder: _measure(REGIMES[number], folder), _row, output)
    if docs is not None:
        before = docs.read_text().partition(TITLE)[0].rstrip() if docs.exists() else "# The wire"
        docs.write_text(f"{before}\n\n{_section(found)}")


def _measure(regime: Regime, folder: Path) -> dict[str, Any]:
    model, profile = f"benchmarks.models:{regime.model}", folder / "profile.json"
    box = ["emulate", "--tiers", regime.tiers, "--rates", regime.rates, "--"]
    sizes = ["--micro-batch", str(MICRO_BATCH), "--dtype", regime.dtype, "--mesh", regime.mesh]
    last_line([*box, "hzplan", "profile", model, *sizes, "-o", str(profile)])
    batch = ["--global-batch", str(regime.world * MICRO_BATCH * regime.accumulation)]
    plans = {name: folder / f"{name}.json" for name in ("exact", "safe")}

    def solved(name: str, more: Sequence[str] = ()) -> Plan:
        wire = ["--wire", name, *more]
        last_line(["solve", str(profile), "-o", str(plans[name]), *batch, *wire])
        return Plan.load(plans[name])

    exact, memory = solved("exact"), []
    if regime.budget_percent < 100:
        budget = exact.predicted.peak_memory_bytes * regime.budget_percent // 100
        memory = ["--memory", f"{budget}B"]
        exact = solved("exact", memory)
    safe = solved("safe", memory)
    peers = ",".join([str(plans["exact"]), *PEERS, *NARROW])
    how = ["--steps", str(STEPS), "--lr", "1e-4", "--json", "--against", peers]
    said = last_line([*box, "hzplan", "run", str(plans["safe"]), model, *how])
    return {
        "comparison": json.loads(said)["contenders"],
        "predicted_s": safe.predicted.step_s,
        "predicted_exact_s": exact.predicted.step_s,
        "gap": safe.proof.gap,
        "wire": safe.wire.model_dump() if safe.wire is not None else None,
    }


def _formats(wire: dict[str, Any] | None) -> str:
    if wire is None:
        return "exact"
    named = (("parameters", wire["param"]), ("gradients", wire["grad"]))
    return ", ".join(f"{what} {'/'.join(of)}" for what, of in named if {*of} != {"exact"})


def _row(result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"failed: {result['failed']}"
    step = f"{step_s(result['comparison']) * 1e3:.0f} ms, predicted {result['predicted_s'] * 1e3:.0f}"
    ratios = [
        ratio_text(best_of(result["comparison"], names, fits=True)) for names in (("exact",), PEERS, NARROW)
    ]
    return "; ".join([step, _formats(result["wire"]), *ratios])


TITLE = "## Measured: slow links"


def _section(found: dict[str, Any]) -> str:
    rows: list[str] = []
    ratios: dict[str, list[float]] = {"exact": [], "default": [], "bf16": []}
    errors: list[float] = []
    for name, result in found.items():
        if "failed" in result:
            rows.append(f"| {name} | {result['failed']} | | | | | |")
            continue
        best = {
            what: best_of(result["comparison"], names, fits=True)
            for what, names in (("exact", ("exact",)), ("default", PEERS), ("bf16", NARROW))
        }
        for what, ratio in best.items():
            if ratio is not None:
                ratios[what].append(ratio[1])
        ours_s = step_s(result["comparison"])
        errors.append(abs(result["predicted_s"] / ours_s - 1))
        cells = [ratio_text(ratio).removeprefix("exact: ") for ratio in best.values()]
        rows.append(
            f"| {name} | {ours_s * 1e3:.0f} ms | {result['predicted_s'] * 1e3:.0f} ms | "
            f"{_formats(result['wire'])} | {' | '.join(cells)} |"
        )
    named = {"exact": "the exact plan", "default": "peers with their default wire", "bf16": "peers with bf16"}
    medians = ", ".join(
        f"over {named[what]} {statistics.median(of):.2f}" for what, of in ratios.items() if of
    )
    return "\n".join(
        [
            TITLE,
            "",
            ABOUT,
            "",
            "| regime | step | predicted | chosen | exact | default wire | bf16 |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
            f"Of {len(REGIMES)} regimes {len(errors)} are measured. In the median: {medians}. Prediction: "
            f"mean |error| {statistics.mean(errors):.1%}, at most {max(errors):.1%}."
            if errors
            else "Nothing was measured.",
            "",
        ]
    )


if __name__ == "__main__":
    typer.run(main)
