"""Formatting of numbers for people: three digits and a suitable unit."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10

from hzplan.formats.plan import RelaxedTier

RULES = {
    "periodic": "outer steps (DiLoCo)",
    "plain": "averages",
    "delta": "averages, as differences",
    "ema": "averages beside a moving mean of the drift",
}
SIZES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def duration(seconds: float) -> str:
    """``1.23 ms``: three digits, in the unit that suits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds / 1e-6)} µs"


def at_least(seconds: float) -> str:
    """A duration whose three digits are rounded down: for a bound."""
    places = 10.0 ** (2 - floor(log10(seconds))) if seconds > 0 else 1.0
    return duration(floor(seconds * places * (1 + 1e-12)) / places)


def at_most(share: float) -> str:
    """``1.23%``: a share rounded up."""
    return f"{ceil(share * 1e4 * (1 - 1e-12)) / 1e4:.2%}"


def way(of: str | None) -> str:
    """How a unit is recomputed, in a word or two."""
    known = {
        None: "activations kept",
        "host": "activations on the host",
        "full": "recomputed",
        "chunks": "the loss in chunks",
    }
    return known.get(of, f"recomputed: {of}")


def size(nbytes: float) -> str:
    """``1.23 GiB``."""
    for unit, scale in SIZES:
        if abs(nbytes) >= scale:
            return f"{_digits(nbytes / scale)} {unit}"
    return f"{nbytes:.0f} B"


def unit_of(nbytes: float) -> tuple[str, int]:
    """A suitable unit for a number of bytes: its name and its size in bytes."""
    return next(((name, scale) for name, scale in SIZES if nbytes >= scale), ("B", 1))


def count(number: float) -> str:
    """``1.23 M``."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= scale:
            return f"{_digits(number / scale)} {unit}"
    return f"{number:.0f}"


def difference(step_s: float, of_s: float) -> str:
    """``+65.6 s (+30%)``: how much longer a step takes than ``of_s`` seconds."""
    share = f" ({round(step_s / of_s - 1, 3) + 0.0:+.1%})" if of_s else ""
    return f"{'+' if step_s >= of_s else '-'}{duration(abs(step_s - of_s))}{share}"


def shards(param: int, grad: int, optim: int) -> str:
    """``params ÷2, grads ÷64, optimizer ÷64``: into how many shards each state is cut."""
    return f"params ÷{param}, grads ÷{grad}, optimizer ÷{optim}"


def relaxed(tier: RelaxedTier) -> str:
    """When groups exchange what, in a sentence."""
    parts = "all parameters" if tier.parts == 1 else f"one of {tier.parts} parts of the parameters"
    every = "every step" if tier.every == 1 else f"every {tier.every} steps"
    return (
        f"{tier.groups} groups over the {tier.tier} do not wait for each other: {RULES[tier.rule]}, {every} "
        f"{parts}, so each every {tier.policy.interval} steps, applied {tier.delay} later; a transfer takes "
        f"{duration(tier.transfer_s)}, {hidden(tier):.0%} of it hidden"
        + ("" if tier.wire == "exact" else f", values in {tier.wire}")
        + ("" if tier.copies == "device" else "; what is kept of the others lies on the host")
    )


def hidden(tier: RelaxedTier) -> float:
    """The share of a round's transfer that steps hide, as predicted."""
    return min(1.0, tier.delay * tier.busy_s / tier.transfer_s) if tier.transfer_s else 1.0


def cluster(sizes: Sequence[int], tier_names: Sequence[str], device: str) -> str:
    """``8 GPUs × 8 nodes``: devices of a group of the fastest tier, then groups of each slower one.

    A tier's name is that of the group that its links join.
    """
    of = [worker(device), *tier_names[:-1]]
    return " × ".join(
        f"{number} {name if number == 1 else _plural(name)}" for number, name in zip(sizes, of, strict=True)
    )


def _plural(name: str) -> str:
    return name + ("es" if name.endswith(("s", "sh", "ch", "x")) else "s")


def worker(device: str) -> str:
    """The word for a rank in texts: GPU where it has one."""
    return "GPU" if device == "cuda" else "rank"


def _digits(value: float) -> str:
    magnitude = abs(value)
    return f"{value:.0f}" if magnitude >= 100 else f"{value:.1f}" if magnitude >= 10 else f"{value:.2f}"
