"""``python -m tests.mutants``: breaks the product on purpose, one line at a time; ``make mutants``.

Every mutant is made in a copy of the tree, never in the tree itself. Its hinted tests run first; where they
pass, all of ``make test`` does. A test that fails, or hangs, without the mutant too has seen nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[2]
HINTED_S, WHOLE_S = 300.0, 3600.0
"""Limits of the hinted tests and of a whole suite, in seconds; a run that exceeds its limit hangs."""
CLEAN, HANGS = "clean", "a hang"
NOTHING_RAN = (4, 5)  # pytest's exit codes where a hint names no test
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A mistake: ``old`` in ``file`` (under hzplan/) becomes ``new``. ``tests``: where to look first."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: list[str]

    def mutated(self) -> str:
        """The file's text with the mistake; ValueError where ``old`` is not in it exactly once."""
        path = ROOT / "hzplan" / self.file
        if not path.exists():
            raise ValueError(f"{self.name}: no file hzplan/{self.file}")
        text = path.read_text(encoding="utf-8")
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: fragment found {found} times in hzplan/{self.file}: {self.old!r}")
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """All of ``mutants.toml``."""
    data = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text(encoding="utf-8"))
    return [Mutant(**one) for one in data["mutant"]]


def problems(some: Sequence[Mutant]) -> list[str]:
    """Why mutants cannot be made from the tree as it is, a line each."""
    found = []
    for mutant in some:
        try:
            compile(mutant.mutated(), mutant.file, "exec")
        except (ValueError, SyntaxError) as error:
            found.append(str(error))
    return found


def copy_to(folder: Path) -> Path:
    """Copy the files of the tree that git knows, or would, into a folder."""
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.check_output(listing, text=True).split("\0")):
        if (ROOT / name).is_file():  # else removed, and not yet committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def failing(tree: Path, command: Sequence[str], limit_s: float) -> str | None:
    """Run tests in a tree until one fails: its name, HANGS at the limit, None where all pass."""
    env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    env |= {"PYTEST_ADDOPTS": "-x --tb=no -rfE -p no:cacheprovider"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=tree, env=env, start_new_session=True, **pipes) as process:
        try:
            said, _ = process.communicate(timeout=limit_s)
        except BaseException as error:  # an interruption too: tests have a session of their own
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return HANGS
            raise
    last = f"exit code {process.returncode}: {' '.join(said.split()[-30:])}"
    if process.returncode in NOTHING_RAN:
        print(f"{' '.join(command)}: {last}", file=sys.stderr)
    named = FAILED.search(said)
    return None if process.returncode in (0, *NOTHING_RAN) else named[1] if named else last


def tried(mutant: Mutant, folder: Path, target: str | None) -> tuple[str | None, float]:
    """Which test sees a mutant, None where none does, and the seconds that it took to know.

    ``folder`` has an unchanged copy of the tree. ``target``: the Makefile's; None: the hinted tests alone.
    """
    began, found = time.monotonic(), None
    tree, pytest = copy_to(folder / mutant.name), [sys.executable, "-m", "pytest"]
    (tree / "hzplan" / mutant.file).write_text(mutant.mutated(), encoding="utf-8")
    # As the Makefile runs them, with this interpreter and nothing installed.
    whole = ["make", "-o", ".venv/.installed", str(target), f"PY={sys.executable}"]
    runs = [([*pytest, *mutant.tests], HINTED_S)] * bool(mutant.tests) + [(whole, WHOLE_S)] * bool(target)
    while runs and found is None:
        command, limit_s = runs.pop(0)
        found = failing(tree, command, limit_s)
        again = [*pytest, found] if found and "::" in found else command
        if found and failing(folder / CLEAN, again, limit_s):
            print(f"{mutant.name}: {found} without it too", file=sys.stderr)
            found = None
    shutil.rmtree(tree, ignore_errors=True)
    return found, time.monotonic() - began


def main(
    only: Annotated[list[str] | None, typer.Option(help="A mutant's name; may be repeated.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Fall back to test-all, not test.")] = False,
    hinted: Annotated[bool, typer.Option("--hinted", help="Run the hinted tests alone.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Only see that every mutant can be made.")] = False,
) -> None:
    """Break the product one line at a time, and say which test sees it; exit 1 where none does.

    One mutant at a time: what else runs makes tests hang that do not.
    """
    chosen = [mutant for mutant in mutants() if not only or mutant.name in only]
    if unknown := {*(only or [])} - {mutant.name for mutant in chosen}:
        raise SystemExit(f"no mutant is called {', '.join(sorted(unknown))}")
    if found := problems(chosen):
        raise SystemExit("\n".join(found))
    if check:
        raise SystemExit(print(f"{len(chosen)} mutants can be made"))
    survived = []
    target = None if hinted else "test-all" if everything else "test"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="hzplan-mutants-", ignore_cleanup_errors=True) as name:
        copy_to(Path(name, CLEAN))
        for mutant in chosen:
            test, seconds = tried(mutant, Path(name), target)
            print(f"{mutant.name:35} {seconds:6.0f} s  {test or 'SURVIVED'}", flush=True)
            survived += [] if test else [mutant]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} mutants caught")
    for mutant in survived:
        print(f"not seen: {mutant.name} (hzplan/{mutant.file}): {mutant.breaks}")
    raise SystemExit(bool(survived))


if __name__ == "__main__":
    typer.run(main)
