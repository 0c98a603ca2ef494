"""Numbers as people read them: three digits, and the unit that suits."""

from __future__ import annotations

SIZES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def duration(seconds: float) -> str:
    """``1.23 ms``: three digits, in the unit that suits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds / 1e-6)} µs"


def size(nbytes: float) -> str:
    """``1.23 GiB``."""
    for unit, scale in SIZES:
        if abs(nbytes) >= scale:
            return f"{_digits(nbytes / scale)} {unit}"
    return f"{nbytes:.0f} B"


def unit_of(nbytes: float) -> tuple[str, int]:
    """The unit that suits a number of bytes, and its own bytes: for an axis."""
    return next(((name, scale) for name, scale in SIZES if nbytes >= scale), ("B", 1))


def count(number: float) -> str:
    """``1.23 M``."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= scale:
            return f"{_digits(number / scale)} {unit}"
    return f"{number:.0f}"


def _digits(value: float) -> str:
    magnitude = abs(value)
    return f"{value:.0f}" if magnitude >= 100 else f"{value:.1f}" if magnitude >= 10 else f"{value:.2f}"
