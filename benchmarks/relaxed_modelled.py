"""``python -m benchmarks.relaxed_modelled``: what not waiting is worth between modelled sites."""

from __future__ import annotations

from itertools import product
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

MODEL, LENGTH, LIMIT_S, SEQUENCES = "hf:llama3-8b", 2048, 80.0, 16
CLUSTER = "a100-8x200g"
SITES = ((2, 4), (4, 8))
"""Sites, and GPUs of each."""
HOST_BYTES = (0, 64 << 30)
"""Of the host's memory that a GPU may take."""
SITE_BYTES_PER_S, LATENCY_S = 1e9 / 8, 0.01
TITLE = "## Modelled"


def main(
    docs: Annotated[Path | None, typer.Option(help="A page whose section of this is written anew.")] = None,
) -> None:
    """Plan each question, about twelve minutes; nobody measured a step of them.

    Example: python -m benchmarks.relaxed_modelled --docs docs/relaxed.md
    """
    rows = []
    for (sites, gpus), host in product(SITES, HOST_BYTES):
        rows.append(_row(sites, gpus, host))
        print(rows[-1], flush=True)
    text = "\n".join(
        [
            TITLE,
            "",
            f"By `python -m benchmarks.relaxed_modelled`: Llama-3-8B, sequences of {LENGTH:,} tokens, "
            f"bfloat16, {SEQUENCES} a GPU and step, sites of A100 80 GB, 1 Gbit/s at each, 20 ms there and "
            "back; of the host's memory none, or 64 GiB a GPU.",
            "",
            "| sites | host | one by itself | all, waiting | all, not waiting | timetable | copies |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )
    if docs is not None:
        write_section(docs, TITLE, text)


def _row(sites: int, gpus: int, host: int) -> str:
    profile = _profile(sites, gpus)
    budget = budget_bytes(profile.cluster)
    request = Request(budget, SEQUENCES * sites * gpus, time_limit_s=LIMIT_S, host_bytes=host)
    found = relax(Allowed("periodic"), profile, request, solve)
    assert isinstance(found, Relaxed)
    rates = {name: rate * LENGTH for name, rate in found.sequences_per_s.items()}
    alone, tier = rates["one group"], found.tier
    cells = [f"{sites} of {gpus} GPUs", f"{host >> 30} GiB"]
    cells += [f"{rates[name]:,.0f} tokens/s" for name in ("one group", "all, waiting")]
    cells += [f"{rates['all, relaxed']:,.0f} ({rates['all, relaxed'] / alone:.2f} ×)"]
    cells += [
        f"every {tier.every} steps one of {tier.parts} parts, {tier.delay} later; a transfer takes "
        f"{tier.transfer_s:.1f} s, a step {tier.step_s:.2f} s",
        f"{tier.kept_bytes / 2**30:.1f} GiB on the {tier.copies}",
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
