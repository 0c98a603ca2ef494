"""``python -m benchmarks.runtime_overhead``: the runtime under schemes that others have too, beside them.

What is compared is the runtime alone: the plan's levels are the peer's scheme, for all tensors. One rank is
compared with plain PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.measure import MICRO_BATCH, beside, profiled
from benchmarks.plans import given
from benchmarks.regimes import Regime
from hzplan.core.hierarchy import Levels
from hzplan.cost.model import CostModel
from hzplan.formats.base import write_text
from hzplan.formats.profile import Profile
from hzplan.peers import LOCAL
from hzplan.peers.paired import paired_ratio
from hzplan.solver.evaluate import evaluate, uniform
from hzplan.solver.search import paces
from hzplan.solver.solve import PREFETCH_DEPTHS, Request

ROUNDS = 12
NETWORK = "500mbit"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Case:
    """``levels``: of every tensor; ``most``: what our step may take of the peer's."""

    name: str
    world: int
    levels: Levels
    peer: str
    most: float


CASES = (
    Case("one rank, plain PyTorch", 1, Levels(0, 0, 0), LOCAL, 1.02),
    Case("full shard, FSDP2", 4, Levels(2, 2, 2), "fsdp2", 1.0),
    Case("replicas, DDP", 4, Levels(0, 0, 0), "ddp", 1.0),
    Case("shards in a node, HSDP", 4, Levels(1, 1, 1), "hsdp", 0.9),
)


@app.command()
def main(
    only: Annotated[str | None, typer.Option(help="Cases whose names contain this.")] = None,
    model: Annotated[str, typer.Option(help="deep or wide.")] = "wide",
    output: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    work: Annotated[Path, typer.Option(help="Profiles and plans.")] = Path("build/benchmarks"),
) -> None:
    """Measure the runtime's own cost. Nothing else should run meanwhile.

    Example: python -m benchmarks.runtime_overhead
    """
    found = []
    for case in CASES:
        if (only or "") in case.name:
            found.append(_measure(case, model, work))
            print(_line(found[-1]), flush=True)
    if output is not None:
        write_text(output, json.dumps(found, indent=1) + "\n")


def _measure(case: Case, model: str, work: Path) -> dict[str, Any]:
    tiers = "2x2" if case.world > 1 else "1"
    regime = Regime(model, tiers, NETWORK, 110, 1, "fp32")
    profile, plan = profiled(regime, work), work / "overhead.json"
    step_s = _write_plan(Profile.load(profile), profile, case, plan)
    peers = list(dict.fromkeys(["ddp", *([case.peer] if case.peer != LOCAL else [])]))
    compared = beside(regime, plan, peers, step_s, ROUNDS)
    entries = {entry["name"]: entry for entry in compared["contenders"]}
    return {"case": case.name, "peer": case.peer, "most": case.most, "control": compared["control"]} | {
        who: entries[name]["round_s"] for who, name in (("ours_s", "hzplan"), ("peer_s", case.peer))
    }


def _write_plan(profile: Profile, profile_path: Path, case: Case, plan: Path) -> float:
    """The case's levels at the pace that is predicted to be fastest; returns the predicted step."""
    model = CostModel(profile)
    global_batch = case.world * MICRO_BATCH
    fastest = min(
        (
            evaluate(
                model,
                uniform(profile, case.levels),
                model.schedule(**pace._asdict(), accumulation=1, clip=True),
                MICRO_BATCH,
            )
            for pace in paces(model, PREFETCH_DEPTHS)
        ),
        key=lambda found: found.step_s,
    )
    given(profile, profile_path, fastest, Request(1 << 40, global_batch)).save(plan)
    return fastest.step_s


def _line(found: Mapping[str, Any]) -> str:
    ratio, control = paired_ratio(found["ours_s"], found["peer_s"]), found["control"]
    margin = (control["high"] - control["low"]) / 2
    reached = ratio.high <= found["most"] + margin
    return (
        f"{found['case']}: {ratio.value:.3f} ({ratio.low:.3f}–{ratio.high:.3f}) of the peer's time, "
        f"control ±{margin:.3f}, asked at most {found['most']}: {'reached' if reached else 'missed'}"
    )


if __name__ == "__main__":
    app()
