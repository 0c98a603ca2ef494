"""How near to proven, and how soon: ``python -m benchmarks.solver``.

Profiles are modelled, so any machine will do; one core is used. For every model the communication's seconds
are scaled so that all of it, under ZeRO-3, takes so many times as long as compute; memory is so many times
the least that fits. Every search is whole: all micro-batch sizes, paces and sets of units to recompute.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import pulp
import typer

from benchmarks.__main__ import about
from benchmarks.replays import table
from hzplan.cost.model import CostModel
from hzplan.cost.parallel import share
from hzplan.formats.base import write_text
from hzplan.formats.parallel import ModelParallel
from hzplan.formats.profile import Profile
from hzplan.models.hf import CONFIGS
from hzplan.solver.candidates import Candidates
from hzplan.solver.evaluate import evaluate, uniform
from hzplan.solver.problem import build_fastest
from hzplan.solver.search import FIRST_OFFER
from hzplan.solver.solve import Infeasible, Request, SearchState, Solved, searches_of, solve

CLUSTER = "h100-8x400g"
RATIOS = (0.3, 1.0, 3.0)
ROOMS = (1.05, 1.5, 3.0)
GAP, TIGHTER = 0.01, 0.001
LIMIT_S = 10.0


@dataclass(frozen=True)
class Case:
    """A model on nodes of eight H100, and how many forward passes of the smallest micro-batch a step has.

    ``layers``: instead of those that the model has. ``beside``: what model parallelism it is trained with;
    the plan is then for one rank's share.
    """

    name: str
    model: str
    nodes: int
    seq_len: int
    micro_batches: str = "1,2"
    layers: int | None = None
    passes: int = 2
    beside: ModelParallel | None = None

    def profile(self, folder: Path) -> Profile:
        """Made once, by ``hzplan profile --analytic``; then one rank's share of it."""
        path = folder / f"{self.name.replace(' ', '-')}.json"
        if not path.exists():
            spec = self.model
            if self.layers is not None:
                data = json.loads((CONFIGS / f"{self.model.removeprefix('hf:')}.json").read_text())
                made = folder / self.name.replace(" ", "-") / "config.json"
                write_text(made, json.dumps(data | {"num_hidden_layers": self.layers}))
                spec = f"hf:{made}"
            options = ["--analytic", "--cluster", CLUSTER, "--nodes", str(self.nodes), "--dtype", "bf16"]
            options += ["--micro-batch", self.micro_batches, "--seq-len", str(self.seq_len), "-o", str(path)]
            subprocess.run([sys.executable, "-m", "hzplan", "profile", spec, *options], check=True)
        whole = Profile.load(path)
        return whole if self.beside is None else share(whole, self.beside)


CASES = (
    Case("llama3-8b on 64", "hf:llama3-8b", 8, 4096),
    Case("61-layer MoE on 512", "hf:mixtral-8x7b", 64, 2048, layers=61),
    Case("llama3-70b on 1024", "hf:llama3-70b", 128, 4096),
    Case("llama3-405b on 16384", "hf:llama3-405b", 2048, 4096, beside=ModelParallel(tensor=8, pipeline=16)),
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
    recomputed: int
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


def measure(case: Case, folder: Path) -> Iterator[Result]:
    """All ratios and rooms of a case."""
    profile = case.profile(folder)
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

    def watch(state: SearchState) -> None:
        point = state.best_ms, state.bound_ms
        if not curve or curve[-1][1:] != point:
            curve.append((state.seconds, *point))

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
    recomputed = len(best.modes.recompute)
    return Result(case.name, ratio, room, gap, seconds, first(GAP), first(TIGHTER), over, recomputed, curve)


@dataclass(frozen=True)
class Beside:
    """One ILP, the same for both solvers: seconds, and the gap that each reached (None: no solution)."""

    case: str
    patterns: int
    rows: int
    seconds: tuple[float, float]
    gaps: tuple[float | None, float | None]


def beside(case: Case, folder: Path) -> Beside:
    """HiGHS and CBC on the ILP that is left of a case's first pace after its relaxation, at 1 and 1.5."""
    profile = scaled(case.profile(folder), 1.0, case.passes)
    batch = profile.mesh.world * profile.micro_batches[0] * case.passes
    nothing = solve(profile, Request(1, batch))
    assert isinstance(nothing, Infeasible)
    request = Request(int(nothing.smallest.memory.peak * 1.5), batch, TIGHTER)
    one = searches_of(profile, request)[0]
    found = Candidates()
    while one.has_open_nodes and one.may_improve(found):
        one.branch(found, defaultdict(set))
    offered = one.offered(found, FIRST_OFFER)
    solvers = (
        pulp.HiGHS(msg=False, threads=1, gapRel=TIGHTER, timeLimit=LIMIT_S),
        pulp.PULP_CBC_CMD(msg=False, threads=1, gapRel=TIGHTER, timeLimit=LIMIT_S),
    )
    took, gaps, rows = [], [], 0
    for solver in solvers:
        problem = build_fastest(one.question, offered, [cut for _, cut in one.lp.cycles])
        rows = len(problem.lp.constraints)
        started = time.monotonic()
        problem.lp.solve(solver)
        took.append(time.monotonic() - started)
        value = problem.lp.objective.value()
        gaps.append(value / one.bound_ms - 1 if problem.lp.sol_status in (1, 2) and value else None)
    patterns = sum(map(len, offered.values()))
    return Beside(case.name, patterns, rows, (took[0], took[1]), (gaps[0], gaps[1]))


def main(
    only: Annotated[str | None, typer.Option(help="Cases whose name contains this.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write JSON here.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Where to write the tables.")] = None,
    work: Annotated[Path, typer.Option(help="Profiles; one there is taken as it is.")] = Path("build/solver"),
) -> None:
    """Solve every case and print a table."""
    results = []
    titles = ("comm/comp", "memory", "gap", "s", "to 1%", "to 0.1%", "sim", "recomputed")
    print(f"{'case':<22}" + "".join(f"{title:>10}" for title in titles))
    for case in CASES:
        if only is None or only in case.name:
            for result in measure(case, work):
                results.append(result)
                print(_line(result), flush=True)
    both = [beside(case, work) for case in CASES if only is None or only in case.name]
    for pair in both:
        print(" | ".join(_pair(pair)), flush=True)
    peak = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"
    print(f"peak memory of this process {peak}")
    if output is not None:
        found = {**about(), "peak_memory": peak, "results": [asdict(result) for result in results]}
        found["beside"] = [asdict(pair) for pair in both]
        write_text(output, json.dumps(found, indent=1) + "\n")
    if docs is not None:
        write_text(docs, _page(results, both, peak))


def _page(results: list[Result], both: list[Beside], peak: str) -> str:
    made = about()
    head = f"""# How near to proven, and how soon

`python -m benchmarks.solver --docs docs/solver.md`, {made["date"]}, {made["commit"]}, one core.
At most {LIMIT_S:g} s were given, a gap of {TIGHTER:.1%} was asked for; the process took {peak}. Profiles are
modelled, for nodes of eight H100; communication is scaled to take so many times as long as compute under
ZeRO-3, and memory is so many times the least that fits. Every search is whole: all micro-batch sizes, paces
and sets of units to recompute. The 405 B model is planned with
`--model-parallel tp=8,pp=16`: solved is one rank's share of it, over 128 data-parallel ranks. `sim` is the
predicted step over the objective, in which links are not shared; `recomputed`: how many units are.

| model and ranks | communication/compute | memory | gap | s | to 1 % | to 0.1 % | sim | recomputed |
|---|--:|--:|--:|--:|--:|--:|--:|--:|
"""
    page = head + "".join(f"| {' | '.join(_cells(result))} |\n" for result in results)
    page += f"""
## HiGHS and CBC

The ILP over the {FIRST_OFFER} best patterns of every unit that is left of a case's first pace, at
communication/compute 1 and memory 1.5: seconds and gap to the relaxation's bound, HiGHS then CBC, one thread,
at most {LIMIT_S:g} s each.

| model and ranks | patterns | rows | HiGHS s | gap | CBC s | gap |
|---|--:|--:|--:|--:|--:|--:|
"""
    page += "".join(f"| {' | '.join(_pair(pair))} |\n" for pair in both)
    return f"""{page}
## Replays

A choice is decided by a replay: the simulator's steady state, with messages in order or links shared. How
many there are in a second for the golden plans, one core (`python -m benchmarks.replays`):

{table()}"""


def _pair(pair: Beside) -> list[str]:
    cells = [pair.case, str(pair.patterns), str(pair.rows)]
    for seconds, gap in zip(pair.seconds, pair.gaps, strict=True):
        cells += [f"{seconds:.1f}", "none" if gap is None else f"{max(0.0, gap):.2%}"]
    return cells


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
        str(result.recomputed),
    ]


if __name__ == "__main__":
    typer.run(main)
