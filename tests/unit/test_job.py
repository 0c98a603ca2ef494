"""Where a process finds that it is a rank, and whose failure it was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hzplan.errors import CheckFailed, JobFailed, NoPlanFits, Preempted, UserError
from hzplan.launch.job import (
    RankInfo,
    first_host,
    meeting_point,
    rank_info,
    record_failure,
    with_exit_code,
)
from hzplan.launch.local import _explain, cluster_line
from hzplan.runtime.backends.nccl import check_order
from tests.cli.command import torchrun

SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2"}


def test_no_job() -> None:
    assert rank_info({}) is None
    script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}  # of a batch
    assert rank_info(script) is None


def test_torchrun() -> None:
    env = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert rank_info(env | SRUN) == RankInfo(3, 8, 1, 2)
    assert rank_info({"RANK": "3", "WORLD_SIZE": "8"}) == RankInfo(3, 8, 0, 1)


def test_srun() -> None:
    assert rank_info(SRUN) == RankInfo(5, 8, 1, 4)
    step = {"SLURM_JOB_ID": "20007", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "6"}
    assert rank_info(SRUN | step) == RankInfo(5, 6, 1, 3)
    uneven = step | {"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_STEP_NUM_TASKS": "20"}
    found = [rank_info(SRUN | uneven | {"SLURM_NODEID": str(node)}) for node in range(3)]
    assert [one.local_world for one in found if one is not None] == [8, 8, 4]
    shell = step | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}  # of srun --pty, or salloc
    assert rank_info(SRUN | shell) is None
    assert meeting_point(step | {"SLURM_STEP_NODELIST": "gpu[07-09]"}) == ("gpu07", 20007)
    assert meeting_point(step | {"MASTER_ADDR": "here", "MASTER_PORT": "1"}) == ("here", 1)


@pytest.mark.parametrize(
    "env",
    [{"RANK": "1"}, {"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "2"}],
)
def test_half_a_job(env: dict[str, str]) -> None:
    with pytest.raises(UserError, match="RANK"):
        rank_info(env)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("alone", "alone"),
        ("a1,b2", "a1"),
        ("gpu[003-010,012],login", "gpu003"),
        ("rack-2-gpu[1,5]-ib", "rack-2-gpu1-ib"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_cluster_line_leaves_out_what_the_launcher_knows() -> None:
    line = cluster_line(["run", "my plan.json", "--nproc", "4", "--nproc=4"], nodes=2, ranks_per_node=2)
    assert line.startswith("torchrun --nnodes 2 ")
    assert line.endswith("--nproc-per-node 2 -m hzplan run 'my plan.json'")


@pytest.mark.parametrize("kind", [UserError, CheckFailed, NoPlanFits, Preempted, JobFailed])
def test_errors_are_made_again_from_their_exit_code(kind: type[UserError]) -> None:
    assert type(with_exit_code("text", kind.exit_code)) is kind


def failure(
    folder: Path,
    rank: int,
    exit_code: int,
    monkeypatch: pytest.MonkeyPatch,
    said: str = "",
    lost: bool = False,
) -> ProcessFailure:
    path = folder / f"{rank}.json"
    if said:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        record_failure(said, exit_code, lost_peer=lost)
    return ProcessFailure(local_rank=rank, pid=1, exitcode=exit_code, error_file=str(path))


def test_the_culprit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missed = failure(tmp_path, 0, 4, monkeypatch, "rank 0: Connection closed by peer", lost=True)
    ended = failure(tmp_path, 1, -signal.SIGTERM, monkeypatch)
    reported = failure(tmp_path, 2, 4, monkeypatch, "rank 2: ValueError: no")
    abrupt = failure(tmp_path, 3, -signal.SIGSEGV, monkeypatch)
    assert str(_explain({0: missed, 1: ended, 2: reported, 3: abrupt})) == "rank 3 was ended by SIGSEGV"
    assert str(_explain({0: missed, 1: ended, 2: reported})) == "rank 2: ValueError: no"
    assert str(_explain({0: missed, 1: ended})) == "rank 0: Connection closed by peer"
    assert str(_explain({1: ended})) == "rank 1 was ended by SIGTERM"


def test_word_is_left_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is ended as soon as another has failed, and its launcher reads what it left."""

    def ended(_: object, file: TextIO) -> None:
        file.write("{")
        file.flush()
        raise SystemExit(128 + signal.SIGTERM)

    monkeypatch.setattr("hzplan.launch.job.json.dump", ended)
    with pytest.raises(SystemExit):
        failure(tmp_path, 0, 4, monkeypatch, "rank 0: Connection closed by peer", lost=True)
    (left,) = tmp_path.iterdir()
    monkeypatch.undo()
    assert left.name != "0.json"
    assert (
        str(_explain({0: failure(tmp_path, 0, -signal.SIGTERM, monkeypatch)}))
        == "rank 0 was ended by SIGTERM"
    )


def test_a_users_mistake_keeps_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = _explain({0: failure(tmp_path, 0, 3, monkeypatch, "nothing fits")})
    assert (str(error), error.exit_code) == ("nothing fits", 3)


def test_an_nccl_that_does_not_order_communicators_is_refused() -> None:
    ordered = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    check_order((2, 26, 2), ordered)
    check_order((3, 0), ordered)
    for env in ({}, {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}):
        with pytest.raises(JobFailed, match="could wait for each other for ever"):
            check_order((2, 26, 2), env)
    with pytest.raises(JobFailed, match=r"NCCL 2\.25\.1: .* need 2\.26 or later; install a newer torch"):
        check_order((2, 25, 1), ordered)


CONNECTIONS = """
import os, sys, torch, torch.distributed as dist
from hzplan.core.hierarchy import Mesh, Stage
from hzplan.launch.job import join, rank_info
from hzplan.runtime.backends import groups
from hzplan.runtime.world import ProcessWorld

def connections():
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(link) and os.readlink(link).startswith("socket") for link in links)

with join(rank_info()) as job:
    mesh, world = Mesh.parse(sys.argv[1]), ProcessWorld()
    for kind in ("unshard", "reduce", "gather"):
        for stage in mesh.stages():
            world.new_group(mesh, kind, stage, torch.device("cpu"))
    job.agree(lambda: None)
    world.all_reduce(torch.ones(100))
    if job.info.rank == 1:  # the first rank has the store, and a connection of each rank
        print("connections", connections(), flush=True)
    dist.barrier()
print("kept", len(groups._made), flush=True)
"""


def test_connections_do_not_grow_with_the_world(tmp_path: Path) -> None:
    """What a rank holds after groups were made for every stage, and ranks have compared notes."""
    (tmp_path / "count.py").write_text(CONNECTIONS)
    found = []
    for world in (4, 16):
        done = torchrun(world, "count.py", f"4|{world // 4}" if world > 4 else "4", cwd=tmp_path)
        assert done.code == 0, done.stderr
        # Who has left a job keeps no groups: their threads abort a process that ends (see ``groups._keep``).
        assert re.findall(r"kept (\d+)", done.stdout) == ["0"] * world
        found.append(int(re.search(r"connections (\d+)", done.stdout).group(1)))  # type: ignore[union-attr]
    assert found[1] <= found[0] + 8, found


STARTS = """
from hzplan.launch import local
asks = "import os, sys; print(os.getsid(0), os.getpgid(0) == os.getpid(), sys.argv[1], flush=True)"
local._python_arguments = lambda: ["-c", asks]
local.start(["it"], 2)
"""


def test_ranks_are_groups_of_processes_in_our_session() -> None:
    command = [sys.executable, "-c", STARTS]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [f"{os.getsid(0)} True it"] * 2, done.stderr
