"""The HTML page of a report: one file that loads nothing from the network."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hzplan.errors import UserError, printable
from hzplan.show.readable import duration, size
from hzplan.show.report import ComparedScheme, Report, TaskSpan

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Content security policy: the browser loads nothing from the network."""

_CONTROLS = "".join(
    f'<button type="button" data-move="{move}">{label}</button> '
    for move, label in (
        ("in", "Zoom in"),
        ("out", "Zoom out"),
        ("earlier", "Earlier"),
        ("later", "Later"),
        ("all", "Whole step"),
    )
)
_KEYS = "keys + and − zoom, arrows move, Home shows the whole step"


def check() -> None:
    """UserError where bokeh is not installed."""
    if importlib.util.find_spec("bokeh") is None:
        raise UserError("--html: needs the package bokeh; pip install 'hzplan[report]'")


def page(report: Report) -> str:
    """The file's text."""
    from bokeh.resources import Resources

    from hzplan.show.charts import draw

    sections = _sections(report)
    style, script = (
        (Path(__file__).parent / name).read_text(encoding="utf-8") for name in ("report.css", "report.js")
    )
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in sections)
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(title)}</h2>'
        f"{content}</section>\n"
        for name, title, content in sections
    )
    title = _text(report.title)
    library = Resources(mode="inline", components=["bokeh"], minified=True, log_level="error")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title} · hzplan</title>\n<style>\n{style}</style></head>\n"
        f'<body><a class="skip" href="#summary">Skip to the summary</a><header><h1>{title}</h1>'
        f'<p class="remark">{_text(report.subtitle)}</p></header>\n'
        f'<nav aria-label="Sections">{links}</nav>\n<main>\n{body}</main>\n'
        f'<script type="application/json" id="figures">{embedded(draw(report))}</script>\n'
        + "".join(f"<script>{part}</script>\n" for part in library.js_raw)
        + f"<script>{script}</script>\n</body></html>\n"
    )


def embedded(data: Any) -> str:
    """JSON that ends no script element and begins no comment, whatever its strings say."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _text(value: object) -> str:
    return escape(printable(value))


def _sections(report: Report) -> list[tuple[str, str, str]]:
    """Id, heading and content."""
    found = [
        ("summary", "Summary", _summary(report)),
        ("shards", "Shards", _shards(report)),
        ("step", "Timeline", _timeline(report)),
        ("memory", "Memory over time", _memory(report)),
        ("traffic", "Traffic, and communication not hidden", _traffic(report)),
        ("path", "Critical path", _path(report)),
        ("alternatives", "Alternatives", _alternatives(report.schemes)),
    ]
    if report.beside:
        found.insert(1, ("measured", "Predicted beside measured", _measured(report)))
    return found


def _summary(report: Report) -> str:
    rows = "".join(
        f'<tr><th scope="row">{_text(name)}</th><td>{_text(value)}</td></tr>' for name, value in report.facts
    )
    return f"<table>{rows}</table>"


def _shards(report: Report) -> str:
    rows = [(tensor.unit, tensor.name, *tensor.shards) for tensor in report.tensors]
    heads = ("unit", "tensor", "parameter", "gradient", "optimizer state")
    caption = (
        "Into how many shards every tensor is cut. A row is a layer; each tensor's three cells are its "
        "parameter, gradient and optimizer state."
    )
    return _figure("shards", caption) + _details("Shards as a table", _table(heads, rows, texts=2))


def _timeline(report: Report) -> str:
    heads = ("stream", "what", "unit", "stage", "begins", "duration", "bytes", "critical")
    totals: dict[tuple[str, str], list[TaskSpan]] = {}
    for span in report.spans:
        totals.setdefault((span.stream, span.what), []).append(span)
    sums = [
        (
            *key,
            len(spans),
            duration(sum(span.end_s - span.start_s for span in spans)),
            size(sum(span.nbytes for span in spans)),
        )
        for key, spans in sorted(totals.items())
    ]
    caption = (
        "What every stream does in a step, in steady state; the dashed line is where the next step begins, "
        "and an orange edge marks what that waits for, one after the other. "
        f"With the focus on the chart, {_KEYS}; Ctrl and the wheel zoom too."
    )
    return (
        f'<p class="controls">{_CONTROLS}</p>'
        + _figure("timeline", caption, keys=True)
        + _details(
            "Timeline as a table: sums",
            _table(("stream", "what", "tasks", "seconds", "bytes"), sums, texts=2),
        )
        + _details(
            "Timeline as a table: every task",
            _table(heads, []),
            _rows("timeline", heads),
        )
    )


def _memory(report: Report) -> str:
    over = report.occupancy
    rows = [(name, size(nbytes)) for name, nbytes in over.static]
    rows.append(("activations and temporaries, at most", size(max(over.activations, default=0))))
    rows += [("all at the peak", size(over.peak_bytes)), ("budget", size(over.budget_bytes))]
    caption = "Memory of a rank; what is below the activations is allocated once. The red line is the budget."
    return (
        f'<p class="controls">{_CONTROLS}</p>'
        + _figure("memory", f"{caption} With the focus on the chart, {_KEYS}.", keys=True)
        + _details("Memory as a table", _table(("category", "bytes"), rows))
        + _details(
            "Memory as a table: over time",
            _table(("begins", "category", "bytes"), []),
            _rows("memory", ("begins", "what", "bytes")),
        )
    )


def _traffic(report: Report) -> str:
    rows = [
        (
            tier.name,
            size(tier.sent_bytes),
            duration(tier.busy_s),
            _share(tier.busy_s, report.step_s),
            duration(tier.exposed_s),
            _share(tier.exposed_s, report.step_s),
        )
        for tier in report.tiers
    ]
    waits = report.optimizer_exposed_s
    rows.append(("optimizer", "", "", "", duration(waits), _share(waits, report.step_s)))
    heads = ("tier", "sent per rank", "at work", "of the step", "not hidden", "of the step")
    return (
        _figure("traffic", "Bytes that a rank sends in a step, by tier.")
        + _figure("exposed", "How long a tier is at work, and how long compute waits for it.")
        + _details("Traffic and communication not hidden, as a table", _table(heads, rows))
    )


def _path(report: Report) -> str:
    rows = [
        (part.what, ", ".join(part.units), duration(part.seconds), _share(part.seconds, report.path_s))
        for part in report.path
    ]
    said = f"One after the other these take {duration(report.path_s)}, no link or processor shared."
    if report.binding is not None:
        said += f" What takes longer is {report.binding.what}: {duration(report.binding.seconds)}."
    heads = ("what", "mostly of", "seconds", "share")
    return (
        f"<p>{_text(said)}</p>"
        + _figure("path", "What the critical path is made of.")
        + _details("Critical path as a table", _table(heads, rows, texts=2))
    )


def _alternatives(schemes: Sequence[ComparedScheme]) -> str:
    own = schemes[0].step_s
    rows = [
        (
            one.name,
            duration(one.step_s),
            f"{one.step_s / own:.2f}×" if own else "",
            duration(one.exposed_s),
            size(one.sent_bytes),
            size(one.peak_bytes),
            "yes" if one.fits else "no",
        )
        for one in schemes
    ]
    heads = ("", "step", "of this plan's", "not hidden", "sent per rank", "memory at the peak", "fits")
    caption = "The known schemes at their best, on the same question; one that does not fit could not run."
    return _figure("alternatives", caption) + _details(
        "Alternatives as a table", _table(heads, rows), " open"
    )


def _measured(report: Report) -> str:
    rows = []
    for row in report.beside:
        text = size if row.bytes else duration
        change = f"{row.measured / row.predicted - 1:+.1%}" if row.predicted else ""
        rows.append((row.what, text(row.predicted), text(row.measured), change))
    table = _table(("", "predicted", "measured", "difference"), rows)
    caption = f"Medians of {report.measured_steps} measured steps beside the prediction."
    return _figure("measured", caption) + _details("Measured as a table", table, " open")


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _figure(name: str, caption: str, *, keys: bool = False) -> str:
    """Where report.js draws; the caption names it to who cannot see it."""
    focus = ' tabindex="0" role="group" data-keys' if keys else ""
    return (
        f'<figure aria-labelledby="caption-{name}"><div id="figure-{name}"{focus} '
        f'aria-labelledby="caption-{name}"></div>'
        f'<figcaption id="caption-{name}">{escape(caption)}</figcaption></figure>'
    )


def _rows(figure: str, columns: Sequence[str]) -> str:
    """Marks a table that report.js fills from a figure's data when it is opened: it may be long."""
    listed = " ".join(columns)
    return f' data-rows="{figure}" data-columns="{listed}"'


def _details(summary: str, content: str, more: str = "") -> str:
    return f'<details{more}><summary>{escape(summary)}</summary><div tabindex="0">{content}</div></details>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, texts: int = 1) -> str:
    """The first columns are text, the first of them the row's head; the others are numbers."""

    def cell(place: int, value: object) -> str:
        tag, scope = ("th", ' scope="row"') if place == 0 else ("td", "")
        number = ' class="number"' if place >= texts else ""
        return f"<{tag}{scope}{number}>{_text(value)}</{tag}>"

    numbers = ("" if place < texts else ' class="number"' for place in range(len(heads)))
    top = "".join(
        f'<th scope="col"{number}>{escape(head)}</th>' for number, head in zip(numbers, heads, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(cell(place, value) for place, value in enumerate(row))}</tr>" for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
