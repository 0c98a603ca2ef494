"""Which figures of ``cost_models/`` are fitted, and what is known of them before any training row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import exp, log

from benchmarks.published.fit import Figure
from benchmarks.published.micro import Measured
from benchmarks.published.parameters import CHIPS, with_values
from hzplan.formats.cluster import load_device

SUSTAINED = 0.82
"""Share of the best matrix rate of a short benchmark that large products reach in training, where power and
temperature have settled and shapes are not the best ones; before any row, and of chips without rows fitted on
those that have some."""
RAMP = 128.0
"""Elements of the inner dimension that a tile's begin and end are worth, before any row."""
UPPER = {"bytes_share": 0.97, "product_share": 0.97}
"""Upper limits of shares."""

WITH_ROWS = ("a100", "h100", "h100-hbm2e", "b200")
"""Chips that training rows speak of."""
ATTENTION = {
    "a100": ("flash-2", "flash-1", "standard"),
    "h100": ("flash-2", "flash-3", "cudnn", "standard"),
}
"""Attention kernels with microbenchmarks."""
SHARE_ONLY = (("h100", "standard"),)
"""Kernels whose other figures are as on the chip before."""
AS_ANOTHER = (("h100", "cudnn"),)
"""Kernels whose ramp is as assumed."""
LINKS = ("nvlink3", "nvlink4", "nvlink5")
NETWORKS = ("infiniband", "roce", "efa")


def limited(path: str, value: float) -> float:
    """A figure's value within its limits."""
    return min(value, UPPER.get(path.rpartition(".")[2], 1e12))


def micro_figures() -> list[Figure]:
    """Figures that microbenchmarks alone decide: attention, links and networks."""
    found = []
    for chip, kernels in ATTENTION.items():
        for kernel in kernels:
            path = f"{chip}.attention.{kernel}"
            found.append(Figure(f"{path}.share", 0.3, 1.0))
            if (chip, kernel) not in SHARE_ONLY:
                found.append(Figure(f"{path}.narrow_share", 0.85, 0.3))
            if (chip, kernel) not in (*SHARE_ONLY, *AS_ANOTHER):
                found.append(Figure(f"{path}.ramp", 150.0, 0.7))
    for link in LINKS:
        found += [Figure(f"{link}.bytes_share", 0.8, 0.2), Figure(f"{link}.latency_s", 5e-6, 0.7)]
    for network in NETWORKS:
        found += [Figure(f"{network}.bytes_share", 0.88, 0.1), Figure(f"{network}.latency_s", 1.5e-5, 0.5)]
        found.append(Figure(f"{network}.congestion", 0.02, 0.5))
    return found


def best_shares(data: Iterable[Measured], values: Mapping[str, float]) -> dict[str, float]:
    """By chip, the share of its peak at which its best published matrix product ran."""
    found: dict[str, list[float]] = {}
    ramps = {f"{chip}.product_ramp": RAMP for chip in CHIPS}  # as before any fit, whatever is shipped
    before = {**values, **ramps, **{f"{chip}.product_share": 0.5 for chip in CHIPS}}
    for one in data:
        if one.kind == "matmul":
            device = with_values(load_device(CHIPS[one.owner][0]), one.owner, before.items())
            said = one.value / one.of(before) * device.product_share.value
            found.setdefault(one.owner, []).append(said)
    best = {chip: min(UPPER["product_share"], max(shares)) for chip, shares in found.items()}
    best["h100-hbm2e"] = best["h100"] * (500 / 700) ** 0.5  # by power: rate as its square root, about
    return best


def training_figures(
    best: Mapping[str, float], values: Mapping[str, float], sustained: float = SUSTAINED
) -> list[Figure]:
    """Figures that training rows decide, with what microbenchmarks say of them before."""
    found = []
    for chip in WITH_ROWS:
        found.append(Figure(f"{chip}.product_share", best[chip] * sustained, 0.25))
    for chip in ("a100", "h100"):
        found.append(Figure(f"{chip}.product_ramp", RAMP, 0.7))
        found.append(Figure(f"{chip}.bytes_share", 0.85, 0.15))
        triton = values[f"{chip}.attention.flash-2.share"] * 0.45
        found.append(Figure(f"{chip}.attention.triton.share", triton, 0.15))
        found.append(Figure(f"{chip}.attention.triton.narrow_share", 0.95, 0.1))
    for network in ("infiniband", "roce"):
        found += [
            Figure(f"{network}.{name}", values[f"{network}.{name}"], sigma)
            for name, sigma in (("bytes_share", 0.1), ("latency_s", 0.4), ("congestion", 0.5))
        ]
        found.append(Figure(f"{network}.lateness", 0.003, 0.7))
    return found


def sustained_share(fitted: Mapping[str, float], best: Mapping[str, float], chips: Iterable[str]) -> float:
    """The share of the best matrix rate that products reach in training, over chips: a geometric mean."""
    shares = [log(fitted[f"{chip}.product_share"] / best[chip]) for chip in chips]
    return exp(sum(shares) / len(shares))
