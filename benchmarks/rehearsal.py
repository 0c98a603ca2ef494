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
TURNS = 5
"""How often a model is profiled and its plans rehearsed: a machine that others share has another speed each
time, in a profile as in a rehearsal."""
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    output: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    work: Annotated[Path, typer.Option(help="Links, profiles and plans; links there are taken.")] = Path(
        "build/rehearsal"
    ),
) -> None:
    """Links are measured on an emulated cluster, models in one process, as a user would who has one device.

    Example: python -m benchmarks.rehearsal
    """
    turns = [[*_rehearsed(regime, work / regime.name)] for _ in range(TURNS) for regime in REGIMES]
    found: dict[str, list[dict[str, Any]]] = {}
    for answer in (answer for turn in turns for answer in turn):
        found.setdefault(answer["plan"], []).append(answer)
    print("\n".join(_markdown(found)))
    if output is not None:
        write_text(output, json.dumps(about() | {"rehearsals": found}, indent=1) + "\n")


def _rehearsed(regime: Regime, folder: Path) -> Iterator[dict[str, Any]]:
    """Random plans of a regime, one after the other; the same ones every time."""
    folder.mkdir(parents=True, exist_ok=True)
    links, profile = folder / "links.json", folder / "profile.json"
    if not links.exists():
        emulated(
            regime, "profile", "--only", "links", "--mesh", regime.mesh, "--dtype", regime.dtype, "-o", links
        )
    profile.unlink(missing_ok=True)
    _hzplan("profile", factory(regime), "--links", links, "--micro-batch", MICRO_BATCH, "--dtype", regime.dtype, "-o", profile)  # fmt: skip  # noqa: E501
    for plan in random_plans(profile, regime, folder, PLANS):
        answer = json.loads(_hzplan("rehearse", plan, factory(regime), "--steps", STEPS, "--json"))
        yield answer | {"plan": f"{regime.name} {plan.stem}"}
        print(f"{regime.name} {plan.stem}: {_apart(answer):+.1%}", flush=True, file=sys.stderr)


def _hzplan(*words: object) -> str:
    return output_of([sys.executable, "-m", "hzplan", *map(str, words)])


def _markdown(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    yield "| plan | predicted | rehearsed | apart, median | from | to | spread | memory apart |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, turns in found.items():
        yield _row(name, turns)
    medians = [abs(statistics.median(map(_apart, turns))) for turns in found.values()]
    yield f"\nMean of the medians: {statistics.fmean(medians):.1%}"


def _row(name: str, turns: Sequence[Mapping[str, Any]]) -> str:
    def ms(what: str) -> float:
        return float(statistics.median(turn["step_s"][what] for turn in turns)) * 1e3

    apart = sorted(map(_apart, turns))
    low, _, high = statistics.quantiles(apart, n=4)
    more = max((memory["rehearsed"] / memory["predicted"] - 1 for memory in _memory(turns)), key=abs)
    return (
        f"| {name} | {ms('predicted'):.0f} ms | {ms('rehearsed'):.0f} ms | {statistics.median(apart):+.1%} "
        f"| {apart[0]:+.1%} | {apart[-1]:+.1%} | {(high - low) / 2:.1%} | {more:+.2%} |"
    )


def _memory(turns: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, int]]:
    return (turn["peak_memory_bytes"] for turn in turns)


def _apart(one: Mapping[str, Any]) -> float:
    return float(one["step_s"]["rehearsed"] / one["step_s"]["predicted"] - 1)


if __name__ == "__main__":
    app()
