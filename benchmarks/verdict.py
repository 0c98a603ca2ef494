"""What a regime's figures say: against which peer, by how much, and whether that reaches the bar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from benchmarks.measure import DEEPSPEED, PEERS, SMALLEST
from hzplan.peers import CONTROL, LOCAL, OURS
from hzplan.peers.compare import within
from hzplan.peers.paired import Ratio, paired_ratio

BARS: Mapping[str, float] = {
    "DDP fits": 0.97,
    "parts fit": 1.0,
    "full shard only": 1.0,
    "no plan fits": 1.0,
    "tensor parallelism is best": 0.97,
}
"""By what fits the budget: everything; schemes in between (HSDP, ZeRO-1, …); only FSDP2 or ZeRO-3; not even
the smallest plan, whose memory is the budget then. A regime is lost where the interval lies wholly below.
What fits fastest may be no data parallelism, which a plan does not choose."""

MEDIANS: Mapping[str, float] = {"DDP fits": 1.0, "parts fit": 1.2, "full shard only": 2.0}
"""What the median regime is asked to reach."""

FULL = ("fsdp2", "deepspeed3")
SHARE = 0.6
"""Of the way from the best peer to the bound, at least, where the network binds."""


@dataclass(frozen=True)
class Verdict:
    """``ratio``: the best fitting peer's step over ours, with its interval; ``margin``: A/A half-width.

    ``share``: (peer − ours) ÷ (peer − bound); None where the network does not bind. ``bound_s``: the larger
    of compute alone and the bytes that must cross at the link's rate. ``sound``: the plan fits its budget and
    trains as DDP does.
    """

    group: str
    peer: str | None
    ratio: float
    low: float
    high: float
    margin: float
    bound_s: float
    network_binds: bool
    share: float | None
    sound: bool

    @property
    def bar(self) -> float:
        """What the ratio must not be below."""
        return BARS[self.group]

    @property
    def passed(self) -> bool | None:
        """Whether the interval reaches the bar, and the plan keeps what it promises; None: no peer."""
        return None if self.peer is None else self.sound and self.high >= self.bar

    @property
    def share_passed(self) -> bool:
        """Whether enough of the way is gone, where that is asked."""
        return self.share is None or self.share >= SHARE


def ratio_of(slower: Mapping[str, Any], faster: Mapping[str, Any]) -> Ratio:
    """Two contenders' steps, from the rounds that were kept."""
    return paired_ratio(slower["round_s"], faster["round_s"])


def judge(result: Mapping[str, Any]) -> Verdict:
    """See ``Verdict``."""
    compared = result["comparison"]
    entries = {entry["name"]: entry for entry in compared["contenders"]}
    fitting = {
        name: entry
        for name, entry in entries.items()
        if _kind(name) in (*PEERS, *SMALLEST, *DEEPSPEED, "ddp")
        and entry["losses_agree"]
        and fits(entry, result)
    }
    looked = (entry for entry in result.get("look", ()) if entry["losses_agree"] and fits(entry, result))
    kinds = {_kind(name) for name in (*fitting, *(entry["name"] for entry in looked))} - {
        OURS,
        LOCAL,
        CONTROL,
    }
    if "no_plan_in_bytes" in result:
        group = "no plan fits"
    elif "ddp" in kinds:
        group = "DDP fits"
    elif kinds - set(FULL):
        group = "parts fit"
    else:
        group = "full shard only"
    margin = ratio_of(entries[CONTROL], entries["ddp"]).half_width
    compute_s = entries[LOCAL]["step_s"]["median"]
    sound = bool(entries[OURS]["losses_agree"]) and fits(entries[OURS], result)
    bound = max(compute_s, result["network_s"])
    binds = result["network_s"] > compute_s
    if not fitting:
        return Verdict(group, None, inf, inf, inf, margin, bound, binds, None, sound)
    peer = min(fitting, key=lambda name: fitting[name]["step_s"]["median"])
    if _kind(peer) == "tp-dp" and group not in ("DDP fits", "no plan fits"):
        group = "tensor parallelism is best"
    ratio = ratio_of(fitting[peer], entries[OURS])
    theirs, ours = fitting[peer]["step_s"]["median"], entries[OURS]["step_s"]["median"]
    share = None
    if binds:  # who is faster than the bound does not send what replicas must: nothing of that way is gone
        share = (theirs - ours) / (theirs - bound) if theirs > bound else 0.0
    return Verdict(group, peer, ratio.value, ratio.low, ratio.high, margin, bound, binds, share, sound)


def _kind(name: str) -> str:
    """A peer without its setting."""
    return name.partition("@")[0]


def fits(entry: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    """Whether a contender needs no more than the regime's budget."""
    return within(entry["peak_memory_bytes"], result["budget_bytes"])
