"""``python -m benchmarks.wire_convergence``: does what travels narrow train as well as what travels exactly?

Ranks are threads of one process, with the runtime's own steps and rounding. Everything is sharded over two
ranks and every message is in the format, so nothing that a plan chooses rounds more. Seeds are paired: a
format's runs have the initial weights and the batches of the exact ones.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from torch import Tensor

from benchmarks.commands import write_section
from benchmarks.models import Sized
from benchmarks.threads import CLIP, RANKS, plan_of, train
from hzplan.core.hierarchy import Levels
from hzplan.core.layout import BucketLayout
from hzplan.core.schedule import Kind
from hzplan.core.stages import PARAMETERS
from hzplan.core.wire import Format, Wire
from hzplan.formats.base import write_text
from hzplan.models.gpt import GPTConfig
from hzplan.models.workload import load
from hzplan.runtime.backends.packing import Form, Step
from hzplan.runtime.bucket import Forms

LR, TAIL, EVERY = 1e-3, 200, 25
REACHED = 0.8
"""Share of the exact run's steps after which others are asked for the loss that it has then."""
MICRO_BATCHES = {"small": 4, "large": 1}
"""Sequences of a rank in a step: the larger model gets few, or its run would take hours here."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t by number of pairs, two-sided."""
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def small() -> Sized:
    """0.2 M parameters, nearly all in four equal blocks."""
    return Sized.of(GPTConfig(vocab=256, layers=4, width=64, heads=4, seq_len=64))


def large() -> Sized:
    """25 M parameters, nearly all in eight equal blocks."""
    return Sized.of(GPTConfig(vocab=256, layers=8, width=512, heads=8, seq_len=64))


@dataclass(frozen=True)
class Case:
    """What travels in what; ``instead``: a form that the product does not have."""

    param: Format = "exact"
    grad: Format = "exact"
    instead: Callable[[], Form] | None = None

    @property
    def wire(self) -> Wire:
        """Nothing is kept exact but what always is."""
        return Wire((self.param,), (self.grad,), kept=())


@dataclass(frozen=True)
class Coarse(Form):
    """4 bits and one scale for a whole message, to the nearest: what is known to harm. Only its rounding:
    what travels has the values' own bytes."""

    dtype: torch.dtype = field(default=torch.float32)

    def units(self, values: int) -> int:
        """See Form."""
        return values

    def pack(self, values: Tensor, packed: Tensor) -> Step:
        """See Form."""
        return _Rounding(values, packed)

    def unpack(self, packed: Tensor, values: Tensor, *, adds: bool = False) -> Step:
        """See Form."""
        return _Moved(packed, values, adds)


@dataclass(frozen=True)
class _Rounding:
    source: Tensor
    target: Tensor

    def run(self) -> None:
        scale = self.source.abs().max().clamp_(min=1e-30) / 7
        self.target.copy_((self.source / scale).round_().mul_(scale))


@dataclass(frozen=True)
class _Moved:
    source: Tensor
    target: Tensor
    adds: bool

    def run(self) -> None:
        if self.adds:
            self.target.add_(self.source)
        elif self.target.data_ptr() != self.source.data_ptr():
            self.target.copy_(self.source)


CASES: dict[str, Case] = {
    "exact": Case(),
    "gradients bf16": Case(grad="bf16"),
    "gradients int8": Case(grad="int8"),
    "parameters int8": Case(param="int8"),
    "parameters fp8": Case(param="fp8"),
    "both int8": Case("int8", "int8"),
    "gradients int4, one scale": Case(grad="bf16", instead=Coarse),
    "parameters int4, one scale": Case(param="bf16", instead=Coarse),
}
LONG = ("exact", "both int8")
"""Those of the larger model."""


@app.command()
def main(
    steps: Annotated[int, typer.Option(help="Optimizer steps of a run.")] = 3000,
    seeds: Annotated[int, typer.Option(help="Runs of each format.")] = 3,
    model: Annotated[str, typer.Option(help="small, or large: one seed of few formats.")] = "small",
    output: Annotated[Path, typer.Option(help="Losses of all runs; those that are there are kept.")] = Path(
        "benchmarks/results/wire-convergence.json"
    ),
    docs: Annotated[Path | None, typer.Option(help="A page whose section of this is written anew.")] = None,
) -> None:
    """Train and compare.

    Example: python -m benchmarks.wire_convergence --docs docs/convergence.md
    """
    found = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    torch.set_num_threads(1)
    for seed in range(seeds if model == "small" else 1):
        for name in CASES if model == "small" else LONG:
            key = f"{model}, {name}, {steps} steps, seed {seed}"
            if key not in found and steps:
                began = time.monotonic()
                losses = _train(model, CASES[name], steps, seed)
                found[key] = {"model": model, "case": name, "steps": steps, "seed": seed}
                found[key] |= {"losses": [round(one, 5) for one in losses[::EVERY]], "final": _final(losses)}
                write_text(output, json.dumps(found, indent=1) + "\n")
                print(f"{key}: {found[key]['final']:.4f}, {time.monotonic() - began:.0f} s", flush=True)
    text = _markdown(found)
    if docs is None:
        print(text)
    else:
        write_section(docs, TITLE, text)


def _final(losses: list[float]) -> float:
    return round(statistics.fmean(losses[-TAIL:]), 5)


def _train(model: str, case: Case, steps: int, seed: int) -> list[float]:
    """The mean loss of every step."""
    workload = load(f"benchmarks.wire_convergence:{model}")
    plan = plan_of(workload, Levels(1, 1, 1), MICRO_BATCHES[model], wire=case.wire)
    with _instead(case):
        return train(workload, plan, torch.optim.AdamW, steps, seed, lr=LR).losses


@contextlib.contextmanager
def _instead(case: Case) -> Iterator[None]:
    """What the case rounds, in a form of its own."""
    if case.instead is None:
        yield
        return
    form = case.instead()

    def of(self: Forms, kind: Kind, tier: int, layout: BucketLayout, *_: Any) -> Form | None:
        is_rounded = (kind in PARAMETERS) == (case.param != "exact")
        return form if is_rounded and layout.narrow else None

    with mock.patch.object(Forms, "of", of):
        yield


TITLE = "## Formats that travel narrow"


def _markdown(found: dict[str, Any]) -> str:
    lines = [
        TITLE,
        "",
        f"By `python -m benchmarks.wire_convergence`: {RANKS} ranks as threads, everything sharded and every "
        "message in the format but those of norms and biases, float32, AdamW at a constant rate of "
        f"{LR}, gradients clipped to {CLIP:g}, the text of Python's own library. A final loss is the mean of "
        f"the last {TAIL} steps. *Apart*: from the exact run of the same seed, the mean over seeds with its "
        "95% interval (Student's t), and how far the exact runs of other seeds are apart. *Tokens*: those "
        f"until the mean of {TAIL} steps (one in {EVERY} is looked at) is down to what the exact run of the "
        f"same seed has after {REACHED:.0%} of its steps, "
        "over those of that run, the mean over seeds; seconds are that over what a step gains on the "
        "link at hand ([wire.md](wire.md)).",
        "",
        "| model | steps | format | final loss by seed | apart | seeds apart | tokens |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    groups = dict.fromkeys((one["model"], one["steps"]) for one in found.values())
    sized = {"small": "0.2 M", "large": "25 M"}
    for model, steps in groups:
        runs = [one for one in found.values() if (one["model"], one["steps"]) == (model, steps)]
        exact = {one["seed"]: one["final"] for one in runs if one["case"] == "exact"}
        spread = f"{max(exact.values()) - min(exact.values()):.4f}" if len(exact) > 1 else ""
        for name in dict.fromkeys(one["case"] for one in runs):
            finals = {one["seed"]: one["final"] for one in runs if one["case"] == name}
            pairs = [finals[seed] - exact[seed] for seed in finals if seed in exact]
            by_seed = ", ".join(f"{finals[seed]:.4f}" for seed in sorted(finals))
            off = "" if name == "exact" else apart(pairs)
            curves = {one["seed"]: one["losses"] for one in runs if one["case"] == name}
            base = {one["seed"]: one["losses"] for one in runs if one["case"] == "exact"}
            tokens = [tokens_to_loss(curves[seed], base[seed], steps) for seed in curves if seed in base]
            reached = "never" if None in tokens else f"{statistics.fmean(filter(None, tokens)):.2f}"
            lines.append(f"| {sized[model]} | {steps} | {name} | {by_seed} | {off} | {spread} | {reached} |")
    return "\n".join([*lines, ""])


def tokens_to_loss(losses: Sequence[float], exact: Sequence[float], steps: int) -> float | None:
    """Tokens until a run is down to what the exact run has after a share of its steps, over that run's.

    ``losses``: of one step in every so many of ``steps``. None where it never is.
    """
    tail = max(1, TAIL * len(exact) // steps)

    def after(curve: Sequence[float], parts: int) -> float:
        return statistics.fmean(curve[max(0, parts - tail) : parts])

    asked = round(REACHED * len(exact))
    goal = after(exact, asked)
    first = next((n for n in range(tail, len(exact) + 1) if after(exact, n) <= goal), None)
    own = next((n for n in range(tail, len(losses) + 1) if after(losses, n) <= goal), None)
    return None if own is None or first is None else own / first


def apart(pairs: list[float]) -> str:
    """The mean of paired differences with its 95% interval (Student's t); alone where there are too few."""
    mean = statistics.fmean(pairs)
    if len(pairs) not in T_95:
        return f"{mean:+.4f}"
    half = T_95[len(pairs)] * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return f"{mean:+.4f} ± {half:.4f}"


if __name__ == "__main__":
    app()
