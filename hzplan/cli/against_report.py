"""The plan beside its peers: a table, or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from hzplan.cli import console
from hzplan.peers import CONTROL, LOCAL, OURS, OURS_AGAIN

LEAST_SHOWN_S = 1e-4
"""Processor time that is worth a word."""

if TYPE_CHECKING:
    from hzplan.peers.compare import ComparedPeer, Comparison
    from hzplan.peers.contender import Setting


def show(setting: Setting, comparison: Comparison, *, as_json: bool) -> None:
    """Print it."""
    found = summary(setting, comparison)
    if as_json:
        print(json.dumps(found, allow_nan=False))
    else:
        _print(found)


def summary(setting: Setting, comparison: Comparison) -> dict[str, Any]:
    """All figures; ``ratio``: how many times as long as the plan's a contender's step is, paired by round."""
    free = comparison.entries[LOCAL].step_s if LOCAL in comparison.entries else None
    both = [(CONTROL, "ddp"), (OURS_AGAIN, OURS)]
    control = next((pair for pair in both if comparison.entries.keys() >= {*pair}), None)
    return {
        "model": setting.plan.model.name,
        "dtype": setting.plan.model.dtype,
        "mesh": setting.plan.cluster.mesh,
        "budget_bytes": setting.plan.source.memory_budget_bytes,
        "tokens_per_step": setting.tokens,
        "accumulation": setting.accumulation,
        "rounds": comparison.rounds,
        "steps_per_round": comparison.steps_per_round,
        "control": None if control is None else _ratio(comparison, *control),
        "contenders": [_contender(setting, comparison, entry, free) for entry in comparison.entries.values()],
        "absent": dict(comparison.absent),
    }


def _contender(
    setting: Setting, comparison: Comparison, entry: ComparedPeer, free: float | None
) -> dict[str, Any]:
    from hzplan.peers.compare import AGREE

    error = entry.loss_error
    dtypes = {setting.plan.model.dtype, setting.plan.reduce_dtype}
    if setting.plan.wire is not None or entry.name.partition("@")[0].endswith("-bf16"):
        dtypes.add("bfloat16")  # which rounds about as much
    return {
        "name": entry.name,
        "step_s": {"median": entry.step_s, "min": entry.spread[0], "max": entry.spread[1]},
        "tokens_per_s": setting.tokens / entry.step_s,
        "ratio": _ratio(comparison, entry.name, OURS),
        "peak_memory_bytes": entry.peak_memory_bytes,
        "fits": entry.fits(setting.plan.source.memory_budget_bytes),
        "sent_bytes": {"in_node": entry.sent_bytes[0], "network": entry.sent_bytes[1]},
        "exposed_comm_s": None if free is None else max(0.0, entry.step_s - free),
        "waits_s": dict(entry.waits_s),
        "processor_s": dict(entry.processor_s),
        "loss_error": error if error is None or isfinite(error) else None,
        "losses_agree": error is None or error <= max(AGREE[dtype] for dtype in dtypes),
        "round_s": list(entry.round_s),
    }


def _ratio(comparison: Comparison, slower: str, faster: str) -> dict[str, float]:
    ratio = comparison.ratio(slower, faster)
    return {"value": ratio.value, "low": ratio.low, "high": ratio.high}


def _print(found: dict[str, Any]) -> None:
    table = console.table(
        f"{found['model']} on {found['mesh']}, {found['rounds']} rounds of {found['steps_per_round']} steps",
        *("", "step", "ratio", "95%", "memory", "sent", "waits"),
    )
    for entry in found["contenders"]:
        ratio, sent = entry["ratio"], entry["sent_bytes"]
        marks = ("" if entry["losses_agree"] else " ≠") + ("" if entry["fits"] else " !")
        table.add_row(
            entry["name"] + marks,
            console.duration(entry["step_s"]["median"]),
            f"{ratio['value']:.2f}",
            f"{ratio['low']:.2f} … {ratio['high']:.2f}",
            console.size(entry["peak_memory_bytes"]),
            console.size(sent["network"] or sent["in_node"]),
            console.duration(entry["exposed_comm_s"])
            if entry["name"] != LOCAL and entry["exposed_comm_s"] is not None
            else "",
        )
    out = console.stdout()
    out.print(table)
    control, names = found["control"], {entry["name"] for entry in found["contenders"]}
    who = "DDP" if CONTROL in names else "the plan"
    itself = " It has no control: nobody fits twice."
    if control:
        span = f"{control['low']:.2f} … {control['high']:.2f}"
        itself = f" Its control, {who} against itself: {control['value']:.2f} ({span})."
    out.print(f"ratio: step time over the plan's, paired by round.{itself}")
    waits = " waits: the step less that of ranks training alone." if LOCAL in names else ""
    out.print(f"sent: by the busiest node in a step.{waits} {found['tokens_per_step']:,} tokens a step.")
    for line in _processors(found["contenders"]):
        out.print(line)
    if not all(entry["fits"] for entry in found["contenders"]):
        out.print(f"! needs more than the plan's budget of {console.size(found['budget_bytes'])} per rank.")
    if not all(entry["losses_agree"] for entry in found["contenders"]):
        out.print("≠ losses differ from the plan's: not the same training.")
    for name, reason in found["absent"].items():
        out.print(f"{name} took no part: {reason}.")


def _processors(contenders: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What the plan and its fastest peer ask of a rank's processors in a step."""
    peers = [one for one in contenders if one["name"] not in (OURS, OURS_AGAIN, CONTROL, LOCAL)]
    fastest = min(peers, key=lambda one: float(one["step_s"]["median"]), default=None)
    asked = [one for one in contenders if one["name"] == OURS or one is fastest]
    if all(one["processor_s"] for one in asked):
        yield "processors, of a rank in a step: " + "; ".join(map(_processor, asked)) + "."


def _processor(contender: dict[str, Any]) -> str:
    spent = contender["processor_s"]
    parts = ", ".join(f"{what} {console.duration(s)}" for what, s in spent.items() if s >= LEAST_SHOWN_S)
    return f"{contender['name']} {console.duration(sum(spent.values()))} ({parts})"
