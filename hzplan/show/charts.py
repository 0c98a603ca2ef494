"""The figures of a report, with Bokeh. Colours of text and grid are the page's: see report.js."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hzplan.errors import printable
from hzplan.show.readable import duration, size, unit_of
from hzplan.show.report import Report, TaskSpan, Tensor

if TYPE_CHECKING:
    from bokeh.plotting import figure as Figure

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bb8844", "#888888", "#44aa99")
"""Paul Tol's bright scheme and a few more; they read on white and on black."""
CRITICAL = "#ff5500"
"""Edge colour of tasks on the critical path."""
MOST_LABELS_PX = 14
"""Least distance between two labels of rows, pixels."""
ROLES = ("parameter", "gradient", "optimizer state")


def draw(report: Report) -> dict[str, Any]:
    """Bokeh's JSON of every figure, by the name of its place in the page."""
    from bokeh.embed import json_item

    unit, scale = unit_of(max(tier.sent_bytes for tier in report.tiers))
    figures = {
        "shards": _shards(report.tensors),
        "timeline": _timeline(report.spans, report.step_s),
        "memory": _memory(report),
        "traffic": _bars(
            f"{unit} sent per rank in a step",
            [tier.name for tier in report.tiers],
            {"sent": [tier.sent_bytes / scale for tier in report.tiers]},
            lambda value: size(value * scale),
        ),
        "exposed": _bars(
            "seconds of a step",
            [*(tier.name for tier in report.tiers), "optimizer"],
            {
                "at work, its link not shared": [*(tier.busy_s for tier in report.tiers), 0.0],
                "not hidden: compute waits": [
                    *(tier.exposed_s for tier in report.tiers),
                    report.optimizer_exposed_s,
                ],
            },
            duration,
        ),
        "path": _bars(
            "seconds of the critical path",
            [part.what for part in report.path],
            {"": [part.seconds for part in report.path]},
            duration,
        ),
        "alternatives": _bars(
            "seconds of a step",
            [one.name + ("" if one.fits else " (does not fit)") for one in report.schemes],
            {
                "not waiting": [one.step_s - one.exposed_s for one in report.schemes],
                "not hidden: compute waits": [one.exposed_s for one in report.schemes],
            },
            duration,
            stacked=True,
        ),
    }
    seconds = [row for row in report.beside if not row.bytes]
    if seconds:
        figures["measured"] = _bars(
            "seconds of a step",
            [row.what for row in seconds],
            {
                "predicted": [row.predicted for row in seconds],
                "measured": [row.measured for row in seconds],
            },
            duration,
        )
    return {name: json_item(figure) for name, figure in figures.items()}


def plain(name: str) -> str:
    """A name with TeX delimiters broken up, because Bokeh would load MathJax from the network for them."""
    return re.sub(r"\$(?=\$)|\\(?=[\[(])", lambda match: match[0] + "\u200b", printable(name))


def place(tensor: str) -> tuple[str, str]:
    """Row and column of a tensor in the heat map: equal layers are rows, their tensors columns."""
    parts = tensor.split(".")
    number = next((index for index, part in enumerate(parts[:-1]) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: number + 1]) or tensor, ".".join(parts[number + 1 :])


def _figure(
    height: int, tooltips: Sequence[tuple[str, str]], *, zoom: bool = False, **options: Any
) -> Figure:
    from bokeh.models import HoverTool, WheelZoomTool
    from bokeh.plotting import figure

    tools = "xpan,xbox_zoom,xzoom_in,xzoom_out,reset,save" if zoom else "save"
    made = figure(
        height=height,
        sizing_mode="stretch_width",
        tools=tools,
        toolbar_location="right",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_right=12,
        **options,
    )
    made.toolbar.logo = None
    made.add_tools(HoverTool(tooltips=list(tooltips)))
    if zoom:
        wheel = WheelZoomTool(dimensions="width", modifiers="ctrl")
        made.add_tools(wheel)
        made.toolbar.active_scroll = wheel
    return made


def _legend(figure: Figure) -> None:
    """Above the figure, in as many lines as it needs."""
    legend = figure.legend[0]
    legend.update(orientation="horizontal", ncols=4, background_fill_alpha=0.0, border_line_color=None)
    legend.update(click_policy="hide", padding=2, label_text_font_size="12px")
    figure.add_layout(legend, "above")


def _label(axis: Any, labels: Sequence[str], every: int = 1) -> None:
    """Names at 0, 1, 2, … of a linear axis: unlike a categorical one, it takes the same name twice."""
    from bokeh.models import FixedTicker

    axis.ticker = FixedTicker(ticks=list(range(0, len(labels), every)))
    axis.major_label_overrides = {
        place: plain(label) for place, label in enumerate(labels) if not place % every
    }


def _shards(tensors: Sequence[Tensor]) -> Figure:
    """Rows are layers, columns their tensors, each three times: parameter, gradient, optimizer state."""
    from bokeh.models import Range1d
    from bokeh.palettes import viridis

    places = [place(tensor.name) for tensor in tensors]
    rows = list(dict.fromkeys(row for row, _ in places))
    columns = list(dict.fromkeys(column for _, column in places))
    row_of, column_of = ({name: at for at, name in enumerate(names)} for names in (rows, columns))
    row_px = max(7, min(18, 900 // max(len(rows), 1)))
    made = _figure(
        row_px * len(rows) + 180,
        [(name, f"@{name}") for name in ("tensor", "unit", "of", "shards", "bytes")],
        x_range=Range1d(start=-0.5, end=len(columns) - 0.5),
        y_range=Range1d(start=len(rows) - 0.5, end=-0.5),
    )
    cells: dict[int, dict[str, list[Any]]] = {}
    for tensor, (row, column) in zip(tensors, places, strict=True):
        for number, (of, shards) in enumerate(zip(ROLES, tensor.shards, strict=True)):
            cell = {
                "x": column_of[column] + (number - 1) * 0.3,
                "y": row_of[row],
                "tensor": plain(tensor.name),
                "unit": plain(tensor.unit),
                "of": of,
                "bytes": f"{size(tensor.nbytes)} as parameter",
            }
            columns_of = cells.setdefault(shards, {name: [] for name in cell})
            for name, value in cell.items():
                columns_of[name].append(value)
    palette = viridis(len(cells) + 1)[1:]  # without its darkest, which is lost on a dark page
    for number, (shards, data) in enumerate(sorted(cells.items())):
        numbers = {"x": np.round(data.pop("x"), 2), "y": np.array(data.pop("y"), dtype=np.int32)}
        source = {**data, **numbers, "shards": [str(shards)] * len(data["tensor"])}
        made.rect(
            "x",
            "y",
            0.28,
            0.88,
            source=source,
            fill_color=palette[number],
            line_color=None,
            legend_label=f"{shards} shard{'' if shards == 1 else 's'}",
        )
    _label(made.yaxis[0], rows, -(-MOST_LABELS_PX // row_px))
    _label(made.xaxis[0], columns)
    made.xaxis.major_label_orientation = 0.6
    made.grid.visible = False
    _legend(made)
    return made


def _timeline(spans: Sequence[TaskSpan], step_s: float) -> Figure:
    """A row per stream, a colour per kind of work."""
    from bokeh.models import Range1d
    from bokeh.models.annotations import Span as Line

    streams = sorted(dict.fromkeys(span.stream for span in spans), key=_row)
    row_of = {name: at for at, name in enumerate(streams)}
    end_s = max([step_s, *(span.end_s for span in spans)])
    made = _figure(
        60 + 34 * len(streams) + 60,
        [
            (name, f"@{name}")
            for name in ("stream", "what", "unit", "stage", "begins", "duration", "bytes", "critical")
        ],
        zoom=True,
        x_range=Range1d(start=0, end=end_s, bounds=(0, end_s), min_interval=end_s / 1e5),
        y_range=Range1d(start=len(streams) - 0.5, end=-0.5),
        x_axis_label="seconds",
    )
    kinds: dict[str, list[TaskSpan]] = {}
    for span in spans:
        kinds.setdefault(span.what, []).append(span)
    for number, (what, listed) in enumerate(kinds.items()):
        rows = np.array([row_of[span.stream] for span in listed])
        source = {
            "left": np.array([span.start_s for span in listed]).round(7),
            "right": np.array([span.end_s for span in listed]).round(7),
            "bottom": rows - 0.4,
            "top": rows + 0.4,
            "stream": [plain(span.stream) for span in listed],
            "what": [plain(what)] * len(listed),
            "unit": [plain(span.units) for span in listed],
            "stage": [plain(span.stage) for span in listed],
            "begins": [duration(span.start_s) for span in listed],
            "duration": [duration(span.end_s - span.start_s) for span in listed],
            "bytes": [size(span.nbytes) if span.nbytes else "" for span in listed],
            "critical": ["yes" if span.critical else "" for span in listed],
        }
        colour = COLOURS[number % len(COLOURS)]
        source["edge"] = [CRITICAL if span.critical else colour for span in listed]
        made.quad(
            "left",
            "right",
            "top",
            "bottom",
            source=source,
            fill_color=colour,
            line_color="edge",  # what is thinner than a pixel stays visible
            line_width=1,
            legend_label=plain(what),
        )
    made.add_layout(Line(location=step_s, dimension="height", line_dash="dashed", line_color="#888888"))
    _label(made.yaxis[0], streams)
    made.ygrid.visible = False
    _legend(made)
    return made


def _row(stream: str) -> tuple[int, str]:
    """Compute first, then the optimizer, and communication by kind and tier."""
    first = ("compute", "optim")
    return (first.index(stream), "") if stream in first else (len(first), stream)


def _memory(report: Report) -> Figure:
    """What stays as layers of constant height, activations upon them; the budget as a line."""
    from bokeh.models import Range1d
    from bokeh.models.annotations import Span as Line

    over = report.occupancy
    end_s = max([report.step_s, *(span.end_s for span in report.spans)])
    top = max(over.peak_bytes, over.budget_bytes if over.budget_bytes < 4 * over.peak_bytes else 0)
    unit, scale = unit_of(top)
    made = _figure(
        360,
        [("", "@what"), ("bytes", "@bytes"), ("from", "@begins")],
        zoom=True,
        x_range=Range1d(start=0, end=end_s, bounds=(0, end_s), min_interval=end_s / 1e5),
        y_range=Range1d(start=0, end=max(top, 1) / scale * 1.05),
        x_axis_label="seconds",
        y_axis_label=unit,
    )
    base = 0
    parts: list[tuple[str, Sequence[float], Sequence[int]]] = [
        (name, [0.0], [nbytes]) for name, nbytes in over.static
    ]
    for number, (name, times, levels) in enumerate([*parts, ("activations", over.times_s, over.activations)]):
        heights = np.array(levels, dtype=np.float64)
        source = {
            "left": np.array(times).round(7),
            "right": np.array([*times[1:], end_s]).round(7),
            "bottom": np.full(len(times), base / scale).round(6),
            "top": ((base + heights) / scale).round(6),
            "what": [plain(name)] * len(times),
            "bytes": [size(level) for level in levels],
            "begins": [duration(time) for time in times],
        }
        made.quad(
            "left",
            "right",
            "top",
            "bottom",
            source=source,
            fill_color=COLOURS[number % len(COLOURS)],
            line_color=COLOURS[number % len(COLOURS)],  # no seams between uses
            line_width=0.5,
            legend_label=name,
        )
        base += levels[0] if len(levels) == 1 else 0
    made.add_layout(
        Line(location=over.budget_bytes / scale, dimension="width", line_color="#cc3311", line_width=2)
    )
    _legend(made)
    return made


def _bars(
    axis: str,
    names: Sequence[str],
    series: Mapping[str, Sequence[float]],
    text: Callable[[float], str],
    *,
    stacked: bool = False,
) -> Figure:
    """Horizontal bars, a row for every name; several series beside each other, or one upon the other."""
    from bokeh.models import Range1d

    totals = [sum(values) if stacked else max(values) for values in zip(*series.values(), strict=True)]
    made = _figure(
        80 + 30 * len(names) + (34 if len(series) > 1 else 0),
        [("", "@what"), ("", "@value")],
        x_range=Range1d(start=0, end=max([*totals, 1e-9]) * 1.05),
        y_range=Range1d(start=len(names) - 0.5, end=-0.5),
        x_axis_label=axis,
    )
    thick = 0.7 if stacked else 0.7 / len(series)
    left = np.zeros(len(names))
    rows = np.arange(len(names))
    for number, (name, values) in enumerate(series.items()):
        lowest = rows - 0.35 + (0 if stacked else number * thick)
        source = {
            "left": left,
            "right": left + np.array(values),
            "bottom": lowest,
            "top": lowest + thick,
            "what": [" · ".join(filter(None, (plain(row), name))) for row in names],
            "value": [text(value) for value in values],
        }
        legend: dict[str, Any] = {"legend_label": name} if name and len(series) > 1 else {}
        colour = COLOURS[number]
        made.quad(
            "left", "right", "top", "bottom", source=source, fill_color=colour, line_color=None, **legend
        )
        if stacked:
            left = left + np.array(values)
    _label(made.yaxis[0], names)
    made.ygrid.visible = False
    if len(series) > 1:
        _legend(made)
    return made
