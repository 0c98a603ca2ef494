"""What is told of the cuts between turns, to read something there."""

from __future__ import annotations

from typing import Protocol


class Probe(Protocol):
    """Is told where the turns of a forward and backward begin."""

    def cut(self) -> None:
        """A turn begins, and the one before it ends."""

    def end(self) -> None:
        """The backward is over."""


class Silence:
    """Reads nothing."""

    def cut(self) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""
