"""What a user would train with instead, on the same model, data and steps: to be measured beside a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from hzplan.errors import UserError

if TYPE_CHECKING:
    from hzplan.peers.contender import Contender, Setting

PEERS = ("ddp", "zero1", "fsdp2", "fsdp2-keep", "hsdp", "tp-dp", "deepspeed1", "deepspeed3")
"""Whom ``hzplan run --against`` knows."""

OURS = "hzplan"
CONTROL = "ddp again"
LOCAL = "no communication"


def check_peers(text: str) -> tuple[str, ...]:
    """The names in ``ddp,fsdp2``, each once; UserError for one that is not known."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in PEERS:
            raise UserError(f"--against {name}: not known; use {','.join(PEERS)}")
    if not names:
        raise UserError(f"--against needs names; use {','.join(PEERS)}")
    return names


def makers(setting: Setting, peers: Iterable[str]) -> dict[str, Callable[[], Contender]]:
    """The plan, the peers, DDP twice as a control, and a run without communication."""
    from hzplan.peers.ddp import DDP, Local, Zero1
    from hzplan.peers.deepspeed import DeepSpeed
    from hzplan.peers.fsdp2 import FSDP2, HSDP
    from hzplan.peers.hzplan import Hzplan
    from hzplan.peers.tensor_parallel import TensorParallel

    known: dict[str, Callable[[], Contender]] = {
        "ddp": partial(DDP, setting),
        "zero1": partial(Zero1, setting),
        "fsdp2": partial(FSDP2, setting),
        "fsdp2-keep": partial(FSDP2, setting, name="fsdp2-keep", keep=True),
        "hsdp": partial(HSDP, setting),
        "tp-dp": partial(TensorParallel, setting),
        "deepspeed1": partial(DeepSpeed, setting, 1),
        "deepspeed3": partial(DeepSpeed, setting, 3),
    }
    return {
        OURS: partial(Hzplan, setting),
        "ddp": known["ddp"],
        CONTROL: partial(DDP, setting, name=CONTROL),
        **{name: known[name] for name in peers},
        LOCAL: partial(Local, setting),
    }
