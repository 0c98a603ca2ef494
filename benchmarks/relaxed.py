"""``python -m benchmarks.relaxed``: seconds to a loss on two groups over a slow link, against who waits.

Two nodes of two ranks on an emulated cluster, a processor for each node. Seconds to a loss are steps to it,
from one process with the same mathematics (``benchmarks.replicas``, three seeds), times seconds of a step,
measured on the cluster. One run from end to end beside it says whether both belong together.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.commands import write_section
from benchmarks.measure import ROOT
from benchmarks.regimes import NoResult
from benchmarks.replicas import Replicas
from benchmarks.wire_convergence import apart as interval
from hzplan.core.relaxed import Policy, Timetable
from hzplan.formats.base import write_text
from hzplan.formats.plan import Plan
from hzplan.models.workload import load
from hzplan.training.data import load_corpus

MODEL, SEQUENCES, LR = "gpt:tiny", 8, 1e-3
LINKS = ("20mbit", "100mbit")
EVERY = 20
"""Steps between two held-out losses."""
TURNS, WARM_UPS = 5, 5
"""How often one group and groups that do not wait are measured, by turns; and the steps at the begin of each
that do not count."""
TITLE = "## Seconds to a loss"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    steps: Annotated[
        int, typer.Option(help="Steps of the synchronous run whose loss is to be reached.")
    ] = 600,
    timed: Annotated[int, typer.Option(help="Steps whose seconds are measured.")] = 50,
    seeds: Annotated[int, typer.Option(help="Runs of each.")] = 3,
    rule: Annotated[str, typer.Option(help="As --allow-stale takes it.")] = "periodic",
    output: Annotated[Path, typer.Option(help="What was found; links that are there are kept.")] = Path(
        "benchmarks/results/relaxed.json"
    ),
    docs: Annotated[Path | None, typer.Option(help="A page whose section of this is written anew.")] = None,
) -> None:
    """Measure and compare.

    Example: python -m benchmarks.relaxed --docs docs/relaxed.md
    """
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    torch.set_num_threads(1)
    for link in LINKS:
        if "turns" not in found.get(link, {}).get("seconds", {}):  # earlier ones were not measured by turns
            with tempfile.TemporaryDirectory() as folder:
                found[link] = {"seconds": _seconds(link, Path(folder), rule, timed, steps)}
            write_text(output, json.dumps(found, indent=1) + "\n")
            print(link, json.dumps(found[link]["seconds"]), flush=True)
    for seed in map(str, range(seeds)):  # which may share the machine with anything
        same = found.setdefault("any link", {}).setdefault(seed, {})
        for who, groups, most in (("waiting", 2, steps), ("one group", 1, 4 * steps)):
            if who not in same:
                until = same["waiting"][-1] if who != "waiting" else 0.0
                same[who] = list(_losses(groups, None, most, until, int(seed)))
                _noted(output, found, who, seed, same[who])
        for link in LINKS:
            known = found[link].setdefault("losses", {})
            if seed not in known:
                policy = Policy(**_policy(found[link]["seconds"]["policy"]))
                known[seed] = list(_losses(2, policy, 3 * steps, same["waiting"][-1], int(seed)))
                _noted(output, found, link, seed, known[seed])
    text = _markdown(found, steps)
    print(text) if docs is None else write_section(docs, TITLE, text)


def _noted(output: Path, found: dict[str, Any], who: str, seed: str, losses: list[float]) -> None:
    write_text(output, json.dumps(found, indent=1) + "\n")
    print(f"{who}, seed {seed}: {losses[-1]} after {EVERY * len(losses)} steps", flush=True)


def _policy(stored: dict[str, Any]) -> dict[str, Any]:
    return {**stored, "timetable": Timetable(*stored["timetable"])}


def _seconds(link: str, folder: Path, rule: str, timed: int, steps: int) -> dict[str, Any]:
    """Of a step: measured, in turns, and predicted for what does not wait."""
    profile, plan, relaxed, alone = (
        folder / f"{name}.json" for name in ("profile", "plan", "relaxed", "alone")
    )
    _on_cluster(2, link, ["profile", MODEL, "--mesh", "2|2", "--micro-batch", "4", "-o", profile])
    ask = ["--memory", "1GiB", "--global-batch", 2 * SEQUENCES]
    _hzplan(["solve", profile, *ask, "-o", plan])
    said = json.loads(_hzplan(["solve", profile, *ask, "--allow-stale", rule, "-o", relaxed, "--json"]))
    of_one = ["solve", folder / "relaxed.profile.json", "--memory", "1GiB", "--global-batch", SEQUENCES]
    _hzplan([*of_one, "-o", alone])
    metrics = folder / "metrics.jsonl"

    def train(which: Path, rows: Path, count: int) -> list[object]:
        return ["run", which, "--lr", LR, "--metrics", rows, "--json", "--steps", count]

    end = json.loads(_on_cluster(2, link, train(relaxed, metrics, steps)))
    turns: dict[str, list[float]] = {"one group": [], "relaxed": []}
    for turn in range(TURNS):
        for name in turns if turn % 2 else reversed(turns):
            for path in folder.glob("metrics*.jsonl"):
                path.unlink()
            if name == "relaxed":
                _on_cluster(2, link, train(relaxed, metrics, timed))
            else:
                rows = [folder / f"metrics-{number}.jsonl" for number in range(2)]
                _side_by_side([train(alone, one, timed) for one in rows])
            turns[name].append(_mean_s(folder))
            print(link, name, turns[name][-1], flush=True)
    against = _on_cluster(2, link, ["run", plan, "--against", "ddp", "--steps", timed, "--json"])
    contenders = {one["name"]: one["step_s"]["median"] for one in json.loads(against)["contenders"]}
    tier = Plan.load(relaxed).relaxed
    assert tier is not None
    return {
        "policy": tier._asdict(),
        **{name: statistics.fmean(seconds) for name, seconds in turns.items()},
        "turns": turns,
        "all, waiting": contenders["hzplan"],
        "ddp": contenders["ddp"],
        "predicted": said["relaxed"]["step_s"],
        "applied": end["groups"]["applied"],
        "waited_s": end["groups"]["waited_s"],
        "heldout": end["heldout_loss"],
    }


def _mean_s(folder: Path) -> float:
    """Of the steps in all metrics, without the first, in which much is made, and the slowest of a hundred."""
    rows = []
    for path in folder.glob("metrics*.jsonl"):
        rows += [json.loads(line)["step_s"] for line in path.open()][WARM_UPS:]
    return statistics.fmean(sorted(rows)[: -(-len(rows) * 99 // 100)])


def _side_by_side(commands: Sequence[Sequence[object]]) -> None:
    """Commands at once, each on a processor of its own: as busy as when groups train together."""
    started = []
    for number, words in enumerate(commands):
        command = ["taskset", "-c", str(number), sys.executable, "-m", "hzplan", *map(str, words)]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
    for one in started:
        _, error = one.communicate()
        if one.returncode:
            raise NoResult((error.decode().strip().splitlines() or ["no message"])[-1])


def _hzplan(words: Sequence[object], before: Sequence[str] = ()) -> str:
    command = [*before, sys.executable, "-m", "hzplan", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoResult((done.stderr.strip().splitlines() or ["no message"])[-1])
    return (done.stdout.strip().splitlines() or [""])[-1]


def _on_cluster(nodes: int, link: str | None, words: Sequence[object]) -> str:
    """A command on every rank, each node's on a processor of its own."""
    inner = shlex.join([sys.executable, "-m", "hzplan", *map(str, words)])
    network = [] if link is None else ["--network", link]
    command = ["emulate", "--nodes", nodes, "--nproc", 2, *network, "--no-verify", "--"]
    return _hzplan([*command, "bash", "-c", f"exec taskset -c $GROUP_RANK {inner}"])


def _losses(groups: int, rule: Policy | None, most: int, until: float, seed: int) -> Iterator[float]:
    """Held-out losses every so many steps, until one is reached."""
    workload = load(MODEL)
    corpus = load_corpus(None, seq_len=workload.seq_len)
    runs = Replicas(workload, corpus, groups, SEQUENCES, rule, LR, seed)
    for step, _ in enumerate(runs.losses(most)):
        if (step + 1) % EVERY == 0:
            loss = runs.heldout()
            yield round(loss, 5)
            if loss <= until:
                return


def _markdown(found: dict[str, Any], steps: int) -> str:
    lines = [
        TITLE,
        "",
        f"By `python -m benchmarks.relaxed`: {MODEL}, each group {SEQUENCES} sequences a step, AdamW at a "
        f"constant {LR:g}, two nodes of two ranks on an emulated cluster, a processor for each (no added "
        "latency: this kernel has no netem). The loss to reach is the held-out one of the synchronous run "
        f"after {steps} steps; steps to it by seed, looked at every {EVERY}; *seconds* are their mean times "
        f"those of a step, the mean of {TURNS} turns; one group by itself is measured while another like it "
        "trains on the other processor, for caches and clock are shared. *Sooner*: than one group by itself, "
        "and than the synchronous plan, mean over seeds with its 95% interval. The loss *end to end* is of "
        "the run on the cluster, under the rate of "
        "`hzplan run`, which decays, and of a group's own weights on other windows: not to be compared.",
        "",
        "| link | who trains | step | steps to the loss | tokens | seconds | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for link in LINKS:
        seconds, runs = found[link]["seconds"], found[link]["losses"]
        reached = {
            "one group": [EVERY * len(found["any link"][seed]["one group"]) for seed in runs],
            "all, waiting": [steps for _ in runs],
            "ddp": [steps for _ in runs],
            "relaxed": [EVERY * len(losses) for losses in runs.values()],
        }
        length = load(MODEL).seq_len
        for name, counts in reached.items():
            step_s, groups = seconds[name], 1 if name == "one group" else 2
            tokens = statistics.fmean(counts) * groups * SEQUENCES * length
            total = statistics.fmean(counts) * step_s
            said = ""
            if name == "relaxed":
                than = {
                    other: [
                        reached[other][i] * seconds[other] / (count * step_s)
                        for i, count in enumerate(counts)
                    ]
                    for other in ("one group", "all, waiting")
                }
                said = ", ".join(f"{interval(of).lstrip('+')} × {other}" for other, of in than.items())
            listed = ", ".join(map(str, counts))
            tokens /= 1e6
            lines.append(
                f"| {link} | {name} | {step_s:.3f} s | {listed} | {tokens:.2f} M | {total:.0f} | {said} |"
            )
        every, parts, delay = seconds["policy"]["timetable"]
        predicted, turns = seconds["predicted"], seconds["turns"]
        lines.append(
            f"| {link} | | predicted {predicted:.3f} s ({predicted / seconds['relaxed'] - 1:+.1%}; turns "
            f"differ by {_apart(turns['relaxed'])}, of one group by {_apart(turns['one group'])}) | | | | "
            f"every {every} steps one of {parts} parts, {delay} later; {seconds['applied']} rounds in "
            f"{steps} steps, waited {seconds['waited_s']:.0f} s; end to end {seconds['heldout']:.3f} |"
        )
    return "\n".join([*lines, ""])


def _apart(seconds: Sequence[float]) -> str:
    """By how much the largest of some is above the smallest."""
    return f"{max(seconds) / min(seconds) - 1:.1%}"


if __name__ == "__main__":
    app()
