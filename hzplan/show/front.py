"""The figure of a sweep: predicted step over the varied quantity, one point per plan."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from hzplan.errors import UserError


def check() -> None:
    """UserError where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot: needs the package matplotlib; pip install matplotlib")


def draw(
    title: str,
    axis: str,
    points: Sequence[tuple[float, float] | None],
    path: Path,
    chosen: tuple[float, float] | None = None,
) -> None:
    """Write an SVG of points (place on the axis, seconds of a step); a point is None where nothing fits.

    ``chosen``: one more point, marked as this plan. UserError when the file cannot be written.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "hzplan"  # the same figures, the same file
    from matplotlib import pyplot

    found = sorted(point for point in points if point is not None)
    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot(*zip(*found, strict=True), marker="o", linewidth=0.8)
    for place, step_s in found:
        axes.annotate(
            f"{step_s:.3g} s", (place, step_s), textcoords="offset points", xytext=(4, 4), fontsize=8
        )
    if chosen is not None:
        axes.plot(*chosen, marker="*", markersize=14, linestyle="none", label="this plan")
        axes.legend()
    axes.set(xlabel=axis, ylabel="predicted step (s)", title=title)
    axes.set_ylim(bottom=0)
    figure.tight_layout()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        pyplot.close(figure)
