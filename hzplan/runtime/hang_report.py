"""Hang attribution: which rank a job waits for in the end.

In a ring, or over several stages, the rank that one waits for is often itself waiting. A rank that gives up
writes into the job's store whom it waited for; whoever is blamed and has written nothing is to blame.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

PATIENCE_S = 2.0
"""Seconds that other ranks have to write: they gave up at about the same time, or not at all."""
POLL_S = 0.05

Blame = tuple[bool, frozenset[int]]
"""Whether ranks are late (else lost), and their numbers."""


def passed_on(late: bool, missing: Collection[int]) -> Blame:
    """Write into the store whom this rank waited for, and follow the others' entries to the cause.

    Without a job's store, or where all blame each other, it is those that were given.
    """
    own = late, frozenset(missing)
    found = [own]
    # The store may be out of reach, as the ranks are that do not answer, and has a patience of its own.
    asking = threading.Thread(target=_ask, args=(own, found), name="hzplan hang report", daemon=True)
    asking.start()
    asking.join(PATIENCE_S + 1.0)
    return found[0]


def _ask(own: Blame, found: list[Blame]) -> None:
    """Replace ``found[0]`` by the blame that the store's entries lead to, if it can be read."""
    late, missing = own
    try:
        store = distributed_c10d._get_default_store()
        store.set(_key(dist.get_rank()), f"{'late' if late else 'lost'} {','.join(map(str, missing))}")

        def read(rank: int) -> Blame | None:
            if not store.check([_key(rank)]):
                return None
            kind, _, ranks = store.get(_key(rank)).decode().partition(" ")
            return kind == "late", frozenset(int(other) for other in ranks.split(",") if other)

        found[0] = follow(own, dist.get_rank(), read, time.monotonic() + PATIENCE_S)
    except (RuntimeError, ValueError):  # it went with the rank that held it
        return


def follow(own: Blame, me: int, read: Callable[[int], Blame | None], until: float) -> Blame:
    """From rank to rank, to those who blame nobody by a time (monotonic seconds).

    ``read``: what a rank has written, None while it has not.
    """
    silent = dict.fromkeys(own[1], own[0])  # by rank: whether it is said to be late
    seen = {me}
    while True:
        for rank in list(silent):
            if (found := read(rank)) is not None:
                del silent[rank]
                seen.add(rank)
                silent |= {other: found[0] for other in found[1] if other not in seen}
        if not silent or time.monotonic() >= until:
            break
        time.sleep(POLL_S)
    if not silent:
        return own
    late = [rank for rank, is_late in silent.items() if is_late]
    return (True, frozenset(late)) if late else (False, frozenset(silent))


def _key(rank: int) -> str:
    return f"hzplan/waits/{rank}"


MOST_ASKED = 256
"""Largest world whose ranks are asked for one by one."""


def meet(what: str, place: int, size: int, timeout: timedelta) -> list[int]:
    """Return when all ranks that train together have come here for ``what``, or those who have not in time.

    In the job's store, not in a collective, which another one of a rank that does not come could be taken
    for. ``place``: this rank's, of ``size``. The store keeps a number for each rank and ``what``, however
    often they meet: nobody comes again before all have come.
    """
    store = distributed_c10d._get_default_store()
    key = f"hzplan/meet/{what}"
    arrived = store.add(key, 1)
    times = -(-arrived // size)
    store.set(f"{key}/{place}", str(times))
    if arrived == times * size:
        store.set(f"{key}/all/{times}", "")
        if times > 1:
            store.delete_key(f"{key}/all/{times - 1}")
    try:
        store.wait([f"{key}/all/{times}"], timeout)
    except RuntimeError:  # torch's errors of a store are such

        def has_come(rank: int) -> bool:
            own = f"{key}/{rank}"
            return bool(store.check([own])) and int(store.get(own)) >= times

        return [rank for rank in range(size) if not has_come(rank)]
    return []


def absent(what: str) -> list[int]:
    """Ranks that do not report either that a collective of all ranks (``what``) timed out.

    Empty where nobody can be asked: without a store in reach, or of too many ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() > MOST_ASKED:
        return []
    found: list[int] = []
    asking = threading.Thread(target=_ask_all, args=(what, found), name="hzplan hang report", daemon=True)
    asking.start()
    asking.join(PATIENCE_S + 1.0)
    return found


def _ask_all(what: str, found: list[int]) -> None:
    """Add to ``found`` the ranks without an entry once the others have had time to write."""
    try:
        store = distributed_c10d._get_default_store()
        store.set(f"hzplan/missed/{what}/{dist.get_rank()}", "")
        time.sleep(PATIENCE_S)
        everyone = range(dist.get_world_size())
        silent = [rank for rank in everyone if not store.check([f"hzplan/missed/{what}/{rank}"])]
    except (RuntimeError, ValueError):
        return
    found += silent if len(silent) < len(everyone) - 1 or len(everyone) == 2 else []
