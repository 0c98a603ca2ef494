"""Random questions, each answered and held against what users know: ``python -m benchmarks.questions``.

A question is a profile of plans/profiles/, or of a model profiled in shapes, on some number of nodes, with
links of some speed, a global batch, a budget and a gap. Of every answer is asked: is a named scheme that fits
faster, or as fast in less memory? Does the same question with fewer choices have a better answer? Does the
plan change when every time in the profile changes by up to 1%?
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from hzplan.core.recompute import Recomputed
from hzplan.cost.collectives import with_nodes
from hzplan.cost.model import CostModel
from hzplan.export.shape import elements
from hzplan.formats.profile import Profile
from hzplan.solver.emit import emit
from hzplan.solver.evaluate import Evaluation, Modes, evaluate, uniform
from hzplan.solver.gain import gain
from hzplan.solver.schemes import RecomputeOptions, Settings, schemes
from hzplan.solver.search import Request
from hzplan.solver.solve import Solved, searches_of, solve, solve_each
from hzplan.solver.sweep import with_network
from hzplan.solver.target import TARGETS

PROFILES = Path(__file__).parent.parent / "plans" / "profiles"
MODELS = {
    "hf-llama3-8b-h100": ("hf:llama3-8b", "h100-8x400g", "1,2,4", 4096),
    "hf-llama3-8b-a100": ("hf:llama3-8b", "a100-8x200g", "1,2", 2048),
    "hf-qwen3-8b-h100": ("hf:qwen3-8b", "h100-8x400g", "1,2,4", 4096),
    "hf-qwen3-8b-asynchzp": ("hf:qwen3-8b", "asynchzp-2x8", "1,2", 2048),
    "hf-qwen3-32b-h100": ("hf:qwen3-32b", "h100-8x400g", "1,2", 4096),
    "hf-llama3-70b-h100": ("hf:llama3-70b", "h100-8x400g", "1,2", 4096),
    "hf-mixtral-8x7b-h100": ("hf:mixtral-8x7b", "h100-8x400g", "1,2", 4096),
    "hf-gpt3-175b-h100": ("hf:gpt3-175b", "h100-8x400g", "1", 2048),
    "hf-llama3-405b-h100": ("hf:llama3-405b", "h100-8x400g", "1", 4096),
    "gpt-1.3b-a100": ("gpt:1.3b", "a100-8x200g", "1,2,4", 2048),
    "gpt-7b-h100": ("gpt:7b", "h100-8x400g", "1,2", 2048),
    "moe-5b-h100": ("moe:5b", "h100-8x400g", "1,2", 2048),
}
"""Models that are profiled for this, in shapes: cluster, micro-batch sizes, tokens."""
NODES = (1, 2, 4, 8, 16, 32, 64)
SPEEDS = (0.25, 0.5, 1.0, 1.0, 2.0)
ACCUMULATIONS = (1, 1, 2, 4)
GAPS = (0.005, 0.05)
DISTURBED = 0.01
CLOSE = 0.005
"""Steps that differ by less than this share are as fast."""
GIB = 2**30


@dataclass(frozen=True)
class Question:
    """One question; ``about`` says it in words."""

    about: str
    profile: Profile
    request: Request


@dataclass(frozen=True)
class Finding:
    """What was seen of one question. Shares of a step; ``beaten``: by which schemes, and how."""

    about: str
    status: str
    seconds: float
    gain: float
    slower: float
    beaten: tuple[str, ...]
    budget_used: float
    narrowed: str
    worse_than_narrow: float
    changed: str


def draw(rng: random.Random, profiles: Sequence[Path]) -> Question:
    """A question."""
    path = rng.choice(profiles)
    profile = Profile.load(path)
    about = path.stem
    if profile.modelled is not None:
        nodes = rng.choice(NODES)
        profile = with_nodes(profile, nodes)
        about += f", {nodes} nodes"
    if len(profile.mesh.tiers) > 1 and (speed := rng.choice(SPEEDS)) != 1.0:
        profile = with_network(profile, speed)
        about += f", network × {speed}"
    size, accumulation = rng.choice(profile.micro_batches), rng.choice(ACCUMULATIONS)
    batch = profile.data_ranks * size * accumulation
    budget = int(profile.cluster.memory_bytes * 0.95)
    if rng.random() < 0.7:
        budget = int(rng.uniform(1, 2.5) * _lean_bytes(profile))
    gap = rng.choice(GAPS)
    about += f", batch {batch}, {budget / GIB:.3g} GiB, gap {gap}"
    return Question(about, profile, Request(budget, batch, gap=gap, time_limit_s=20.0))


def _lean_bytes(profile: Profile) -> int:
    """The peak of ZeRO-3 with everything recomputed at the smallest micro-batch, bytes."""
    model, size = CostModel(profile), profile.micro_batches[0]
    schedule = model.schedule(prefetch=1, accumulation=1, clip=True)
    levels = uniform(profile, schemes(model.mesh)["ZeRO-3"])
    again = Modes(Recomputed.of(model.recomputable))
    return evaluate(model, levels, schedule, size, modes=again).memory.peak


def find(question: Question, rng: random.Random) -> Finding:
    """Solve a question, one with fewer choices, and one on a disturbed profile."""
    profile, request = question.profile, question.request
    solved = solve(profile, request)
    if not isinstance(solved, Solved):
        return Finding(question.about, type(solved).__name__, solved.seconds, 0, 0, (), 0, "", 0, "")
    best, step = solved.best, solved.best.step_s
    rows = [row for row in solved.rows if row.fits and row.allowed]
    slower = max([step / row.found.step_s - 1 for row in rows], default=0.0)
    beaten = [f"{row.name} is faster" for row in rows if row.found.step_s * (1 + CLOSE) < step * (1 - 1e-9)]
    beaten += [
        f"{row.name} is as fast and leaner"
        for row in rows
        if row.found.step_s <= step * (1 + CLOSE) and row.found.memory.peak + GIB < best.memory.peak
    ]
    won = gain(best, solved.rows, request)
    share = won.share if won is not None else 1.0
    narrowed, narrow = _narrowed(question, solved, rng)
    other = solve(narrow.profile, narrow.request)
    worse = step / other.best.step_s - 1 if isinstance(other, Solved) else 0.0
    changed = ""
    if share < CLOSE:
        again = solve(_disturbed(profile, rng), request)
        changed = _difference(best, again.best) if isinstance(again, Solved) else "nothing fits"
    return Finding(
        *(question.about, solved.status, solved.seconds, share, slower, tuple(beaten)),
        *(best.memory.peak / request.memory_bytes, narrowed, worse, changed),
    )


def _narrowed(question: Question, solved: Solved, rng: random.Random) -> tuple[str, Question]:
    """The question with fewer choices."""
    profile, request = question.profile, question.request
    fitting = [row for row in solved.rows if row.fits]
    choices = ["recompute none", "recompute all", "memory", "pin one"] + ["pin all"] * bool(fitting)
    kind = rng.choice(choices)
    if kind.startswith("recompute"):
        return kind, replace(question, request=replace(request, recompute=kind.split()[1]))  # type: ignore[arg-type]
    if kind == "memory":
        return kind, replace(question, request=replace(request, memory_bytes=int(request.memory_bytes * 0.9)))
    if kind == "pin all":
        levels = schemes(profile.mesh)[rng.choice(fitting).name]
        pin = "*=" + ",".join(map(str, levels.shards(profile.mesh)))
    else:
        tensor = rng.choice([t for unit in profile.units for t in unit.tensors if t.trainable])
        some = rng.choice(profile.mesh.triples()).shards(profile.mesh)
        pin = f"{tensor.name}=" + ",".join(map(str, some))
    return pin, replace(question, request=replace(request, pins=(pin,)))


def _disturbed(profile: Profile, rng: random.Random) -> Profile:
    """The profile with every time longer or shorter by up to ``DISTURBED``, each on its own."""

    def change(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                name: item * rng.uniform(1 - DISTURBED, 1 + DISTURBED)
                if name == "seconds" or (name.endswith("_seconds") and item)
                else change(item)
                for name, item in value.items()
            }
        return [change(item) for item in value] if isinstance(value, list) else value

    return Profile.model_validate_json(json.dumps(change(json.loads(profile.model_dump_json()))))


def _difference(one: Evaluation, other: Evaluation) -> str:
    """What differs between two plans, in words; empty where nothing does."""
    said = []
    if one.levels != other.levels:
        said.append("levels")
    if one.modes != other.modes:
        said.append(f"recompute {len(one.modes.recompute)} and {len(other.modes.recompute)}")
    if one.micro_batch != other.micro_batch:
        said.append("micro-batch")
    if one.schedule.prefetch != other.schedule.prefetch:
        said.append("prefetch")
    if one.schedule.gradient_buffers != other.schedule.gradient_buffers:
        said.append("gradient buffers")
    return ", ".join(said)


def answers(seeds: range, profiles: Sequence[Path]) -> Iterator[tuple[int, Finding]]:
    """One finding for every seed."""
    for seed in seeds:
        rng = random.Random(seed)
        question = draw(rng, profiles)
        yield seed, find(question, rng)


def summary(found: Sequence[Finding]) -> Iterator[str]:
    """What all findings say, in lines."""
    solved = [one for one in found if one.status in ("optimal", "feasible")]
    yield f"{len(found)} questions, {len(solved)} with a plan"
    yield f"beaten by a scheme (0.5 %, 1 GiB): {sum(bool(one.beaten) for one in solved)}"
    slower = [one.slower for one in solved]
    yield f"slower than a scheme at all: {sum(share > 1e-6 for share in slower)}, at most {max(slower):.2%}"
    worse = [one.worse_than_narrow for one in solved]
    many = sum(share > CLOSE for share in worse)
    yield f"better with fewer choices, by more than 0.5 %: {many}, at most {max(worse):.2%}"
    near = [one for one in solved if one.gain < CLOSE]
    yield f"gain below 0.5 %: {len(near)}; changed by 1 %: {sum(bool(one.changed) for one in near)}"
    yield f"more than 98 % of the budget: {sum(one.budget_used > 0.98 for one in solved)}"
    seconds = [one.seconds for one in solved]
    yield f"seconds: median {statistics.median(seconds):.1f}, at most {max(seconds):.1f}"


ELEVEN = (
    ("hf-llama3-8b-h100", 8, 128),
    ("hf-llama3-8b-h100", 1, 64),
    ("hf-llama3-8b-a100", 4, 256),
    ("hf-qwen3-8b-h100", 2, 128),
    ("gpt-1.3b-a100", 4, 256),
    ("gpt-7b-h100", 4, 128),
    ("hf-mixtral-8x7b-h100", 16, 512),
    ("hf-qwen3-32b-h100", 16, 512),
    ("hf-llama3-70b-h100", 8, 512),
    ("hf-llama3-70b-h100", 64, 1024),
    ("hf-gpt3-175b-h100", 64, 1024),
)
"""Ordinary questions: a profile, nodes of eight devices, sequences a step; in 76 GiB."""


def eleven(folder: Path) -> Iterator[str]:
    """Markdown: the plan of every ordinary question beside ZeRO-3, and its gain split by cause."""
    yield "| question | plan | ZeRO-3, none or all | ZeRO-3, every k-th | best scheme | gain | from |"
    yield "|---|---|---|---|---|--:|---|"
    for name, nodes, batch in ELEVEN:
        profile = with_nodes(Profile.load(folder / f"{name}.json"), nodes)
        request = Request(76 * GIB, batch)
        solved = solve(profile, request)
        assert isinstance(solved, Solved), f"{name} fits"
        settings = Settings(searches_of(profile, request), request)
        offered = settings.recompute_options
        zero3 = settings.of(schemes(profile.mesh)["ZeRO-3"])
        plain = {frozenset[str](), frozenset(offered.blocks), frozenset(offered.all)}
        by_hand = settings.fastest([one for one in zero3 if one.recompute in plain])
        every = settings.fastest([one for one in zero3 if one.recompute not in plain])
        won = gain(solved.best, solved.rows, request)
        assert won is not None, f"a scheme fits {name}"
        parts = ", ".join(
            f"{part.freedom} {'—' if part.share is None else f'{part.share:+.1%}'}" for part in won.parts
        )
        yield (
            f"| {name}, {8 * nodes}, {batch} | {_about(solved.best, offered)} | {_about(by_hand, offered)} "
            f"| {_about(every, offered)} | {won.over.name} {_about(won.over.found, offered)} "
            f"| {won.share:.1%} | {parts or 'it is the plan'} |"
        )


def targets(folder: Path) -> Iterator[str]:
    """Markdown: every ordinary question for every target: how much longer the best step is that it can be
    told than the best of all, and what its export loses."""
    yield f"| question | plan | {' | '.join(TARGETS)} | lost in export |"
    yield f"|---|--:|{'--:|' * len(TARGETS)}--:|"
    for name, nodes, batch in ELEVEN:
        path = folder / f"{name}.json"
        profile = with_nodes(Profile.load(path), nodes)
        request = Request(76 * GIB, batch)
        free = solve(profile, request)
        assert isinstance(free, Solved), f"{name} fits"
        cells, lost = [], 0
        for target in TARGETS:
            asked, found = solve_each(profile, replace(request, target=target))
            if not isinstance(found, Solved):
                cells.append("does not fit")
                continue
            cells.append(f"{found.best.step_s / free.best.step_s - 1:+.1%}")
            plan = emit(profile, asked, found, profile_path=path, plan_path=folder / "plan.json")
            export = import_module(f"hzplan.export.{target.replace('-', '_')}").export
            specs = [tensor.spec for unit in profile.units for tensor in unit.tensors]
            lost += len(export(Path("plan.json"), plan, elements(specs)).lost)
        question = f"{name}, {8 * nodes}, {batch} | {1e3 * free.best.step_s:,.0f} ms"
        yield f"| {question} | {' | '.join(cells)} | {lost} |"


def _about(one: Evaluation | None, offered: RecomputeOptions) -> str:
    """``883 ms, 68.5 GiB, 2 × none``: step, peak, micro-batch size and what is recomputed."""
    if one is None:
        return "does not fit"
    again = offered.name(one.modes.recompute)
    return f"{1e3 * one.step_s:,.0f} ms, {one.memory.peak / GIB:.1f} GiB, {one.micro_batch} × {again}"


def made(folder: Path) -> list[Path]:
    """Profiles of ``MODELS`` in a folder, made where they are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (model, cluster, sizes, tokens) in MODELS.items():
        path = folder / f"{name}.json"
        if not path.exists():
            asked = ["--analytic", "--cluster", cluster, "--nodes", "8", "--dtype", "bf16"]
            asked += ["--micro-batch", sizes, "--seq-len", str(tokens), "-o", str(path)]
            command = [sys.executable, "-m", "hzplan", "profile", model, *asked, "--json"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return sorted(folder.glob("*.json"))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Random questions held against what users know.")
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--made", type=Path, default=Path("build/questions"), help="where profiles are kept")
    parser.add_argument("--output", type=Path, help="one JSON object a line")
    parser.add_argument("--eleven", action="store_true", help="the table of docs/simulated.md instead")
    parser.add_argument("--targets", action="store_true", help="that of other runtimes instead")
    given = parser.parse_args()
    if given.eleven or given.targets:
        made(given.made)
        for line in (eleven if given.eleven else targets)(given.made):
            print(line, flush=True)
        return
    profiles = [*sorted(PROFILES.glob("*.json")), *made(given.made)]
    found, began = [], time.monotonic()
    out = given.output.open("w", encoding="utf-8") if given.output else None
    for seed, one in answers(range(given.first, given.first + given.questions), profiles):
        found.append(one)
        if out:
            print(json.dumps({"seed": seed} | asdict(one)), file=out, flush=True)
        if one.beaten or one.changed or one.worse_than_narrow > CLOSE:
            print(seed, one, flush=True)
    print("\n".join(summary(found)))
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
