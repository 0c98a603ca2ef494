"""``python -m benchmarks.activations``: what parts of recomputation, a loss in chunks and the host are worth.

Modelled. Beside every plan the best that is set by hand at the same budget, over all schemes, micro-batch
sizes and paces: torchtitan's selective checkpointing by operation, and every k-th block recomputed, none and
all among them; and the plan that the solver finds without one of the new choices. Then the smallest memory
that models train in.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.measure import output_of
from benchmarks.questions import GIB
from benchmarks.ways import table
from hzplan.core.layout import gradient_bytes
from hzplan.core.recompute import NOTHING, Recomputed, Way
from hzplan.cost.curves import interpolate
from hzplan.cost.model import CostModel
from hzplan.formats.base import write_text
from hzplan.formats.profile import Profile
from hzplan.show.readable import duration
from hzplan.solver.schemes import EVERY, RecomputeOptions, Settings, schemes
from hzplan.solver.search import Request
from hzplan.solver.solve import Infeasible, Outcome, Solved, searches_of, solve

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
SMALLEST = (
    Case("gpt:1.3b", 1, 2048, 8, ()),
    Case("hf:llama3-8b", 1, 8192, 8, ()),
    Case("hf:qwen3-8b", 1, 8192, 8, ()),
    Case("hf:qwen3-32b", 2, 8192, 16, ()),
    Case("hf:mixtral-8x7b", 2, 4096, 16, ()),
    Case("hf:llama3-70b", 4, 8192, 32, ()),
    Case("hf:gpt3-175b", 8, 2048, 64, ()),
    Case("hf:llama3-405b", 32, 8192, 256, ()),
)
HOST_GIB = 200
ABOUT_SMALLEST = f"""
## The smallest memory

At one sequence a rank and micro-batch: GiB of the smallest plan, and the step that is planned in just that.
*whole units*: a unit is recomputed or not; *parts and chunks*: as above; *on the host*: and {HOST_GIB} GiB of
the host's memory for a rank, for optimizer state and activations. *FSDP2, all on the host*: what its CPU
offload leaves on the device at least, activations as in the smallest plan and two units' parameters in bf16
with one's gradients; and the seconds that copying parameters for forward and backward, and gradients, takes
at least, without the optimizer on the host's processors.

| model | whole units | parts and chunks | on the host | FSDP2, all on the host |
|---|---|---|---|---|"""
MEASURED = Path(__file__).with_name("results") / "ways.json"
"""What ``benchmarks.ways`` has measured."""
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
    parts: tuple[Way, ...] = ("elementwise", "operations", "attention", "products")
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


def smallest(case: Case, profile: Profile) -> str:
    """The row of a model in the table of smallest memories."""
    parts: tuple[Way, ...] = ("host", "chunks", "elementwise", "operations", "attention", "products")
    host = HOST_GIB * GIB
    cells = [
        _least(without(profile, parts), Request(1, case.global_batch)),
        _least(without(profile, parts[:1]), Request(1, case.global_batch)),
        _least(profile, Request(1, case.global_batch, host_bytes=host)),
    ]
    name = case.model.partition(":")[2]
    return f"| {name}, {8 * case.nodes} H100 | {' | '.join(cells)} | {_fsdp2_on_host(profile)} |"


def _least(profile: Profile, request: Request) -> str:
    found = solve(profile, request)
    if not isinstance(found, Infeasible):
        return "–"
    nbytes = found.smallest.memory.peak
    planned = solve(profile, replace(request, memory_bytes=nbytes))
    step = duration(planned.best.step_s) if isinstance(planned, Solved) else "no plan found"
    return f"{nbytes / GIB:.1f}, {step}"


def _fsdp2_on_host(profile: Profile) -> str:
    """What is left on the device, and what the link to the host takes: both at least."""
    model, size = CostModel(profile), profile.micro_batches[0]
    activations = model.activations.peak_bytes(size, Recomputed.of(model.recomputable))
    units = sorted(sum(t.nbytes for t in specs) for specs in model.tensors.values())
    gradients = max(map(gradient_bytes, model.tensors.values()))
    held = activations + sum(units[-2:]) + gradients
    rank = profile.mesh.world
    copied = (2 * sum(units) + sum(map(gradient_bytes, model.tensors.values()))) // rank
    assert profile.host is not None, "a modelled device has a link to the host's memory"
    seconds = interpolate([(point.bytes, point.seconds) for point in profile.host.points], copied)
    return f"{held / GIB:.1f}, copies {duration(seconds)}"


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
    rows.append(ABOUT_SMALLEST)
    for case in SMALLEST:
        rows.append(smallest(case, profile_of(case, (1,))))
        print(rows[-1], flush=True)
    if MEASURED.exists():
        rows.append(table(json.loads(MEASURED.read_text(encoding="utf-8"))).rstrip("\n"))
    if docs is not None:
        write_text(docs, "\n".join(rows) + "\n")


def profile_of(case: Case, micro_batches: Sequence[int] = MICRO_BATCHES) -> Profile:
    """The modelled profile of a case, by the command that a user has."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "profile.json")
        shape = ["--micro-batch", ",".join(map(str, micro_batches)), "--seq-len", str(case.seq_len)]
        asked = ["--analytic", "--cluster", CLUSTER, "--nodes", str(case.nodes), "--dtype", "bf16", *shape]
        output_of([sys.executable, "-m", "hzplan", "profile", case.model, *asked, "-o", str(path)])
        return Profile.load(path)


if __name__ == "__main__":
    app()
