"""Microbenchmarks, and what the model says of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import log2

from benchmarks.published.parameters import CHIP_OF, Values, with_values
from hzplan.formats.cluster import RateFigure, TierModel, load_device, load_network
from hzplan.formats.published import MicroRow
from hzplan.profiler.model.kernels import Pricing
from hzplan.profiler.model.operations import Attention, Product

GENERATIONS = {
    "flashattention-1": "flash-1",
    "flashattention-2": "flash-2",
    "flashattention-3": "flash-3",
    "cudnn": "cudnn",
    "pytorch standard": "standard",
}
LEAST_BYTES = 1 << 23
"""Smaller messages are short beside a step's, and are left out of fits."""
UNUSUAL = ("degraded", "sockets", "TCPX", "PCIe", "NVLS", "SHARP")
"""Words of networks that are not what a cluster's name stands for."""


@dataclass(frozen=True)
class Measured:
    """A microbenchmark as an equation: ``of(values)`` should be ``value``, in the row's unit."""

    row: MicroRow
    owner: str
    kind: str
    value: float
    of: Callable[[Values], float]


def measured(rows: Iterable[MicroRow]) -> list[Measured]:
    """The microbenchmarks that the model speaks of."""
    found = []
    for row in rows:
        made = KINDS[row.kind](row) if row.kind in KINDS else None
        if made is not None:
            found.append(made)
    return found


def _pricing(stem: str, values: Values, attention: str | None = None) -> Pricing:
    device = with_values(load_device(stem), CHIP_OF[stem], values.items())
    return Pricing(device, "bfloat16", attention=attention)


def _attention(row: MicroRow) -> Measured | None:
    """TFLOP/s, causal ones counted half; heads of 2,048 elements together, 16,384 tokens."""
    shape = re.search(r"head_dim (\d+), seq (\d+), causal=(\w+)", row.shape or "")
    stem = row.device_name
    kernel = next((name for said, name in GENERATIONS.items() if row.op.lower().startswith(said)), None)
    if shape is None or stem is None or kernel is None or kernel not in load_device(stem).attention:
        return None
    width, length, causal = int(shape[1]), int(shape[2]), shape[3] == "True"
    passes = 6 if "bwd" in row.op else 2
    one = Attention(2048 // width * (16384 // length), length, length, width, causal, passes, 0)

    def of(values: Values) -> float:
        return one.flops / (2 if causal else 1) / _pricing(stem, values, kernel).operation(one) / 1e12

    return Measured(row, CHIP_OF[stem], kernel, row.value, of)


def _matmul(row: MicroRow) -> Measured | None:
    """TFLOP/s of a product [M, K] × [K, N], the best of a search over shapes."""
    shape = re.match(r"(\d+)x(\d+)x(\d+)", row.shape or "")
    stem = row.device_name
    if shape is None or stem is None or "bf16" not in row.op or row.unit != "TFLOP/s":
        return None
    m, n, k = (int(side) for side in shape.groups())
    one = Product(1, m, n, k, 2 * (m * k + k * n + m * n))
    return Measured(
        row,
        CHIP_OF[stem],
        "matmul",
        row.value,
        lambda values: one.flops / _pricing(stem, values).operation(one) / 1e12,
    )


def _bus(row: MicroRow) -> Measured | None:
    """Bus bandwidth, GB/s, of large messages, of all-reduces as two passes of a ring."""
    said = f"{row.network} {row.notes}"
    if row.unit != "GB/s busbw" or not row.ranks or not row.bytes or row.bytes < LEAST_BYTES:
        return None
    if row.device_name is None or row.op not in ("all_reduce", "all_gather", "reduce_scatter"):
        return None
    if any(word in (row.network or "") for word in UNUSUAL):
        return None
    stem, ranks, inside = row.device_name, row.ranks, row.ranks_per_node or 8
    device = load_device(stem)
    if ranks <= inside:
        if device.link is None or ranks < 8:
            return None
        link = device.link
        return Measured(
            *(row, link, "link", row.value),
            lambda values: _ring(
                row, with_values(load_network(link), link, values.items()).joining(ranks), 1
            ),
        )
    gbit = re.search(r"(\d+)x(\d+)Gb", row.network or "") or re.search(r"()(\d{4})Gb", row.network or "")
    if gbit is None:
        return None
    each = int(gbit[1] or 1) * int(gbit[2]) / inside
    name = "efa" if "EFA" in said else "roce" if "RoCE" in said and "IB" not in said else "infiniband"
    rate = RateFigure(value=each * 1e9 / 8, kind="specified", source="the row")

    def of(values: Values) -> float:
        network = with_values(load_network(name), name, values.items())
        return _ring(row, network.joining(ranks // inside, rate), inside)

    return Measured(row, name, "network", row.value, of)


def _ring(row: MicroRow, tier: TierModel, inside: int) -> float:
    """Bus bandwidth over ``inside`` NICs of a node, GB/s.

    A ring passes all ranks; an all-reduce goes up and down a tree of nodes, whose depth is the logarithm of
    their number. Between two nodes a tree sends each byte once, where a ring sends it twice.
    """
    assert row.bytes is not None
    groups = tier.ranks
    ranks = groups * inside
    congestion = tier.congestion.value if tier.congestion is not None else 0.0
    rate = inside * tier.bytes_per_s.value * tier.bytes_share.value / (1 + congestion * log2(groups))
    steps = 2 if row.op == "all_reduce" else 1
    moved = steps * (ranks - 1) / ranks * row.bytes
    sent = row.bytes if row.op == "all_reduce" and groups == 2 else moved
    hops = ranks - 1 if row.op != "all_reduce" else 2 * log2(groups) + (inside - 1)
    return moved / (sent / rate + steps * hops * tier.latency_s.value) / 1e9


KINDS = {"attention": _attention, "matmul": _matmul, "busbw": _bus}
"""What makes an equation of a row, by its kind."""
