"""The figures of a report, with Bokeh. Their legends, and the colours of text and grid, are the page's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hzplan.errors import printable
from hzplan.show.folding import layer_rows
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
MOST_LABEL = 24
"""Characters of an axis' label at most: more would leave no room for the figure on a page of 400 pixels."""
LETTER_PX = 6.5
"""Mean width of a character of an axis' label, pixels."""
MOST_TICKS = 4
"""Ticks of an axis of seconds, about: more would run into each other on a page of 400 pixels."""
ROLES = ("parameter", "gradient", "optimizer state")


class Chart(NamedTuple):
    """A figure: Bokeh's JSON, and name and colour of every renderer in order, for the page's legend."""

    item: Any
    legend: tuple[tuple[str, str], ...]


class _Drawing(NamedTuple):
    figure: Figure
    legend: list[tuple[str, str]]


def draw(report: Report) -> dict[str, Chart]:
    """Every figure, by the name of its place in the page."""
    from bokeh.embed import json_item

    drawings = {
        "shards": _shards(report.tensors),
        "timeline": _timeline(report.spans, report.step_s),
        "memory": _memory(report),
    }
    return {
        name: Chart(json_item(drawing.figure), tuple(drawing.legend)) for name, drawing in drawings.items()
    }


def plain(name: str) -> str:
    """A name with TeX delimiters broken up, because Bokeh would load MathJax from the network for them."""
    return re.sub(r"\$(?=\$)|\\(?=[\[(])", lambda match: match[0] + "\u200b", printable(name))


def label(name: str) -> str:
    """A name as short as an axis' label may be: without its middle, since both its ends tell names apart."""
    shown = plain(name)
    begin, end = MOST_LABEL // 3, MOST_LABEL - MOST_LABEL // 3 - 1
    return shown if len(shown) <= MOST_LABEL else f"{shown[:begin]}…{shown[-end:]}"


def _figure(
    height: int, tooltips: Sequence[tuple[str, str]], *, zoom: bool = False, **options: Any
) -> Figure:
    from bokeh.models import BasicTicker, HoverTool, WheelZoomTool
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
        made.xaxis[0].ticker = BasicTicker(desired_num_ticks=MOST_TICKS)
        wheel = WheelZoomTool(dimensions="width", modifiers="ctrl")
        made.add_tools(wheel)
        made.toolbar.active_scroll = wheel
    return made


def _label(axis: Any, labels: Sequence[str], every: int = 1) -> None:
    """Names at 0, 1, 2, … of a linear axis: unlike a categorical one, it takes the same name twice."""
    from bokeh.models import FixedTicker

    axis.ticker = FixedTicker(ticks=list(range(0, len(labels), every)))
    axis.major_label_overrides = {at: label(name) for at, name in enumerate(labels) if not at % every}


def _shards(tensors: Sequence[Tensor]) -> _Drawing:
    """Rows are layers, equal ones in one; columns their tensors, each three times: parameter, gradient,
    optimizer state."""
    from bokeh.models import Range1d
    from bokeh.palettes import viridis

    rows = layer_rows(tensors)
    columns = list(dict.fromkeys(column for row in rows for column, _ in row.tensors))
    column_of = {name: at for at, name in enumerate(columns)}
    row_px = max(7, min(22, 900 // max(len(rows), 1)))
    longest = max(len(label(column)) for column in columns)
    made = _figure(
        row_px * len(rows) + round(LETTER_PX * longest) + 40,
        [(name, f"@{name}") for name in ("tensor", "unit", "of", "shards", "bytes")],
        x_range=Range1d(start=-0.5, end=len(columns) - 0.5),
        y_range=Range1d(start=len(rows) - 0.5, end=-0.5),
    )
    cells: dict[int, dict[str, list[Any]]] = {}
    for at, row in enumerate(rows):
        for column, tensor in row.tensors:
            each = f", in each of {row.layers} layers" if row.layers > 1 else ""
            for number, (of, shards) in enumerate(zip(ROLES, tensor.shards, strict=True)):
                cell = {
                    "x": column_of[column] + (number - 1) * 0.3,
                    "y": at,
                    "tensor": plain(tensor.name),
                    "unit": plain(tensor.unit),
                    "of": of,
                    "bytes": f"{size(tensor.nbytes)} as parameter{each}",
                }
                columns_of = cells.setdefault(shards, {name: [] for name in cell})
                for name, value in cell.items():
                    columns_of[name].append(value)
    palette = viridis(len(cells) + 1)[1:]  # without its darkest, which is lost on a dark page
    legend = []
    for number, (shards, data) in enumerate(sorted(cells.items())):
        numbers = {"x": np.round(data.pop("x"), 2), "y": np.array(data.pop("y"), dtype=np.int32)}
        source = {**data, **numbers, "shards": [str(shards)] * len(data["tensor"])}
        made.rect("x", "y", 0.28, 0.88, source=source, fill_color=palette[number], line_color=None)
        legend.append((f"{shards} shard{'' if shards == 1 else 's'}", palette[number]))
    _label(made.yaxis[0], [row.name for row in rows], -(-MOST_LABELS_PX // row_px))
    _label(made.xaxis[0], columns)
    made.xaxis.major_label_orientation = np.pi / 2  # slanted ones overlap on a narrow page
    made.grid.visible = False
    return _Drawing(made, legend)


def _timeline(spans: Sequence[TaskSpan], step_s: float) -> _Drawing:
    """A row per stream, a colour per kind of work."""
    from bokeh.models import Range1d
    from bokeh.models.annotations import Span as Line

    streams = sorted(dict.fromkeys(span.stream for span in spans), key=_row)
    row_of = {name: at for at, name in enumerate(streams)}
    end_s = max([step_s, *(span.end_s for span in spans)])
    made = _figure(
        34 * len(streams) + 70,
        [
            (name, f"@{name}")
            for name in ("stream", "what", "unit", "stage", "begins", "duration", "bytes", "critical")
        ],
        zoom=True,
        x_range=Range1d(start=0, end=end_s, bounds=(0, end_s), min_interval=end_s / 1e5),
        y_range=Range1d(start=len(streams) - 0.5, end=-0.5),
        x_axis_label="seconds",
    )
    legend = []
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
        )
        legend.append((what, colour))
    made.add_layout(Line(location=step_s, dimension="height", line_dash="dashed", line_color="#888888"))
    _label(made.yaxis[0], streams)
    made.ygrid.visible = False
    return _Drawing(made, legend)


def _row(stream: str) -> tuple[int, str]:
    """Compute first, then the optimizer, and communication by kind and tier."""
    first = ("compute", "optim")
    return (first.index(stream), "") if stream in first else (len(first), stream)


def _memory(report: Report) -> _Drawing:
    """What stays as layers of constant height, activations upon them; the budget as a line."""
    from bokeh.models import Range1d
    from bokeh.models.annotations import Span as Line

    over = report.occupancy
    end_s = max([report.step_s, *(span.end_s for span in report.spans)])
    top = max(over.peak_bytes, over.budget_bytes if over.budget_bytes < 4 * over.peak_bytes else 0)
    unit, scale = unit_of(top)
    made = _figure(
        320,
        [("", "@what"), ("bytes", "@bytes"), ("from", "@begins")],
        zoom=True,
        x_range=Range1d(start=0, end=end_s, bounds=(0, end_s), min_interval=end_s / 1e5),
        y_range=Range1d(start=0, end=max(top, 1) / scale * 1.05),
        x_axis_label="seconds",
        y_axis_label=unit,
    )
    base, legend = 0, []
    parts: list[tuple[str, Sequence[float], Sequence[int]]] = [
        (name, [0.0], [nbytes]) for name, nbytes in over.static
    ]
    for number, (name, times, levels) in enumerate([*parts, ("activations", over.times_s, over.activations)]):
        heights, colour = np.array(levels, dtype=np.float64), COLOURS[number % len(COLOURS)]
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
            fill_color=colour,
            line_color=colour,  # no seams between uses
            line_width=0.5,
        )
        legend.append((name, colour))
        base += levels[0] if len(levels) == 1 else 0
    made.add_layout(
        Line(location=over.budget_bytes / scale, dimension="width", line_color="#cc3311", line_width=2)
    )
    return _Drawing(made, legend)
