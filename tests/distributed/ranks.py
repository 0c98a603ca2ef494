"""Runs a function on several gloo ranks and brings back what rank 0 returns."""

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


def on_ranks(world: int, target: str, payload: Any, folder: Path, *, join: bool = True) -> Any:
    """Call ``module:function(payload)`` on every rank of one job and return rank 0's answer, as JSON.

    Without ``join`` ranks do not meet, and the function is also given the rank's number and the world. Each
    rank is a process of its own; when one fails the others are killed.

    Raises RuntimeError with the standard error of the rank that failed first.
    """
    (folder / "payload").write_bytes(pickle.dumps(payload))
    words = [target, str(folder), *(["join"] * join)]
    said = [folder / f"stderr.{rank}" for rank in range(world)]
    ranks = []
    codes: list[int | None] = []
    try:
        for rank, path in enumerate(said):
            command = [sys.executable, "-m", "tests.distributed.ranks", str(rank), str(world), *words]
            with path.open("w") as stderr:
                ranks.append(
                    Popen(
                        command,
                        cwd=ROOT,
                        env=environment(OMP_NUM_THREADS="1"),
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


def chosen(request: pytest.FixtureRequest, name: str = "case") -> list[Any]:
    """Values of a parameter in those tests of the module that share this fixture and are to be run."""
    fixture, found = request.fixturename, []
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function) and fixture in item.fixturenames:
            found.append(item.callspec.params[name])
    return found


def _rank(rank: int, world: int, target: str, folder: Path, join: bool) -> None:
    torch.set_num_threads(1)
    if join:
        dist.init_process_group(
            "gloo",
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
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    _rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), "join" in sys.argv[5:])
