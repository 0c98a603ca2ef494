"""``python -m benchmarks.activations``: what parts of recomputation and a loss in chunks are worth.

Modelled. Beside every plan the best that is set by hand at the same budget, over all schemes, micro-batch
sizes and paces: torchtitan's selective checkpointing by operation, and every k-th block recomputed, none and
all among them; and the plan that the solver finds without one of the new choices.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.measure import output_of
from benchmarks.questions import GIB
from hzplan.core.recompute import NOTHING, Recomputed, Way
from hzplan.formats.base import write_text
from hzplan.formats.profile import Profile
from hzplan.show.readable import duration
from hzplan.solver.schemes import EVERY, RecomputeOptions, Settings, schemes
from hzplan.solver.search import Request
from hzplan.solver.solve import Outcome, Solved, searches_of, solve

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Case:
    """A modelled question; ``budgets`` in GiB."""

    model: str
    nodes: int
    seq_len: int
    global_batch: int
    budgets: tuple[int, ...]


CASES = (
    Case("hf:llama3-8b", 1, 8192, 64, (30, 45, 60)),
    Case("hf:qwen3-32b", 4, 8192, 256, (35, 50, 70)),
    Case("hf:mixtral-8x7b", 8, 4096, 512, (35, 50, 70)),
)
ABOUT = """# What activations cost

`python -m benchmarks.activations --docs docs/activations.md`. Modelled, on nodes of 8 H100 with 400
Gbit/s for each. *plan*: predicted step and gap to the bound; *chosen*: what units compute again, in
blocks. By hand, the best of all schemes, micro-batch sizes and paces that fits the budget: *operations*:
torchtitan's selective checkpointing by operation in every block; *every k-th*: every k-th block, all or
none. *gain*: of the plan over the better of those. The last three columns are the solver's own plan
without a choice: how much longer its step is.

| question | budget, GiB | plan | chosen | operations | every k-th | gain | without chunks | without parts | \
without both |
|---|---|---|---|---|---|---|---|---|---|"""
CLUSTER, MICRO_BATCHES = "h100-8x400g", (1, 2)


def without(profile: Profile, ways: Collection[Way]) -> Profile:
    """A profile whose units do not have some ways."""
    uses = tuple(
        use.model_copy(
            update={
                "costs": tuple(
                    cost.model_copy(
                        update={
                            "partial": {
                                way: of for way, of in (cost.partial or {}).items() if way not in ways
                            }
                            or None
                        }
                    )
                    for cost in use.costs
                )
            }
        )
        for use in profile.uses
    )
    return profile.model_copy(update={"uses": uses})


def by_hand(profile: Profile, request: Request, choices: Sequence[Recomputed]) -> float | None:
    """Seconds of the fastest step that fits, of any scheme with one of these; None where none fits."""
    settings = Settings(searches_of(profile, request), request)
    every = [one for triple in schemes(profile.mesh).values() for one in settings.of(triple, choices)]
    found = settings.fastest(every)
    return None if found is None else found.step_s


def lines(case: Case, profile: Profile) -> Iterator[str]:
    """The rows of a case."""
    chunks: tuple[Way, ...] = ("chunks",)
    parts: tuple[Way, ...] = ("elementwise", "operations", "attention")
    for budget in case.budgets:
        request = Request(budget * GIB, case.global_batch, time_limit_s=60.0)
        options = RecomputeOptions.of(searches_of(profile, request)[0].question.model)
        blocks = Recomputed.of(options.blocks)
        every = [NOTHING, blocks, *map(options.every, EVERY)]
        hand = {
            "operations": by_hand(profile, request, [Recomputed.of(options.blocks, "operations")]),
            "every": by_hand(profile, request, every),
        }
        best = solve(profile, request)
        others = {
            "chunks": solve(without(profile, chunks), request),
            "parts": solve(without(profile, parts), request),
            "both": solve(without(profile, (*chunks, *parts)), request),
        }
        if not isinstance(best, Solved):
            yield f"| {case.model} | {budget} | none fits | | | | | | | |"
            continue
        step = best.best.step_s
        known = [seconds for seconds in hand.values() if seconds is not None]
        gain = f"{min(known) / step - 1:.1%}" if known else "needed to fit"
        chosen = options.name(best.best.modes.recompute)
        name = case.model.removeprefix("hf:")
        yield (
            f"| {name}, {8 * case.nodes} H100, {case.global_batch} × {case.seq_len} "
            f"| {budget} | {duration(step)}, {best.gap:.1%} | {chosen} | {_said(hand['operations'])} "
            f"| {_said(hand['every'])} | {gain} | {_more(others['chunks'], step)} "
            f"| {_more(others['parts'], step)} | {_more(others['both'], step)} |"
        )


def _said(seconds: float | None) -> str:
    return "does not fit" if seconds is None else duration(seconds)


def _more(found: Outcome, step_s: float) -> str:
    if not isinstance(found, Solved):
        return "does not fit"
    return f"{found.best.step_s / step_s - 1:.1%}".replace("-0.0%", "0.0%")


@app.command()
def main(
    docs: Annotated[Path | None, typer.Option(help="Where to write the table.")] = None,
) -> None:
    """Plan the cases and print the table.

    Example: python -m benchmarks.activations --docs docs/activations.md
    """
    rows = [ABOUT]
    for case in CASES:
        profile = profile_of(case)
        for line in lines(case, profile):
            print(line, flush=True)
            rows.append(line)
    if docs is not None:
        write_text(docs, "\n".join(rows) + "\n")


def profile_of(case: Case) -> Profile:
    """The modelled profile of a case, by the command that a user has."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "profile.json")
        shape = ["--micro-batch", ",".join(map(str, MICRO_BATCHES)), "--seq-len", str(case.seq_len)]
        asked = ["--analytic", "--cluster", CLUSTER, "--nodes", str(case.nodes), "--dtype", "bf16", *shape]
        output_of([sys.executable, "-m", "hzplan", "profile", case.model, *asked, "-o", str(path)])
        return Profile.load(path)


if __name__ == "__main__":
    app()
