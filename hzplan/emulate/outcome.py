"""Exit states of a job's ranks, and the rank that failed first. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

AT_ONCE_S = 0.1


@dataclass(frozen=True)
class Ended:
    """How a rank ended: ``code`` as subprocess has it, negative for a signal; ``at``: seconds of a clock."""

    rank: int
    node: int
    code: int
    at: float
    by_us: bool
    """Whether we had begun to end it."""

    @property
    def exit_code(self) -> int:
        """As a shell says it: 128 and the signal's number."""
        return self.code if self.code >= 0 else 128 - self.code

    def describe(self) -> str:
        """One line."""
        if self.code >= 0:
            how = f"ended with exit code {self.code}"
        else:
            how = f"was ended by {_signal_name(-self.code)}"
            if -self.code == signal.SIGKILL and not self.by_us:
                how += "; the machine may be out of memory"
        return f"rank {self.rank} on node {self.node} {how}"


def culprit(ended: Sequence[Ended]) -> Ended | None:
    """The rank whose exit code is the job's; None where all did well.

    That is one that failed on its own account: not one that we ended, and not one that failed later than the
    first, because its peers were gone. Of those that failed with the first, the one with the largest code.
    """
    failed = [end for end in ended if end.code != 0 and not end.by_us]
    if not failed:
        failed = [end for end in ended if end.code != 0]
    if not failed:
        return None
    first = min(end.at for end in failed)
    return max(
        (end for end in failed if end.at <= first + AT_ONCE_S), key=lambda end: (end.exit_code, -end.rank)
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
