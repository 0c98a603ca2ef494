"""A cluster in a box is what was asked for, and nothing of it is left, however it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from hzplan import emulate
from hzplan.emulate import Cluster
from hzplan.emulate.front import execute
from tests.cli import command
from tests.cli.command import Done, environment

# Processes are looked for by their environment, which a forked one does not show.
hzplan = partial(command.hzplan, cold=True)
started = partial(command.started, cold=True)
SMALL = ("emulate", "--nodes", 2, "--nproc", 2, "--network", "500mbit", "--no-verify")


@pytest.fixture(scope="session")
def namespaces() -> None:
    """For tests that need a machine that can emulate."""
    reason = emulate.available()
    if reason is not None:
        pytest.skip(reason)


needs_namespaces = pytest.mark.usefixtures("namespaces")


# ---- what ranks find ------------------------------------------------------------------------------------

TELL = """
import json, os, socket
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
         "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "HZPLAN_TIERS", "SLURM_PROCID")
print(json.dumps({name: os.environ.get(name) for name in names}
                 | {"devices": sorted(name for _, name in socket.if_nameindex())[:2]}))
"""


@needs_namespaces
def test_ranks_are_told_their_place_and_logged(tmp_path: Path) -> None:
    done = hzplan(
        *SMALL, "--logs", "logs/of it", "--", sys.executable, "-c", TELL, cwd=tmp_path, SLURM_PROCID="5"
    )
    assert done.code == 0, done.stderr
    assert done.lines == ["2 nodes × 2 ranks, network 500 Mbit/s"]
    logs = sorted(path.name for path in (tmp_path / "logs/of it").iterdir())
    assert logs == ["node0-rank0.log", "node0-rank1.log", "node1-rank2.log", "node1-rank3.log"]
    for rank, name in enumerate(logs):
        told = json.loads((tmp_path / "logs/of it" / name).read_text())
        if rank == 0:
            assert told == json.loads(done.stdout)
        assert told.pop("devices") == ["hz0", "lo"]
        assert told == {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank % 2),
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": str(rank // 2),
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": "hz0",
            "NCCL_SOCKET_IFNAME": "hz0",
            "OMP_NUM_THREADS": "1",
            "HZPLAN_TIERS": "2x2",
            "SLURM_PROCID": None,
        }


@needs_namespaces
def test_output_of_rank_0_is_passed_on_unchanged(tmp_path: Path) -> None:
    script = "head -c 3000000 /dev/zero | tr '\\0' x; echo on stderr >&2"
    done = hzplan(*SMALL, "--", "sh", "-c", script, cwd=tmp_path, TMPDIR=str(tmp_path))
    assert done.code == 0
    assert done.stdout == "x" * 3_000_000
    assert "on stderr" in done.lines
    assert list(tmp_path.iterdir()) == []  # logs of what went well are not kept


@needs_namespaces
def test_a_reader_that_leaves_ends_rank_0_as_it_would_alone(tmp_path: Path) -> None:
    line = f"{sys.executable} -m hzplan emulate --nodes 1 --network none -- yes | head -n 1"
    done = subprocess.run(
        ["sh", "-c", line],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout == "y\n"
    assert "rank 0 on node 0 was ended by SIGPIPE" in done.stderr


ALL_REDUCE = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
values = torch.full((2 * 10**6,), dist.get_rank() + 1.0)
dist.barrier()
began = time.perf_counter()
dist.all_reduce(values)
took = time.perf_counter() - began
assert (values == 10).all()
dist.destroy_process_group()
print(took)
"""


@needs_namespaces
@pytest.mark.distributed
def test_a_plain_script_trains_over_the_slow_network(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ALL_REDUCE)
    rate = ("--nodes", 2, "--nproc", 2, "--network", "200mbit", "--no-verify")
    done = hzplan("emulate", *rate, "--", sys.executable, "script.py", cwd=tmp_path)
    assert done.code == 0, done.stderr
    # A ring of 4 takes 2·3/4 of 8 MB over each link: 96 Mbit.
    assert float(done.stdout) > 0.8 * 96 / 200


# ---- rates ----------------------------------------------------------------------------------------------


@needs_namespaces
def test_three_tiers_have_the_rates_asked_for(tmp_path: Path) -> None:
    cluster = Cluster.parse("2x2x2", "600mbit,300mbit,100mbit")
    said: list[str] = []
    with open(os.devnull, "w") as null:
        for _ in range(3):  # a busy machine may need another try to be fast enough; none makes it too fast
            outcome = execute(
                cluster,
                ["true"],
                tmp_path,
                verify=True,
                say=said.append,
                stdout=null.fileno(),
                stderr=null.fileno(),
            )
            assert outcome.code == 0
            parts = [outcome.measured[tier] / (cluster.rates[tier] or 1) for tier in range(3)]
            assert max(parts) < 1.25
            if min(parts) > 0.75:
                break
    assert min(parts) > 0.75
    assert said[-4:][0].startswith("4 nodes × 2 ranks (2x2x2)")
    assert said[-1].startswith("  network 2: asked for 100 Mbit/s, measured ") or "warning" in said[-1]


# ---- exit codes -----------------------------------------------------------------------------------------


@needs_namespaces
@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        ("true", 0, ""),
        (
            "if [ $RANK = 3 ]; then echo because >&2; exit 7; fi; sleep 0.5; exit 1",
            7,
            "rank 3 on node 1 ended with exit code 7",
        ),
        (
            "if [ $RANK = 2 ]; then kill -9 $$; fi; sleep 0.5; exit 1",
            137,
            "rank 2 on node 1 was ended by SIGKILL",
        ),
        ("exit $((RANK + 3))", 6, "exit code"),
    ],
)
def test_the_exit_code_is_of_the_rank_that_failed_first(
    script: str, code: int, says: str, tmp_path: Path
) -> None:
    done = hzplan(*SMALL, "--", "sh", "-c", script, cwd=tmp_path, TMPDIR=str(tmp_path))
    if script.startswith("exit"):  # all at once, or nearly
        assert 3 <= done.code <= code
    else:
        assert done.code == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    folders = list(tmp_path.iterdir())
    if code:
        assert done.lines[-1] == f"logs of all ranks: {folders[0]}"
        assert len(list(folders[0].iterdir())) == 4
    else:
        assert folders == []
    if "because" in script:
        assert "  | because" in done.lines


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nodes", 2, "--network", "1gbit"], "COMMAND"),
        (["--", "true"], "--nodes"),
        (["--nodes", 2, "--", "true"], "--network"),
        (["--nodes", 2, "--network", "fast", "--", "true"], "500mbit"),
        (["--nodes", 0, "--network", "1gbit", "--", "true"], "at least 1"),
        (["--tiers", "2x2", "--", "true"], "--rates"),
        (["--tiers", "2x2", "--rates", "none,1gbit", "--nproc", 2, "--", "true"], "--nproc"),
        (["--tiers", "2x2x2", "--rates", "none,1gbit", "--", "true"], "3 rates"),
        (["--nodes", 2, "--network", "1gbit", "--", "no-such-command"], "no-such-command"),
        (["--nodes", 2, "--network", "1gbit", "--slow", "2=1mbit", "--", "true"], "nodes 0 to 1"),
        (["--nodes", 2, "--network", "1gbit", "--slow", "1", "--", "true"], "1=50mbit"),
        (["--nodes", 2, "--network", "1gbit", "--slow", "1=2gbit", "--", "true"], "1 Gbit/s"),
        (["--nodes", 2, "--network", "1gbit", "--logs", "/dev/null/x", "--", "true"], "--logs"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[object], says: str, tmp_path: Path) -> None:
    done = hzplan("emulate", *arguments, cwd=tmp_path)
    assert (done.code, done.stdout, len(done.lines)) == (2, "", 1)
    assert says in done.stderr


def test_missing_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, **_: None if name == "tc" else f"/bin/{name}")
    assert "apt-get install iproute2" in (emulate.available() or "") or sys.platform != "linux"


# ---- without root ---------------------------------------------------------------------------------------


def without_root(how: list[str], tmp_path: Path) -> Done:
    """A verified run under setpriv."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("needs root and setpriv to give up root; without root all tests here run without it")
    tmp_path.chmod(0o777)
    # Not at once by setpriv, which has root's rights until it runs something.
    runs = ["setpriv", *how, "sh", "-c", 'exec "$@"', "sh", sys.executable, "-c"]
    if subprocess.run([*runs, "pass"], capture_output=True, env=environment(), check=False).returncode:
        pytest.skip(f"{sys.executable} cannot be run by others")
    rest = ["--nodes", "2", "--network", "100mbit", "--", "sh", "-c", "id -u; ls -l /proc/self/exe"]
    main = "from hzplan.cli import main; main()"
    done = subprocess.run(
        [*runs, main, "emulate", *rest],
        cwd=tmp_path,
        env=environment(TMPDIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


@needs_namespaces
@pytest.mark.parametrize(
    "how",
    [
        ["--bounding-set=-sys_admin,-net_admin"],
        ["--reuid=65534", "--regid=65534", "--clear-groups"],
    ],
    ids=["a container's root", "nobody"],
)
def test_user_namespaces_do_as_well_as_root(how: list[str], tmp_path: Path) -> None:
    done = without_root(how, tmp_path)
    if done.code == 2 and "refuses" in done.stderr:
        pytest.skip(done.lines[-1])
    assert done.code == 0, done.stderr
    assert done.stdout.splitlines()[0] == "0"
    assert "network: asked for 100 Mbit/s, measured" in done.stderr


# ---- nothing is left ------------------------------------------------------------------------------------

HARMLESS = "(setsid sleep 1000 &); sleep 1000 & echo started; wait"
STUBBORN = "trap '' INT TERM; echo started; (setsid sleep 1000 &); while :; do sleep 1; done"


def network_of_the_machine() -> tuple[str, str]:
    """What administrators see."""
    tools = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    ip = shutil.which("ip", path=tools) or "ip"
    links = subprocess.run([ip, "-o", "link"], capture_output=True, text=True, check=True).stdout
    names = subprocess.run([ip, "netns", "list"], capture_output=True, text=True, check=True).stdout
    return links, names


def processes_with(mark: str) -> list[str]:
    """Command lines of processes that have this word in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def wait_for(what: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Until it is true, or time is up: the kernel clears away after a process has ended."""
    until = time.monotonic() + timeout_s
    while not what() and time.monotonic() < until:
        time.sleep(0.02)


CASES = [
    *((number, after_s, HARMLESS) for number in ("INT", "TERM", "KILL") for after_s in (0.1, 0.2, 0.3, 0.5)),
    *((number, None, HARMLESS) for number in ("INT", "TERM", "KILL")),
    ("INT", None, STUBBORN),
    ("KILL", None, STUBBORN),
    (None, None, HARMLESS.replace("1000", "0.2")),
    (None, None, "(setsid sleep 1000 &)"),
    (None, None, "(setsid sleep 1000 &); exit 3"),
]


@needs_namespaces
def test_nothing_is_left_however_it_ends(tmp_path: Path) -> None:
    assert len(CASES) == 20
    before = network_of_the_machine()
    size = ["--nodes", "2", "--nproc", "2", "--network", "50mbit"]
    for number, (name, after_s, script) in enumerate(CASES):
        mark = f"HZ_MARK={uuid.uuid4().hex}"
        verify = ["--no-verify"] if number % 2 else []
        words = ("emulate", *size, *verify, "--", "sh", "-c", script)
        with started(*words, cwd=tmp_path, HZ_MARK=mark.split("=")[1]) as process:
            assert process.stdout
            if after_s is not None:
                time.sleep(after_s)
            elif "started" in script:
                assert process.stdout.readline() == "started\n"
                assert len(processes_with(mark)) > 4  # so it is one that can be found
            if name is not None:
                assert process.poll() is None or after_s is not None, (name, script)
                process.send_signal(signal.Signals[f"SIG{name}"])
            code = process.wait(timeout=30)
        case = (name, after_s, script)
        if after_s is None:  # before that, Python itself may answer a signal
            expected = {"INT": 130, "TERM": 143, "KILL": -9, None: 3 if "exit 3" in script else 0}[name]
            assert code == expected, case
        wait_for(lambda: not processes_with(mark))  # noqa: B023 (called before the mark changes)
        assert processes_with(mark) == [], case
        wait_for(lambda: network_of_the_machine() == before)
        assert network_of_the_machine() == before, case


@needs_namespaces
def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with started(*SMALL, "--", "sh", "-c", STUBBORN, cwd=tmp_path) as process:
        assert process.stdout
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert time.monotonic() - began < 2.5  # not the 3 s that a first signal leaves


def test_importing_it_does_not_import_torch() -> None:
    line = "import hzplan.emulate, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", line], env=environment(), check=False).returncode == 0


# ---- a slow node is found -------------------------------------------------------------------------------


@needs_namespaces
@pytest.mark.distributed
@pytest.mark.long
def test_a_node_slowed_on_purpose_is_named(tmp_path: Path) -> None:
    cluster = ("--tiers", "1x4", "--rates", "none,2gbit", "--slow", "2=200mbit", "--no-verify")
    measures = (sys.executable, "-m", "hzplan", "profile", "--only", "links", "--mesh", "1|4", "--json")
    done = hzplan("emulate", *cluster, "--", *measures, cwd=tmp_path)
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout)["stragglers"]
    assert [(entry["what"], entry["ranks"]) for entry in found] == [("links", [2])]
    assert found[0]["host"].endswith("node 2")
    assert 5 < found[0]["slowdown"] < 15
