"""``python -m tests.group_faults``: groups that are killed at random moments, and come back.

Two groups of two ranks train under a relaxed plan, each a job of its own that meets the other at ``hzplan
meet``. Again and again one of them is killed, all of its processes at once, and started anew. Both have to
end, and the held-out loss has to be within the spread of undisturbed runs with other seeds.
"""

from __future__ import annotations

import json
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
from tests.cli.command import environment, hzplan
from tests.unit.test_wire import profile_with

TITLE = "## Groups that die, and come back"
SEEDS = 2
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Group(subprocess.Popen[str]):
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
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
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
            text = _campaign(folder, where, times, steps, rng)
        finally:
            meet.terminate()
            meet.wait()
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


def _campaign(folder: Path, where: str, times: int, steps: int, rng: random.Random) -> str:
    calm = [_undisturbed(folder, where, steps, seed) for seed in range(SEEDS)]
    print("undisturbed:", calm, flush=True)
    groups = [Group(folder, one, f"{where}/killed", steps, 0, "killed") for one in range(2)]
    back: list[float] = []
    killed = 0
    while killed < times and all(group.poll() is None for group in groups):
        both = min(group.step() for group in groups)
        if both < 0:
            time.sleep(0.2)
            continue
        time.sleep(rng.uniform(0.0, 3.0))
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
    codes = [group.returncode for group in groups]
    losses = [group.said()["heldout_loss"] for group in groups if group.returncode == 0]
    spread = max(calm) - min(calm)
    wrong = [f"exit codes {codes}"] if any(codes) else []
    if losses and max(losses) > max(calm) + spread:
        wrong.append(f"held-out {losses}, undisturbed {calm}")
    return "\n".join(
        [
            TITLE,
            "",
            f"By `python -m tests.group_faults`: two groups of two ranks (gpt:nano, {steps} steps). One of "
            f"them was killed {killed} times at random moments, all of its processes at once, and started "
            f"anew with `--resume`. It trains again after a median of {statistics.median(back):.1f} s "
            f"({max(back):.1f} at most), starting Python and torch included. "
            f"Held-out losses in the end: {', '.join(f'{loss:.4f}' for loss in losses)}; of undisturbed runs "
            f"with {SEEDS} seeds {', '.join(f'{loss:.4f}' for loss in calm)}. "
            + (f"**Not as it should be: {'; '.join(wrong)}.**" if wrong else "All ended as they should."),
            "",
        ]
    )


def _undisturbed(folder: Path, where: str, steps: int, seed: int) -> float:
    """The mean held-out loss of both groups."""
    name = f"calm{seed}"
    groups = [Group(folder, one, f"{where}/{name}", steps, seed, name) for one in range(2)]
    for group in groups:
        group.wait(timeout=1800)
        assert group.returncode == 0, group.files[1].read_text()
    return statistics.fmean(group.said()["heldout_loss"] for group in groups)


if __name__ == "__main__":
    app()
