"""``python -m benchmarks.muon_convergence``: does a plan's Muon train as one process's, and what is it worth?

Three kinds of runs with the same initial weights and batches: AdamW, torch.optim.Muon in one process, and
Muon under plans, whose ranks are threads.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.optim import AdamW, Optimizer

from benchmarks.commands import write_section
from benchmarks.threads import CLIP, RANKS, Trained, plan_of, train
from benchmarks.wire_convergence import REACHED, TAIL, apart, tokens_to_loss
from hzplan.core.hierarchy import Levels
from hzplan.core.matrices import EXCHANGED, OWNED, MatrixWay
from hzplan.formats.base import write_text
from hzplan.formats.plan import Plan
from hzplan.models.workload import Workload, load
from hzplan.runtime.muon import Muon
from hzplan.training.batches import batches
from hzplan.training.data import load_corpus

DECAY = 0.1
TUNED = 100
"""The seed at which learning rates are tried."""
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
"""Learning rates that the small model is tried with, whole runs; each method has its best."""
ADJUST = "match_rms_adamw"
"""Muon's updates as large as AdamW's, so that both can have one learning rate (arXiv 2502.16982, §2.2)."""
EVERY = 10


@dataclass(frozen=True)
class Sizing:
    """A model, its sequences of a rank in a step, and how many seeds are trained."""

    factory: str
    parameters: str
    micro_batch: int
    seeds: int


SIZES = {
    "small": Sizing("benchmarks.wire_convergence:small", "0.2 M", 4, 3),
    "large": Sizing("benchmarks.wire_convergence:large", "25 M", 4, 1),
}


@dataclass(frozen=True)
class Case:
    """``way``: how a plan's matrices come together; None: one process trains."""

    muon: bool
    way: MatrixWay | None = None


ADAMW, ALONE = "AdamW", "Muon, one process"
CASES = {
    ADAMW: Case(muon=False, way=""),
    ALONE: Case(muon=True),
    "Muon, exchanged": Case(muon=True, way=EXCHANGED),
    "Muon, owned": Case(muon=True, way=OWNED),
}
LARGE = (ADAMW, ALONE, "Muon, exchanged")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    steps: Annotated[int, typer.Option(help="Optimizer steps of a run.")] = 2000,
    model: Annotated[str, typer.Option(help="small, or large: one seed.")] = "small",
    output: Annotated[Path, typer.Option(help="Losses of all runs; those that are there are kept.")] = Path(
        "benchmarks/results/muon-convergence.json"
    ),
    docs: Annotated[Path | None, typer.Option(help="A page whose section of this is written anew.")] = None,
) -> None:
    """Train and compare. Nothing else should run meanwhile, for seconds are compared too.

    Example: python -m benchmarks.muon_convergence --docs docs/muon.md
    """
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    torch.set_num_threads(1)

    def run(name: str, rate: float, seed: int) -> float:
        key = f"{model}, {name}, {steps} steps, rate {rate:g}, seed {seed}"
        if key not in found:
            losses, seconds = _train(SIZES[model], CASES[name], steps, seed, rate)
            found[key] = {"model": model, "case": name, "steps": steps, "seed": seed, "rate": rate}
            found[key] |= {"seconds": None if isnan(seconds) else round(seconds, 2), "final": _final(losses)}
            found[key] |= {"losses": [round(one, 5) for one in losses[::EVERY]]}
            write_text(output, json.dumps(found, indent=1) + "\n")
            print(f"{key}: {found[key]['final']:.4f}, {seconds:.0f} s", flush=True)
        final: float = found[key]["final"]
        return final

    if steps:
        names = LARGE if model == "large" else tuple(CASES)
        rates = dict.fromkeys(names, RATES[1])
        if model == "small":
            adamw, muon = (min(RATES, key=lambda rate: run(of, rate, TUNED)) for of in (ADAMW, ALONE))
            rates = {name: muon if CASES[name].muon else adamw for name in names}
        for seed in range(SIZES[model].seeds):
            for name in names:
                run(name, rates[name], seed)
    text = _markdown(found)
    if docs is None:
        print(text)
    else:
        write_section(docs, TITLE, text)


def _final(losses: Sequence[float]) -> float:
    return round(statistics.fmean(losses[-TAIL:]), 5)


def _train(sizing: Sizing, case: Case, steps: int, seed: int, rate: float) -> Trained:
    workload = load(sizing.factory)
    options = {"lr": rate, "weight_decay": DECAY}
    kind = "muon" if case.muon else "adamw"
    plan = plan_of(workload, Levels(1, 1, 1, case.way or ""), sizing.micro_batch, optimizer=kind)
    if case.way is None:
        return Trained(_alone(workload, plan, steps, seed, options), nan)
    if case.muon:
        more = {"adjust_lr_fn": ADJUST, "adamw": {"weight_decay": DECAY}}
        return train(workload, plan, Muon, steps, seed, **options, **more)
    return train(workload, plan, AdamW, steps, seed, **options)


def _alone(workload: Workload, plan: Plan, steps: int, seed: int, options: Mapping[str, Any]) -> list[float]:
    """torch.optim.Muon and AdamW in one process, on the batches of all ranks."""
    data = batches(workload, load_corpus(None, seq_len=workload.seq_len), plan, seed=seed)
    torch.manual_seed(seed)
    model = workload.build()
    named = dict(model.named_parameters())
    listed = [name for unit in plan.units for of in unit.buckets if of.matrix for name in of.tensors]
    matrices: list[nn.Parameter] = [named.pop(name) for name in listed]
    optimizers: Sequence[Optimizer] = (
        torch.optim.Muon(matrices, **options, adjust_lr_fn=ADJUST),
        AdamW(named.values(), **options),
    )
    found = []
    for step in range(steps):
        losses = [workload.loss(model, data.train(step, 0, rank)) for rank in range(RANKS)]
        mean = torch.stack(losses).mean()
        mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found.append(float(mean.detach()))
    return found


TITLE = "## Curves"


def _markdown(found: Mapping[str, Any]) -> str:
    lines = [
        TITLE,
        "",
        f"By `python -m benchmarks.muon_convergence`: sequences of 64 tokens from the text of Python's own "
        f"library, {RANKS} ranks as threads, everything sharded, float32 (Newton–Schulz in bfloat16), a "
        f"constant learning rate, weight decay {DECAY:g}, gradients clipped to {CLIP:g}; Muon's updates are "
        "scaled to AdamW's size (match_rms_adamw). The small model's rates are the best of "
        f"{', '.join(f'{rate:g}' for rate in RATES)} at a seed that is not among the others; the larger "
        f"model has {RATES[1]:g}. A final loss is the mean of the last {TAIL} steps. *Apart*: from "
        "torch.optim.Muon in one process at the same seed, the mean with its 95% interval (Student's t), and "
        f"how far the seeds of that are apart. *As AdamW*: steps until the mean of {TAIL} steps (one in "
        f"{EVERY} is looked at) is down to what AdamW has at the same seed after {REACHED:.0%} of its steps, "
        "over those of AdamW, and the same in seconds of this machine, where ranks are two threads on two "
        "cores; the mean over seeds.",
        "",
        "| model | steps | rate | optimizer | final loss by seed | apart | seeds apart | as AdamW |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model, steps in dict.fromkeys((one["model"], one["steps"]) for one in found.values()):
        runs = [one for one in found.values() if (one["model"], one["steps"]) == (model, steps)]
        best = _best_rates(runs)
        by_case = {
            name: {one["seed"]: one for one in runs if one["case"] == name and one["seed"] != TUNED}
            for name in CASES
            if name in best
        }
        for name, of in by_case.items():
            alone, adamw = by_case.get(ALONE, {}), by_case.get(ADAMW, {})
            finals = ", ".join(f"{of[seed]['final']:.4f}" for seed in sorted(of))
            pairs = [one["final"] - alone[seed]["final"] for seed, one in of.items() if seed in alone]
            every = [one["final"] for one in alone.values()]
            edge = (
                f" (of {RATES[0]:g} to {RATES[-1]:g} the last)" if best[name] in (RATES[0], RATES[-1]) else ""
            )
            cells = [
                *(SIZES[model].parameters, str(steps), f"{best[name]:g}{edge}", name, finals),
                apart(pairs) if "," in name and name != ALONE and pairs else "",
                f"{max(every) - min(every):.4f}" if name == ALONE and len(every) > 1 else "",
                _as_adamw(of, adamw, steps) if name != ADAMW else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _best_rates(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By case the rate that it was trained with, where rates were no longer tried."""
    return {one["case"]: one["rate"] for one in runs if one["seed"] != TUNED}


def _as_adamw(of: Mapping[int, Mapping[str, Any]], adamw: Mapping[int, Mapping[str, Any]], steps: int) -> str:
    both = [seed for seed in of if seed in adamw]
    shares = [tokens_to_loss(of[seed]["losses"], adamw[seed]["losses"], steps) for seed in both]
    if not shares or None in shares:
        return "never" if shares else ""
    mean = statistics.fmean(filter(None, shares))
    if any(of[seed]["seconds"] is None for seed in both):
        return f"{mean:.0%} of steps"
    dearer = statistics.fmean(of[seed]["seconds"] / adamw[seed]["seconds"] for seed in both)
    return f"{mean:.0%} of steps, {mean * dearer:.0%} of seconds"


if __name__ == "__main__":
    app()
