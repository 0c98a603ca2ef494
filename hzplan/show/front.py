"""A figure of several plans: the memory that each takes against the step that it is predicted to make."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from hzplan.errors import UserError


def check() -> None:
    """UserError where nothing can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot: needs the package matplotlib; pip install 'hzplan[report]'")


def draw(title: str, points: Sequence[tuple[str, float, int] | None], path: Path) -> None:
    """Write an SVG: of every point its label, seconds of a step, and bytes per rank; None where nothing fits.

    UserError when the file cannot be written.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "hzplan"  # the same figures, the same file
    from matplotlib import pyplot

    found = sorted((point for point in points if point is not None), key=lambda point: point[2])
    figure, axes = pyplot.subplots(figsize=(6, 4))
    memory, seconds = [point[2] / 2**30 for point in found], [point[1] for point in found]
    axes.plot(memory, seconds, marker="o", linewidth=0.8)
    for label, step_s, nbytes in found:
        axes.annotate(label, (nbytes / 2**30, step_s), textcoords="offset points", xytext=(4, 4), fontsize=8)
    axes.set(xlabel="memory per rank (GiB)", ylabel="predicted step (s)", title=title)
    axes.set_ylim(bottom=0)
    figure.tight_layout()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        pyplot.close(figure)
