"""``python -m benchmarks.accuracy``: how true predictions are, for random plans on emulated clusters.

A third of the regimes is held out: no constant and no formula may be changed because of what they show.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.__main__ import about
from benchmarks.measure import MICRO_BATCH, beside, profiled
from benchmarks.plans import given
from benchmarks.plot import scatter
from benchmarks.regimes import NoResult, Regime
from hzplan.core.hierarchy import Levels
from hzplan.core.recompute import Recomputed
from hzplan.cost.model import CostModel, tensors_of
from hzplan.formats.accuracy import Accuracy, AccuracyEntry
from hzplan.formats.base import write_text
from hzplan.formats.metrics import Measured
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile
from hzplan.peers import OURS
from hzplan.solver.calibrate import calibrate
from hzplan.solver.evaluate import Evaluation, Modes, evaluate, replay
from hzplan.solver.search import paces
from hzplan.solver.solve import PREFETCH_DEPTHS, Request

FILE = Path(__file__).parent / "accuracy.json"
PLANS = 6
"""Random plans in a regime."""
UNLIMITED = 1 << 40
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    only: Annotated[str | None, typer.Option(help="Regimes whose names contain this.")] = None,
    output: Annotated[Path, typer.Option(help="Figures; what is there is not measured again.")] = Path(
        "benchmarks/results/accuracy.json"
    ),
    work: Annotated[Path, typer.Option(help="Profiles and plans; a profile there is taken.")] = Path(
        "build/benchmarks"
    ),
    docs: Annotated[
        Path | None, typer.Option(help="Where to write the table, and beside it a figure.")
    ] = None,
    publish: Annotated[
        Path | None, typer.Option(help="Where to write what solve says of the error to expect.")
    ] = None,
) -> None:
    """Measure random plans beside their predictions. Nothing else should run meanwhile.

    Example: python -m benchmarks.accuracy --docs docs/accuracy.md --publish cost_models/accuracy.json
    """
    results = about()
    if output.exists():
        results["regimes"] = json.loads(output.read_text(encoding="utf-8"))["regimes"]
    known = {entry["name"] for entry in results["regimes"]}
    for entry in json.loads(FILE.read_text(encoding="utf-8")):
        held_out = entry.pop("held_out")
        regime = Regime(**entry, budget_percent=100)
        if regime.name in known or (only or "") not in regime.name:
            continue
        print(regime.name, flush=True)
        try:
            found = _measure(regime, work / f"accuracy-{regime.name}")
        except NoResult as error:
            results["failed"].append({"regime": regime.name, "why": str(error)})
            print(f"    not measured: {error}", flush=True)
            continue
        results["regimes"].append({"name": regime.name, "held_out": held_out, **found})
        write_text(output, json.dumps(results, indent=1) + "\n")
        print(f"    {_line(results['regimes'][-1])}", flush=True)
    text = "\n".join([*_markdown(results), ""])
    if docs is None:
        print(text)
    else:
        write_text(docs, text)
        seconds = {r["name"]: [measured_s(plan) for plan in r["plans"]] for r in results["regimes"]}
        scatter(results["regimes"], seconds, docs.with_suffix(".svg"))
    if publish is not None:
        _published(results).save(publish)


def _published(results: Mapping[str, Any]) -> Accuracy:
    """Of regimes that were held out."""
    regimes = [regime for regime in results["regimes"] if regime["held_out"]]
    time, calibrated = (errors(regimes, name, "round_s") for name in ("predicted_s", "calibrated_s"))
    memory = errors(regimes, "predicted_bytes", "peak_bytes")
    entry = AccuracyEntry(
        backend="gloo",
        where="emulated clusters",
        plans=len(time),
        step_mean=round(statistics.fmean(map(abs, time)), 4),
        step_worst=round(max(map(abs, time)), 4),
        calibrated_mean=round(statistics.fmean(map(abs, calibrated)), 4),
        memory_worst=round(max(map(abs, memory)), 4),
    )
    return Accuracy(date=results["date"], commit=results["commit"], entries=(entry,))


def _measure(regime: Regime, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    plans = random_plans(profiled(regime, folder.parent), regime, folder, PLANS)
    predicted = {path.stem: Plan.load(path).predicted for path in plans}
    slowest = max(entry.step_s for entry in predicted.values())
    first, *others = plans
    compared = beside(regime, first, [*map(str, others)], slowest)
    entries = {entry["name"]: entry for entry in compared["contenders"]}
    entries[first.stem] = entries[OURS]
    calibrated = _calibrated(plans, profiled(regime, folder.parent), entries[first.stem])
    return {
        "control": compared["control"],
        "plans": [
            {
                "name": name,
                "predicted_s": entry.step_s,
                "calibrated_s": calibrated.get(name),
                "round_s": entries[name]["round_s"],
                "predicted_waits_s": sum(entry.exposed_comm_s.values()),
                "waits_s": sum(entries[name]["waits_s"].values()),
                "waits_by_tier_s": entries[name]["waits_s"],
                "predicted_bytes": entry.peak_memory_bytes,
                "peak_bytes": entries[name]["peak_memory_bytes"],
            }
            for name, entry in predicted.items()
        ],
    }


def _calibrated(plans: Sequence[Path], profile_path: Path, entry: Mapping[str, Any]) -> dict[str, float]:
    """What is predicted of the others when the first plan's run has corrected the profile."""
    first, *others = plans
    measured = Measured(len(entry["round_s"]), statistics.median(entry["round_s"]), entry["waits_s"])
    corrected = calibrate(Plan.load(first), Profile.load(profile_path), first, measured).profile
    return {path.stem: replay(Plan.load(path), corrected, path).step_s for path in others}


def random_plans(profile_path: Path, regime: Regime, folder: Path, count: int) -> list[Path]:
    """Random plans that differ: of one triple, of one per unit, and of one per tensor; every other one
    recomputes half of the units that can be."""
    profile = Profile.load(profile_path)
    model, rng = CostModel(profile), random.Random(regime.name)
    global_batch = profile.mesh.world * MICRO_BATCH * regime.accumulation
    written = []
    for number in range(count):
        able = [unit for unit in model.ways if number % 2 and rng.random() < 0.5]
        again = Recomputed({unit: rng.choice(model.ways[unit]) for unit in able})
        found = _random(profile, model, global_batch, rng, number % 3, again)
        path = folder / f"random{number}.json"
        given(profile, profile_path, found, Request(UNLIMITED, global_batch)).save(path)
        written.append(path)
    return written


def _random(
    profile: Profile,
    model: CostModel,
    global_batch: int,
    rng: random.Random,
    variety: int,
    again: Recomputed,
) -> Evaluation:
    triples = model.mesh.triples()
    pace = rng.choice(paces(model, PREFETCH_DEPTHS))
    single = rng.choice(triples)
    levels: dict[str, tuple[Levels, ...]] = {}
    for unit, tensors in tensors_of(profile).items():
        of_unit = rng.choice(triples) if variety else single
        if tensors:
            chosen = [rng.choice(triples) if variety == 2 else of_unit for _ in tensors]
            levels[unit] = tuple(
                triple if tensor.trainable else Levels(triple.param, triple.param, triple.param)
                for triple, tensor in zip(chosen, tensors, strict=True)
            )
    schedule = model.schedule(
        **pace._asdict(),
        accumulation=global_batch // (model.mesh.world * MICRO_BATCH),
        clip=True,
    )
    return evaluate(model, levels, schedule, MICRO_BATCH, modes=Modes(again))


def measured_s(plan: Mapping[str, Any]) -> float:
    """The median round's seconds of a step."""
    return float(statistics.median(plan["round_s"]))


def errors(regimes: Sequence[Mapping[str, Any]], predicted: str, measured: str) -> list[float]:
    """Relative errors of all plans of which there is a prediction: positive where too much was predicted."""
    return [
        plan[predicted] / (measured_s(plan) if measured == "round_s" else plan[measured]) - 1
        for regime in regimes
        for plan in regime["plans"]
        if plan[predicted] is not None
    ]


def spread(regimes: Sequence[Mapping[str, Any]]) -> float:
    """Half-width of DDP's interval against itself, the mean over regimes."""
    return statistics.fmean((r["control"]["high"] - r["control"]["low"]) / 2 for r in regimes)


def ranked(regime: Mapping[str, Any]) -> tuple[int, int]:
    """Of pairs of plans that differ by more than the control's half-width: (in the right order, all)."""
    margin = (regime["control"]["high"] - regime["control"]["low"]) / 2
    right = total = 0
    for one, other in itertools.combinations(regime["plans"], 2):
        ratio = measured_s(one) / measured_s(other)
        if max(ratio, 1 / ratio) > 1 + margin:
            total += 1
            right += (ratio > 1) == (one["predicted_s"] > other["predicted_s"])
    return right, total


def regret(regime: Mapping[str, Any]) -> float:
    """How much slower than the fastest plan the one is that was predicted to be fastest."""
    chosen = min(regime["plans"], key=lambda plan: plan["predicted_s"])
    return measured_s(chosen) / min(map(measured_s, regime["plans"])) - 1


def _line(regime: Mapping[str, Any]) -> str:
    time, memory = (
        errors([regime], *names) for names in (("predicted_s", "round_s"), ("predicted_bytes", "peak_bytes"))
    )
    right, total = ranked(regime)
    return (
        f"step {_mean_of(time)} (worst {max(time, key=abs):+.0%}), memory {_mean_of(memory)}, "
        f"{right} of {total} pairs, regret {regret(regime):.1%}"
    )


def _mean_of(found: Sequence[float]) -> str:
    return f"{statistics.fmean(map(abs, found)):.1%}"


def _markdown(results: Mapping[str, Any]) -> Iterator[str]:
    machine = results["machine"]
    yield "# Accuracy of predictions"
    yield ""
    yield (
        f"Measured {results['date']} at commit {results['commit']} on {machine['cpus']} cores of "
        f"{machine['cpu']}, torch {machine['torch']}, with `{results['command']}`: {PLANS} random plans per "
        "regime in one job, in turns. Regimes marked *held out* are used for no decision. *step*, *memory*: "
        "mean absolute error, and the worst; *pairs*: plans that differ by more than DDP from itself and are "
        "predicted in the right order; *regret*: of the plan predicted fastest, against the fastest; "
        "*calibrated*: the mean error of the other plans' steps when `hzplan calibrate` has seen a run of "
        "the first; *spread*: half the width of DDP's interval against itself."
    )
    yield ""
    yield "![predicted over measured](accuracy.svg)"
    yield ""
    yield (
        "| regime | | step | worst | calibrated | spread | memory | worst | waits, share of the step "
        "| pairs | regret |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for regime in results["regimes"]:
        yield _row(regime["name"], [regime], "held out" if regime["held_out"] else "")
    for held_out in (False, True):
        group = [regime for regime in results["regimes"] if regime["held_out"] == held_out]
        if group:
            yield _row("**all held out**" if held_out else "**all others**", group, "")
    for failed in results["failed"]:
        yield f"\nNot measured: {failed['regime']}: {failed['why']}"


def _row(name: str, regimes: Sequence[Mapping[str, Any]], mark: str) -> str:
    time = errors(regimes, "predicted_s", "round_s")
    memory = errors(regimes, "predicted_bytes", "peak_bytes")
    waits = [
        abs(plan["predicted_waits_s"] - plan["waits_s"]) / measured_s(plan)
        for regime in regimes
        for plan in regime["plans"]
    ]
    right, total = (sum(column) for column in zip(*map(ranked, regimes), strict=True))
    return (
        f"| {name} | {mark} | {_mean_of(time)} | {max(time, key=abs):+.0%} "
        f"| {_mean_of(errors(regimes, 'calibrated_s', 'round_s'))} | {spread(regimes):.1%} "
        f"| {_mean_of(memory)} "
        f"| {max(memory, key=abs):+.0%} | {statistics.fmean(waits):.1%} | {right} of {total} "
        f"| {max(map(regret, regimes)):.1%} |"
    )


if __name__ == "__main__":
    app()
