"""The network of a cluster as lines for ``ip -batch`` and ``tc -batch``. Pure.

All bridges live in one namespace; every node has its own, with one link, ``hz0``, whose other end is
``n<node>`` in the bridge of the node's group. The bridge of group ``g`` of tier ``k`` is ``b<k>-<g>``; its
uplink goes from ``u<k>-<g>`` to ``d<k>-<g>`` in the bridge of the next tier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from hzplan.emulate.cluster import INTERFACE, Cluster, address

MTU = 9000
"""Bytes; of every shaped link, as clusters have it. Also keeps a frame far below the smallest burst."""

SMALLEST_BURST, WHOLE_SEND = 20_000, 68_000
QUEUE = 64 * 2**20
"""Bytes that wait at most before a link. Clusters hardly lose packets, so neither do we: many senders at once
fill a queue, they do not cause retransmissions. Senders limit what they have on the way themselves."""


def burst(rate: int) -> int:
    """Bytes that a link lets pass at once: 1 ms of its rate, because timers on a busy machine are late.

    A sender hands over up to 64 KiB at once; to let that pass whole is cheap, but below some 270 Mbit/s it
    would keep the link for more than 2 ms, so there the kernel cuts it.
    """
    millisecond = rate // 8000
    return max(SMALLEST_BURST, min(WHOLE_SEND, 2 * millisecond), millisecond)


def links(cluster: Cluster, node_paths: Sequence[str]) -> Iterator[str]:
    """Lines of ip for the namespace of the bridges; ``node_paths`` are files that stand for the nodes'."""
    tiers = _tiers(cluster)
    for tier in range(1, len(tiers)):
        for group in range(prod(tiers[tier + 1 :])):
            yield f"link add name b{tier}-{group} type bridge"
            yield f"link set dev b{tier}-{group} up"
    for node, path in enumerate(node_paths):
        yield f"link add name n{node} mtu {MTU} type veth peer name {INTERFACE} mtu {MTU} netns {path}"
        yield f"link set dev n{node} master b1-{node // tiers[1]} up"
    for tier in range(1, len(tiers) - 1):
        for group in range(prod(tiers[tier + 1 :])):
            up, down = f"u{tier}-{group}", f"d{tier}-{group}"
            yield f"link add name {up} mtu {MTU} type veth peer name {down} mtu {MTU}"
            yield f"link set dev {up} master b{tier}-{group} up"
            yield f"link set dev {down} master b{tier + 1}-{group // tiers[tier + 1]} up"


def limits(cluster: Cluster) -> Iterator[str]:
    """Lines of tc for the namespace of the bridges: the ends of the links that are in it."""
    tiers, rates = _tiers(cluster), (*cluster.rates, None)
    for node in range(cluster.nodes):
        yield from _limit(f"n{node}", rates[1])
    for tier in range(1, len(tiers) - 1):
        for group in range(prod(tiers[tier + 1 :])):
            yield from _limit(f"u{tier}-{group}", rates[tier + 1])
            yield from _limit(f"d{tier}-{group}", rates[tier + 1])


def node_links(cluster: Cluster, node: int) -> Iterator[str]:
    """Lines of ip for a node's namespace."""
    small = f" mtu {MTU}" if cluster.rates[0] is not None else ""
    yield f"link set dev lo{small} up"
    yield f"addr add {address(node)}/16 dev {INTERFACE}"
    yield f"link set dev {INTERFACE} up"


def node_limits(cluster: Cluster) -> Iterator[str]:
    """Lines of tc for a node's namespace; what its ranks send each other passes its loopback."""
    yield from _limit("lo", cluster.rates[0])
    yield from _limit(INTERFACE, (*cluster.rates, None)[1])


def slow_links(cluster: Cluster) -> Iterator[tuple[int, list[str], list[str]]]:
    """For every node with a link of its own rate: its number, and lines of tc for the bridges' namespace and
    for its own."""
    for node, rate in cluster.slow:
        outside, inside = (
            [line.replace("qdisc add", "qdisc replace") for line in _limit(device, rate)]
            for device in (f"n{node}", INTERFACE)
        )
        yield node, outside, inside


def _tiers(cluster: Cluster) -> tuple[int, ...]:
    """With a network even where there is one node only."""
    return cluster.tiers if len(cluster.tiers) > 1 else (*cluster.tiers, 1)


def _limit(device: str, rate: int | None) -> Iterator[str]:
    if rate is not None:
        yield f"qdisc add dev {device} root tbf rate {rate}bit burst {burst(rate)}b limit {QUEUE}b"
