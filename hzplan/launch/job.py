"""Being a rank: where this process stands in a distributed job, joining it, and failing in it.

A rank is told its place by torchrun's variables, which our own launcher sets too, or by srun's. Nothing here
imports torch before a job is joined.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from hzplan.errors import CheckFailed, JobFailed, NoPlanFits, Preempted, UserError, one_line
from hzplan.launch.meeting import meet

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

TIMEOUT_S = 300.0
"""How long a rank waits for the others before it gives the job up."""

MEETING = 0.9
"""Share of it in which they have to meet, so that who is missing is named before all is given up."""

MOST_FILES = 65536
"""Open files, connections among them, that a process asks for where the system allows as many."""

LAUNCHED = "HZPLAN_LAUNCHED"
"""Set in ranks that ``hzplan.launch.local`` started: their failures are for the launcher to print."""


@dataclass(frozen=True)
class RankInfo:
    """A process's rank in the job and on its host."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @property
    def launched_here(self) -> bool:
        """Whether our own launcher started this rank, and tells the user what became of it."""
        return LAUNCHED in os.environ

    def in_group(self, groups: int) -> tuple[int, RankInfo]:
        """The group that a rank is in, of so many of neighbouring ranks, and its place there."""
        each = self.world // groups
        return self.rank // each, replace(self, rank=self.rank % each, world=each)

    def route_to(self, ranks: Sequence[int]) -> str:
        """Name the route from this rank to others, for messages; nodes are full but for the last one."""
        nodes = {rank // self.local_world for rank in ranks}
        return " (over the network)" if nodes and self.rank // self.local_world not in nodes else ""


def rank_info(env: Mapping[str, str] = os.environ) -> RankInfo | None:
    """This process's place, None where it is not part of a job.

    Raises UserError when the variables that say so make no sense.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        world = _number(env, "WORLD_SIZE")
        here = RankInfo(
            rank=_number(env, "RANK"),
            world=world,
            local_rank=_number(env, "LOCAL_RANK", 0),
            local_world=_number(env, "LOCAL_WORLD_SIZE", 1),
        )
    elif _in_srun(env):
        world = _number(env, _tasks(env))
        if world == 1:  # as of an interactive shell; what needs several ranks starts them
            return None
        here = RankInfo(
            rank=_number(env, "SLURM_PROCID"),
            world=world,
            local_rank=_number(env, "SLURM_LOCALID", 0),
            local_world=_on_this_node(env, world),
        )
    else:
        return None
    if not 0 <= here.rank < here.world:
        raise UserError(
            f"rank {here.rank} in a job of {here.world}: check RANK and WORLD_SIZE, or unset them"
        )
    return here


def _in_srun(env: Mapping[str, str]) -> bool:
    """Whether srun started this process; a batch script has most of the variables, but is one process."""
    tasks = "SLURM_PROCID" in env and "SLURM_NTASKS" in env
    return tasks and ("SLURM_JOB_ID" not in env or "SLURM_STEP_ID" in env)


def _tasks(env: Mapping[str, str]) -> str:
    """The name of the variable that says how many tasks srun has started."""
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"


def _on_this_node(env: Mapping[str, str], world: int) -> int:
    """How many of the tasks are on this node: of a list such as ``8(x2),4`` its own, else the mean."""
    listed = env.get("SLURM_STEP_TASKS_PER_NODE", "")
    node = _number(env, "SLURM_NODEID", -1)
    for each, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed) if node >= 0 else ():
        node -= int(times or 1)
        if node < 0:
            return int(each)
    return -(-world // max(_number(env, "SLURM_STEP_NUM_NODES", 1), 1))


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        state = "is not set" if text is None else f"is {text!r}, not a number"
        raise UserError(
            f"this looks like a rank of a distributed job, but {name} {state}; start it with torchrun or "
            "srun, or unset RANK and WORLD_SIZE"
        ) from None


def meeting_point(env: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Host and port where the ranks meet: torchrun's, or under srun the first node and a port by job."""
    if "MASTER_ADDR" in env:
        return env["MASTER_ADDR"], _number(env, "MASTER_PORT", 29500)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise UserError(
            "this looks like a rank of a distributed job, but MASTER_ADDR is not set; start it with torchrun "
            "or srun, or unset RANK and WORLD_SIZE"
        )
    job = _number(env, "SLURM_JOB_ID", 0)
    return first_host(nodes), _number(env, "MASTER_PORT", 20000 + job % 20000)


def first_host(nodes: str) -> str:
    """The first of Slurm's compressed host names: ``gpu[003-010,012]-ib,login`` begins with ``gpu003-ib``."""
    parts = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in parts.groups()) if parts else nodes


@dataclass(frozen=True)
class Job:
    """A job that this process has joined."""

    info: RankInfo

    def agree(self, work: Callable[[], T]) -> T:
        """Do what may fail on one rank alone; where it does, it fails on every rank, with the same message.

        Raises what ``work`` raised when all ranks failed alike, else JobFailed naming the first that did.
        """
        import torch.distributed as dist

        from hzplan.runtime.faults import named

        result: list[T] = []
        failure: tuple[int, str] | None = None
        try:
            result.append(work())
        except UserError as error:
            failure = (error.exit_code, str(error))
        failures: list[tuple[int, str] | None] = [None] * self.info.world
        with named("ranks comparing notes: all-gather", self.info.route_to):
            dist.all_gather_object(failures, failure)
        for rank, found in enumerate(failures):
            if found is not None:
                code, message = found
                if len(set(failures)) > 1:
                    raise JobFailed(f"rank {rank}: {message}")
                raise with_exit_code(message, code)
        return result[0]

    def first(self, work: Callable[[], None]) -> None:
        """Do what the first rank does for all; what it raises, all do."""
        import torch.distributed as dist

        from hzplan.runtime.faults import named

        failure: list[tuple[int, str] | None] = [None]
        if self.info.rank == 0:
            try:
                work()
            except UserError as error:
                failure = [(error.exit_code, str(error))]
        with named("the first rank's word: broadcast", self.info.route_to):
            dist.broadcast_object_list(failure, src=0)
        if failure[0] is not None:
            code, message = failure[0]
            raise with_exit_code(message, code)


@contextmanager
def join(here: RankInfo, *, timeout_s: float = TIMEOUT_S, groups: int = 1) -> Iterator[Job]:
    """Be a rank while the block runs: torch.distributed over NCCL where every rank here has a GPU, else gloo.

    ``groups``: of neighbouring ranks, as many in each; this rank then joins those of its group only, and the
    environment says which that is and where it meets the others (HZPLAN_GROUP, HZPLAN_MEET).

    After an error the job is left as it is, because taking leave would wait for the others: the process must
    end.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if here.launched_here:
        end_with_parent()
    share_processors(here.local_world)
    host, port = meeting_point()
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    watchdog = threading.Timer(timeout_s, _give_up, (here, f"{host}:{port}", timeout_s))
    watchdog.daemon = True
    watchdog.start()
    timeout = timedelta(seconds=timeout_s)
    try:
        store, *_ = next(rendezvous("env://", here.rank, here.world, timeout=timeout))
        start = f"hzplan/{meet(store, here.rank, here.world, MEETING * timeout_s)}"
        if groups > 1:
            group, here = here.in_group(groups)
            os.environ |= {"HZPLAN_GROUP": str(group), "HZPLAN_MEET": f"{host}:{port}/{start}"}
            start += f"/group/{group}"
        store = PrefixStore(start, store)
        backend, device = _backend(here)
        _allow_connections()
        dist.init_process_group(
            backend, store=store, rank=here.rank, world_size=here.world, timeout=timeout, device_id=device
        )
    except (RuntimeError, ValueError) as error:
        raise JobFailed(
            f"rank {here.rank} did not meet the other ranks at {host}:{port}: {one_line(error)}"
        ) from error
    finally:
        watchdog.cancel()
    yield Job(here)
    dist.destroy_process_group()


def _allow_connections() -> None:
    """gloo connects two ranks when they first have something to say to each other, and as many as the system
    allows: a mesh of all ranks would be a connection for each pair, of every process group."""
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if sys.platform == "linux":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _backend(here: RankInfo) -> tuple[str, torch.device | None]:
    """NCCL for what is on GPUs, beside gloo for what is not, and the rank's GPU.

    Where a host has GPUs every rank has one: its own, or the only one that it sees. HZPLAN_BACKEND=gloo keeps
    to the processors.
    """
    import torch

    from hzplan.runtime.backends.nccl import check_order

    count = torch.cuda.device_count()
    if not count or os.environ.get("HZPLAN_BACKEND") == "gloo":
        return "gloo", None
    if 1 < count < here.local_world:
        raise JobFailed(
            f"rank {here.rank}: {here.local_world} ranks on a host that shows {count} GPUs; start one per "
            "GPU, or set HZPLAN_BACKEND=gloo to train on its processors"
        )
    check_order(torch.cuda.nccl.version(), os.environ)
    device = torch.device("cuda", min(here.local_rank, count - 1))
    torch.cuda.set_device(device)
    return "cuda:nccl,cpu:gloo", device  # whose communicators are then split from the world's


def _give_up(here: RankInfo, where: str, timeout_s: float) -> None:
    """End this process, which waits where nothing else can end it.

    gloo tries for five times as long as it is told, should a connection get lost while ranks make them.
    """
    message = f"rank {here.rank} did not connect to the ranks that it met at {where} within {timeout_s:.0f} s"
    record_failure(message, JobFailed.exit_code, lost_peer=True)
    if not here.launched_here:
        print(f"hzplan: {message}", file=sys.stderr, flush=True)
    os._exit(JobFailed.exit_code)


def end_with_parent() -> None:
    """Ctrl-C and the death of who started it end this process at once, even inside a collective."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def share_processors(ranks: int) -> None:
    """One thread for each of so many ranks of a host where they have less than two processors each, unless
    the user said otherwise."""
    import torch

    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if "OMP_NUM_THREADS" not in os.environ and ranks > 1 and processors < 2 * ranks:
        torch.set_num_threads(1)


def with_exit_code(message: str, exit_code: int) -> UserError:
    """The error that a rank met, made again from what it left word of."""
    kinds = (UserError, CheckFailed, NoPlanFits, Preempted)
    kind = next((kind for kind in kinds if kind.exit_code == exit_code), JobFailed)
    return kind(message)


def record_failure(message: str, exit_code: int, *, lost_peer: bool) -> None:
    """Leave word for whoever launched this rank: torch's error file, with a part that ours reads."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now = time.time()
    extra = {"py_callstack": message, "timestamp": str(int(now))}  # torchrun prints this, so one line
    ours = {"message": message, "exit_code": exit_code, "time": now, "lost_peer": lost_peer}
    with suppress(OSError):  # whole or not at all, for this rank is ended as soon as another has failed
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}, "hzplan": ours}, file)
        os.replace(f"{path}.part", path)
