"""The certificate beside a plan: what its bounds follow from, for anybody to multiply out again.

A bound is the least over all paces. Under one pace the plans are split into leaves; in each leaf a sum of
rows that hold for every plan, times multipliers, leaves a number that no step is below (weak duality).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hzplan.formats.base import Document, Finite, Fraction, NonNegativeInt, PositiveInt, Seconds, Strict

SUFFIX = ".proof"


class Multipliers(Strict):
    """Multipliers of a leaf's rows; what is not named is 0.

    ``rows``: (row, ms per ms) of rows of the period: first that of all compute, then those of whole steps
    (``Network.capacities``), then the pace's ``walks``. ``memory``, ``host``: ms per MiB of the device's and
    the host's memory. ``buffers``: (buffer, unit, ms per MiB); ``events``: (buffer, event, ms per MiB);
    ``counts``: (group of like units, ms per recomputed unit).
    """

    rows: tuple[tuple[NonNegativeInt, Fraction], ...]
    memory: Fraction = 0.0
    host: Fraction = 0.0
    buffers: tuple[tuple[NonNegativeInt, str, Fraction], ...] = ()
    events: tuple[tuple[NonNegativeInt, NonNegativeInt, Fraction], ...] = ()
    counts: tuple[tuple[NonNegativeInt, Finite], ...] = ()


class Node(Strict):
    """A leaf (``multipliers``), or a split of the plans in two, whose parts follow, the lower one first.

    ``split``: (what, below, above): a shared buffer's MiB or, by indices behind those, how many of a group of
    like units are recomputed, is at most ``below`` or at least ``above``.
    """

    multipliers: Multipliers | None = None
    split: tuple[NonNegativeInt, Fraction, Fraction] | None = None


class PaceProof(Strict):
    """The proof under one micro-batch size and pace (see ``Plan``): ``bound_s``.

    ``in_order``: of messages in the plan's order, as far as this prefetch allows; else in any. ``walks``:
    cycles of the event graph, from node to predecessor, below 0 where that is in the step before.
    ``nodes``: the tree of splits, from its root, every node before its parts.
    """

    micro_batch: PositiveInt
    prefetch: PositiveInt
    gradient_buffers: PositiveInt
    message_bytes: PositiveInt | None = None
    matrix_units: PositiveInt | None = None
    in_order: bool
    bound_s: Seconds
    walks: tuple[tuple[int, ...], ...]
    nodes: tuple[Node, ...]


class Certificate(Document):
    """What a plan's bounds follow from.

    ``bound_s`` and ``in_order_bound_s``: what is certified. A plan's own may be higher, where HiGHS proved
    them by branching, which multiplications do not follow.
    """

    format: Literal["hzplan.certificate"] = "hzplan.certificate"
    version: Literal[1] = 1
    profile_sha256: str
    bound_s: Seconds
    in_order_bound_s: Seconds | None = None
    paces: tuple[PaceProof, ...]


def path_of(plan: Path) -> Path:
    """Where the certificate of a plan lies: beside the file, not beside a link to it."""
    return plan.resolve().with_suffix(SUFFIX)


def save(plan: Document, certificate: Certificate, path: Path) -> None:
    """Write a plan, and its certificate beside it; only the plan where ``path`` is a device or pipe."""
    if not path.exists() or path.is_file():
        certificate.save(path_of(path))
    plan.save(path)
