"""The messages between the front and the namespaces' first process: JSON objects over descriptors."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from hzplan.emulate.cluster import Cluster


@dataclass(frozen=True)
class Spec:
    """A job to run; the descriptors are the world's.

    ``control``: bytes that are signal numbers for the ranks; its end means that the front is gone.
    ``report``: for events, one line each. ``stdout``, ``stderr``: for rank 0's output.
    """

    tiers: tuple[int, ...]
    rates: tuple[int | None, ...]
    slow: tuple[tuple[int, int], ...]
    cuts: tuple[tuple[int, float, float | None], ...]
    executable: str
    command: tuple[str, ...]
    ip: str
    tc: str
    logs: str
    verify: bool
    stdout: int
    stderr: int
    control: int = -1
    report: int = -1

    @property
    def cluster(self) -> Cluster:
        """The one to emulate."""
        return Cluster(self.tiers, self.rates, self.slow, self.cuts)

    def to_text(self) -> str:
        """For ``from_text``."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Spec:
        """What ``to_text`` wrote."""
        fields = json.loads(text)
        for name in ("tiers", "rates", "command"):
            fields[name] = tuple(fields[name])
        fields["slow"] = tuple((node, rate) for node, rate in fields["slow"])
        fields["cuts"] = tuple((node, start, seconds) for node, start, seconds in fields["cuts"])
        return cls(**fields)

    def tell(self, event: str, **what: Any) -> None:
        """Report to the front."""
        os.write(self.report, json.dumps({"event": event} | what).encode() + b"\n")


def log_name(node: int, rank: int) -> str:
    """The file in the folder of logs that has all that a rank said."""
    return f"node{node}-rank{rank}.log"
