"""A forked process is to its parent what a new one is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import environment
from tests.warm import COLD, Popen, Program, program_of

pytestmark = pytest.mark.skipif(COLD, reason="nothing is forked here")

PLACE = "import os, sys; print(sys.argv, os.getcwd(), os.environ['MARK'], sys.path[0], sys.stdin.read())"
SESSION = "import os; print(os.getsid(0) == os.getpid())"
STARTS = """
import subprocess, sys
done = subprocess.run([sys.executable, "-c", "import os, sys; print(os.getppid()); sys.exit(3)"],
                      capture_output=True, text=True)
import os; print(done.returncode, int(done.stdout) == os.getpid())
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", PLACE, "a", "b c"),
        ("-u", "-P", "script.py", "x"),
        ("-c", SESSION),
        ("-c", STARTS),
        ("-c", "import sys; sys.exit(7)"),
        ("-c", "import sys; sys.exit('said')"),
        ("-c", "import os; os.abort()"),
        ("-c", "raise KeyboardInterrupt"),
        ("-c", "import signal, os; os.kill(os.getpid(), signal.SIGTERM)"),
        ("-c", "import signal; print([signal.getsignal(number) for number in (2, 13, 15)])"),
        ("-c", "import threading as t; t.Thread(target=print, args=('late',)).start()"),
        ("-m", "hzplan", "--no-such-option"),
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_it_ends_and_says_as_a_new_one(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.argv, __file__, sys.path[0])")
    found = []
    for popen in (subprocess.Popen, Popen):
        with popen(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment(MARK="mine"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            out, errors = process.communicate("in", timeout=60)
        found.append((process.returncode, out, errors.splitlines()[-1:]))
    assert found[0] == found[1]


def test_it_is_a_group_of_processes_in_our_session() -> None:
    asks = "import os; print(os.getpgid(0) == os.getpid(), os.getsid(0))"
    with Popen(
        *([sys.executable, "-c", asks],),
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        assert process.communicate(timeout=60)[0].split() == ["True", str(os.getsid(0))]


def test_it_is_a_child_that_is_signalled(tmp_path: Path) -> None:
    with Popen(
        [sys.executable, "-c", "import os, signal; print(os.getppid(), flush=True); signal.pause()"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == os.getpid()
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=60) == -signal.SIGKILL


def test_only_what_is_understood_is_forked() -> None:
    assert program_of([sys.executable, "-u", "-m", "hzplan", "run"]) == Program(
        "-m", "hzplan", ("run",), unbuffered=True
    )
    for words in (["sh", "-c", "true"], [sys.executable], [sys.executable, "-X", "dev", "a.py"]):
        assert program_of(words) is None
