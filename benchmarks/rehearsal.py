"""``python -m benchmarks.rehearsal``: what a rehearsal says beside the simulator, for random plans."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.__main__ import about
from benchmarks.accuracy import random_plans
from benchmarks.measure import MICRO_BATCH, emulated, factory, output_of
from benchmarks.regimes import Regime
from hzplan.formats.base import write_text

REGIMES = tuple(
    Regime(model, "2x2", network, 100, accumulation, dtype)
    for model, network, accumulation, dtype in (
        ("deep", "500mbit", 1, "fp32"),
        ("deep", "2gbit", 2, "bf16"),
        ("wide", "500mbit", 2, "bf16"),
        ("wide", "2gbit", 1, "fp32"),
    )
)
PLANS = 3
STEPS = 12
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    output: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    work: Annotated[Path, typer.Option(help="Profiles and plans; what is there is taken.")] = Path(
        "build/rehearsal"
    ),
) -> None:
    """Links are measured on an emulated cluster, models in one process, as a user would who has one device.

    Example: python -m benchmarks.rehearsal
    """
    results = about() | {"rehearsals": [found for regime in REGIMES for found in _rehearsed(regime, work)]}
    print("\n".join(_markdown(results["rehearsals"])))
    if output is not None:
        write_text(output, json.dumps(results, indent=1) + "\n")


def _rehearsed(regime: Regime, work: Path) -> Iterator[dict[str, Any]]:
    """Random plans of a regime, one after the other."""
    folder = work / regime.name
    folder.mkdir(parents=True, exist_ok=True)
    links, profile = folder / "links.json", folder / "profile.json"
    if not links.exists():
        emulated(
            regime, "profile", "--only", "links", "--mesh", regime.mesh, "--dtype", regime.dtype, "-o", links
        )
    if not profile.exists():
        _hzplan("profile", factory(regime), "--links", links, "--micro-batch", MICRO_BATCH, "--dtype", regime.dtype, "-o", profile)  # fmt: skip  # noqa: E501
    for plan in random_plans(profile, regime, folder, PLANS):
        answer = json.loads(_hzplan("rehearse", plan, factory(regime), "--steps", STEPS, "--json"))
        yield {"regime": regime.name, "plan": plan.stem, **answer}
        print(_row(answer, f"{regime.name} {plan.stem}"), flush=True, file=sys.stderr)


def _hzplan(*words: object) -> str:
    return output_of([sys.executable, "-m", "hzplan", *map(str, words)])


def _markdown(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| plan | predicted | rehearsed | apart | spread | memory apart |"
    yield "|---|---|---|---|---|---|"
    for one in found:
        yield _row(one, f"{one['regime']} {one['plan']}")
    yield f"\nMean of the steps' differences: {statistics.fmean(abs(_apart(one)) for one in found):.1%}"


def _row(one: Mapping[str, Any], name: str) -> str:
    step, memory = one["step_s"], one["peak_memory_bytes"]
    low, _, high = statistics.quantiles(step["rounds"], n=4)
    more = memory["rehearsed"] / memory["predicted"] - 1
    return (
        f"| {name} | {step['predicted'] * 1e3:.0f} ms | {step['rehearsed'] * 1e3:.0f} ms "
        f"| {_apart(one):+.1%} | {(high - low) / 2 / step['rehearsed']:.1%} | {more:+.2%} |"
    )


def _apart(one: Mapping[str, Any]) -> float:
    return float(one["step_s"]["rehearsed"] / one["step_s"]["predicted"] - 1)


if __name__ == "__main__":
    app()
