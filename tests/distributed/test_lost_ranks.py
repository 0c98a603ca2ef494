"""An all-reduce that a rank does not come to: the others name it, whether it died or hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from hzplan.runtime.backends.base import Buffers
from hzplan.runtime.backends.exchange import GlooGroup
from hzplan.runtime.faults import Unfinished

rank, timeout = int(sys.argv[1]), timedelta(seconds=4)
store = dist.FileStore(sys.argv[2], 4)
dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timeout)
group = GlooGroup(dist.new_group([0, 1, 2, 3], timeout=timeout))
values = torch.ones(400_000)
sums = group.all_reduce([Buffers(values, values.view(4, -1)[rank])], torch.zeros(100_000))
sums.run()
if rank == 2:
    time.sleep(12 if sys.argv[3] == "hangs" else 0)
    os._exit(0)
try:
    sums.run()
except Unfinished as error:
    print(error, error.ranks, flush=True)
    time.sleep(3)  # others ask the store, and would find this rank's connections broken
os._exit(0)
"""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("how", "says"), [("dies", "the connection to rank 2 broke"), ("hangs", "rank 2 did not arrive")]
)
def test_the_rank_that_does_not_come_is_named(tmp_path: Path, how: str, says: str) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store"), how],
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    said = [one.communicate(timeout=60)[0] for one in ranks]
    assert all(says in said[rank] and "(2,)" in said[rank] for rank in (0, 1, 3)), said
