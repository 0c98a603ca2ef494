"""How near to proven, and how soon: ``python -m benchmarks.solver``.

Profiles are modelled, so any machine will do; one core is used. For every model the communication's seconds
are scaled so that all of it, under ZeRO-3, takes so many times as long as compute; memory is so many times
the least that fits. Every search is whole: all micro-batch sizes and paces.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.__main__ import about
from hzplan.cost import CostModel
from hzplan.formats.base import write_text
from hzplan.formats.profile import Profile
from hzplan.solver.evaluate import evaluate, uniform
from hzplan.solver.solve import Infeasible, Request, Solved, Standing, solve

RATIOS = (0.3, 1.0, 3.0)
ROOMS = (1.05, 1.5, 3.0)
GAP, TIGHTER = 0.01, 0.001
LIMIT_S = 10.0


@dataclass(frozen=True)
class Case:
    """A profile, and how many forward passes of the smallest micro-batch a step has."""

    name: str
    profile: Path
    passes: int = 2


CASES = (
    Case("llama3-8b on 64", Path("plans/profiles/llama3-8b-h100-8.json")),
    Case("qwen3-32b on 128", Path("plans/profiles/qwen3-32b-h100-16.json")),
    Case("mixtral-8x7b on 128", Path("plans/profiles/mixtral-8x7b-h100-16.json")),
    Case("llama3-70b on 128", Path("plans/profiles/llama3-70b-h100-16.json")),
    Case("gpt3-175b on 512", Path("plans/profiles/gpt3-175b-h100-64.json")),
    Case("llama3-405b on 1024", Path("plans/profiles/llama3-405b-h100-128.json")),
)


@dataclass(frozen=True)
class Result:
    """``curve``: seconds, best and bound in milliseconds, whenever they changed; None: not reached."""

    case: str
    ratio: float
    room: float
    gap: float
    seconds: float
    to_one_percent_s: float | None
    to_a_thousandth_s: float | None
    predicted_over_objective: float
    curve: list[tuple[float, float, float]]


def scaled(profile: Profile, ratio: float, passes: int) -> Profile:
    """The profile with links so fast that ZeRO-3's communication takes ``ratio`` times compute's seconds."""
    model = CostModel(profile)
    finest = profile.mesh.triples()[-1]
    schedule = model.schedule(prefetch=1, accumulation=passes, clip=True)
    found = evaluate(model, uniform(profile, finest), schedule, profile.micro_batches[0])
    compute = sum(
        duration
        for task, duration in zip(schedule.tasks, found.durations_ns, strict=True)
        if task.stream == "compute"
    )
    factor = ratio * compute / found.communication_ns
    collectives = [
        curve.model_copy(
            update={"points": [p.model_copy(update={"seconds": p.seconds * factor}) for p in curve.points]}
        )
        for curve in profile.collectives
    ]
    return profile.model_copy(update={"collectives": collectives})


def measure(case: Case) -> Iterator[Result]:
    """All ratios and rooms of a case."""
    profile = Profile.load(case.profile)
    batch = profile.mesh.world * profile.micro_batches[0] * case.passes
    nothing = solve(profile, Request(1, batch))
    assert isinstance(nothing, Infeasible)
    least = nothing.smallest.memory.peak
    for ratio in RATIOS:
        wanted = scaled(profile, ratio, case.passes)
        for room in ROOMS:
            yield _one(case, wanted, ratio, room, Request(int(least * room), batch, TIGHTER, LIMIT_S))


def _one(case: Case, profile: Profile, ratio: float, room: float, request: Request) -> Result:
    curve: list[tuple[float, float, float]] = []

    def watch(standing: Standing) -> None:
        point = standing.best_ms, standing.bound_ms
        if not curve or curve[-1][1:] != point:
            curve.append((standing.seconds, *point))

    started = time.monotonic()
    outcome = solve(profile, request, watch)
    seconds = time.monotonic() - started
    assert isinstance(outcome, Solved)

    def first(gap: float) -> float | None:
        reached = [at for at, best, bound in curve if bound and best / bound - 1 <= gap]
        return reached[0] if reached else None

    best = outcome.best
    gap = curve[-1][1] / curve[-1][2] - 1
    over = best.predicted.period_ns / best.objective_ns
    return Result(case.name, ratio, room, gap, seconds, first(GAP), first(TIGHTER), over, curve)


def main(
    only: Annotated[str | None, typer.Option(help="Cases whose name contains this.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write JSON here.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Where to write the table.")] = None,
) -> None:
    """Solve every case and print a table."""
    results = []
    titles = ("comm/comp", "memory", "gap", "s", "to 1%", "to 0.1%", "sim")
    print(f"{'case':<22}" + "".join(f"{title:>10}" for title in titles))
    for case in CASES:
        if only is None or only in case.name:
            for result in measure(case):
                results.append(result)
                print(_line(result), flush=True)
    peak = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"
    print(f"peak memory of this process {peak}")
    if output is not None:
        found = {**about(), "peak_memory": peak, "results": [asdict(result) for result in results]}
        write_text(output, json.dumps(found, indent=1) + "\n")
    if docs is not None:
        write_text(docs, _page(results, peak))


def _page(results: list[Result], peak: str) -> str:
    made = about()
    head = f"""# How near to proven, and how soon

`python -m benchmarks.solver --docs docs/solver.md`, {made["date"]}, {made["commit"]}, one core.
At most {LIMIT_S:g} s were given, a gap of {TIGHTER:.1%} was asked for; the process took {peak}. Modelled
profiles of `plans/profiles/`; communication is scaled to take so many times as long as compute under ZeRO-3,
and memory is so many times the least that fits. Every search is whole: all micro-batch sizes and paces.
`sim` is the predicted step over the objective, in which links are not shared.

| model and ranks | communication/compute | memory | gap | s | to 1 % | to 0.1 % | sim |
|---|--:|--:|--:|--:|--:|--:|--:|
"""
    return head + "".join(f"| {' | '.join(_cells(result))} |\n" for result in results)


def _line(result: Result) -> str:
    case, *others = _cells(result)
    return f"{case:<22}" + "".join(f"{text:>10}" for text in others)


def _cells(result: Result) -> list[str]:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    return [
        result.case,
        f"{result.ratio:g}",
        f"{result.room:g}",
        f"{max(0.0, result.gap):.2%}",
        f"{result.seconds:.1f}",
        seconds(result.to_one_percent_s),
        seconds(result.to_a_thousandth_s),
        f"{result.predicted_over_objective:.2f}",
    ]


if __name__ == "__main__":
    typer.run(main)
