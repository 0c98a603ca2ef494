"""Collectives that do not finish: which ranks are to blame, said where it is noticed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple, Protocol

from hzplan.errors import StreamError, is_lost_peer, one_line
from hzplan.runtime.hang_report import absent, passed_on

GRACE = timedelta(milliseconds=200)
"""How long the others of an exchange have once one of them has not arrived."""


class Work(Protocol):
    """What torch.distributed and threads give for something under way."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Return when it is over; RuntimeError when it fails."""


class Transfer(NamedTuple):
    """A send or receive with one rank (``peer``, in the world), or a collective of a whole group (None).

    ``suspects``: of a collective, the ranks that may be why it does not finish, asked whether one is late
    (else one is lost).
    """

    work: Work | None
    peer: int | None = None
    suspects: Callable[[bool], Collection[int]] = lambda late: ()


class Unfinished(RuntimeError):
    """Part of an exchange did not finish: what with, as one phrase; ``__cause__`` is the backend's error.

    ``late``: because a rank did not arrive; ``ranks``: those to blame.
    """

    def __init__(self, message: str, *, late: bool, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.late, self.ranks = late, tuple(ranks)


def wait(transfers: Sequence[Transfer]) -> None:
    """Return when everything has arrived and gone. Raises Unfinished naming the ranks that it failed with."""
    began = time.monotonic()
    for index, transfer in enumerate(transfers):
        assert transfer.work is not None, "every rank of the group takes part"
        try:
            transfer.work.wait()
        except RuntimeError as error:
            after_s = time.monotonic() - began
            late = _is_late(error)
            missing = {transfer.peer, *transfer.suspects(late)}
            if late:  # then it is over in any case; else a wait that ends would break connections
                missing |= {other.peer for other in transfers[index + 1 :] if not _finishes(other)}
            named = frozenset(peer for peer in missing if peer is not None)
            if named and (late or is_lost_peer(error)):
                late, named = passed_on(late, named)
            to_blame = sorted(named)
            raise Unfinished(_phrase(error, late, to_blame, after_s), late=late, ranks=to_blame) from error


def _finishes(transfer: Transfer) -> bool:
    assert transfer.work is not None
    with suppress(RuntimeError):
        transfer.work.wait(GRACE)
        return True
    return False


def _phrase(error: RuntimeError, late: bool, missing: Sequence[int], after_s: float) -> str:
    if not missing:
        return f"it did not finish within {after_s:.0f} s" if late else one_line(error)
    who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    if late:
        return f"{who} did not arrive within {after_s:.0f} s"
    return f"the connection to {who} broke" if is_lost_peer(error) else f"with {who}: {one_line(error)}"


def _is_late(error: BaseException) -> bool:
    """Whether a backend gave up waiting. (gloo then closes all connections, of which others complain.)"""
    return "timed out" in str(error).lower()


def _missed(what: str, route: Callable[[Sequence[int]], str]) -> str:
    """A collective of all ranks timed out, which does not say for whom."""
    ranks = absent(what)
    listed = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    who = f"{listed}{route(ranks)}" if ranks else "other ranks"
    return f"{who} did not arrive in time"


@contextmanager
def named(what: str, route: Callable[[Sequence[int]], str] = lambda ranks: "") -> Iterator[None]:
    """Errors of the block as StreamError: what was going on, and why it failed.

    ``route``: names the network tiers towards ranks, for messages.
    """
    try:
        yield
    except Exception as error:
        cause = error.__cause__ or error if isinstance(error, Unfinished) else error
        lost, late = is_lost_peer(cause), _is_late(cause)
        if isinstance(error, Unfinished):
            way = route(error.ranks) if error.ranks else ""
            why, late = f"{error}{way}", error.late
        elif lost:
            why = _missed(what, route) if late else "the connection to another rank broke"
        else:
            why = one_line(error)
        raise StreamError(f"{what}: {why}", lost_peer=lost and not late) from error
