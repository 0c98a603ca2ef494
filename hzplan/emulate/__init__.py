"""A cluster in a box: one torch.distributed job over nodes whose links are as slow as you say.

Nodes are Linux network namespaces, joined by bridges, with ``tc tbf`` on both ends of every link. All of it
lives in one private world that the kernel removes when the world's first process ends, however that happens.

    from hzplan.emulate import Cluster, available, run

    if available() is None:
        code = run(Cluster.parse("2x2", "none,500mbit"), ["python", "train.py"])

Nothing here imports torch, so that a job starts fast.
"""

from __future__ import annotations

from hzplan.emulate.cluster import Cluster
from hzplan.emulate.front import available, run

__all__ = ["Cluster", "available", "run"]
