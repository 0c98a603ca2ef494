"""``python -m benchmarks.imbalance``: how unevenly a mixture routes real text, and what that costs a rank.

One process trains the mixture on the text of Python's own library. Then it plays ranks of one step, each with
its own held-out text, and takes turns between the routing that the text has and an even one.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from hzplan.formats.base import write_text
from hzplan.models.moe import Experts, evenly_routed
from hzplan.models.workload import load
from hzplan.training.batches import TextBatches
from hzplan.training.data import load_corpus
from hzplan.training.measure import peak_memory_bytes

MODELS, MICRO_BATCH, RANKS, TURNS, LR = ("moe:tiny",), 4, 8, 9, 1e-3
AFTER = (0, 100, 400)
"""Steps of training before each look."""
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    model: Annotated[list[str] | None, typer.Option(help="Mixtures; by default a preset.")] = None,
    output: Annotated[Path, typer.Option(help="All figures.")] = Path("benchmarks/results/imbalance.json"),
    docs: Annotated[Path | None, typer.Option(help="Where to write the table.")] = None,
) -> None:
    """Train, look at the routing, and measure.

    Example: python -m benchmarks.imbalance --docs docs/imbalance.md
    """
    torch.set_num_threads(1)
    found = {name: list(_looks(name)) for name in model or MODELS}
    write_text(output, json.dumps(found, indent=1) + "\n")
    text = _markdown(found)
    print(text)
    if docs is not None:
        write_text(docs, text)


def _looks(name: str) -> Iterator[dict[str, Any]]:
    workload = load(name)
    corpus = load_corpus(None, seq_len=workload.seq_len)
    data = TextBatches(corpus, MICRO_BATCH, workload.seq_len, 0, 1, 1)
    torch.manual_seed(0)
    model = workload.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    trained = 0
    for after in AFTER:
        for step in range(trained, after):
            workload.loss(model, data.train(step, 0, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained = after
        texts = [data.heldout(1, rank, RANKS)[0] for rank in range(RANKS)]
        yield {"after": after} | _measured(model, texts, workload.loss)
        print(f"{name} after {after} steps", flush=True)


def _measured(
    model: nn.Module, texts: list[Tensor], loss: Callable[[nn.Module, object], Tensor]
) -> dict[str, Any]:
    """``shares``: by rank and layer, the fullest expert's tokens over the mean's; ``time``: by rank, a
    forward and backward with the routing of its text over one that is even, the median of turns; ``peak``:
    likewise bytes; ``seconds``: by rank, with the routing of its text."""

    def step(text: Tensor, *, even: bool) -> None:
        with evenly_routed() if even else nullcontext():
            loss(model, text).backward()
        model.zero_grad()

    shares, times, peaks, by_rank = [], [], [], []
    for text in texts:
        with _counting(model) as counts:
            step(text, even=False)
        shares.append([float(count.max() / count.float().mean()) for count in counts])
        ratios, seconds = [], []
        for turn in range(TURNS):
            took = {}
            for even in (turn % 2 == 0, turn % 2 == 1):
                began = time.perf_counter()
                step(text, even=even)
                took[even] = time.perf_counter() - began
            ratios.append(took[False] / took[True])
            seconds.append(took[False])
        times.append(statistics.median(ratios))
        by_rank.append(statistics.median(seconds))
        peak = {
            even: peak_memory_bytes(lambda t=text, e=even: step(t, even=e), torch.device("cpu"))  # type: ignore[misc]
            for even in (False, True)
        }
        peaks.append(peak[False] / peak[True])
    return {"shares": shares, "time": times, "peak": peaks, "seconds": by_rank}


@contextmanager
def _counting(model: nn.Module) -> Iterator[list[Tensor]]:
    """Tokens by expert of every layer of the forward inside."""
    counts: list[Tensor] = []

    def count(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        assert isinstance(module, Experts)
        counts.append(torch.bincount(given[1].flatten(), minlength=len(module.up)))

    hooks = [m.register_forward_pre_hook(count) for m in model.modules() if isinstance(m, Experts)]
    yield counts
    for hook in hooks:
        hook.remove()


def _markdown(found: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "# Uneven experts",
        "",
        "Experts are gathered and tokens stay where they are, so a rank computes all experts on its own "
        "tokens: as many products of tokens and experts as every other rank, in pieces of other sizes. "
        "What that costs was measured by `python -m benchmarks.imbalance`: a mixture is trained on the "
        f"text of Python's own library, then {RANKS} ranks' held-out texts of {MICRO_BATCH} sequences each "
        f"are routed as the model does and evenly, in {TURNS} turns, on one core.",
        "",
        "*fullest*: the tokens of a layer's fullest expert over the mean expert's, the median and the "
        "largest of ranks and layers; *time*: a forward and backward over one with even routing, the "
        "median and the worst rank; *slowest*: the slowest rank over the median one; *memory*: the worst "
        "rank's peak over that with even routing.",
        "",
        "| model | after steps | fullest | time | slowest | memory |",
        "|---|---|---|---|---|---|",
    ]
    for name, looks in found.items():
        for look in looks:
            shares = [share for rank in look["shares"] for share in rank]
            middle = statistics.median(look["time"])
            slowest = max(look["seconds"]) / statistics.median(look["seconds"])
            lines.append(
                f"| {name} | {look['after']} | {statistics.median(shares):.2f}, {max(shares):.2f} | "
                f"{middle:.3f}, {max(look['time']):.3f} | {slowest:.3f} | "
                f"{max(look['peak']):.3f} |"
            )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    app()
