"""Ranks for commands that need them: joining the job of this process, or starting ranks here."""

from __future__ import annotations

import os
import sys

from hzplan.errors import UserError
from hzplan.launch.job import RankInfo, rank_info

RANKS_PER_CPU = 16


def this_rank(nproc: int | None) -> RankInfo | None:
    """This process's place in the job it was started in; None where the ranks are yet to be started here."""
    if nproc is not None and nproc < 1:
        raise UserError(f"--nproc {nproc}: at least 1 rank is needed")
    here = rank_info()
    if here and nproc is not None and nproc != here.world:
        raise UserError(
            f"--nproc {nproc}, but this process is a rank of a job of {here.world}; leave --nproc out"
        )
    return here


def start_here(world: int) -> None:
    """Run this command line as ``world`` ranks here; UserError where the machine is plainly too small."""
    from hzplan.launch.local import start

    most = RANKS_PER_CPU * (os.cpu_count() or 1)
    if world > most:
        raise UserError(
            f"{world} ranks are too many to start on this machine ({most} at most); "
            "start them with torchrun or srun on the nodes that they are for"
        )

    start(sys.argv[1:], world)


def say_how_on_a_cluster(here: RankInfo, *, nodes: int | None = None) -> None:
    """Print the launch line for a cluster to who started ranks on one machine; ``nodes``: if known."""
    from hzplan.cli.console import remark
    from hzplan.launch.local import cluster_line

    if here.launched_here:
        line = cluster_line(sys.argv[1:], nodes=nodes, ranks_per_node=here.world // (nodes or 1))
        remark(f"{'With torchrun' if nodes == 1 else 'On a cluster'}: {line}")
