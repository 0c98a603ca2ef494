"""Where groups meet: a store of torch's that all of them reach, and this group's number among them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from hzplan.errors import UserError
from hzplan.runtime.relaxed.sync import Groups

GROUP, MEET = "HZPLAN_GROUP", "HZPLAN_MEET"
PATIENCE = "HZPLAN_PATIENCE"
CONNECT_S = 10.0
"""How long a connection to the store may take."""


def here(groups: int, weight: float, transfer_s: float = 0.0, env: Mapping[str, str] = os.environ) -> Groups:
    """What the environment says: HZPLAN_GROUP, this group's number from 0 on; HZPLAN_MEET, host and port of
    ``hzplan meet``; HZPLAN_PATIENCE, seconds that a result which is due is waited for (120).

    UserError where it says nothing, or nothing that makes sense.
    """
    how = f"start each of the {groups} with hzplan run --group 0 (1, …) --meet HOST:PORT, after hzplan meet"
    if GROUP not in env or MEET not in env:
        raise UserError(f"under this plan {groups} groups train without waiting for each other; {how}")
    group, (where, _, prefix) = env[GROUP], env[MEET].partition("/")
    host, _, port = where.rpartition(":")
    if not group.isdecimal() or int(group) >= groups:
        raise UserError(f"--group {group}: the plan has groups 0 to {groups - 1}")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(f"--meet {env[MEET]}: write HOST:PORT, as hzplan meet prints it")
    try:
        patience_s = float(env.get(PATIENCE, "120"))
    except ValueError:
        patience_s = 0.0
    if not 1 <= patience_s <= 1e6:
        raise UserError(f"--patience {env[PATIENCE]}: seconds, from 1 on")
    return Groups(int(group), partial(connected, host, int(port), prefix), weight, patience_s, transfer_s)


def connected(host: str, port: int, prefix: str = "") -> Store:
    """A connection of its own to the store; RuntimeError where nobody answers."""
    timeout = timedelta(seconds=CONNECT_S)
    store = dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)  # type: ignore[attr-defined]
    return PrefixStore(prefix, store)
