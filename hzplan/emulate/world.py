"""The first process inside the private namespaces: makes the network, measures it, runs the ranks.

The front starts it as ``python -m hzplan.emulate.world SPEC`` inside new namespaces. When it ends the kernel
ends everything that it made.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterable

from hzplan.emulate import advice, namespaces, network, verify
from hzplan.emulate.ranks import RankProcesses
from hzplan.emulate.spec import Spec
from hzplan.errors import UserError


def main() -> None:
    """Run the job that argv[1] specifies, and report to the front."""
    spec = Spec.from_text(sys.argv[1])
    for descriptor in (spec.control, spec.report, spec.stdout, spec.stderr):
        os.set_inheritable(descriptor, False)
    try:
        namespaces.own_proc()
        spec.tell("hello")
        nodes = _build(spec)
        if spec.verify and not _verify(spec, nodes):
            return
        for number, outside, inside in network.slow_links(spec.cluster):
            _batch(spec.tc, outside)
            with namespaces.inside(nodes[number]):
                _batch(spec.tc, inside)
        if _called(spec):
            return
        spec.tell("ready")
        _cut_later(spec)
        ended = RankProcesses(spec, nodes).run()
        spec.tell("ended", ranks=[vars(end) for end in ended])
    except UserError as error:
        spec.tell("error", message=str(error))
    except BrokenPipeError:
        pass  # the front is gone, and with us goes the world


def _build(spec: Spec) -> list[int]:
    """Descriptors of the nodes' networks, joined and limited."""
    cluster = spec.cluster
    try:
        nodes = [namespaces.create() for _ in range(cluster.nodes)]
    except OSError as error:
        raise UserError(advice.refused(str(error), root=os.geteuid() == 0)) from None
    paths = [f"/proc/self/fd/{node}" for node in nodes]
    _batch(spec.ip, network.links(cluster, paths), nodes)
    _batch(spec.tc, network.limits(cluster))
    for number, node in enumerate(nodes):
        with namespaces.inside(node):
            _batch(spec.ip, network.node_links(cluster, number))
            _batch(spec.tc, network.node_limits(cluster))
    return nodes


def _cut_later(spec: Spec) -> None:
    """Take links down, and up again, while ranks run; from threads, which are in the bridges' namespace."""

    def later(seconds: float, node: int, state: str) -> None:
        timer = threading.Timer(seconds, lambda: _batch(spec.ip, [f"link set dev n{node} {state}"]))
        timer.daemon = True
        timer.start()

    for node, start_s, seconds in spec.cluster.cuts:
        later(start_s, node, "down")
        if seconds is not None:
            later(start_s + seconds, node, "up")


def _batch(tool: str, lines: Iterable[str], descriptors: Iterable[int] = ()) -> None:
    """Have ip or tc do all lines; UserError from the one that failed."""
    text = list(lines)
    if not text:
        return
    done = subprocess.run(
        [tool, "-batch", "-"],
        input="\n".join(text) + "\n",
        capture_output=True,
        text=True,
        pass_fds=tuple(descriptors),
        check=False,
    )
    if done.returncode != 0:
        said, _, number = done.stderr.strip().partition("Command failed -:")
        line = text[int(number) - 1] if number.strip().isdigit() else text[0]
        raise UserError(advice.failed(line, said))


def _verify(spec: Spec, nodes: list[int]) -> bool:
    """Report what each limited tier carries; False if the front called meanwhile."""
    cluster = spec.cluster
    for tier, rate in enumerate(cluster.rates):
        if rate is None or cluster.tiers[tier] == 1:
            continue
        try:
            measured = verify.measure(cluster, tier, nodes, spec.control)
        except OSError as error:
            raise UserError(
                f"nothing comes through the emulated {cluster.tier_name(tier)} ({error}); "
                "if br_netfilter drops bridged packets: sysctl -w net.bridge.bridge-nf-call-iptables=0"
            ) from None
        if measured is None:
            return False
        spec.tell("rate", tier=tier, measured=measured)
    return True


def _called(spec: Spec) -> bool:
    return bool(select.select([spec.control], [], [], 0)[0])


if __name__ == "__main__":
    main()
