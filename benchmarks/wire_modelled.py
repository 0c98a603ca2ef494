"""``python -m benchmarks.wire_modelled``: what narrower gradients are worth on H100, modelled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.commands import write_section
from hzplan.core.hierarchy import Mesh
from hzplan.core.layout import REDUCE_DTYPES
from hzplan.core.wire import Admitted
from hzplan.cost.memory import budget_bytes
from hzplan.formats.cluster import find_cluster
from hzplan.formats.profile import Profile
from hzplan.models.workload import load
from hzplan.profiler.analytic import analyse
from hzplan.solver.search import Request
from hzplan.solver.solve import Outcome, Solved, solve
from hzplan.solver.wire import solve_in

MODEL, LENGTH, LIMIT_S, NODES = "hf:llama3-70b", 4096, 20.0, (4, 8, 16)
CLUSTERS = ("h100-8x400g", "h100-8x100g", "h100-8x25g")

TITLE = "## Modelled: H100"


def main(
    docs: Annotated[Path | None, typer.Option(help="A page whose section of this is written anew.")] = None,
) -> None:
    """Plan every question, about ten minutes; nobody measured a step of them.

    Example: python -m benchmarks.wire_modelled --docs docs/wire.md
    """
    rows = []
    for row in _rows():
        print(row, flush=True)
        rows.append(row)
    text = "\n".join(
        [
            TITLE,
            "",
            f"By `python -m benchmarks.wire_modelled`: Llama-3-70B, sequences of {LENGTH:,} tokens, one for "
            f"each GPU in a step, bfloat16, nodes of 8 H100; the best plan found in {LIMIT_S:.0f} s. "
            "*Network*: what compute waits for there, with gradients in float32.",
            "",
            "| nodes, Gbit/s for each GPU | float32 | network | bf16 | `--wire safe` | formats chosen |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )
    if docs is not None:
        write_section(docs, TITLE, text)


def _rows() -> Iterator[str]:
    for name in CLUSTERS:
        for nodes in NODES if name == CLUSTERS[0] else NODES[1:2]:
            yield _row(name, nodes)


def _row(name: str, nodes: int) -> str:
    profile = _profile(name, nodes)
    request = Request(budget_bytes(profile.cluster), 8 * nodes, time_limit_s=LIMIT_S)

    def answer(asked: Request) -> tuple[Request, Outcome]:
        return asked, solve(profile, asked)

    exact, bf16 = (solve(profile, replace(request, reduce_dtype=of)) for of in REDUCE_DTYPES["bfloat16"])
    _, safe = solve_in(Admitted.parse("safe"), profile, request, answer)
    assert isinstance(exact, Solved) and isinstance(bf16, Solved) and isinstance(safe, Solved)
    wire = safe.best.model.wire
    cells = [f"{nodes}, {name.rpartition('x')[2].removesuffix('g')}", f"{exact.best.step_s:.2f} s"]
    cells += [f"{exact.best.waits_s['network'] * 1e3:.0f} ms"]
    cells += [f"{bf16.best.step_s:.2f} s", f"{safe.best.step_s:.2f} s"]
    return f"| {' | '.join([*cells, 'none' if wire is None else wire.text.replace('|', '/')])} |"


def _profile(name: str, nodes: int) -> Profile:
    cluster, device = find_cluster(name)
    return analyse(
        *(load(MODEL, seq_len=LENGTH), cluster, device),
        mesh=Mesh.of_tiers(8, nodes),
        micro_batches=(1,),
        dtype="bfloat16",
        optimizer="adamw",
    )


if __name__ == "__main__":
    typer.run(main)
