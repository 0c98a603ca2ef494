"""The emulated cluster: sizes and rates of its tiers, parsed from options. Pure arithmetic."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, prod

from hzplan.errors import UserError

MAX_RANKS = 256
MIN_RATE, MAX_RATE = 10**6, 400 * 10**9
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


@dataclass(frozen=True)
class Cluster:
    """A tree of links. Ranks of one node talk over its loopback, nodes over their links to a bridge.

    ``tiers``: sizes, fastest first: ranks per node, nodes per group, groups per larger group, …
    ``rates``: bits/s of the links of each tier, None where nothing limits them: the node's loopback, a
    node's link to its group, a group's uplink (shared by the group's nodes), …; the same in both directions.

    Raises UserError where sizes or rates make no sense together.
    """

    tiers: tuple[int, ...]
    rates: tuple[int | None, ...]
    slow: tuple[tuple[int, int], ...] = ()
    """Nodes whose links have another rate than their tier's: (node, bits/s)."""

    cuts: tuple[tuple[int, float, float | None], ...] = ()
    """Links that fail: (node, seconds after the ranks' start, for how many seconds; None: for good)."""

    def __post_init__(self) -> None:
        if not self.tiers or min(self.tiers) < 1:
            raise UserError(f"tiers {self.sizes}: every size must be at least 1, as in 2x2")
        if self.world > MAX_RANKS:
            raise UserError(f"tiers {self.sizes}: {self.world} ranks; at most {MAX_RANKS} are emulated")
        if len(self.rates) != len(self.tiers):
            raise UserError(
                f"tiers {self.sizes} need {len(self.tiers)} rates, not {len(self.rates)}: one per tier, "
                "fastest first, as in none,500mbit"
            )
        for rate in self.rates:
            if rate is not None and not MIN_RATE <= rate <= MAX_RATE:
                raise UserError(f"a rate of {rate_text(rate)}: write one between 1mbit and 400gbit, or none")
        for node, rate in self.slow:
            if not 0 <= node < self.nodes or len(self.tiers) < 2:
                raise UserError(f"slow node {node}: the cluster has nodes 0 to {self.nodes - 1}")
            if not MIN_RATE <= rate <= (self.rates[1] or MAX_RATE):
                raise UserError(f"slow node {node}: its rate must be 1mbit to {rate_text(self.rates[1])}")
        for node, _, _ in self.cuts:
            if not 0 <= node < self.nodes or len(self.tiers) < 2:
                raise UserError(f"cut node {node}: the cluster has nodes 0 to {self.nodes - 1}")
        limits = [inf if rate is None else rate for rate in self.rates]
        if limits != sorted(limits, reverse=True):
            texts = ", ".join(rate_text(rate) for rate in self.rates)
            raise UserError(f"rates {texts}: a tier cannot be faster than one inside it; write fastest first")

    @classmethod
    def parse(cls, tiers: str, rates: str, slow: Iterable[str] = (), cuts: Iterable[str] = ()) -> Cluster:
        """``2x2`` and ``none,500mbit``: sizes and rates per tier, fastest first. Raises UserError.

        ``slow``: ``1=50mbit``, nodes with a link of their own rate; ``cuts``: ``1@10+5``, nodes whose link
        fails, here after 10 s for 5 s, or ``1@10``, for good.
        """
        sizes = tiers.split("x")
        if not all(re.fullmatch(r"[0-9]{1,6}", size) for size in sizes):
            raise UserError(f"tiers {tiers}: write sizes with x between, fastest first, as in 2x2 or 8x2x4")
        return cls(
            tuple(map(int, sizes)),
            tuple(map(parse_rate, rates.split(","))),
            tuple(map(_parse_slow, slow)),
            tuple(map(_parse_cut, cuts)),
        )

    @property
    def sizes(self) -> str:
        """As ``parse`` reads them."""
        return "x".join(map(str, self.tiers))

    @property
    def world(self) -> int:
        """Ranks."""
        return prod(self.tiers)

    @property
    def per_node(self) -> int:
        """Ranks per node."""
        return self.tiers[0]

    @property
    def nodes(self) -> int:
        """Nodes."""
        return prod(self.tiers[1:])

    def tier_name(self, tier: int) -> str:
        """``node``, ``network``; where there are more, ``network 1``, ``network 2``, …"""
        if tier == 0:
            return "node"
        return "network" if len(self.tiers) == 2 else f"network {tier}"

    def describe(self) -> str:
        """``2 nodes × 2 ranks, network 500 Mbit/s``."""
        text = f"{_count(self.nodes, 'node')} × {_count(self.per_node, 'rank')}"
        if len(self.tiers) > 2:
            text += f" ({self.sizes})"
        for tier, rate in enumerate(self.rates):
            if tier or rate is not None:
                colon = ":" if len(self.tiers) > 2 and tier else ""
                text += f", {self.tier_name(tier)}{colon} {rate_text(rate)}"
        return text


def parse_rate(text: str) -> int | None:
    """``500mbit`` in bits/s, as tc writes it with kbit, mbit or gbit; None for ``none``. Raises UserError."""
    word = text.strip().lower()
    if word == "none":
        return None
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,9})?)(kbit|mbit|gbit)", word)
    if match is None:
        raise UserError(f"rate {text.strip()[:40]!r}: write it as 500mbit, 2.5gbit or none")
    return round(float(match[1]) * _UNITS[match[2]])


def _parse_slow(text: str) -> tuple[int, int]:
    node, _, rate = text.partition("=")
    bits = parse_rate(rate) if rate else None
    if not re.fullmatch(r"[0-9]{1,6}", node) or bits is None:
        raise UserError(f"slow node {text[:40]!r}: write the node's number and its rate, as in 1=50mbit")
    return int(node), bits


def _parse_cut(text: str) -> tuple[int, float, float | None]:
    match = re.fullmatch(
        r"([0-9]{1,6})@([0-9]{1,6}(?:\.[0-9]{1,3})?)(?:\+([0-9]{1,6}(?:\.[0-9]{1,3})?))?", text
    )
    if match is None:
        raise UserError(
            f"cut node {text[:40]!r}: write the node's number, after how many seconds, and for how many, as "
            "in 1@10+5, or 1@10 for good"
        )
    return int(match[1]), float(match[2]), float(match[3]) if match[3] else None


def rate_text(rate: float | None) -> str:
    """``500 Mbit/s``, of bits/s."""
    if rate is None:
        return "not limited"
    scale, unit = (1e9, "Gbit/s") if rate >= 1e9 else (1e6, "Mbit/s")
    return f"{rate / scale:.4g} {unit}" if rate < 1e12 else f"{rate / scale:.0f} {unit}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def environment(cluster: Cluster, rank: int, inherited: dict[str, str]) -> dict[str, str]:
    """A rank's environment: torchrun's variables, and the interface to use."""
    kept = {name: value for name, value in inherited.items() if not name.startswith(_NOT_INHERITED)}
    node, local = divmod(rank, cluster.per_node)
    if cluster.world > 1:
        kept.setdefault("OMP_NUM_THREADS", "1")
    kept["HZPLAN_BACKEND"] = "gloo"  # NCCL would find ways past the links
    kept.setdefault("PYTHONUNBUFFERED", "1")  # what is killed leaves its last words in the log
    return kept | {
        "RANK": str(rank),
        "WORLD_SIZE": str(cluster.world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(cluster.per_node),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(cluster.nodes),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(MEETING_PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "HZPLAN_TIERS": cluster.sizes,
    }


_NOT_INHERITED = ("TORCHELASTIC_", "SLURM_", "HZPLAN_LAUNCHED")
INTERFACE = "hz0"
"""A node's link, as its ranks see it."""

MEETING_PORT = 29500  # nobody else is in this network


def address(node: int) -> str:
    """A node's IPv4 address, in 10.0.0.0/16."""
    return f"10.0.{(node + 1) // 256}.{(node + 1) % 256}"
