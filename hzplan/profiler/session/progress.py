"""Progress of a measurement, as one fraction over parts of different length."""

from __future__ import annotations

from collections.abc import Callable


class Progress:
    """Turns progress inside parts, of about known weights, into one fraction from 0 to 1."""

    def __init__(self, report: Callable[[str, float], None], total: float) -> None:
        """``total``: the sum of the weights of all parts to come."""
        self._report, self._total = report, total
        self._done = self._weight = 0.0
        self._text = ""

    def part(self, text: str, weight: float) -> None:
        """The part before has ended, this one begins."""
        self._done += self._weight
        self._text, self._weight = text, weight
        self.at(0.0)

    def at(self, fraction: float) -> None:
        """How much of the current part is done."""
        done = self._done + self._weight * min(fraction, 1.0)
        self._report(self._text, min(done / self._total, 1.0))

    def finish(self, text: str) -> None:
        """Everything is done."""
        self._report(text, 1.0)
