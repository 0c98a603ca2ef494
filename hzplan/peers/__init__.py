"""What a user would train with instead, on the same model, data and steps: to be measured beside a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hzplan.errors import UserError
from hzplan.formats.plan import Plan

if TYPE_CHECKING:
    from hzplan.peers.contender import Contender, Setting

PEERS = (
    *("ddp", "zero1", "fsdp2", "fsdp2-keep", "fsdp2-offload", "hsdp", "tp-dp", "deepspeed1", "deepspeed3"),
    "megatron-fsdp",
    *(
        "owners",
        "owners-size",
        "owners-work",
        "pytorch-optimizer",
        "ddp-bf16",
        "fsdp2-bf16",
        "fsdp2-keep-bf16",
        "hsdp-bf16",
    ),
)
"""Other systems that ``hzplan run --against`` knows."""

SETTINGS: Mapping[str, str] = {
    **dict.fromkeys(("ddp", "ddp-bf16", "zero1", "tp-dp"), "buckets"),
    **dict.fromkeys(("fsdp2", "fsdp2-keep", "fsdp2-offload", "hsdp"), "ahead"),
    **dict.fromkeys(("fsdp2-bf16", "fsdp2-keep-bf16", "hsdp-bf16"), "ahead"),
}
"""What the number after ``@`` sets, as in ``ddp@3``: into how many buckets gradients are cut, or how many
blocks are gathered ahead."""

POORER = ("one-stream", "no-threads")
"""The plan again, its runtime with one background thread for everything, and with none."""

OURS = "hzplan"
CONTROL = "ddp again"
OURS_AGAIN = "hzplan again"
"""The control where there is no room for replicas."""
LOCAL = "alone"

REPLICA_BYTES = 16
"""Of a parameter in a replica: float32 weights, gradients and two moments."""


def check_peers(text: str, plan: Plan) -> dict[str, Plan | None]:
    """The names in ``ddp,fsdp2,other.json``, each once, and the plans that some of them are.

    Raises UserError for a name that is not known, and for a plan that trains something else than ``plan``.
    """
    known = ",".join([*PEERS, *POORER])
    found: dict[str, Plan | None] = {}
    for name in dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))):
        if name.endswith(".json"):
            found[_stem(name, found)] = _same_training(Path(name), plan)
        elif name in PEERS or name in POORER:
            found[name] = None
        else:
            base, at, number = name.partition("@")
            if not (
                at and base in SETTINGS and number.isdecimal() and (int(number) or SETTINGS[base] == "ahead")
            ):
                raise UserError(f"--against {name}: not known; use {known}, or a plan's file")
            found[name] = None
    if not found:
        raise UserError(f"--against needs names; use {known}, or a plan's file")
    return found


def _stem(name: str, taken: Iterable[str]) -> str:
    stem = Path(name).stem
    return name if stem in (*taken, *PEERS, *POORER, OURS, OURS_AGAIN, CONTROL, LOCAL) else stem


def _same_training(path: Path, plan: Plan) -> Plan:
    other = Plan.load(path)
    for field in ("model", "batch", "optimizer", "clip"):
        if getattr(other, field) != getattr(plan, field):
            raise UserError(f"{path}: field {field} differs from the plan's; only equal training is compared")
    if other.mesh.world != plan.mesh.world:
        raise UserError(f"{path}: is for {other.mesh.world} ranks, the plan for {plan.mesh.world}")
    return other


def makers(setting: Setting, peers: Mapping[str, Plan | None]) -> dict[str, Callable[[], Contender]]:
    """The plan, the peers, DDP twice as a control, and a run without communication; see ``check_peers``.

    All live on a device at once. Where replicas have no room there, the plan itself is run twice instead.
    """
    from hzplan.peers.ddp import DDP, Local, Zero1
    from hzplan.peers.deepspeed import DeepSpeed
    from hzplan.peers.distributed_muon import DistributedMuon
    from hzplan.peers.fsdp2 import FSDP2, HSDP
    from hzplan.peers.hzplan import Hzplan
    from hzplan.peers.megatron_fsdp import MegatronFSDP
    from hzplan.peers.owners import OWNERS, OwnersMuon
    from hzplan.peers.tensor_parallel import TensorParallel
    from hzplan.runtime.executor import Streams

    # Whatever the plan's gradients travel in: DDP's hook, FSDP2's policy.
    in_bf16 = replace(setting, plan=setting.plan.model_copy(update={"reduce_dtype": "bfloat16"}))
    known: dict[str, Callable[..., Contender]] = {
        "ddp-bf16": partial(DDP, in_bf16, name="ddp-bf16"),
        "fsdp2-bf16": partial(FSDP2, in_bf16, name="fsdp2-bf16"),
        "fsdp2-keep-bf16": partial(FSDP2, in_bf16, name="fsdp2-keep-bf16", keep=True),
        "hsdp-bf16": partial(HSDP, in_bf16, name="hsdp-bf16"),
        "ddp": partial(DDP, setting),
        "zero1": partial(Zero1, setting),
        "fsdp2": partial(FSDP2, setting),
        "fsdp2-keep": partial(FSDP2, setting, name="fsdp2-keep", keep=True),
        "fsdp2-offload": partial(FSDP2, setting, name="fsdp2-offload", offload=True),
        "hsdp": partial(HSDP, setting),
        "tp-dp": partial(TensorParallel, setting),
        "deepspeed1": partial(DeepSpeed, setting, 1),
        "deepspeed3": partial(DeepSpeed, setting, 3),
        "megatron-fsdp": partial(MegatronFSDP, setting),
        **{name: partial(OwnersMuon, setting, name=name) for name in OWNERS},
        "pytorch-optimizer": partial(DistributedMuon, setting),
        "one-stream": partial(Hzplan, setting, name="one-stream", streams=Streams.ONE),
        "no-threads": partial(Hzplan, setting, name="no-threads", streams=Streams.NONE),
    }

    def known_as(name: str) -> Callable[[], Contender]:
        base, at, number = name.partition("@")
        return partial(known[base], name=name, **{SETTINGS[base]: int(number)}) if at else known[name]

    found: dict[str, Callable[[], Contender]] = {
        OURS: partial(Hzplan, setting),
        "ddp": known["ddp"],
        CONTROL: partial(DDP, setting, name=CONTROL),
        **{
            name: partial(Hzplan, setting, name=name, plan=plan) if plan else known_as(name)
            for name, plan in peers.items()
        },
        LOCAL: partial(Local, setting),
    }
    crowded = no_room(setting.plan, len(peers), _device_bytes(setting))
    if crowded is None:
        return found
    again: dict[str, Callable[[], Contender]] = {
        OURS: found[OURS],
        OURS_AGAIN: partial(Hzplan, setting, name=OURS_AGAIN),
    }
    return again | found | dict.fromkeys(("ddp", CONTROL, LOCAL), partial(_not_here, crowded))


def no_room(plan: Plan, peers: int, device_bytes: int | None) -> str | None:
    """Why three replicas, the plan and ``peers`` like it do not fit a device together; None where they do, or
    where nobody knows (``device_bytes`` is None)."""
    replicas = 3 * REPLICA_BYTES * plan.model.parameters
    wanted = replicas + (1 + peers) * plan.predicted.peak_memory_bytes
    if device_bytes is None or wanted <= device_bytes:
        return None
    return (
        f"three replicas and {1 + peers} others need {wanted / 2**30:,.0f} GiB together, "
        f"the device has {device_bytes / 2**30:,.0f}"
    )


def _device_bytes(setting: Setting) -> int | None:
    """Of the smallest GPU, the same on all ranks; a host's memory is not asked."""
    from hzplan.profiler.session.machine import rank_memory_bytes
    from hzplan.profiler.session.ranks import Ranks

    ranks = Ranks.here()
    return min(ranks.gather(rank_memory_bytes(ranks))) if setting.device.type == "cuda" else None


def _not_here(reason: str) -> Contender:
    from hzplan.peers.contender import NotHere

    raise NotHere(reason)
