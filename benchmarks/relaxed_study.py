"""``python -m benchmarks.relaxed_study``: which rule for groups that do not wait, at equal traffic.

Sparse averages (plain, delta, ema) of 5% and 1% of the parameters in each step, applied 1, 10 and 50 steps
later, beside DiLoCo's outer steps every 20 and 100 steps, which send as many bytes. All in one process
(``benchmarks.replicas``). Seeds are paired: runs have the same initial weights and batches.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.commands import write_section
from benchmarks.replicas import Replicas
from benchmarks.wire_convergence import apart as interval
from hzplan.core.relaxed import Policy, Rule, Timetable
from hzplan.formats.base import write_text
from hzplan.models.workload import load
from hzplan.training.data import load_corpus

MODEL, SEQUENCES, LR = "benchmarks.wire_convergence:small", 4, 1e-3
TITLE = "## Which rule, at equal traffic"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Cell:
    """``policy``: None where gradients are averaged in every step."""

    groups: int
    policy: Policy | None

    @property
    def name(self) -> str:
        """For people."""
        if self.policy is None:
            return "one by itself" if self.groups == 1 else "every step, waiting"
        every, parts, delay = self.policy.timetable
        if self.policy.rule == "periodic":
            streamed = f" in {parts} fragments" if parts > 1 else ""
            return f"DiLoCo every {every * parts}{streamed}, {delay} later"
        return f"{self.policy.rule}, 1/{parts} a step, {delay} later"


def _sparse(rule: Rule, groups: int, parts: int, delay: int) -> Cell:
    return Cell(groups, Policy(rule, groups, Timetable(1, parts, delay)))


def _outer(groups: int, every: int, parts: int, delay: int) -> Cell:
    return Cell(groups, Policy("periodic", groups, Timetable(every, parts, delay)))


SPARSE: tuple[Rule, ...] = ("plain", "delta", "ema")
CELLS = [
    *(Cell(groups, None) for groups in (1, 2, 4)),
    *(_sparse(rule, 2, 20, delay) for delay in (1, 10) for rule in SPARSE),
    *(_outer(2, 20, 1, delay) for delay in (1, 10)),
    _outer(2, 5, 4, 4),
    *(_sparse(rule, 2, 100, delay) for delay in (1, 10, 50) for rule in SPARSE),
    *(_outer(2, 100, 1, delay) for delay in (10, 50)),
    *(_sparse(rule, 4, 20, 10) for rule in SPARSE),
    _outer(4, 20, 1, 10),
]


@app.command()
def main(
    steps: Annotated[int, typer.Option(help="Optimizer steps of a run.")] = 1500,
    seeds: Annotated[int, typer.Option(help="Runs of each cell.")] = 3,
    output: Annotated[Path, typer.Option(help="Losses of all runs; those that are there are kept.")] = Path(
        "benchmarks/results/relaxed-study.json"
    ),
    docs: Annotated[Path | None, typer.Option(help="A page whose section of this is written anew.")] = None,
) -> None:
    """Train and compare.

    Example: python -m benchmarks.relaxed_study --docs docs/relaxed.md
    """
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    torch.set_num_threads(1)
    workload = load(MODEL)
    corpus = load_corpus(None, seq_len=workload.seq_len)
    for seed in range(seeds):
        for cell in CELLS:
            key = f"{cell.groups} groups, {cell.name}, {steps} steps, seed {seed}"
            if key in found or not steps:
                continue
            began = time.monotonic()
            runs = Replicas(workload, corpus, cell.groups, SEQUENCES, cell.policy, LR, seed)
            for _ in runs.losses(steps):
                pass
            found[key] = {"groups": cell.groups, "cell": cell.name, "seed": seed, "steps": steps}
            found[key]["heldout"] = round(runs.heldout(), 5)
            write_text(output, json.dumps(found, indent=1) + "\n")
            print(f"{key}: {found[key]['heldout']:.4f}, {time.monotonic() - began:.0f} s", flush=True)
    text = _markdown(found)
    if docs is None:
        print(text)
    else:
        write_section(docs, TITLE, text)


def _markdown(found: dict[str, Any]) -> str:
    runs = list(found.values())
    steps = max(one["steps"] for one in runs)
    lines = [
        TITLE,
        "",
        f"By `python -m benchmarks.relaxed_study`: 0.2 M parameters, {steps} steps, each group {SEQUENCES} "
        f"sequences of 64 bytes a step of the text of Python's own library, float32, AdamW at {LR:g}, "
        "gradients clipped to 1. The loss is held-out, of the mean of all groups' parameters. *Apart*: from "
        "the run that waits in every step, same seed and number of groups, the mean over seeds with its 95% "
        "interval (Student's t). 1/20 a step and every 20 steps send the same bytes, and so do 1/100 and "
        "every 100.",
        "",
        "| groups | rule | held-out loss by seed | apart |",
        "| --- | --- | --- | --- |",
    ]
    for groups in sorted({one["groups"] for one in runs}):
        waiting = {
            one["seed"]: one["heldout"]
            for one in runs
            if one["groups"] == max(groups, 2) and one["cell"] == "every step, waiting"
        }
        for name in dict.fromkeys(one["cell"] for one in runs if one["groups"] == groups):
            of = {
                one["seed"]: one["heldout"] for one in runs if (one["groups"], one["cell"]) == (groups, name)
            }
            pairs = [of[seed] - waiting[seed] for seed in of if seed in waiting]
            apart = "" if name == "every step, waiting" else interval(pairs)
            lines.append(f"| {groups} | {name} | {', '.join(f'{of[s]:.4f}' for s in sorted(of))} | {apart} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    app()
