"""``python -m benchmarks.muon_modelled``: plans of Muon beside AdamW's, and beside repeating, modelled."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.commands import write_section
from hzplan.core.hierarchy import Mesh
from hzplan.cost.memory import budget_bytes
from hzplan.formats.cluster import find_cluster
from hzplan.formats.profile import Profile
from hzplan.models.workload import load
from hzplan.profiler.analytic import analyse
from hzplan.solver.search import Request
from hzplan.solver.solve import Solved, solve

LENGTH = 4096
LIMIT_S = 40.0


@dataclass(frozen=True)
class Question:
    """A model on so many nodes of 8 H100, and the sequences of a step."""

    model: str
    nodes: int
    global_batch: int

    @property
    def name(self) -> str:
        """As results call it."""
        return f"{self.model.removeprefix('hf:')} on {8 * self.nodes}, {self.global_batch} sequences"


QUESTIONS = (
    Question("hf:qwen3-32b", 8, 512),
    Question("hf:qwen3-32b", 32, 512),
    Question("hf:qwen3-32b", 128, 1024),
    Question("hf:mixtral-8x7b", 8, 512),
    Question("hf:moonlight-16b-a3b", 8, 512),
    Question("hf:moonlight-16b-a3b", 32, 1024),
)
PUBLISHED = (
    "Published by others, end to end: Moonlight's distributed Muon 1–3% over AdamW (arXiv 2502.16982); "
    "DMuon 1.7–3.4% over AdamW on 16 nodes, 1.48–3.01 times as fast as gathering (arXiv 2606.27153 and its "
    "README); Canzona 1.57 times as fast as its baseline for Qwen3 up to 32B on 256 GPUs (arXiv 2602.06079); "
    "MatrixFSDP 1.37–2.15 times as fast as FSDP2 with gathering on up to 64 A100 (arXiv 2607.05895); "
    "Megatron-FSDP's Muon 1.5–2.7 times AdamW's step for 1B–8B (Megatron-LM pull request 4486). Their "
    "batches and links are not these."
)


def main(
    output: Annotated[Path, typer.Option(help="Results, JSON; what is there is not asked again.")] = Path(
        "build/muon-modelled.json"
    ),
    docs: Annotated[Path | None, typer.Option(help="Where to add the table, below what is there.")] = None,
) -> None:
    """Ask every question under AdamW, under Muon, and under Muon with every matrix gathered and repeated.

    Example: python -m benchmarks.muon_modelled --docs docs/muon.md
    """
    found: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    for question in QUESTIONS:
        if question.name not in found:
            found[question.name] = _asked(question)
            output.write_text(json.dumps(found, indent=1) + "\n")
        print(question.name, found[question.name], flush=True)
    if docs is not None:
        write_section(docs, TITLE, _table(found))


def _asked(question: Question) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, optimizer, pins in (
        ("adamw", "adamw", ()),
        ("muon", "muon", ()),
        ("repeated", "muon", ("*=*,*,*,repeated",)),
    ):
        profile = _profile(question, optimizer)
        budget = budget_bytes(profile.cluster, matrices=optimizer == "muon")
        request = Request(budget, question.global_batch, pins=pins, time_limit_s=LIMIT_S)
        outcome = solve(profile, request)
        if isinstance(outcome, Solved):
            ways = {levels.matrix for of in outcome.best.levels.values() for levels in of} - {""}
            found[name] = {"step_s": outcome.best.step_s, "ways": sorted(ways), "gap": outcome.gap}
    return found


def _profile(question: Question, optimizer: str) -> Profile:
    cluster, device = find_cluster("h100-8x400g")
    return analyse(
        *(load(question.model, seq_len=LENGTH), cluster, device),
        mesh=Mesh.of_tiers(8, question.nodes),
        micro_batches=(1, 2),
        dtype="bfloat16",
        optimizer=optimizer,
    )


TITLE = "## Modelled: H100"


def _table(found: dict[str, Any]) -> str:
    rows = []
    for name, of in found.items():
        cells = [name]
        base = of.get("adamw", {}).get("step_s")
        for way in ("adamw", "muon", "repeated"):
            if way not in of:
                cells.append("nothing fits")
                continue
            step, over = of[way]["step_s"], of[way]["step_s"] / base - 1 if base else None
            more = "" if way == "adamw" or over is None else f" ({over:+.1%})"
            cells.append(f"{step:.2f} s{more}")
        cells.append(", ".join(of.get("muon", {}).get("ways", [])))
        cells.append(f"{of['muon']['gap']:.1%}" if "muon" in of else "")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [
            TITLE,
            "",
            "By `python -m benchmarks.muon_modelled`: sequences of 4,096 tokens, bfloat16, nodes of 8 H100 "
            "on 400 Gbit/s; every step is that of the plan chosen within 40 s, and nobody measured one. "
            "*Repeated*: the best plan whose matrices are all gathered, and computed by every rank; *gap*: "
            "of Muon's plan, in any order of messages.",
            "",
            "| model on GPUs, batch | AdamW | Muon, planned | Muon, repeated | ways chosen | gap |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
            PUBLISHED,
            "",
        ]
    )


if __name__ == "__main__":
    typer.run(main)
