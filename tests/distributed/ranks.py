"""Runs a function on several ranks, over gloo or NCCL, and brings back what rank 0 returns."""

from __future__ import annotations

import importlib
import json
import pickle
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cli.command import ROOT, environment
from tests.warm import Popen

POLL_S = 0.01
"""Seconds between two looks whether a rank has ended."""


def on_ranks(
    world: int, target: str, payload: Any, folder: Path, *, join: bool = True, nccl: bool = False
) -> Any:
    """Call ``module:function(payload)`` on every rank of one job and return rank 0's answer, as JSON.

    Without ``join`` ranks do not meet, and the function is also given the rank's number and the world. Each
    rank is a process of its own; when one fails the others are killed. ``nccl``: for tensors on the first
    GPU, which all ranks share.

    Raises RuntimeError with the standard error of the rank that failed first.
    """
    (folder / "payload").write_bytes(pickle.dumps(payload))
    words = [target, str(folder), *(["join"] * join), *(["nccl"] * nccl)]
    said = [folder / f"stderr.{rank}" for rank in range(world)]
    # CUDA may not begin in a process that is forked.
    popen: Any = subprocess.Popen if torch.cuda.is_available() else Popen
    ranks = []
    codes: list[int | None] = []
    try:
        for rank, path in enumerate(said):
            command = [sys.executable, "-m", "tests.distributed.ranks", str(rank), str(world), *words]
            with path.open("w") as stderr:
                ranks.append(
                    popen(
                        command,
                        cwd=ROOT,
                        env=environment(OMP_NUM_THREADS="1", **(shared_card(rank) if nccl else {})),
                        stdin=subprocess.DEVNULL,
                        stderr=stderr,
                    )
                )
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            time.sleep(POLL_S)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    failed = next((rank for rank, code in enumerate(codes) if code), None)
    if failed is not None:
        text = said[failed].read_text(errors="replace")
        raise RuntimeError(f"rank {failed} ended with exit code {codes[failed]}:\n{text}")
    return json.loads((folder / "result.json").read_text())


def shared_card(rank: int) -> dict[str, str]:
    """Variables with which NCCL lets a rank share a GPU with others: it takes each for a host of its own, and
    they reach each other by sockets."""
    return {
        "NCCL_HOSTID": f"host-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    }


def chosen(request: pytest.FixtureRequest, name: str = "case") -> list[Any]:
    """Values of a parameter in those tests of the module that share this fixture and are to be run."""
    fixture, found = request.fixturename, []
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function) and fixture in item.fixturenames:
            found.append(item.callspec.params[name])
    return found


def _rank(rank: int, world: int, target: str, folder: Path, join: bool, nccl: bool) -> None:
    torch.set_num_threads(1)
    if join:
        device = torch.device("cuda", 0) if nccl else None
        dist.init_process_group(
            "cuda:nccl,cpu:gloo" if nccl else "gloo",
            device_id=device,
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
        )
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    payload = pickle.loads((folder / "payload").read_bytes())
    returned = function(payload) if join else function(payload, rank, world)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(returned))
    if join:
        dist.barrier(device_ids=[0] if nccl else None)
        dist.destroy_process_group()


if __name__ == "__main__":
    said = sys.argv[5:]
    _rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), "join" in said, "nccl" in said)
