"""Running the command line as a user does, in a process of its own.

Processes are forked from one that has imported everything (``tests.warm``). ``cold=True`` starts a new one,
for tests of the process itself and of how it starts others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests import warm

ROOT = warm.ROOT

# What would make a process a rank, or change how it reports.
_NOT_INHERITED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_",
    "SLURM_",
    "TORCHELASTIC_",
    "HZPLAN_",
    "PYTHON",
)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[str]:
        """Of stderr."""
        return self.stderr.splitlines()


def environment(**extra: str) -> dict[str, str]:
    """This process's, without what a job leaves in it, and with this checkout importable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    return kept | {"PYTHONPATH": str(ROOT), "TERM": "dumb"} | extra


def hzplan(*arguments: object, cwd: Path, timeout_s: float = 120.0, cold: bool = False, **extra: str) -> Done:
    """Run ``hzplan`` in a folder; ``extra`` are environment variables."""
    return python("-m", "hzplan", *arguments, cwd=cwd, timeout_s=timeout_s, cold=cold, **extra)


def torchrun(nproc: int, *arguments: object, cwd: Path, timeout_s: float = 200.0, cold: bool = False) -> Done:
    """Run a script, or a module after ``-m``, on local ranks in a folder."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", nproc)
    return python(*launcher, *arguments, cwd=cwd, timeout_s=timeout_s, cold=cold, OMP_NUM_THREADS="1")


def python(*arguments: object, cwd: Path, timeout_s: float = 200.0, cold: bool = False, **extra: str) -> Done:
    """Run this Python with such arguments in a folder."""
    with _popen(cold)(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return Done(process.returncode, stdout, stderr)


def _popen(cold: bool) -> type[subprocess.Popen[str]]:
    return subprocess.Popen if cold else warm.Popen


@contextmanager
def started(
    *arguments: object, cwd: Path, cold: bool = False, **extra: str
) -> Iterator[subprocess.Popen[str]]:
    """``hzplan`` at work in a folder, its output in pipes; killed if the test leaves it running."""
    with _popen(cold)(
        [sys.executable, "-m", "hzplan", *map(str, arguments)],
        cwd=cwd,
        env=environment(TMPDIR=str(cwd), **extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
