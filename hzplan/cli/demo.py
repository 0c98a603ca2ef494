"""``hzplan demo``: profile, solve and run on this machine, in a few minutes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from hzplan.errors import UserError

MODEL = "gpt:tiny"
RANKS = 4
MICRO_BATCHES = (4, 8)
GLOBAL_BATCH = 32
STEPS = 200
LEARNING_RATE = 2e-3


def command(
    folder: Annotated[Path, typer.Option(help="Where the files are written.")] = Path("hzplan-demo"),
    steps: Annotated[int, typer.Option(help="Training steps.")] = STEPS,
) -> None:
    """Train a small GPT on text found on this machine, through profile, solve and run, on 4 local ranks.

    The memory budget is one that plain data parallelism (DDP) does not fit in.

    Example: hzplan demo
    """
    if steps < 1:
        raise UserError(f"--steps {steps}: a run has at least 1 step")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); name another --folder") from None
    profile, plan, metrics = folder / "profile.json", folder / "plan.json", folder / "metrics.jsonl"

    _say("1. Measure: what the model's units and the links between ranks cost on this machine.")
    _hzplan(
        "profile", MODEL, "--nproc", RANKS, "--micro-batch", ",".join(map(str, MICRO_BATCHES)), "-o", profile
    )
    budget, ddp = _budget(profile)
    _say(
        f"2. Choose: the fastest plan within {budget / 2**20:.1f} MiB per rank, "
        f"less than the {ddp / 2**20:.1f} MiB that DDP needs."
    )
    _hzplan("solve", profile, "--global-batch", GLOBAL_BATCH, "--memory", f"{budget}B", "-o", plan)
    _say("3. Train with that plan, on the source text of Python's own library, byte by byte.")
    _hzplan("run", plan, "--steps", steps, "--lr", LEARNING_RATE, "--metrics", metrics)
    _say(f"Files: {profile} (measured), {plan} (the plan, made to be reviewed), {metrics} (every step).")
    _say("Your own model: hzplan profile package.module:factory -o profile.json")


def _budget(profile: Path) -> tuple[int, int]:
    """Half-way between the least memory of any plan and the least of DDP; and the latter."""
    from hzplan.formats.profile import Profile
    from hzplan.solver.schemes import Settings
    from hzplan.solver.solve import Infeasible, Request, searches_of, solve

    measured = Profile.load(profile)
    request = Request(memory_bytes=1, global_batch=GLOBAL_BATCH)
    outcome = solve(measured, request)
    assert isinstance(outcome, Infeasible), "nothing fits in one byte"
    rows = {row.name: row.found for row in Settings(searches_of(measured, request), request).rows()}
    ddp = rows["DDP"].memory.peak
    return (outcome.smallest.memory.peak + ddp) // 2, ddp


def _say(text: str) -> None:
    print(f"\n{text}", flush=True)


def _hzplan(*arguments: object) -> None:
    """Run a command as a user would, and show it."""
    words = [str(argument) for argument in arguments]
    print(f"   $ hzplan {shlex.join(words)}", flush=True)
    status = subprocess.run([sys.executable, "-m", "hzplan", *words], check=False).returncode
    if status:
        raise typer.Exit(status)
