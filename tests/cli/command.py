"""Running the command line as a user does, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

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


def hzplan(*arguments: object, cwd: Path, timeout_s: float = 120.0, **extra: str) -> Done:
    """Run ``hzplan`` in a folder; ``extra`` are environment variables."""
    return _python(["-m", "hzplan", *arguments], cwd, timeout_s, extra)


def torchrun(nproc: int, *arguments: object, cwd: Path, timeout_s: float = 200.0) -> Done:
    """Run a script, or a module after ``-m``, on local ranks in a folder."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", nproc)
    return _python([*launcher, *arguments], cwd, timeout_s, {"OMP_NUM_THREADS": "1"})


def _python(arguments: Sequence[object], cwd: Path, timeout_s: float, extra: Mapping[str, str]) -> Done:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


@contextmanager
def started(*arguments: object, cwd: Path, **extra: str) -> Iterator[subprocess.Popen[str]]:
    """``hzplan`` at work in a folder, its output in pipes; killed if the test leaves it running."""
    with subprocess.Popen(
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
