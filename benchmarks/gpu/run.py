"""``python -m benchmarks.gpu.run``: all that one GPU can show, in one command; a table last, and JSON.

    python -m benchmarks.gpu.run --output gpu.json
    python -m benchmarks.gpu.run --only rehearsal
    python -m benchmarks.gpu.run --within 540  # where time is short: what fits, the quickest first
    python -m benchmarks.gpu.run --small  # the script itself, on any machine: its figures mean nothing

Every part is made of the product's own commands, in processes of their own: one that fails is written down
and the next one goes on. The file is written after every row.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

import torch
import typer

from benchmarks.__main__ import about
from benchmarks.measure import ROOT, output_of
from benchmarks.regimes import NoResult
from hzplan.core.wire import Format
from hzplan.cost.model import CostModel
from hzplan.formats.base import to_text, write_text
from hzplan.formats.cluster import find_cluster
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile
from hzplan.formats.source import profile_of
from hzplan.peers.paired import paired_ratio
from hzplan.runtime.backends import packing
from hzplan.runtime.backends.packing import form_of

MOST_SAID = 120
"""Characters of an error in the table; the file has all of them."""
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Scale:
    """What is trained. ``models``: the first one is for all parts, all of them for the accuracy of what is
    predicted; ``matrix``: rows and columns of the product that says what the device can do."""

    models: tuple[str, ...]
    seq_len: int
    micro_batches: tuple[int, ...]
    steps: int
    rounds: int
    matrix: int
    dtype: str
    cluster: str
    nodes: int


LLAMA_1B = f"hf:{Path(__file__).resolve().parent / 'llama-1b.json'}"
"""Llama 3.2's smallest; transformers makes it. Without transformers a GPT of 1.3 B parameters stands in."""
LARGE = LLAMA_1B if find_spec("transformers") else "gpt:1.3b"
FULL = Scale((LARGE, "gpt:medium"), 2048, (1, 2), 20, 8, 8192, "bf16", "h100-8x400g", 8)
SMALL = Scale(("gpt:tiny", "gpt:nano"), 32, (1, 2), 6, 6, 256, "fp32", "asynchzp-2x8", 2)


@dataclass(frozen=True)
class Row:
    """A line of the table. ``asked``: in words; ``reached``: None where it is information."""

    what: str
    figure: str
    asked: str = ""
    reached: bool | None = None


@dataclass
class Bench:
    """Where parts work, and what they found."""

    scale: Scale
    work: Path
    output: Path | None = None
    until_s: float = float("inf")  # of time.perf_counter
    results: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)

    def say(self, what: str, figure: str, asked: str = "", reached: bool | None = None) -> None:
        """A line of the table, shown and written at once: a job may end before all is done."""
        self.rows.append(Row(what, figure, asked, reached))
        print(_line(self.rows[-1]), file=sys.stderr, flush=True)
        self.save()

    def save(self) -> None:
        """Write what there is."""
        write(self.output, self.results | {"parts": self.found, "rows": [asdict(row) for row in self.rows]})

    def is_late(self, what: str) -> bool:
        """Whether the time is over, which then is a line of the table."""
        late = time.perf_counter() > self.until_s
        if late:
            self.say(what, "no time left")
        return late

    def plan(self, model: str, name: str, micro_batch: int, *options: object) -> Path:
        """A plan for this device alone, of one micro-batch."""
        path = self.work / f"{name}.json"
        hzplan("solve", self.profile(model, micro_batch), "--global-batch", micro_batch, "-o", path, *options)
        return path

    def profile(self, model: str, micro_batch: int) -> Path:
        """A model's profile on this device, of this size alone, or plans would be of smaller ones; measured
        once. bf16 plans train float32 master weights."""
        path = self.work / f"profile-{named(model)}-{micro_batch}.json"
        if not path.exists():
            hzplan("profile", model, *self._how(micro_batch), "-o", path)
        return path

    def _how(self, *micro_batches: int) -> list[object]:
        sizes = ",".join(map(str, micro_batches or self.scale.micro_batches))
        return ["--seq-len", self.scale.seq_len, "--micro-batch", sizes, "--dtype", self.scale.dtype]

    def profile_for_cluster(self, model: str) -> Path:
        """The model as measured here, over links as a known cluster's are modelled."""
        name = f"{named(model)}-{self.scale.cluster}-{self.scale.nodes}"
        path = self.work / f"profile-{name}.json"
        if not path.exists():
            cluster = ["--cluster", self._cluster(), "--nodes", self.scale.nodes]
            hzplan("profile", model, *self._how(), *cluster, "-o", path)
        return path

    def _cluster(self) -> str | Path:
        """The scale's; where there is no GPU, which tries this script only, one like it of this device."""
        if torch.cuda.is_available():
            return self.scale.cluster
        tried = find_cluster(self.scale.cluster)[0].model_copy(update={"backend": "gloo"})
        path = self.work / f"{tried.name}-tried.json"
        write_text(path, to_text(tried))
        return path


def hzplan(*words: object) -> str:
    """What the product's command says on stdout; NoResult where it fails."""
    return output_of([sys.executable, "-m", "hzplan", *map(str, words)])


def oracles(bench: Bench) -> None:
    """1, 2 and 4 ranks on one card, over gloo and over NCCL, against one process, and runs of plans."""
    if not torch.cuda.is_available():
        bench.say("oracles on this card", "skipped: no CUDA device here")
        return
    report = bench.work / "oracles.xml"
    report.unlink(missing_ok=True)
    tests = ["tests/distributed/test_cuda.py", "tests/distributed/test_cuda_runs.py", "-n", "6"]
    command = [sys.executable, "-m", "pytest", "-q", *tests, f"--junitxml={report}"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if not report.exists():
        raise NoResult(f"pytest ended with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None, "which every report of pytest's has"
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    bad = counts["failures"] + counts["errors"]
    passed = counts["tests"] - bad - counts["skipped"]
    bench.found["oracles"] = counts | {"output": done.stdout[-4000:] if bad else ""}
    bench.say("oracles on this card", f"{passed} of {counts['tests']}", "all", passed == counts["tests"])


def overhead(bench: Bench) -> None:
    """One rank beside plain PyTorch and FSDP2, with recomputation and without."""
    model = bench.scale.models[0]
    peak = matrix_flops(bench.scale)
    bench.found["overhead"] = {"matrix_flops_per_s": peak}
    bench.say(f"{bench.scale.dtype} product of {bench.scale.matrix}² matrices", f"{peak / 1e12:,.1f} TFLOP/s")
    least = bench.scale.micro_batches[0]
    for again in ("none", "all"):
        plan = bench.plan(model, f"overhead-{again}", least, "--recompute", again)
        pairs: list[tuple[str, str, float | None]] = [("hzplan", "plain", 1.01), ("hzplan", "fsdp2", 1.0)]
        if again == "none":
            pairs.append(("plain again", "plain", None))
        for one, other, most in pairs:
            if bench.is_late(f"{one} ÷ {other}, recompute {again}"):
                continue
            rounds = ["--rounds", bench.scale.rounds, "--steps", max(2, bench.scale.steps // 5)]
            words = [sys.executable, "-m", "benchmarks.gpu.beside", plan, one, other, *rounds]
            answer = json.loads(output_of(list(map(str, words))))
            bench.found["overhead"][f"{one} beside {other}, recompute {again}"] = answer
            ratio = paired_ratio(answer[one]["round_s"], answer[other]["round_s"])
            bench.say(
                f"{one} ÷ {other}, recompute {again}",
                f"{ratio.value:.3f} ({ratio.low:.3f}–{ratio.high:.3f})",
                f"≤ {most}" if most else "",
                ratio.value <= most if most else None,
            )
        answer = bench.found["overhead"].get(f"hzplan beside plain, recompute {again}")
        if answer is None:
            continue
        flops = CostModel(profile_of(plan, Plan.load(plan))).flops(least)  # not those of recomputation
        for who in ("hzplan", "plain"):
            share = flops / statistics.median(answer[who]["round_s"]) / peak
            bench.say(f"share of that peak, {who}, recompute {again}", f"{share:.1%}")


def accuracy(bench: Bench) -> None:
    """Predicted against measured, over models, micro-batches, recomputation and offload."""
    scale = bench.scale
    found: list[dict[str, Any]] = []
    bench.found["accuracy"] = found
    combinations = [
        (model, size, again, offload)
        for model, size, again in product(scale.models, scale.micro_batches, ("none", "all"))
        for offload in ((False, True) if model == scale.models[0] else (False,))
    ]
    for number, (model, size, again, offload) in enumerate(combinations):
        name = f"{named(model)}, {size} × {scale.seq_len}, recompute {again}{', offload' * offload}"
        if bench.is_late(name):
            break
        # Nobody offloads who has room: all state is made to go by a budget just below what staying takes.
        options: list[object] = ["--recompute", again]
        if offload:
            whole = Plan.load(bench.plan(model, "accuracy-whole", size, *options))
            less = whole.predicted.peak_memory_bytes - whole.predicted.memory_bytes["optimizer"] // 2
            options += ["--memory", f"{less // 1024}KiB", "--host-memory", "1TiB"]
        try:
            plan = bench.plan(model, f"accuracy-{number}", size, *options)
            if bool(Plan.load(plan).offloaded) != offload:
                raise NoResult("the plan offloads something else than was asked for")
            one = _measured(plan, model, bench.work / f"accuracy-{number}.trace.json", scale.steps)
        except NoResult as error:
            bench.say(name, f"not measured: {error}"[:MOST_SAID], "", False)
            continue
        found.append({"name": name, **one})
        step, memory, unit = one["step"], one["memory"], one["worst_unit"]
        good = abs(step) <= 0.05 and abs(memory) <= 0.02 and abs(unit) <= 0.05
        figure = f"step {step:+.1%}, memory {memory:+.2%}, worst unit {unit:+.1%}"
        bench.say(name, figure, "5 %, 2 %, 5 %", good)


def rounding(bench: Bench) -> None:
    """int8 and fp8 there and back, by kernels and by torch's operations: alike, and how long."""
    if not torch.cuda.is_available():
        bench.say("rounding by kernels", "skipped: no CUDA device here")
        return
    device = torch.device("cuda", 0)
    copied = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    rate = 2 * copied.numel() / _seconds(lambda: copied[: 1 << 27].copy_(copied[1 << 27 :])) / 2
    kinds: tuple[Format, ...] = ("int8", "fp8")
    for kind, count in product(kinds, (1 << 20, 1 << 26)):
        values, form = torch.randn(count, device=device), form_of(kind)
        by = {}
        for name, kernels_on in (("kernels", {"cuda"}), ("torch", set[str]())):
            packing.KERNELS_ON = kernels_on
            packing._kernels_for.cache_clear()
            packed = torch.zeros(form.units(count), dtype=torch.uint8, device=device)
            there, back = form.pack(values, packed), form.unpack(packed, torch.empty_like(values))
            by[name] = packed, _seconds(there.run), _seconds(back.run), type(there).__name__
        packing.KERNELS_ON = {"cuda"}
        packing._kernels_for.cache_clear()
        least = (values.nbytes + form.units(count)) / rate
        bench.found.setdefault("rounding", {})[f"{kind} of {count}"] = {
            name: {"pack_s": pack_s, "unpack_s": unpack_s, "by": step}
            for name, (_, pack_s, unpack_s, step) in by.items()
        }
        alike = torch.equal(by["kernels"][0], by["torch"][0])
        seconds = ", ".join(
            f"{name} {pack_s * 1e6:,.0f} + {unpack_s * 1e6:,.0f} µs"
            for name, (_, pack_s, unpack_s, _) in by.items()
        )
        figure = f"{seconds}; a copy of as many bytes {least * 1e6:,.0f}"
        bench.say(f"{kind} of {count:,} values", figure, "alike to the bit", alike)


def _seconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Of a call on the device, the median."""
    found = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[3:])


def units(bench: Bench) -> None:
    """A model's units as measured here, beside what ``--analytic`` has of this card."""
    model, size = bench.scale.models[0], bench.scale.micro_batches[0]
    card = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    short = next((name for name in ("h100", "h200", "a100", "b200") if name in card), None)
    cluster = f"{short}-8x400g" if short else bench.scale.cluster
    path = bench.work / "analytic.json"
    words = ["--analytic", "--cluster", cluster, "--nodes", 1, "--seq-len", bench.scale.seq_len]
    hzplan("profile", model, *words, "--micro-batch", size, "--dtype", bench.scale.dtype, "-o", path)
    measured, analytic = (
        {(use.unit, use.phase): use.costs[0] for use in Profile.load(of).uses}
        for of in (bench.profile(model, size), path)
    )
    both = [name for name in measured if name in analytic]
    for what in ("retained_bytes", "peak_bytes"):
        apart = [abs(getattr(measured[name], what) - getattr(analytic[name], what)) for name in both]
        bench.say(
            f"{what} of {len(both)} uses, measured beside modelled", f"{max(apart):,} bytes apart at most"
        )
    bench.found["units"] = {
        f"{phase} {unit}": {
            of: costs[unit, phase].model_dump(include={"seconds", "retained_bytes", "peak_bytes", "flops"})
            for of, costs in (("measured", measured), ("modelled", analytic))
        }
        for unit, phase in both
    }
    total = {
        of: sum(costs[name].seconds for name in both) for of, costs in (("m", measured), ("a", analytic))
    }
    bench.say("compute of a step, modelled ÷ measured", f"{total['a'] / total['m']:.2f}")


def _measured(plan: Path, model: str, trace: Path, steps: int) -> dict[str, Any]:
    """Measured against predicted: ratios less 1. ``worst_unit``: the one that is furthest off, of those that
    take a hundredth of the step or more."""
    answer = json.loads(hzplan("run", plan, model, "--steps", steps, "--trace", trace, "--json"))
    step, memory = answer["step_s"], answer["peak_memory_bytes"]
    expected, measured = unit_seconds(json.loads(trace.read_text(encoding="utf-8")))
    long = [name for name, seconds in expected.items() if seconds > step["predicted"] / 100]
    apart = {name: measured[name] / expected[name] - 1 for name in long if name in measured}
    return {
        "step_s": step,
        "peak_memory_bytes": memory,
        "step": step["measured"] / step["predicted"] - 1,
        "memory": memory["measured"] / memory["predicted"] - 1,
        "worst_unit": max(apart.values(), key=abs, default=0.0),
        "units": apart,
    }


def unit_seconds(trace: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """From a trace of ``hzplan run``: seconds of every compute task by name, as predicted, and as measured in
    the median of its steps."""
    names: dict[tuple[int, int], str] = {}
    processes: dict[int, str] = {}
    for event in trace["traceEvents"]:
        if event.get("name") == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event.get("name") == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
    predicted: dict[str, list[float]] = {}
    measured: dict[str, list[float]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and names[event["pid"], event["tid"]] == "compute":
            into = measured if processes[event["pid"]].startswith("rank") else predicted
            into.setdefault(event["name"], []).append(event["dur"] / 1e6)
    return tuple(  # type: ignore[return-value]
        {name: statistics.median(values) for name, values in of.items()} for of in (predicted, measured)
    )


def rehearsal(bench: Bench) -> None:
    """A rank of a cluster's plan, on this card."""
    scale = bench.scale
    profile, plan = bench.profile_for_cluster(scale.models[0]), bench.work / "rehearsal.json"
    ranks = Profile.load(profile).mesh.world
    hzplan("solve", profile, "--global-batch", ranks * scale.micro_batches[0] * 2, "-o", plan)
    trace = bench.work / "rehearsal.trace.json"
    answer = json.loads(
        hzplan("rehearse", plan, scale.models[0], "--steps", scale.steps, "--trace", trace, "--json")
    )
    bench.found["rehearsal"] = answer
    for what, of, most in (("step", "step_s", 0.05), ("memory", "peak_memory_bytes", 0.02)):
        apart = answer[of]["rehearsed"] / answer[of]["predicted"] - 1
        bench.say(f"rehearsal of {ranks} ranks: {what}", f"{apart:+.2%}", f"{most:.0%}", abs(apart) <= most)


def memory(bench: Bench) -> None:
    """What the allocator does over many steps, close to the budget."""
    if not torch.cuda.is_available():
        bench.say("the allocator close to the budget", "skipped: no CUDA device here")
        return
    plan = bench.plan(bench.scale.models[0], "memory", bench.scale.micro_batches[0], "--recompute", "none")
    answer = json.loads(output_of([sys.executable, "-m", "benchmarks.gpu.steady", str(plan)]))
    bench.found["memory"] = answer
    ratio = answer["reserved_of_allocated"]
    bench.say(f"reserved ÷ allocated after {answer['steps']} steps", f"{ratio:.3f}", "≤ 1.05", ratio <= 1.05)
    for part, where in (("free", ""), ("capped", ", at 95 % of the budget")):
        for name in ("num_device_alloc", "num_alloc_retries"):
            count = answer[part][name]
            bench.say(f"{name} after warm-up{where}", str(count), "0", count == 0)


PARTS: Mapping[str, Callable[[Bench], None]] = {
    "rounding": rounding,
    "oracles": oracles,
    "units": units,
    "overhead": overhead,
    "accuracy": accuracy,
    "rehearsal": rehearsal,
    "memory": memory,
}


@app.command()
def main(
    only: Annotated[str, typer.Option(help=f"Parts, with commas between: {', '.join(PARTS)}.")] = "",
    small: Annotated[bool, typer.Option("--small", help="Try the script with a small model.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    within: Annotated[float, typer.Option(help="Seconds after which nothing new is begun.")] = float("inf"),
    work: Annotated[Path, typer.Option(help="Profiles and plans; profiles there are taken.")] = Path(
        "build/gpu"
    ),
) -> None:
    """Show on one GPU what only a GPU can show. Nothing else should run on it.

    Example: python -m benchmarks.gpu.run --output gpu.json
    """
    wanted = [name for name in only.split(",") if name] or list(PARTS)
    for name in wanted:
        if name not in PARTS:
            raise SystemExit(f"--only {name}: one of {', '.join(PARTS)}")
    results = about()
    if not (torch.cuda.is_available() or small):
        skip(f"no CUDA device here (torch {torch.__version__})", output)
        return
    results["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    folder, until_s = work / ("small" if small else "full"), time.perf_counter() + within
    bench = Bench(SMALL if small else FULL, folder, output, until_s, results)
    bench.work.mkdir(parents=True, exist_ok=True)
    seconds = results["seconds"] = {}
    for name in wanted:
        if bench.is_late(name):
            continue
        began = time.perf_counter()
        try:
            PARTS[name](bench)
        except Exception as error:  # the other parts are worth having
            said = str(error).splitlines() or [type(error).__name__]
            bench.found[f"{name} failed"] = f"{type(error).__name__}: {error}"
            bench.say(name, f"failed: {said[0]}"[:MOST_SAID], "", False)
        seconds[name] = time.perf_counter() - began
        bench.save()
    print("\n".join(table(bench.rows, results["device"])))


def matrix_flops(scale: Scale) -> float:
    """FLOP/s of a square product, the best of several."""
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    dtype = torch.bfloat16 if scale.dtype == "bf16" else torch.float32
    one = torch.randn(scale.matrix, scale.matrix, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(12):
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(4):
            one @ one
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - began) / 4)
    return 2 * scale.matrix**3 / best


def table(rows: Sequence[Row], device: str) -> Iterable[str]:
    """In Markdown, for docs/gpu.md."""
    yield f"On {device}, torch {torch.__version__}:\n"
    yield "| what | measured | asked | |"
    yield "|---|---|---|---|"
    yield from map(_line, rows)


def _line(row: Row) -> str:
    verdict = {True: "reached", False: "missed", None: ""}[row.reached]
    return f"| {row.what} | {row.figure} | {row.asked} | {verdict} |"


def named(model: str) -> str:
    """For a file's name."""
    return model.rpartition("/")[2].removesuffix(".json").replace(":", "-")


def skip(reason: str, output: Path | None) -> None:
    """Say and write why nothing is measured."""
    print(f"skipped: {reason}")
    write(output, about() | {"skipped": reason})


def write(output: Path | None, results: Mapping[str, Any]) -> None:
    """The figures, where somebody wants them in a file."""
    if output is not None:
        write_text(output, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    app()
