"""``python -m tests.faults``: a campaign of faults, and what became of each; ``make faults``.

Every fault is one function that returns how often it was tried and what went wrong, in lines. Most of them
run ``hzplan`` as a user does, in processes that this one starts and ends.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.__main__ import about
from hzplan.checkpoint.folder import PARTIAL, listed, newest_whole, place_of
from hzplan.errors import UserError
from hzplan.formats.base import write_text
from hzplan.formats.checkpoint import FILE, Checkpoint, data_file
from tests.cli.command import environment, hzplan
from tests.distributed.pairs import contents, wrong_pairs
from tests.plans import make_plan

RANKS = 2
STEPS = 240
SETTINGS = (
    "--steps",
    STEPS,
    "--checkpoint-every",
    20,
    "--lr",
    1e-3,
    "--seed",
    5,
    "--json",
    "--resume",
    "--timeout",
    20,
)
PATIENCE_S = 300.0
CUT_OFF = re.compile(r"network.*ranks? [23]\b|ranks? [23]\b.*network|tier 1.*ranks? [23]\b")
"""How ranks of the first node name the second one, and the link between them."""
GOLDEN = Path(__file__).resolve().parents[1] / "plans"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Result:
    """Of one fault: how often it was done, what should not have been, and what was seen."""

    times: int
    wrong: list[str]
    seen: str


@dataclass(frozen=True)
class Scene:
    """Where a fault plays: a folder of its own, and the plan of two ranks that every run trains."""

    folder: Path
    plan: Path
    rng: random.Random


class Job(subprocess.Popen[str]):
    """``hzplan run`` at work. It writes to files: a pipe that nobody reads would hold it up."""

    def __init__(self, scene: Scene, command: Sequence[object], folder: Path) -> None:
        self.files = [
            scene.folder / f"{folder.name}.{number}.{what}" for number, what in ((1, "out"), (2, "err"))
        ]
        with self.files[0].open("w") as out, self.files[1].open("w") as err:
            super().__init__(
                [str(word) for word in command],
                cwd=scene.folder,
                env=environment(OMP_NUM_THREADS="1"),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def said(self) -> str:
        """All of stderr, when it has ended. TimeoutExpired when it does not."""
        self.wait(timeout=PATIENCE_S)
        return self.files[1].read_text()


def run(scene: Scene, checkpoints: Path, *options: object, restarts: int | None = None) -> Job:
    """``hzplan run`` at work, under torchrun where it shall restart."""
    launcher: list[object] = [sys.executable, "-m"]
    if restarts is not None:
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]
        launcher += ["--max-restarts", restarts, "--monitor-interval", 0.05, "-m"]
    words = ["hzplan", "run", scene.plan, *SETTINGS, "--checkpoint", checkpoints, *options]
    return Job(scene, [*launcher, *words], checkpoints)


def ranks_of(launcher: int) -> list[int]:
    """The processes of a job's ranks."""
    try:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        return [int(c) for c in children if b"hzplan\0run" in Path(f"/proc/{c}/cmdline").read_bytes()]
    except OSError:
        return []


def trained(pid: int) -> bool:
    """Whether a rank has begun its work: torch is there, so more threads than one are."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 4
    except OSError:
        return False


def undisturbed(scene: Scene) -> dict[str, torch.Tensor]:
    """What the run ends with when nothing happens to it."""
    folder = scene.folder / "undisturbed"
    job = run(scene, folder)
    errors = job.said()
    if job.returncode:
        raise UserError(f"the undisturbed run failed: {errors}")
    return contents(place_of(folder, STEPS))


def differs(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """The tensors that are not equal to the bit."""
    names = sorted(found.keys() ^ expected.keys())
    return names + [n for n in found.keys() & expected.keys() if not torch.equal(found[n], expected[n])]


def killed_rank(scene: Scene, times: int) -> Result:
    """kill -9 of a random rank at a random moment; torchrun restarts the job."""
    expected = undisturbed(scene)
    kills, jobs, wrong = 0, 0, []
    while kills < times:
        jobs += 1
        folder = scene.folder / f"killed{jobs}"
        with run(scene, folder, restarts=times) as job:
            while job.poll() is None and kills < times:
                victims = ranks_of(job.pid)
                if len(victims) == RANKS and all(map(trained, victims)):
                    time.sleep(scene.rng.uniform(0, 2.5))
                    if job.poll() is None and ranks_of(job.pid) == victims:
                        os.kill(scene.rng.choice(victims), signal.SIGKILL)
                        kills += 1
                time.sleep(0.05)
            errors = job.said()
        if job.returncode:
            wrong.append(f"job {jobs}: exit code {job.returncode}: {errors[-500:]}")
            continue
        wrong += [
            f"job {jobs}: {name} differs" for name in differs(contents(place_of(folder, STEPS)), expected)
        ]
        shutil.rmtree(folder)
    return Result(kills, wrong, f"{jobs} jobs ended with the undisturbed run's weights and optimizer state")


def killed_saving(scene: Scene, times: int) -> Result:
    """All ranks are killed while a checkpoint is being written."""
    wrong: list[str] = []
    folder = scene.folder / "saving"
    kills = hits = 0
    newest = 0
    while kills < times:
        with run(scene, folder, "--steps", 10**6, "--checkpoint-every", 7) as job:
            end, hit = time.monotonic() + PATIENCE_S, False
            wanted = newest + 7 * scene.rng.randint(1, 3)
            while time.monotonic() < end and job.poll() is None and not hit:
                names = [entry.name for entry in os.scandir(folder)] if folder.exists() else []
                at = [int(name[6:14]) for name in names if PARTIAL.fullmatch(name)]
                hit = any(step >= wanted for step in at)
            time.sleep(scene.rng.uniform(0, 0.03))
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        kills += 1
        hits += any(PARTIAL.fullmatch(entry.name) for entry in os.scandir(folder))
        found = newest_whole(folder, 0, 1, lambda mine: [mine])
        if found is None or found.passed_over:
            wrong.append(f"kill {kills}: {'nothing whole' if found is None else found.passed_over[0]}")
        elif found.index.step < newest:
            wrong.append(f"kill {kills}: step {found.index.step} after step {newest} was whole")
        else:
            newest = found.index.step
    return Result(times, wrong, f"{hits} left a half-written checkpoint, which no run took for one")


def _some_checkpoints(scene: Scene) -> Path:
    folder = scene.folder / "some"
    job = run(scene, folder, "--steps", 40)
    errors = job.said()
    if job.returncode:
        raise UserError(f"a run failed: {errors}")
    return folder


def damaged(scene: Scene, times: int) -> Result:
    """A checkpoint is cut short, has a bit flipped, lacks a file, or is another model's."""
    source, wrong = _some_checkpoints(scene), []
    newest, older = listed(source)
    passed = refused = 0
    for number in range(times):
        folder = scene.folder / "damaged"
        shutil.copytree(source, folder)
        names = [FILE, *map(data_file, range(Checkpoint.load(newest).world))]
        both = number % 4 == 3
        for victim in [newest, older] if both else [newest]:
            _damage(folder / victim.name / scene.rng.choice(names), scene.rng)
        try:
            found = newest_whole(folder, 0, 1, lambda mine: [mine])
            if both or found is None or found.path.name != older.name or len(found.passed_over) != 1:
                wrong.append(f"mutation {number} was accepted")
            passed += 1
        except UserError as error:
            if not both or "\n" in str(error):
                wrong.append(f"mutation {number}: {error}")
            refused += 1
        shutil.rmtree(folder)
    other = make_plan("gpt:tiny", mesh=str(RANKS), clip=True)
    other.save(scene.folder / "other.json")
    done = hzplan("run", "other.json", "--resume", "--checkpoint", source, cwd=scene.folder)
    if done.code != 2 or len(done.lines) != 1 or "of another model" not in done.stderr:
        wrong.append(f"another model: exit code {done.code}: {done.stderr}")
    return Result(
        times + 1, wrong, f"{passed} times the older one was used, {refused + 1} were one line, exit 2"
    )


def _damage(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    match rng.randrange(4):
        case 0:
            path.write_bytes(content[: rng.randrange(len(content))])
        case 1:
            path.unlink()
        case 2:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)
        case _:
            start = rng.randrange(len(content))
            content[start : start + 64] = rng.randbytes(len(content[start : start + 64]))
            path.write_bytes(content)


def full_disk(scene: Scene, times: int) -> Result:
    """The folder is a tmpfs with room for one checkpoint and a half."""
    size = sum(path.stat().st_size for path in listed(_some_checkpoints(scene))[0].iterdir())
    wrong = []
    for number in range(times):
        folder = scene.folder / f"small{number}"
        folder.mkdir()
        script = (
            f"mount -t tmpfs -o size={size * 3 // 2} none {folder} && "
            f'"$@"; code=$?; ls -A {folder}; exit $code'
        )
        command = [sys.executable, "-m", "hzplan", "run", scene.plan, *SETTINGS, "--steps", 60]
        done = subprocess.run(
            ["unshare", "-rm", "sh", "-c", script, "sh", *map(str, [*command, "--checkpoint", folder])],
            cwd=scene.folder,
            env=environment(OMP_NUM_THREADS="1"),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        said = done.stderr.splitlines()
        if done.returncode != 4 or not any("No space left on device" in line for line in said):
            wrong.append(f"exit code {done.returncode}: {done.stderr[-500:]}")
        if '"loss_last"' not in done.stdout or done.stdout.split()[-1] != "step-00000020":
            wrong.append(
                f"training did not go on, or more than the first checkpoint is left: {done.stdout[-300:]}"
            )
    return Result(times, wrong, "60 steps trained, two saves reported, the first checkpoint kept")


def _emulated(scene: Scene, cut: str, *options: object) -> tuple[int, str, float, Path]:
    logs = scene.folder / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    began = time.monotonic()
    make_plan("gpt:nano", mesh="2|2", clip=True).save(scene.folder / "four.json")
    done = hzplan(
        *(
            "emulate",
            "--nodes",
            2,
            "--nproc",
            2,
            "--network",
            "200mbit",
            "--no-verify",
            "--cut",
            cut,
            "--logs",
            logs,
        ),
        *("--", sys.executable, "-m", "hzplan", "run", "four.json", "--json", *options),
        cwd=scene.folder,
        timeout_s=PATIENCE_S,
    )
    return done.code, done.stdout + done.stderr, time.monotonic() - began, logs


def short_cut(scene: Scene, times: int) -> Result:
    """A node's link is down for 5 s."""
    wrong, lengths = [], []
    for _ in range(times):
        code, said, seconds, _ = _emulated(scene, f"1@{scene.rng.uniform(8, 10):.1f}+5", "--steps", 300)
        lengths.append(seconds)
        if code:
            wrong.append(f"exit code {code}: {said[-500:]}")
    return Result(times, wrong, f"went on; the longest run took {max(lengths):.0f} s")


def long_cut(scene: Scene, times: int) -> Result:
    """A node's link is down for good."""
    wrong, lengths, last = [], [], ""
    for _ in range(times):
        code, said, seconds, logs = _emulated(
            scene, f"1@{scene.rng.uniform(12, 15):.1f}", "--steps", 10**6, "--timeout", 10
        )
        lengths.append(seconds)
        texts = [path.read_text() for path in sorted(logs.glob("*.log"))]
        last = next((line for line in said.splitlines() if line.startswith("hzplan: rank")), "")
        if code != 4:
            wrong.append(f"exit code {code}: {said[-500:]}")
        if len(texts) != 4 or not all("hzplan: rank" in text for text in texts):
            wrong.append("a rank ended without a word")
        if not any(CUT_OFF.search(text) for text in texts[:2]):
            wrong.append(f"no peer and tier are named: {last}")
    return Result(times, wrong, f"every rank ended, within {max(lengths):.0f} s of the start: “{last[:200]}”")


def slow_rank(scene: Scene, times: int) -> Result:
    """One rank gets a tenth of its time: stopped for nine tenths of every 50 ms."""
    wrong, steps = [], []
    for number in range(times):
        with run(scene, scene.folder / f"slow{number}", "--steps", 10**6, "--metrics", "m.jsonl") as job:
            metrics = scene.folder / "m.jsonl"
            while not metrics.exists() or metrics.read_text().count("\n") < 60:
                time.sleep(0.05)
            rank = scene.rng.randrange(RANKS)
            victim = next(pid for pid in ranks_of(job.pid) if _rank_of(pid) == rank)
            before = metrics.read_text().count("\n")
            end = time.monotonic() + 60
            while time.monotonic() < end and metrics.read_text().count("\n") < before + 40:
                os.kill(victim, signal.SIGSTOP)
                time.sleep(0.045)
                os.kill(victim, signal.SIGCONT)
                time.sleep(0.005)
            os.killpg(job.pid, signal.SIGTERM)
            errors = job.said()
        metrics.unlink()
        lines = [line for line in errors.splitlines() if "is slow" in line]
        late = [line for line in lines if int(line.split("step ")[1].split(":")[0]) > before - 2]
        if len(late) < 1 or f"rank {rank} " not in late[0]:
            wrong.append(f"rank {rank}, from step {before} on: {lines}")
        else:
            steps.append(int(late[0].split("step ")[1].split(":")[0]) - before)
    return Result(times, wrong, f"named after {max(steps, default=0)} steps at most")


def _rank_of(pid: int) -> int:
    fields = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return int(next(field for field in fields if field.startswith(b"RANK="))[5:])


def other_plans(scene: Scene, times: int) -> Result:
    """Saved under plan A on W ranks, loaded under B on V."""
    wrong = wrong_pairs([*range(times)], 8, scene.folder)
    return Result(times, wrong, "parameters and optimizer state equal to the bit")


def malformed(scene: Scene, times: int) -> Result:
    """Profiles, plans, metrics and command lines that are not as they should be."""
    good = scene.folder / "good"
    shutil.copytree(GOLDEN / "profiles", good / "profiles")
    shutil.copy(GOLDEN / "gpt-tiny-2x2.json", good / "plan.json")
    plan = json.loads((good / "plan.json").read_text())
    line = {
        "step": 1,
        "loss": 1.0,
        "step_s": 0.1,
        "exposed_comm_s": {"node": 0.0, "network": 0.01, "optim": 0.0},
    }
    lines = [json.dumps(line | {"step": step, "tokens": 9, "peak_memory_bytes": 9}) for step in range(30)]
    (good / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    profile = plan["source"]["profile"]
    commands: list[tuple[str | None, list[str]]] = [
        ("plan.json", ["show", "plan.json"]),
        ("plan.json", ["check", "plan.json", "--replay-only"]),
        ("plan.json", ["diff", "plan.json", "plan.json"]),
        (profile, ["solve", profile, "-o", "out.json", "--global-batch", "32"]),
        ("metrics.jsonl", ["calibrate", "plan.json", "metrics.jsonl", "-o", "out.json"]),
        (None, ["solve", profile, "-o", "out.json", "--global-batch", "32"]),
        (None, ["show", "plan.json"]),
    ]
    for _, command in commands[:5]:
        if (done := hzplan(*command, cwd=good)).code:
            raise UserError(f"{' '.join(command)}: {done.stderr}")
    (good / "out.json").unlink()
    wrong, codes = [], Counter[int]()
    for number in range(times):
        folder = scene.folder / f"malformed{number}"
        shutil.copytree(good, folder)
        victim, command = scene.rng.choice(commands)
        if victim is None:
            command = _mangled_words(command, scene.rng)
        else:
            _mangle(folder / victim, scene.rng)
        before = _everything(folder)
        done = hzplan(*command, cwd=folder)
        codes[done.code] += 1
        after = {name: text for name, text in _everything(folder).items() if name != "out.json"}
        problems = [
            what
            for what, is_so in (
                ("a traceback", "Traceback" in done.stderr),
                ("not one line", done.code == 2 and len(done.lines) != 1),
                (f"exit code {done.code}", done.code not in (0, 1, 2, 3)),
                ("a file was touched", after != before),
                ("half written", done.code != 0 and (folder / "out.json").exists()),
            )
            if is_so
        ]
        wrong += [
            f"{number}: {' '.join(command)} ({victim}): {what}: {done.stderr[-300:]}" for what in problems
        ]
        shutil.rmtree(folder)
    refused = codes[2]
    return Result(
        times, wrong, f"{refused} were one line and exit 2; the others made no difference that matters"
    )


def _everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


STRANGE = (
    None,
    -1,
    0,
    1e308,
    True,
    "",
    "x" * 2000,
    "\x1b[2J\n",
    [],
    {},
    [[]],
    {"a": 1},
    2**70,
    0.5,
    "nan",
    "../..",
)


def _mangle(path: Path, rng: random.Random) -> None:
    """Change the file's bytes, or what they say."""
    text = path.read_bytes()
    if rng.random() < 0.3:
        place = rng.randrange(len(text))
        path.write_bytes(rng.choice([text[:place], text[:place] + rng.randbytes(3) + text[place + 3 :]]))
        return
    lines = text.decode().splitlines() if path.suffix == ".jsonl" else [text.decode()]
    number = rng.randrange(len(lines))
    data = json.loads(lines[number])
    for _ in range(rng.choice((1, 1, 3))):
        holder, key = rng.choice(list(_places(data)))
        if isinstance(holder, dict) and rng.random() < 0.2:
            holder.pop(key, None)
        elif isinstance(holder, dict) and rng.random() < 0.1:
            holder["surprise"] = rng.choice(STRANGE)
        elif (isinstance(holder, dict) and key in holder) or (isinstance(holder, list) and key < len(holder)):
            holder[key] = rng.choice(STRANGE)
    lines[number] = json.dumps(data)
    path.write_text("\n".join(lines) + "\n")


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield data, key
        yield from _places(data[key])


def _mangled_words(words: list[str], rng: random.Random) -> list[str]:
    """A command line with words that are missing, doubled, strange or new."""
    found = [*words]
    for _ in range(rng.choice((1, 2))):
        place = rng.randrange(1, len(found) + 1)
        options = [
            "--memory",
            "-1",
            "--gap",
            "x",
            "--sweep",
            "memory=",
            "--pin",
            "a=b=c",
            "--nodes",
            "0",
            "\x00"[1:],
            "--global-batch",
            "9" * 40,
            "--time-limit",
            "nan",
            "--what-if",
            "--against",
            "none",
            "--unit",
            "é" * 99,
        ]
        match rng.randrange(3):
            case 0:
                found.insert(place, rng.choice(options))
            case 1 if place < len(found):
                found.pop(place)
            case _:
                found[min(place, len(found) - 1)] = rng.choice(options)
    return found


def long_run(scene: Scene, times: int) -> Result:
    """Many small steps: memory, threads and open files of every rank."""
    wrong: list[str] = []
    metrics = scene.folder / "long.jsonl"
    with run(
        scene,
        scene.folder / "long",
        "--steps",
        times,
        "--checkpoint-every",
        times // 10,
        "--metrics",
        metrics,
    ) as job:
        points: list[tuple[int, list[tuple[int, int, int]]]] = []
        while job.poll() is None:
            time.sleep(1)
            steps = metrics.read_text().count("\n") if metrics.exists() else 0
            if steps > times // 10 and (seen := [_uses(pid) for pid in ranks_of(job.pid)]):
                points.append((steps, [use for use in seen if use is not None]))
        errors = job.said()
    if job.returncode:
        wrong.append(f"exit code {job.returncode}: {errors[-500:]}")
    full = [uses for _, uses in points if len(uses) == RANKS]
    tenth = max(1, len(full) // 5)
    growth = []
    for rank in range(RANKS):
        for what, at in (("memory", 0), ("threads", 1), ("files", 2)):
            early = sorted(uses[rank][at] for uses in full[:tenth])[tenth // 2]
            late = sorted(uses[rank][at] for uses in full[-tenth:])[tenth // 2]
            growth.append((what, late / early - 1))
            if late > early * (1.01 if what == "memory" else 1.0):
                wrong.append(f"rank {rank}: {what} {early} → {late}")
    worst = max(value for what, value in growth if what == "memory")
    return Result(times, wrong, f"memory {worst:+.2%} at most, threads and open files the same")


def _uses(pid: int) -> tuple[int, int, int] | None:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return (
            pages * os.sysconf("SC_PAGE_SIZE"),
            len(os.listdir(f"/proc/{pid}/task")),
            len(os.listdir(f"/proc/{pid}/fd")),
        )
    except OSError:
        return None


FAULTS: dict[str, tuple[str, int, Callable[[Scene, int], Result]]] = {
    "killed-rank": ("kill -9 of a random rank at a random moment", 100, killed_rank),
    "killed-saving": ("all ranks killed during a save", 50, killed_saving),
    "damaged": ("checkpoint cut, flipped, missing, of another model", 200, damaged),
    "full-disk": ("disk full while saving", 3, full_disk),
    "short-cut": ("a node's link down for 5 s", 3, short_cut),
    "long-cut": ("a node's link down for good", 3, long_cut),
    "slow-rank": ("one rank slowed tenfold", 5, slow_rank),
    "other-plans": ("saved under one plan and world, loaded under another", 200, other_plans),
    "malformed": ("malformed profiles, plans, metrics and command lines", 500, malformed),
    "long-run": ("small steps in a row", 20_000, long_run),
}


@contextmanager
def _scene(name: str) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="hzplan-faults-") as place:
        plan = Path(place) / "plan.json"
        make_plan("gpt:nano", mesh=str(RANKS), clip=True).save(plan)
        yield Scene(Path(place), plan, random.Random(name))


@app.command()
def main(
    only: Annotated[str | None, typer.Option(help="Faults, with commas between.")] = None,
    share: Annotated[float, typer.Option(help="Of the usual number of times.")] = 1.0,
    output: Annotated[Path, typer.Option(help="Figures; faults that are there are not done again.")] = Path(
        "benchmarks/results/faults.json"
    ),
    docs: Annotated[Path | None, typer.Option(help="Where to write the table.")] = None,
) -> None:
    """Do what should not happen to a run, many times, and see what becomes of it.

    Example: python -m tests.faults --docs docs/reliability.md
    """
    results = about() | {"faults": {}}
    if output.exists():
        results["faults"] = json.loads(output.read_text(encoding="utf-8"))["faults"]
    for name, (what, times, fault) in FAULTS.items():
        if (only is not None and name not in only.split(",")) or name in results["faults"]:
            continue
        print(f"{name}: {what}", flush=True)
        began = time.monotonic()
        with _scene(name) as scene:
            result = fault(scene, max(1, round(times * share)))
        for line in result.wrong:
            print(f"    wrong: {line}", flush=True)
        print(f"    {result.times} times, {len(result.wrong)} wrong: {result.seen}", flush=True)
        results["faults"][name] = {
            "what": what,
            "times": result.times,
            "wrong": result.wrong,
            "seen": result.seen,
            "seconds": round(time.monotonic() - began),
            "commit": results["commit"],
        }
        write_text(output, json.dumps(results, indent=1) + "\n")
    if docs is not None:
        write_text(docs, "\n".join([*_markdown(results), ""]))
    if any(fault["wrong"] for fault in results["faults"].values()):
        raise SystemExit(1)


def _markdown(results: dict[str, object]) -> Iterator[str]:
    yield "# Reliability"
    yield ""
    yield (
        f"A campaign of faults, of {results['date']}, with "
        f"`python -m tests.faults --docs docs/reliability.md` (`make faults`): `hzplan run` on {RANKS} ranks "
        "(4 on emulated nodes), gpt:nano. A short part of it is in `make test`."
    )
    yield ""
    yield "| fault | times | wrong | what was seen | commit |"
    yield "|---|---|---|---|---|"
    faults = results["faults"]
    assert isinstance(faults, dict)
    for name in FAULTS:
        if name in faults:
            fault = faults[name]
            row = (fault["what"], f"{fault['times']:,}", len(fault["wrong"]), fault["seen"], fault["commit"])
            yield f"| {' | '.join(map(str, row))} |"
    wrong = [(name, line) for name in FAULTS if name in faults for line in faults[name]["wrong"]]
    if wrong:
        yield ""
        yield "What was not as it should be:"
        yield ""
        yield from (f"- {name}: {' '.join(line.split())[:400]}" for name, line in wrong)


if __name__ == "__main__":
    app()
