"""``python -m benchmarks``: measure regimes, keep the figures, write docs/benchmarks.md."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import regimes, report
from benchmarks.measure import DEEPSPEED, PEERS, ROOT, measure
from benchmarks.verdict import judge
from hzplan.emulate import available
from hzplan.formats.base import write_text

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    full: Annotated[bool, typer.Option(help="All regimes, not only the quick ones.")] = False,
    only: Annotated[str | None, typer.Option(help="Regimes whose names contain this.")] = None,
    ablations: Annotated[
        bool, typer.Option(help="In the quick regimes also what each of the plan's freedoms is worth.")
    ] = True,
    deepspeed: Annotated[
        bool, typer.Option(help="In the quick regimes also DeepSpeed, where it is installed.")
    ] = True,
    output: Annotated[
        Path | None, typer.Option(help="Results; by default benchmarks/results/DATE….json.")
    ] = None,
    work: Annotated[Path, typer.Option(help="Profiles and plans; a profile there is taken as it is.")] = Path(
        "build/benchmarks"
    ),
    docs: Annotated[Path | None, typer.Option(help="Where to write the tables.")] = None,
    shown: Annotated[Path | None, typer.Option(help="Only write the tables of these results.")] = None,
) -> None:
    """Measure plans beside their peers on emulated clusters. Nothing else should run meanwhile.

    A file of results that is there is completed: what it has is not measured again.

    Example: python -m benchmarks --full --docs docs/benchmarks.md
    """
    if shown is not None:
        _write_docs(json.loads(shown.read_text(encoding="utf-8")), docs)
        return
    if (reason := available()) is not None:
        sys.exit(f"benchmarks need emulated clusters: {reason}")
    everything = (*regimes.load(), *(regimes.load_drawn() if full or only else ()))
    chosen = [r for r in everything if (full or r.quick or only) and (only or "") in r.name]
    chosen.sort(key=lambda r: -regimes.bits_per_s(r.network))  # where steps are short first
    results = about()
    path = output or ROOT / "benchmarks" / "results" / f"{results['date']}{'-full' if full else ''}.json"
    if path.exists():  # go on where it stopped
        results["regimes"] = json.loads(path.read_text(encoding="utf-8"))["regimes"]
        chosen = [r for r in chosen if r not in {regimes.Regime(**m["regime"]) for m in results["regimes"]}]
    for number, regime in enumerate(chosen, start=1):
        print(f"[{number}/{len(chosen)}] {regime.name}", flush=True)
        began = time.monotonic()
        try:
            peers = [*PEERS, *(DEEPSPEED if deepspeed and regime.quick else ())]
            found = measure(regime, work / regime.name, peers=peers, ablations=ablations and regime.quick)
            results["regimes"].append({"commit": results["commit"], **found})
            print(f"    {_line(found)} ({time.monotonic() - began:.0f} s)", flush=True)
        except regimes.NoResult as error:
            results["failed"].append({"regime": regime.name, "why": str(error)})
            print(f"    not measured: {error}", flush=True)
        write_text(path, json.dumps(results, indent=1) + "\n")
    _write_docs(results, docs)


def _asked(arguments: Sequence[str]) -> list[str]:
    """The options of a command line, without those that say where files lie."""
    found, places = list[str](), {"--output", "--work", "--docs", "--shown"}
    for before, one in zip(["", *arguments], arguments, strict=False):
        if one.partition("=")[0] not in places and before not in places:
            found.append(one)
    return found


def about() -> dict[str, Any]:
    ask = ["git", "rev-parse", "--short", "HEAD"]
    head = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "date": date.today().isoformat(),
        "commit": head.stdout.strip() or "unknown",
        "command": " ".join(["python -m", _module(), *_asked(sys.argv[1:])]),
        "machine": {
            "cpus": os.cpu_count(),
            "cpu": _cpu(),
            "torch": torch.__version__,
            "kernel": platform.release(),
        },
        "regimes": [],
        "failed": [],
    }


def _module() -> str:
    """Which of ours runs: ``python -m`` names its file."""
    name = ".".join(Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__main__")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def _line(result: dict[str, Any]) -> str:
    verdict = judge(result)
    share = "" if verdict.share is None else f", share {verdict.share:.2f}"
    return (
        f"{verdict.group}: {verdict.peer} takes {verdict.ratio:.2f} ({verdict.low:.2f}–{verdict.high:.2f}) "
        f"of the plan's time, control ±{verdict.margin:.2f}, bar {verdict.bar} "
        f"{'not lost' if verdict.passed else 'lost'}{share}"
    )


def _write_docs(results: dict[str, Any], docs: Path | None) -> None:
    text = report.markdown(results)
    if docs is None:
        print(text)
    else:
        write_text(docs, text)


if __name__ == "__main__":
    app()
