"""The figure of docs/accuracy.md: predicted against measured seconds of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def scatter(
    regimes: Sequence[Mapping[str, Any]], measured: Mapping[str, Sequence[float]], path: Path
) -> None:
    """Write an SVG: a point for every plan; ``measured``: seconds by regime, in the order of its plans."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "hzplan"  # the same figures, the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 5))
    everything = [*(s for seconds in measured.values() for s in seconds)]
    ends = [0.8 * min(everything), 1.25 * max(everything)]
    axes.plot(ends, ends, color="gray", linewidth=0.8)
    axes.fill_between(ends, [0.9 * s for s in ends], [1.1 * s for s in ends], color="gray", alpha=0.15)
    for held_out, marker, label in ((False, "o", "others"), (True, "^", "held out")):
        chosen = [regime for regime in regimes if regime["held_out"] == held_out]
        axes.scatter(
            [s for regime in chosen for s in measured[regime["name"]]],
            [plan["predicted_s"] for regime in chosen for plan in regime["plans"]],
            marker=marker,
            s=18,
            label=label,
        )
    axes.set(xscale="log", yscale="log", xlabel="measured step (s)", ylabel="predicted step (s)")
    axes.set_title("Random plans on emulated clusters; band: ±10 %", fontsize=10)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
