"""``python -m benchmarks.relaxed_modelled``: what not waiting is worth between modelled sites."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.commands import write_section
from hzplan.core.hierarchy import Mesh
from hzplan.cost.memory import budget_bytes
from hzplan.formats.cluster import ClusterModel, find_cluster
from hzplan.formats.profile import Profile
from hzplan.models.workload import load
from hzplan.profiler.analytic import analyse
from hzplan.solver.relaxed import Allowed, Relaxed, relax
from hzplan.solver.search import Request
from hzplan.solver.solve import solve

MODEL, LENGTH, LIMIT_S, SEQUENCES = "hf:llama3-8b", 2048, 40.0, 16
CLUSTER = "a100-8x200g"
SITES = ((2, 4), (4, 8))
"""Sites, and GPUs of each."""
SITE_BYTES_PER_S, LATENCY_S = 1e9 / 8, 0.01
TITLE = "## Modelled"


def main(
    docs: Annotated[Path | None, typer.Option(help="A page whose section of this is written anew.")] = None,
) -> None:
    """Plan each question, about five minutes; nobody measured a step of them.

    Example: python -m benchmarks.relaxed_modelled --docs docs/relaxed.md
    """
    rows = []
    for sites, gpus in SITES:
        rows.append(_row(sites, gpus))
        print(rows[-1], flush=True)
    text = "\n".join(
        [
            TITLE,
            "",
            f"By `python -m benchmarks.relaxed_modelled`: Llama-3-8B, sequences of {LENGTH:,} tokens, "
            f"bfloat16, {SEQUENCES} a GPU and step, sites of A100 80 GB, 1 Gbit/s at each, 20 ms there and "
            "back.",
            "",
            "| sites | one by itself | all, waiting | all, not waiting | timetable |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )
    if docs is not None:
        write_section(docs, TITLE, text)


def _row(sites: int, gpus: int) -> str:
    profile = _profile(sites, gpus)
    request = Request(budget_bytes(profile.cluster), SEQUENCES * sites * gpus, time_limit_s=LIMIT_S)
    found = relax(Allowed("periodic"), profile, request, solve)
    assert isinstance(found, Relaxed)
    rates = {name: rate * LENGTH for name, rate in found.sequences_per_s.items()}
    alone, tier = rates["one group"], found.tier
    cells = [f"{sites} of {gpus} GPUs"]
    cells += [f"{rates[name]:,.0f} tokens/s" for name in ("one group", "all, waiting")]
    cells += [f"{rates['all, relaxed']:,.0f} ({rates['all, relaxed'] / alone:.2f} ×)"]
    cells += [
        f"every {tier.every} steps one of {tier.parts} parts, {tier.delay} later; a transfer takes "
        f"{tier.transfer_s:.1f} s, a step {tier.step_s:.2f} s"
    ]
    return f"| {' | '.join(cells)} |"


def _profile(sites: int, gpus: int) -> Profile:
    """On a cluster of the user's own: that of CLUSTER, with other sites and another link between them."""
    cluster, device = find_cluster(CLUSTER)
    inside, between = cluster.tiers
    figure = between.bytes_per_s.model_copy(
        update={"value": SITE_BYTES_PER_S / gpus, "source": "1 Gbit/s a site, shared by its GPUs"}
    )
    latency = between.latency_s.model_copy(update={"value": LATENCY_S, "source": "20 ms there and back"})
    link = between.model_copy(
        update={"ranks": sites, "bytes_per_s": figure, "latency_s": latency, "pat": None}
    )
    own: ClusterModel = cluster.model_copy(
        update={"name": "sites", "tiers": (inside.model_copy(update={"ranks": gpus}), link)}
    )
    return analyse(
        *(load(MODEL, seq_len=LENGTH), own, device),
        mesh=Mesh.of_tiers(gpus, sites),
        micro_batches=(1, 2),
        dtype="bfloat16",
        optimizer="adamw",
    )


if __name__ == "__main__":
    typer.run(main)
