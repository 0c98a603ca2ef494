"""``hzplan emulate``: a command as one job on a cluster in a box."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hzplan.emulate.cluster import Cluster
from hzplan.errors import UserError


def command(
    run: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="What every rank runs."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes.")] = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks per node; by default 1.")] = None,
    network: Annotated[
        str | None, typer.Option(help="Rate of a node's link: 500mbit, 2gbit or none.")
    ] = None,
    node_link: Annotated[str | None, typer.Option(help="Rate inside a node; by default none.")] = None,
    tiers: Annotated[
        str | None, typer.Option(help="Sizes, fastest tier first, as in 2x2x2; instead of --nodes, --nproc.")
    ] = None,
    rates: Annotated[
        str | None, typer.Option(help="Rate per tier, as in none,1gbit,200mbit; instead of --network.")
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(help="A node with a slower link: 1=50mbit. As often as wanted; to see it found."),
    ] = None,
    cut: Annotated[
        list[str] | None,
        typer.Option(help="A node whose link fails: 1@10+5, after 10 s for 5 s, or 1@10 for good."),
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(help="Folder for all ranks' output; by default one kept on failure only.")
    ] = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not measure the rates first.")] = False,
) -> None:
    """Run a command as one torch.distributed job on a cluster in a box: namespaces with slow links between.

    Every rank gets torchrun's variables. Rank 0's output is shown, all ranks' goes to --logs. The exit code
    is that of the rank that failed first, 130 after Ctrl-C. Needs Linux, iproute2, root or user namespaces.

    Example: hzplan emulate --nodes 2 --nproc 2 --network 500mbit -- python train.py

    Example: hzplan emulate --tiers 2x2x2 --rates none,1gbit,200mbit -- hzplan profile gpt:tiny
    """
    from hzplan import emulate

    if not run:
        raise UserError("no COMMAND to run; write it after --, as in: -- python train.py")
    code = emulate.run(
        _cluster(nodes, nproc, network, node_link, tiers, rates, slow or [], cut or []),
        run,
        logs=logs,
        verify=not no_verify,
    )
    if code:
        raise SystemExit(code)


def _cluster(
    nodes: int | None,
    nproc: int | None,
    network: str | None,
    node_link: str | None,
    tiers: str | None,
    rates: str | None,
    slow: list[str],
    cut: list[str],
) -> Cluster:
    """What the options describe, in either of the two ways."""
    if tiers is not None or rates is not None:
        if not all(option is None for option in (nodes, nproc, network, node_link)):
            raise UserError("with --tiers and --rates leave out --nodes, --nproc, --network and --node-link")
        if tiers is None or rates is None:
            raise UserError("--tiers and --rates go together, as in --tiers 2x2x2 --rates none,1gbit,200mbit")
        return Cluster.parse(tiers, rates, slow, cut)
    if nodes is None or network is None:
        raise UserError("say how large a cluster, as in --nodes 2 --nproc 2 --network 500mbit")
    return Cluster.parse(
        f"{1 if nproc is None else nproc}x{nodes}", f"{node_link or 'none'},{network}", slow, cut
    )
