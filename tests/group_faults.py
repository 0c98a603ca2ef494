"""``python -m tests.group_faults``: groups that are killed at random moments, and come back.

Two groups of two ranks train under a relaxed plan, each a job of its own that meets the other at ``hzplan
meet``. Again and again one of them is killed, all of its processes at once, and started anew. Both have to
end. Where they are killed as soon as they are back, hardly ever do both train: the held-out loss has to be
between that of undisturbed runs and that of a group which the other never came to; within the spread of the
first, where they are left in peace for long. Processes are forked from one that has imported torch, so that
who was killed is back soon; HZPLAN_TESTS_COLD=1 executes them.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.commands import write_section
from benchmarks.wire_convergence import T_95
from hzplan.formats.base import write_text
from tests import warm
from tests.cli.command import environment, hzplan
from tests.unit.test_wire import profile_with

TITLE = "## Groups that die, and come back"
SEEDS = 3
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Group(warm.Popen):
    """``hzplan run`` of one group, in a session of its own."""

    def __init__(
        self,
        folder: Path,
        group: int,
        where: str,
        steps: int,
        seed: int,
        name: str,
        before: Sequence[str] = (),
        **more: str,
    ) -> None:
        """``before``: of its command line; ``more``: of its environment."""
        self.files = [folder / f"{name}.group{group}.{what}" for what in ("out", "err")]
        self.metrics = folder / f"{name}.group{group}.jsonl"
        words = ["run", "plan.json", "--steps", steps, "--lr", "1e-3", "--seed", seed, "--json"]
        words += ["--metrics", self.metrics, "--group", group, "--meet", where, "--patience", "30"]
        words += ["--checkpoint", folder / name, "--checkpoint-every", 500, "--resume"]
        with self.files[0].open("w") as out, self.files[1].open("a") as err:
            super().__init__(
                [*before, sys.executable, "-m", "hzplan", *map(str, words)],
                cwd=folder,
                env=environment(OMP_NUM_THREADS="1", **more),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
                start_new_session=True,
            )

    def step(self) -> int:
        """The last one of which there is a line."""
        try:
            lines = self.metrics.read_text().splitlines()
            return int(json.loads(lines[-1])["step"]) if lines else -1
        except (OSError, ValueError):
            return -1

    def kill(self) -> None:
        """All of its processes, at once."""
        os.killpg(self.pid, signal.SIGKILL)
        self.wait()

    def said(self) -> dict[str, Any]:
        """What it printed in the end."""
        found: dict[str, Any] = json.loads(self.files[0].read_text().strip().splitlines()[-1])
        return found


@app.command()
def main(
    times: Annotated[int, typer.Option(help="How often a group is killed.")] = 50,
    steps: Annotated[int, typer.Option(help="Steps of a run.")] = 12000,
    peace: Annotated[float, typer.Option(help="Seconds before the next kill, at most.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
    output: Annotated[Path, typer.Option(help="What was found; what is not of a kill is kept.")] = Path(
        "benchmarks/results/group-faults.json"
    ),
    docs: Annotated[Path | None, typer.Option(help="A page whose section of this is written anew.")] = None,
) -> None:
    """Kill and compare.

    Example: python -m tests.group_faults --docs docs/relaxed.md
    """
    with tempfile.TemporaryDirectory() as name:
        folder, rng = Path(name), random.Random(seed)
        make_plan(folder)
        meet, where = start_meeting(folder, "localhost")
        try:
            found = json.loads(output.read_text()) if output.exists() else {}
            of_steps = found.setdefault(str(steps), {"calm": [], "campaigns": []})
            for one in range(len(of_steps["calm"]), SEEDS):
                of_steps["calm"].append(_undisturbed(folder, where, steps, one, range(2)))
            if "lone" not in of_steps:
                of_steps["lone"] = _undisturbed(folder, where, steps, SEEDS, range(1))
            print({name: of_steps[name] for name in ("calm", "lone")}, flush=True)
            write_text(output, json.dumps(found, indent=1) + "\n")
            if times:
                of_steps["campaigns"].append(_campaign(folder, where, times, steps, peace, rng))
                write_text(output, json.dumps(found, indent=1) + "\n")
        finally:
            meet.terminate()
            meet.wait()
    text = _markdown(found)
    print(text) if docs is None else write_section(docs, TITLE, text)


def make_plan(folder: Path) -> None:
    """plan.json, whose ranks have the same slices and send a share each: what has most to agree on."""
    profile = profile_with((1e12, 2e7), 0.0)
    cpus = profile.cluster.model_copy(update={"device": "cpu"})
    profile.replaced(cluster=cpus).save(folder / "profile.json")
    ask = ("--memory", "1GiB", "--global-batch", 16, "--allow-stale", "periodic", "--time-limit", 10)
    done = hzplan("solve", "profile.json", *ask, "--pin", "*=1,1,1", cwd=folder)
    assert done.code == 0, done.stderr


def start_meeting(folder: Path, host: str, before: Sequence[str] = ()) -> tuple[subprocess.Popen[str], str]:
    """``hzplan meet``, and what ``--meet`` takes."""
    meet = subprocess.Popen(
        [*before, sys.executable, "-m", "hzplan", "meet", "--port", "0", "--host", host],
        cwd=folder,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert meet.stderr is not None
    return meet, meet.stderr.readline().rpartition("--meet ")[2].strip()


def _campaign(
    folder: Path, where: str, times: int, steps: int, peace: float, rng: random.Random
) -> dict[str, Any]:
    groups = [Group(folder, one, f"{where}/killed", steps, 0, "killed") for one in range(2)]
    back: list[float] = []
    killed = 0
    while killed < times and all(group.poll() is None for group in groups):
        both = min(group.step() for group in groups)
        if both < 0:
            time.sleep(0.2)
            continue
        time.sleep(rng.uniform(0.0, peace))
        one = rng.randrange(2)
        other = groups[1 - one]
        groups[one].kill()
        before = groups[one].step()
        killed += 1
        time.sleep(rng.uniform(0.0, 1.0))
        began, goes_on = time.monotonic(), other.step()
        groups[one] = Group(folder, one, f"{where}/killed", steps, 0, "killed")
        while groups[one].poll() is None and groups[one].step() <= before and other.poll() is None:
            time.sleep(0.1)
        back.append(time.monotonic() - began)
        print(
            f"{killed}: group {one} at step {before}, back after {back[-1]:.1f} s; the other went from "
            f"{goes_on} to {other.step()}",
            flush=True,
        )
    for group in groups:
        group.wait(timeout=900)
    return {
        "peace_s": peace,
        "cold": warm.COLD,
        "back_s": [round(seconds, 1) for seconds in back],
        "codes": [group.returncode for group in groups],
        "losses": [group.said()["heldout_loss"] for group in groups if group.returncode == 0],
    }


def _markdown(found: dict[str, Any]) -> str:
    lines = [
        TITLE,
        "",
        "By `python -m tests.group_faults`: two groups of two ranks (gpt:nano), of which now and then one "
        "is killed at a random moment, all of its processes at once, and started anew with `--resume`. "
        "*Back*: seconds until it trains again on a busy machine, median and most, starting Python and torch "
        "included where processes are *new*, not where they are *forked* from one that has imported both; "
        "*peace*: seconds before the next kill, at most. Losses are held-out, of each group; "
        "*calm*: of runs without a kill, by seed, and where one more seed's would lie (95%, Student's t); "
        "*alone*: of a group that the other never came to. Groups are killed from the beginning on, until it "
        "has been often enough.",
        "",
        "| steps | kills | peace | back, processes | exit codes | losses | calm | alone |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for steps, of_steps in found.items():
        calm = ", ".join(f"{loss:.4f}" for loss in of_steps["calm"])
        if (count := len(of_steps["calm"])) in T_95:
            half = T_95[count] * statistics.stdev(of_steps["calm"]) * math.sqrt(1 + 1 / count)
            mean = statistics.fmean(of_steps["calm"])
            calm += f"; {mean - half:.4f} to {mean + half:.4f}"
        for one in of_steps["campaigns"]:
            back = f"{statistics.median(one['back_s']):.1f}, {max(one['back_s']):.1f}"
            losses = ", ".join(f"{loss:.4f}" for loss in one["losses"])
            codes = ", ".join(map(str, one["codes"]))
            back += " s, new" if one["cold"] else " s, forked"
            cells = [steps, len(one["back_s"]), f"{one['peace_s']:.0f} s", back, codes, losses, calm]
            lines.append(f"| {' | '.join(map(str, cells))} | {of_steps['lone']:.4f} |")
    return "\n".join([*lines, ""])


def _undisturbed(folder: Path, where: str, steps: int, seed: int, numbers: range) -> float:
    """The mean held-out loss of groups that nobody kills."""
    name = f"calm{seed}"
    groups = [Group(folder, one, f"{where}/{name}", steps, seed, name) for one in numbers]
    for group in groups:
        group.wait(timeout=1800)
        assert group.returncode == 0, group.files[1].read_text()
    return statistics.fmean(group.said()["heldout_loss"] for group in groups)


if __name__ == "__main__":
    app()
