"""Measurement of the emulated links: a short transfer per tier."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence
from math import prod

from hzplan.emulate import namespaces
from hzplan.emulate.cluster import Cluster, address
from hzplan.emulate.network import MTU

TOLERANCE = 0.2
"""Share of the asked rate by which the measured one may differ without a warning."""

_HEADERS = 14 + 20 + 32  # bytes of Ethernet, IP and TCP in a frame of MTU + 14 bytes
_ON_THE_WIRE = (MTU + 14) / (MTU + 14 - _HEADERS)
_PORT = 29499
_IMPATIENT_S = 10.0


def duration_s(rate: int) -> float:
    """Seconds to measure a rate (bits/s): so long that the first burst hardly counts."""
    return min(2.0, max(0.4, 8 * 250_000 / rate))


def measure(cluster: Cluster, tier: int, nodes: Sequence[int], stop: int) -> float | None:
    """Bits/s that TCP carries over a tier, headers included; None if ``stop`` became readable.

    ``nodes`` are descriptors of the nodes' networks. The transfer is from the first node to the first that is
    so far away; within the node for tier 0. Raises OSError where nothing comes through.
    """
    rate = cluster.rates[tier]
    assert rate is not None
    far = prod(cluster.tiers[1:tier]) if tier else 0
    with namespaces.inside(nodes[far]), socket.create_server((address(far), _PORT)) as server:
        server.settimeout(_IMPATIENT_S)
        with namespaces.inside(nodes[0]):
            sender = socket.create_connection((address(far), _PORT), timeout=_IMPATIENT_S)
        receiver, _ = server.accept()
    with sender, receiver:
        # What was not sent when time is up is dropped, not sent while the job begins.
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return _transfer(sender, receiver, duration_s(rate), stop)


def _transfer(sender: socket.socket, receiver: socket.socket, seconds: float, stop: int) -> float | None:
    """Bits/s received in the last three quarters of the time: links let a burst through first."""
    sender.setblocking(False)
    receiver.setblocking(False)
    chunk, into = bytes(2**17), bytearray(2**18)
    began = last = time.perf_counter()
    first: float | None = None
    received = 0
    while (now := time.perf_counter()) < began + seconds:
        waiting: list[socket.socket | int] = [receiver, stop]
        readable, writable, _ = select.select(waiting, [sender], [], began + seconds - now)
        if stop in readable:
            return None
        if writable:
            sender.send(chunk)
        if receiver in readable:
            got = receiver.recv_into(into)
            last = time.perf_counter()
            if first is not None:
                received += got
            elif last > began + seconds / 4:
                first = last
    if first is None or last <= first:
        return 0.0
    return 8 * received * _ON_THE_WIRE / (last - first)
