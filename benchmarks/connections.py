"""What a job asks of its ranks as it grows: ``python -m benchmarks.connections [WORLD ...]``.

For each world a job of that many ranks on this machine joins as ``hzplan run`` does, makes a group for every
stage of two tiers, and then uses what training uses: on GPUs, where stage groups are NCCL's, collectives of
all ranks over gloo alone; on processors stage groups too. Each rank counts the sockets that its process
holds, and the pieces of data that joining sent to the store.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

WORLDS = (4, 8, 16, 32, 64)
SCRIPT = """
import json, os, socket, struct, sys, torch, torch.distributed as dist
from hzplan.core.hierarchy import Mesh
from hzplan.launch.job import join, rank_info
from hzplan.runtime.backends.base import Buffers
from hzplan.runtime.world import ProcessWorld

def sockets():
    found = []
    for name in os.listdir("/proc/self/fd"):
        link = os.path.join("/proc/self/fd", name)
        if os.path.islink(link) and os.readlink(link).startswith("socket"):
            found.append(socket.socket(fileno=os.dup(int(name))))
    return found

def said_to_the_store():
    "Pieces of data that this rank has sent to the store, and bytes that came from there (tcp_info)."
    sent = received = 0
    for one in sockets():
        with one:
            try:
                peer = one.getpeername()
            except OSError:
                continue
            if one.type == socket.SOCK_STREAM and peer[1:2] == (int(os.environ["MASTER_PORT"]),):
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                received += struct.unpack_from("Q", info, 128)[0]
                sent += struct.unpack_from("I", info, 156)[0]
    return sent, received

def held():
    found = sockets()
    for one in found:
        one.close()
    return len(found)

found = {}
with join(rank_info()) as job:
    found["messages to the store"], found["bytes from it"] = said_to_the_store()
    mesh, world = Mesh.parse(sys.argv[1]), ProcessWorld()
    groups = [world.new_group(mesh, kind, stage, torch.device("cpu"))
              for kind in ("unshard", "reduce", "gather") for stage in mesh.stages()]
    found["messages with groups"], found["bytes with groups"] = said_to_the_store()
    job.agree(lambda: None)
    world.all_reduce(torch.ones(100))
    world.broadcast(torch.ones(100))
    dist.barrier()
    dist.all_gather_object([None] * job.info.world, 1)
    found["sockets"] = held()
    for group in groups:
        buffers = [Buffers(torch.ones(group.size * 64), torch.ones(64))]
        group.all_gather(buffers).run()
        group.reduce_scatter(buffers, torch.empty(group.size * 64)).run()
    found["sockets, gloo for stages"] = held()
    everyone = [None] * job.info.world
    dist.all_gather_object(everyone, found)
    if job.info.rank == 0:
        print("found", json.dumps(everyone), flush=True)
    dist.barrier()
    print("passed", flush=True)
print("left", flush=True)
"""


def main(*worlds: str) -> None:
    """Print a line for each world: the first rank has the store, so it is counted by itself."""
    for world in [int(world) for world in worlds] or WORLDS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "count.py"
            path.write_text(SCRIPT)
            mesh = f"4|{world // 4}" if world > 4 else "4"
            line = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            line += [f"--nproc-per-node={world}", str(path), mesh]
            done = subprocess.run(line, check=False, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr[:4000])
        (found,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
        first, *others = json.loads(found.removeprefix("found "))
        most = {key: max(one[key] for one in others) for key in first}
        print(f"{world:5} ranks: others at most {most}, the first {first}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
