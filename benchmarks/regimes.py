"""The regimes: every pair of values of the factors occurs in one of them; and some that chance has drawn."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from pathlib import Path

FILE = Path(__file__).parent / "regimes.json"
DRAWN_FILE = FILE.with_name("regimes_drawn.json")

FACTORS: Mapping[str, tuple[str | int, ...]] = {
    "model": ("deep", "wide"),
    "tiers": ("2x2", "1x4", "2x2x2"),
    "network": ("100mbit", "500mbit", "2gbit"),
    "budget_percent": (40, 70, 110),
    "accumulation": (1, 4),
    "dtype": ("fp32", "bf16"),
}
COUNT = 24
DRAWN_FACTORS: Mapping[str, tuple[str | int, ...]] = {
    "model": ("deep", "wide", "tall", "llama"),
    "tiers": ("4", "2x2", "1x4", "2x2x2"),
    "network": ("200mbit", "400mbit", "1gbit", "4gbit"),
    "budget_percent": (45, 60, 85, 105, 130),
    "accumulation": (1, 2, 3),
    "dtype": ("fp32", "bf16"),
}
"""Other values, for regimes that nobody has chosen."""
DRAWN = 8
ONE_NODE = "none"
"""The network of a single node."""


class NoResult(Exception):
    """A regime cannot be measured; the message is why, in one line."""


@dataclass(frozen=True)
class Regime:
    """One setting. ``network``: the slowest tier's rate; a middle tier has four times that, a node's inside
    is not limited. ``budget_percent``: of DDP's measured peak. ``quick``: part of ``make bench``."""

    model: str
    tiers: str
    network: str
    budget_percent: int
    accumulation: int
    dtype: str
    quick: bool = False

    @property
    def name(self) -> str:
        """As results and tables call it."""
        budget = f"{self.budget_percent}%"
        return f"{self.model}-{self.tiers}-{self.network}-{budget}-x{self.accumulation}-{self.dtype}"

    @property
    def world(self) -> int:
        """Ranks, all on one machine."""
        return prod(int(size) for size in self.tiers.split("x"))

    @property
    def rates(self) -> str:
        """As ``hzplan emulate`` takes them."""
        if "x" not in self.tiers:
            return ONE_NODE
        middle = [f"{4 * bits_per_s(self.network) // 10**6}mbit"] * (self.tiers.count("x") - 1)
        return ",".join(["none", *middle, self.network])

    @property
    def mesh(self) -> str:
        """As ``hzplan profile`` takes it; four of a kind are split in two, for finer choices."""
        return "|".join("2,2" if size == "4" else size for size in self.tiers.split("x"))


def bits_per_s(rate: str) -> int:
    """Of ``500mbit``; of no network, as much as no memory moves."""
    if rate == ONE_NODE:
        return 10**12
    units = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
    return int(rate[:-4]) * units[rate[-4:]]


def load() -> tuple[Regime, ...]:
    """The regimes, as they were written down."""
    return _read(FILE)


def load_drawn() -> tuple[Regime, ...]:
    """Those that chance has drawn, likewise."""
    return _read(DRAWN_FILE)


def _read(path: Path) -> tuple[Regime, ...]:
    return tuple(Regime(**entry) for entry in json.loads(path.read_text(encoding="utf-8")))


def draw_more(seed: int = 20261126) -> list[Regime]:
    """Regimes of other values, each as likely as any other, and no two alike."""
    chance = random.Random(seed)
    found: dict[Regime, None] = {}
    while len(found) < DRAWN:
        picked = {name: chance.choice(values) for name, values in DRAWN_FACTORS.items()}
        if picked["tiers"] == "4":
            picked["network"] = ONE_NODE
        found[Regime(**picked)] = None  # type: ignore[arg-type]
    return list(found)


def uncovered(regimes: Sequence[Regime]) -> set[tuple[tuple[str, object], ...]]:
    """The pairs of values that occur in no regime."""
    return set(_tuples(2)) - {pair for regime in regimes for pair in _of(regime, 2)}


def draw(seed: int = 20261121) -> list[Regime]:
    """Regimes that cover every pair, and then as many triples of values as greed finds."""
    chance = random.Random(seed)
    everything = [Regime(*values) for values in itertools.product(*FACTORS.values())]  # type: ignore[arg-type]
    left = {size: set(_tuples(size)) for size in (2, 3)}
    found: list[Regime] = []
    for _ in range(COUNT):
        chance.shuffle(everything)
        best = max(everything, key=lambda r: [len(left[size] & set(_of(r, size))) for size in (2, 3)])
        everything.remove(best)
        found.append(best)
        for size in left:
            left[size] -= set(_of(best, size))
    return sorted(found, key=lambda r: [FACTORS[f].index(getattr(r, f)) for f in FACTORS])


def write(regimes: Sequence[Regime], path: Path = FILE) -> None:
    """Write a file, a regime per line."""
    lines = ",\n".join("  " + json.dumps(asdict(regime)) for regime in regimes)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _tuples(size: int) -> Iterator[tuple[tuple[str, object], ...]]:
    for names in itertools.combinations(FACTORS, size):
        for values in itertools.product(*(FACTORS[name] for name in names)):
            yield tuple(zip(names, values, strict=True))


def _of(regime: Regime, size: int) -> Iterator[tuple[tuple[str, object], ...]]:
    names = [field.name for field in fields(regime) if field.name in FACTORS]
    for chosen in itertools.combinations(names, size):
        yield tuple((name, getattr(regime, name)) for name in chosen)
